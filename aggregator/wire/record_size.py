"""The size that a record has to Kafka's brokers, who judge whole produce batches.

Must not know what topics hold or allow. Source: the format of record batches, magic 2
(https://kafka.apache.org/documentation/#recordbatch).
"""

from __future__ import annotations

from typing import Final

from aggregator.core.query import HeaderList

BATCH_HEAD_BYTES: Final = 61
"""Everything of a batch before its first record."""
_RECORD_HEAD_BYTES: Final = 3
"""Attributes, and the offset and the timestamp of a first record, which are 0 to the batch's."""


def batch_bytes(key: bytes | None, value: bytes | None, headers: HeaderList) -> int:
    """Bytes of an uncompressed batch that holds this record alone."""
    size = _RECORD_HEAD_BYTES + _field_bytes(key) + _field_bytes(value)
    size += _varint_bytes(len(headers))
    for name, content in headers:
        size += _field_bytes(name.encode()) + _field_bytes(content)
    return BATCH_HEAD_BYTES + _varint_bytes(size) + size


def _field_bytes(content: bytes | None) -> int:
    """With its length before it; that of null is -1."""
    return 1 if content is None else _varint_bytes(len(content)) + len(content)


def _varint_bytes(number: int) -> int:
    """Of a length of at least 0: zigzag doubles it, then 7 bits a byte."""
    return max((2 * number).bit_length() + 6, 7) // 7
