"""Any bytes give a query, and any query comes back as it was written."""

from __future__ import annotations

import orjson
from hypothesis import given
from hypothesis import strategies as st

from aggregator.core.effects import Form
from aggregator.core.failures import Reason
from aggregator.core.query import Query
from aggregator.wire.dead_letter import encode_letter
from aggregator.wire.headers import HeaderRules, headers_bytes
from aggregator.wire.query import DecodeOptions
from aggregator.wire.result import ResultEncoder
from protos.embedding.v1 import query_pb2
from tests.unit.wire_builders import PROTOBUF_HEADERS, decoded

LIMIT = 64
OPTIONS = DecodeOptions(
    models=frozenset({"minilm", "other"}),
    default_model="minilm",
    text_bytes_max=100,
    headers=HeaderRules(bytes_max=LIMIT),
)

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=25)
ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=64)
names = st.sampled_from(
    ["content-type", "Content-Type", "traceparent", "ce_id", "__aggregator.replay.id", "é", ""]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
values = st.none() | st.binary(max_size=40)
content_types = st.sampled_from(
    [
        None,
        b"application/json",
        b"application/protobuf",
        b"application/x-protobuf; a=b",
        b"text/plain",
        b"\xff",
    ]
)
headers = st.lists(
    st.tuples(names, values) | st.tuples(st.just("content-type"), content_types), max_size=5
)
fields = st.fixed_dictionaries(
    {"text": texts},
    optional={
        "id": ids,
        "model": st.sampled_from(["minilm", "other"]),
        "input_type": st.sampled_from(["query", "document"]),
        "dimensions": st.integers(1, 2**32 - 1),
        "encoding": st.sampled_from(["float32", "float16", "int8", "ubinary"]),
        "format": st.sampled_from(["array", "base64"]),
        "truncate": st.booleans(),
        "ttl_ms": st.integers(0, 2**63 - 1),
    },
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    "id",
    "text",
    "model",
    "input_type",
    "dimensions",
    "encoding",
    "format",
    "truncate",
    "ttl_ms",
]
json_objects = st.dictionaries(st.sampled_from(FIELDS) | texts, json_values, max_size=9)


def protobuf_of(fields: dict[str, object]) -> query_pb2.Query:
    message = query_pb2.Query()
    for name, value in fields.items():
        if name == "input_type":
            number = query_pb2.InputType.Value(f"INPUT_TYPE_{str(value).upper()}")
            message.input_type = number  # type: ignore[assignment]
        elif name == "encoding":
            number = query_pb2.Encoding.Value(f"ENCODING_{str(value).upper()}")
            message.encoding = number  # type: ignore[assignment]
        elif name != "format":
            setattr(message, name, value)
    return message


protobuf_bytes = fields.map(protobuf_of).map(lambda message: message.SerializeToString())


@st.composite
def damaged(draw: st.DrawFn, sound: st.SearchStrategy[bytes]) -> bytes:
    """Sound bytes with some changed, left out or put in."""
    value = bytearray(draw(sound))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(value)))
        cut = draw(st.integers(0, 3))
        value[start : start + cut] = draw(st.binary(max_size=3))
    return bytes(value)


hostile = (
    st.none()
    | st.binary(max_size=200)
    | json_objects.map(orjson.dumps)
    | damaged(json_objects.map(orjson.dumps))
    | protobuf_bytes
    | damaged(protobuf_bytes)
)


def assert_same(query: Query, fields: dict[str, object], *, protobuf: bool) -> None:
    assert query.failure is None, query.failure
    assert query.protobuf is protobuf
    assert query.id == (fields.get("id") or "queries-3-41")
    assert query.model == fields.get("model", "minilm")
    assert query.text == fields["text"]
    assert query.text_bytes == len(query.text.encode())
    words = {0: None, 1: "query", 2: "document"}
    assert words[query.input_type] == fields.get("input_type")
    encodings = {1: "float32", 2: "float16", 3: "int8", 4: "ubinary"}
    assert encodings[query.encoding] == fields.get("encoding", "float32")
    assert query.dimensions == fields.get("dimensions", 0)
    assert query.truncate is fields.get("truncate", False)
    assert query.base64 is (not protobuf and fields.get("format") == "base64")
    ttl_ms = fields.get("ttl_ms", 60_000)
    assert isinstance(ttl_ms, int)
    expected = min(query.arrived_ns + ttl_ms * 10**6, 2**63 - 1) if ttl_ms else 0
    assert query.deadline_ns == expected


@given(fields)
def test_json_comes_back(fields: dict[str, object]) -> None:
    assert_same(decoded(orjson.dumps(fields), None, OPTIONS), fields, protobuf=False)


@given(fields, st.lists(st.sampled_from([name for name in FIELDS if name != "text"])))
def test_null_json_fields_are_as_absent_ones(fields: dict[str, object], nulls: list[str]) -> None:
    absent = {name: value for name, value in fields.items() if name not in nulls}
    with_nulls = {**fields, **dict.fromkeys(nulls)}

    assert_same(decoded(orjson.dumps(with_nulls), None, OPTIONS), absent, protobuf=False)


@given(fields)
def test_protobuf_comes_back(fields: dict[str, object]) -> None:
    value = protobuf_of(fields).SerializeToString()

    assert_same(decoded(value, PROTOBUF_HEADERS, OPTIONS), fields, protobuf=True)


@given(hostile, headers, values, st.none() | st.integers(-(2**63), 2**63 - 1))
def test_any_record_gives_a_query_and_its_answers_fit(
    value: bytes | None,
    headers: list[tuple[str, bytes | None]],
    key: bytes | None,
    timestamp_ms: int | None,
) -> None:
    query = decoded(value, headers, OPTIONS, key=key, timestamp_ms=timestamp_ms)

    assert all(hasattr(query, name) for name in Query.__slots__)
    assert 0 < len(query.id.encode()) <= 256
    assert query.model in OPTIONS.models or query.failure is not None
    assert len(query.text.encode()) <= 100
    assert 0 <= query.deadline_ns < 2**63
    if query.failure is None:
        assert query.text
        return
    assert query.failure.dead_letter is (query.failure.reason is Reason.UNDECODABLE)
    assert_answers_fit(query)


def assert_answers_fit(query: Query) -> None:
    encoder = ResultEncoder(OPTIONS.headers)
    key, value, headers = encoder.encode_error(query)
    assert key == (query.id.encode() if query.key is None else query.key)
    assert headers_bytes(headers[3:]) <= LIMIT
    if query.protobuf:
        assert query_pb2.Result.FromString(value).id == query.id
    else:
        assert orjson.loads(value)["id"] == query.id
    letter = encode_letter(query)
    assert letter[:2] == (query.key, query.value)
    assert letter[2][: len(query.headers)] == list(query.headers)
    for bare in (encoder.encode_error(query, Form.BARE), encode_letter(query, Form.BARE)):
        size = sum(len(part or b"") for part in bare[:2]) + headers_bytes(bare[2])
        assert size < 8192
