"""Results in both encodings, and their headers."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest

from aggregator.core.effects import Form
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import HeaderList, Query, VectorGroup
from aggregator.wire.headers import HeaderRules, Headers
from aggregator.wire.result import Record, ResultEncoder
from protos.embedding.v1 import query_pb2
from tests.unit.wire_builders import (
    ARRIVED_NS,
    BROKEN,
    DEFAULT_ID,
    PROTOBUF_HEADERS,
    decoded,
    float32_group,
    from_json,
    from_protobuf,
    group_of,
)

PB_VALUE = query_pb2.Query(id="q", text="a").SerializeToString()
INT8 = group_of(
    query_pb2.ENCODING_INT8,
    3,
    np.array([[1, -2, 3], [-127, 0, 127]], "<i1").tobytes(),
    2,
    scales=[float(np.float32(0.1)), 0.5],
)
FLOAT16 = group_of(
    query_pb2.ENCODING_FLOAT16, 2, np.array([[1, 2], [0.1, -0.5]], "<f2").tobytes(), 2
)
UBINARY = group_of(query_pb2.ENCODING_UBINARY, 16, bytes([1, 2, 255, 128]), 2)


def encode(query: Query, group: VectorGroup, row: int = 1) -> Record:
    return ResultEncoder(HeaderRules()).encode_vector(
        query,
        group,
        row,
        model_revision="rev-1",
        inference_us=15_500,
        answered_ns=ARRIVED_NS + 20_000_000,
    )


def json_of(record: Record) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(record[1])
    return document


def result_of(record: Record) -> query_pb2.Result:
    return query_pb2.Result.FromString(record[1])


def fail(query: Query, failure: Failure = BROKEN) -> Query:
    query.failure = failure
    return query


def test_a_vector_in_protobuf() -> None:
    group = float32_group()
    key, value, headers = encode(decoded(PB_VALUE, PROTOBUF_HEADERS), group)

    assert query_pb2.Result.FromString(value) == query_pb2.Result(
        id="q",
        model="minilm",
        model_revision="rev-1",
        tokens=11,
        embedding=group.embeddings[16:32],
        dimensions=4,
        encoding=query_pb2.ENCODING_FLOAT32,
        source=query_pb2.Source(topic="queries", partition=3, offset=41),
        queue_ms=4.5,
        inference_ms=15.5,
    )
    assert key == b"q"
    assert headers == [
        ("content-type", b"application/protobuf"),
        ("embedding-status", b"OK"),
        ("embedding-id", b"q"),
    ]


def test_partition_and_offset_0_are_present() -> None:
    query = decoded(PB_VALUE, PROTOBUF_HEADERS, tp=("queries", 0))
    query.offset = 0
    source = result_of(encode(query, float32_group())).source

    assert source.HasField("partition")
    assert source.HasField("offset")


def test_a_vector_in_json() -> None:
    key, value, headers = encode(from_json(id="q"), float32_group())

    assert orjson.loads(value) == {
        "id": "q",
        "model": "minilm",
        "model_revision": "rev-1",
        "tokens": 11,
        "embedding": [0.4, 0.5, 0.6, 0.7],
        "dimensions": 4,
        "encoding": "float32",
        "source": {"topic": "queries", "partition": 3, "offset": 41},
        "queue_ms": 4.5,
        "inference_ms": 15.5,
    }
    assert key == b"q"
    assert headers == [
        ("content-type", b"application/json"),
        ("embedding-status", b"OK"),
        ("embedding-id", b"q"),
    ]


@pytest.mark.parametrize(
    ("group", "dimensions", "name", "vector"),
    [
        (float32_group(), 4, "float32", [0.4, 0.5, 0.6, 0.7]),
        (FLOAT16, 2, "float16", [float(np.float16(0.1)), -0.5]),
        (INT8, 3, "int8", [-127, 0, 127]),
        (UBINARY, 16, "ubinary", [255, 128]),
    ],
)
def test_every_encoding_in_every_format(
    group: VectorGroup, dimensions: int, name: str, vector: list[float]
) -> None:
    as_array = json_of(encode(from_json(), group))
    as_base64 = json_of(encode(from_json(format="base64"), group))
    as_protobuf = result_of(encode(decoded(PB_VALUE, PROTOBUF_HEADERS), group))

    assert as_array["embedding"] == pytest.approx(vector, rel=1e-3)
    assert [type(x) for x in as_array["embedding"]] == [type(x) for x in vector]
    raw = group.embeddings[group.stride :]
    assert base64.b64decode(as_base64["embedding"], validate=True) == raw
    assert as_protobuf.embedding == raw
    for document in (as_array, as_base64):
        assert (document["dimensions"], document["encoding"]) == (dimensions, name)
        assert ("scale" in document) == (name == "int8")
    assert (as_protobuf.dimensions, as_protobuf.encoding) == (dimensions, group.encoding)
    assert as_protobuf.HasField("scale") == (name == "int8")


def test_numbers_in_json_are_the_bytes_numbers() -> None:
    rng = np.random.default_rng(7)
    matrix = rng.standard_normal((3, 384)).astype("<f4")
    group = group_of(query_pb2.ENCODING_FLOAT32, 384, matrix.tobytes(), 3)
    vector = json_of(encode(from_json(), group, row=2))["embedding"]

    assert np.array(vector, "<f4").tobytes() == matrix[2].tobytes()


def test_the_scale_is_a_float32() -> None:
    document = json_of(encode(from_json(), INT8, row=0))
    message = result_of(encode(decoded(PB_VALUE, PROTOBUF_HEADERS), INT8, row=0))

    assert document["scale"] == 0.1
    assert np.float32(message.scale) == np.float32(0.1)


def test_one_encoder_keeps_claims_apart() -> None:
    encoder = ResultEncoder(HeaderRules())
    groups = [float32_group(), float32_group(rows=3, dimensions=2), INT8, float32_group()]
    for revision in ("one", "two"):
        for number, group in enumerate(groups):
            for query in (decoded(PB_VALUE, PROTOBUF_HEADERS), from_json()):
                record = encoder.encode_vector(
                    query,
                    group,
                    1,
                    model_revision=revision,
                    inference_us=number,
                    answered_ns=ARRIVED_NS,
                )
                fresh = ResultEncoder(HeaderRules()).encode_vector(
                    query,
                    group,
                    1,
                    model_revision=revision,
                    inference_us=number,
                    answered_ns=ARRIVED_NS,
                )
                assert record == fresh


def test_the_time_in_the_queue_is_never_below_0() -> None:
    record = ResultEncoder(HeaderRules()).encode_vector(
        from_json(),
        float32_group(),
        0,
        model_revision="",
        inference_us=50_000,
        answered_ns=ARRIVED_NS + 1,
    )

    assert json_of(record)["queue_ms"] == 0


# Errors -----------------------------------------------------------------------------------------

FAILURE = Failure(
    code=Code.UNAVAILABLE,
    reason=Reason.NO_SERVER,
    message="no server",
    field="text",
    retryable=True,
    retry_after_ms=500,
)


def test_an_error_in_protobuf() -> None:
    key, value, headers = ResultEncoder(HeaderRules()).encode_error(
        fail(decoded(PB_VALUE, PROTOBUF_HEADERS), FAILURE)
    )

    assert query_pb2.Result.FromString(value) == query_pb2.Result(
        id="q",
        model="minilm",
        error=query_pb2.QueryError(
            code="UNAVAILABLE",
            reason="NO_SERVER",
            field="text",
            message="no server",
            retryable=True,
            retry_after_ms=500,
        ),
        source=query_pb2.Source(topic="queries", partition=3, offset=41),
    )
    assert key == b"q"
    assert headers[1] == ("embedding-status", b"UNAVAILABLE")


def test_an_error_in_json() -> None:
    _, value, headers = ResultEncoder(HeaderRules()).encode_error(fail(from_json(id="q"), FAILURE))

    assert orjson.loads(value) == {
        "id": "q",
        "model": "minilm",
        "error": {
            "code": "UNAVAILABLE",
            "reason": "NO_SERVER",
            "field": "text",
            "message": "no server",
            "retryable": True,
            "retry_after_ms": 500,
        },
        "source": {"topic": "queries", "partition": 3, "offset": 41},
    }
    assert headers == [
        ("content-type", b"application/json"),
        ("embedding-status", b"UNAVAILABLE"),
        ("embedding-id", b"q"),
    ]


@pytest.mark.parametrize("headers", [None, PROTOBUF_HEADERS])
def test_what_is_absent_is_left_out(headers: HeaderList | None) -> None:
    record = ResultEncoder(HeaderRules()).encode_error(decoded(b"\xff", headers))

    assert record[0] == DEFAULT_ID.encode()
    if headers is None:
        assert set(json_of(record)) == {"id", "error", "source"}
        assert set(json_of(record)["error"]) == {"code", "reason", "message", "retryable"}
    else:
        result = result_of(record)
        assert not result.HasField("model")
        assert not result.HasField("embedding")
        assert not result.error.HasField("field")
        assert not result.error.HasField("retry_after_ms")
        assert result.error.HasField("retryable")


@pytest.mark.parametrize("query", [from_json(), from_protobuf(query_pb2.Query(text="a"))])
def test_messages_are_bounded_and_always_encodable(query: Query) -> None:
    failure = Failure(
        code=Code.INTERNAL, reason=Reason.SERVER_ERROR, message="\ud800" + "é" * 10**6
    )
    _, value, _ = ResultEncoder(HeaderRules()).encode_error(fail(query, failure))

    assert len(value) < 2000


def test_an_error_result_needs_a_failure() -> None:
    with pytest.raises(ValueError, match="failure"):
        ResultEncoder(HeaderRules()).encode_error(from_json())


# Keys and headers -------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "expected"), [(b"k", b"k"), (b"", b""), (None, b"q")])
def test_the_key_is_the_query_s_else_its_id(key: bytes | None, expected: bytes) -> None:
    query = decoded(PB_VALUE, PROTOBUF_HEADERS, key=key)

    assert encode(query, float32_group())[0] == expected
    assert ResultEncoder(HeaderRules()).encode_error(fail(query))[0] == expected


PASSED: Headers = [("b", b"1"), ("a", None), ("b", b"1"), ("traceparent", b"00-1")]
OURS = ["content-type", "embedding-status", "embedding-id"]
FORGED: Headers = [
    ("Embedding-Status", b"OK"),
    ("EMBEDDING-ID", b"x"),
    ("__aggregator.replay.attempts", b"1"),
    ("ce_id", b"1"),
]


def test_headers_are_ours_first_then_what_is_passed_on() -> None:
    query = decoded(PB_VALUE, [*FORGED, *PROTOBUF_HEADERS, *PASSED])
    vector = encode(query, float32_group())[2]
    error = ResultEncoder(HeaderRules()).encode_error(fail(query))[2]

    for headers in (vector, error):
        assert [name for name, _ in headers[:3]] == OURS
        assert headers[3:] == PASSED


def test_a_content_type_is_exact_whatever_the_query_wrote() -> None:
    query = decoded(PB_VALUE, [("Content-Type", b"Application/X-Protobuf; v=1")])

    assert encode(query, float32_group())[2][0] == ("content-type", b"application/protobuf")


def test_headers_over_the_limit_are_passed_on_as_far_as_they_fit() -> None:
    rules = HeaderRules(bytes_max=10)
    query = decoded(PB_VALUE, [("a", b"123"), ("b", b"x" * 20), ("c", b"4"), *PROTOBUF_HEADERS])
    query.failure = Failure(
        code=Code.INVALID_ARGUMENT, reason=Reason.HEADERS_TOO_LARGE, message="too large"
    )
    headers = ResultEncoder(rules).encode_error(query)[2]

    assert headers[3:] == [("a", b"123"), ("c", b"4")]


def test_the_bare_form_has_our_headers_only_and_the_id_as_key() -> None:
    query = fail(decoded(PB_VALUE, [*PROTOBUF_HEADERS, *PASSED], key=b"k" * 10**6))
    full = ResultEncoder(HeaderRules()).encode_error(query, Form.FULL)
    key, value, headers = ResultEncoder(HeaderRules()).encode_error(query, Form.BARE)

    assert key == b"q"
    assert value == full[1]
    assert headers == full[2][:3]
