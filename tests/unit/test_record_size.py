"""Sizes of records against the batches that Kafka's own format makes of them."""

from __future__ import annotations

import pytest

from aggregator.core.query import HeaderList
from aggregator.wire.record_size import batch_bytes


def zigzag(number: int) -> bytes:
    """A varint of the format, the long way."""
    left = (number << 1) ^ (number >> 63)
    out = bytearray()
    while left > 0x7F:
        out.append(left & 0x7F | 0x80)
        left >>= 7
    out.append(left)
    return bytes(out)


def field(content: bytes | None) -> bytes:
    return zigzag(-1) if content is None else zigzag(len(content)) + content


def batch(key: bytes | None, value: bytes | None, headers: HeaderList) -> bytes:
    """A batch of one record as the format has it; what is fixed is zeros."""
    record = b"\0" + zigzag(0) + zigzag(0) + field(key) + field(value) + zigzag(len(headers))
    for name, content in headers:
        record += field(name.encode()) + field(content)
    head = 8 + 4 + 4 + 1 + 4 + 2 + 4 + 8 + 8 + 8 + 2 + 4 + 4
    return bytes(head) + zigzag(len(record)) + record


@pytest.mark.parametrize("size", [0, 1, 62, 63, 64, 65, 8_190, 8_191, 8_192, 8_193, 1_048_577])
@pytest.mark.parametrize("key", [None, b"", b"k" * 64])
@pytest.mark.parametrize(
    "headers", [[], [("a", None)], [("\u00e4" * 40, b"x" * 9_000)], [("", b"")] * 70]
)
def test_as_the_format_has_it(size: int, key: bytes | None, headers: HeaderList) -> None:
    value = b"v" * size
    assert batch_bytes(key, value, headers) == len(batch(key, value, headers))
    assert batch_bytes(key, None, headers) == len(batch(key, None, headers))
