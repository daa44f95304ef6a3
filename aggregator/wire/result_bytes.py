"""The bytes of Protobuf results that hold vectors, put together from parts.

Owns the one place where the wire format is written by hand: the library takes twice the time for
each result, most of it for objects and for copying the vector. Invariant: the bytes are those that
the library gives for the same message. What the results of one claim share is encoded by the
library, once.

Encoded messages may be concatenated: the parts' fields are then one message's.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from aggregator.core.query import TopicPartition
from protos.embedding.v1 import query_pb2

_VARINT, _FIXED64, _LENGTH = 0, 1, 2
_SEVEN_BITS: Final = 1 << 7
_TWO_BYTES: Final = 1 << 14
_LOW_BITS: Final = _TWO_BYTES - 1
_CONTINUES: Final = 0x80


def _varint_of_two(number: int) -> bytes:
    return bytes((number & 0x7F | _CONTINUES, number >> 7))


_SHORT: Final = [bytes((number,)) for number in range(_SEVEN_BITS)] + [
    _varint_of_two(number) for number in range(_SEVEN_BITS, _TWO_BYTES)
]
"""The varints of one and two bytes, by number."""
_CONTINUED: Final = [
    bytes((number & 0x7F | _CONTINUES, number >> 7 | _CONTINUES)) for number in range(_TWO_BYTES)
]
"""The lowest 14 bits of a number that has more."""


def varint(number: int) -> bytes:
    """Encode a whole number of at least 0."""
    if number < _TWO_BYTES:
        return _SHORT[number]
    return _CONTINUED[number & _LOW_BITS] + varint(number >> 14)


def _tag(field: int, wire_type: int) -> bytes:
    return varint(field << 3 | wire_type)


_RESULT = query_pb2.Result
_ID: Final = _tag(_RESULT.ID_FIELD_NUMBER, _LENGTH)
_TOKENS: Final = _tag(_RESULT.TOKENS_FIELD_NUMBER, _VARINT)
_EMBEDDING: Final = _tag(_RESULT.EMBEDDING_FIELD_NUMBER, _LENGTH)
_SOURCE: Final = _tag(_RESULT.SOURCE_FIELD_NUMBER, _LENGTH)
_OFFSET: Final = _tag(query_pb2.Source.OFFSET_FIELD_NUMBER, _VARINT)
_QUEUE_MS: Final = _tag(_RESULT.QUEUE_MS_FIELD_NUMBER, _FIXED64)
_DOUBLE: Final = Struct("<d").pack


def embedding_head(size: int) -> bytes:
    """Encode what goes before a vector of `size` bytes."""
    return _EMBEDDING + varint(size)


class ResultBytes:
    """Encodes rows of vectors; remembers each partition's part, of which there are few."""

    __slots__ = ("_sources",)

    def __init__(self) -> None:
        self._sources: dict[TopicPartition, bytes] = {}

    def row(  # noqa: PLR0917 - positional for speed: it runs once per result
        self,
        shared: bytes,
        identifier: bytes,
        tokens: int,
        head: bytes,
        vector: bytes,
        scale: bytes,
        tp: TopicPartition,
        offset: int,
        queue_ms: float,
    ) -> bytes:
        """Encode a result.

        `shared` are encoded fields before it, `head` what `embedding_head` gives for the vector's
        size, `scale` an encoded field. Ids, as Kafka's topics, have less than 16,384 bytes.
        """
        source = (self._sources.get(tp) or self._source(tp)) + varint(offset)
        return b"".join(
            (
                shared,
                _ID,
                _SHORT[len(identifier)],
                identifier,
                _TOKENS,
                varint(tokens),
                head,
                vector,
                scale,
                _SOURCE,
                _SHORT[len(source)],
                source,
                _QUEUE_MS,
                _DOUBLE(queue_ms),
            )
        )

    def _source(self, tp: TopicPartition) -> bytes:
        """Encode the topic and partition, and the tag of the offset."""
        topic, partition = tp
        source = query_pb2.Source(topic=topic, partition=partition).SerializeToString() + _OFFSET
        self._sources[tp] = source
        return source
