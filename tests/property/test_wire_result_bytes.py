"""What is put together by hand is what the library would have written, byte for byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.wire.result_bytes import ResultBytes, embedding_head, varint
from protos.embedding.v1 import query_pb2

_SHARED = query_pb2.Result(model="m", model_revision="r", dimensions=1, encoding="ENCODING_INT8")


@given(
    identifier=st.text(max_size=300),
    tokens=st.integers(0, 2**32 - 1),
    vector=st.binary(max_size=40),
    scale=st.none() | st.floats(0, 1, width=32),
    tp=st.tuples(st.text(max_size=200), st.integers(0, 2**31 - 1)),
    offset=st.integers(0, 2**63 - 1),
    queue_ms=st.floats(0, allow_infinity=False, allow_nan=False),
)
def test_the_bytes_are_the_librarys(  # noqa: PLR0917 - one for each part
    identifier: str,
    tokens: int,
    vector: bytes,
    scale: float | None,
    tp: tuple[str, int],
    offset: int,
    queue_ms: float,
) -> None:
    source = query_pb2.Source(topic=tp[0], partition=tp[1], offset=offset)
    whole = query_pb2.Result(
        id=identifier,
        tokens=tokens,
        embedding=vector,
        scale=scale,
        source=source,
        queue_ms=queue_ms,
    )
    encoder = ResultBytes()
    for _ in range(2):  # the second time the partition is known
        value = encoder.row(
            _SHARED.SerializeToString(),
            identifier.encode(),
            tokens,
            embedding_head(len(vector)),
            vector,
            b"" if scale is None else query_pb2.Result(scale=scale).SerializeToString(),
            tp,
            offset,
            queue_ms,
        )
        assert value == _SHARED.SerializeToString() + whole.SerializeToString()


@pytest.mark.parametrize("number", [0, 127, 128, 16_383, 16_384, 2**21, 2**28 - 1, 2**63 - 1])
def test_varints_at_their_bounds(number: int) -> None:
    message = query_pb2.Source(offset=number)

    assert message.SerializeToString()[1:] == varint(number)
