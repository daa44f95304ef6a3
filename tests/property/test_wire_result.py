"""Results say in every format what the columns say."""

from __future__ import annotations

import base64

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from aggregator.core.query import Query, VectorGroup
from aggregator.wire.headers import HeaderRules
from aggregator.wire.result import DTYPES, ENCODING_NAMES, ResultEncoder
from protos.embedding.v1 import query_pb2
from tests.unit.wire_builders import ARRIVED_NS, PROTOBUF_HEADERS, decoded, group_of

INT8, UBINARY = 3, 4


@st.composite
def groups(draw: st.DrawFn) -> VectorGroup:
    """Finite vectors of any bits."""
    encoding = draw(st.sampled_from(sorted(DTYPES)))
    rows = draw(st.integers(1, 4))
    dimensions = draw(st.integers(1, 5)) * (8 if encoding == UBINARY else 1)
    stride = dimensions // 8 if encoding == UBINARY else dimensions * DTYPES[encoding].itemsize
    raw = draw(st.binary(min_size=rows * stride, max_size=rows * stride))
    numbers = np.frombuffer(raw, DTYPES[encoding])
    finite = np.where(np.isfinite(numbers), numbers, 0).astype(DTYPES[encoding]).tobytes()
    scale = st.floats(0, 2.0**100, width=32)
    scales = draw(st.lists(scale, min_size=rows, max_size=rows)) if encoding == INT8 else ()
    return group_of(encoding, dimensions, finite, rows, scales)


def query_of(form: str) -> Query:
    if form == "protobuf":
        return decoded(query_pb2.Query(id="q", text="a").SerializeToString(), PROTOBUF_HEADERS)
    return decoded(orjson.dumps({"id": "q", "text": "a", "format": form}))


@given(groups(), st.data(), st.integers(0, 10**9), st.integers(-(10**12), 10**12))
def test_all_formats_agree(
    group: VectorGroup, data: st.DataObject, inference_us: int, waited_ns: int
) -> None:
    row = data.draw(st.integers(0, len(group.indexes) - 1))
    encoder = ResultEncoder(HeaderRules())
    values = {
        form: encoder.encode_vector(
            query_of(form),
            group,
            row,
            model_revision="r",
            inference_us=inference_us,
            answered_ns=ARRIVED_NS + waited_ns,
        )[1]
        for form in ("protobuf", "array", "base64")
    }
    message = query_pb2.Result.FromString(values["protobuf"])
    array, text = orjson.loads(values["array"]), orjson.loads(values["base64"])

    raw = group.embeddings[row * group.stride : (row + 1) * group.stride]
    assert message.embedding == raw
    assert base64.b64decode(text["embedding"], validate=True) == raw
    back = np.array(array["embedding"], dtype=DTYPES[group.encoding])
    # As numbers: JSON has no negative zero in some writers, and 0 equals it.
    assert np.array_equal(back, np.frombuffer(raw, DTYPES[group.encoding]))
    for document in (array, text):
        assert document["tokens"] == message.tokens == group.tokens[row]
        assert document["dimensions"] == message.dimensions == group.dimensions
        assert document["encoding"] == ENCODING_NAMES[message.encoding]
        assert document["queue_ms"] == round(message.queue_ms, 3) >= 0
        assert document["inference_ms"] == message.inference_ms == inference_us / 1000
        if group.encoding == INT8:
            assert np.float32(document["scale"]) == np.float32(message.scale)
            assert np.float32(message.scale) == np.float32(group.scales[row])
