"""Whatever a Protobuf query's size says, no field that is set is overlooked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aggregator.wire.query import DecodeOptions
from protos.embedding.v1 import query_pb2
from tests.unit.wire_builders import ARRIVED_NS, DEFAULT_ID, from_protobuf

TEXTS = st.text(min_size=1, max_size=8) | st.integers(120, 135).map("a".__mul__)
OPTIONS = DecodeOptions(models=frozenset({"m", "n"}), default_model="m", ttl_from="arrival")


@given(
    identifier=st.none() | st.just("") | TEXTS,
    text=TEXTS,
    model=st.none() | st.just("n"),
    truncate=st.none() | st.booleans(),
    dimensions=st.none() | st.integers(1, 300),
    input_type=st.none() | st.sampled_from(query_pb2.InputType.values()),
    encoding=st.none() | st.sampled_from(query_pb2.Encoding.values()),
    ttl_ms=st.none() | st.integers(1, 100),
)
def test_every_field_that_is_set_is_read(
    identifier: str | None, text: str, ttl_ms: int | None, **others: int | str | None
) -> None:
    message = query_pb2.Query(id=identifier, text=text, ttl_ms=ttl_ms, **others)  # type: ignore[arg-type]

    query = from_protobuf(message, OPTIONS)

    assert query.failure is None
    assert (query.id, query.text) == (identifier or DEFAULT_ID, text)
    assert query.text_bytes == len(text.encode())
    assert query.model == (others["model"] or "m")
    assert query.truncate == bool(others["truncate"])
    assert query.dimensions == (others["dimensions"] or 0)
    assert query.input_type == (others["input_type"] or 0)
    assert query.encoding == (others["encoding"] or query_pb2.ENCODING_FLOAT32)
    lived_ns = query.deadline_ns - ARRIVED_NS
    assert lived_ns == (OPTIONS.ttl_ms if ttl_ms is None else ttl_ms) * 1_000_000
