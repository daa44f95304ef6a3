"""The partitioner of Java's Kafka clients, written from its definition, to check ours against it.

Source: MurmurHash2 by Austin Appleby (public domain) with the seed that Apache Kafka fixes;
positive part, modulo the number of partitions.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0x5BD1E995
_SEED = 0x9747B28C


def murmur2(data: bytes) -> int:
    """Return the unsigned 32-bit hash."""
    value = _SEED ^ len(data)
    whole = len(data) // 4 * 4
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * _MULTIPLIER & _MASK
        k = (k ^ (k >> 24)) * _MULTIPLIER & _MASK
        value = (value * _MULTIPLIER & _MASK) ^ k
    tail = data[whole:]
    if tail:
        value = (value ^ int.from_bytes(tail, "little")) * _MULTIPLIER & _MASK
    value = (value ^ (value >> 13)) * _MULTIPLIER & _MASK
    return value ^ (value >> 15)


def partition_of_key(key: bytes, partitions: int) -> int:
    """Return the partition on which Java's default partitioner puts a record with this key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
