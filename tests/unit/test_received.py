"""Results as consumers see them: both content types, every encoding, and what is no result."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from confluent_kafka import Message

from aggregator.commands.received import NotAResultError, header, headers_of, read_result
from protos.embedding.v1 import query_pb2

NUMBERS = [0.5, -2.0, 0.0, 1.0, 0.25, -0.125, 3.0, -1.0]


def message(value: bytes | None, content_type: str = "application/json") -> Message:
    return Message(topic="results", value=value, headers=[("content-type", content_type.encode())])


def protobuf(**fields: Any) -> Message:
    return message(query_pb2.Result(**fields).SerializeToString(), "application/protobuf")


@pytest.mark.parametrize(
    ("encoding", "data", "scale", "expected"),
    [
        ("float32", np.array(NUMBERS, "<f4").tobytes(), None, NUMBERS),
        ("float16", np.array(NUMBERS, "<f2").tobytes(), None, NUMBERS),
        (
            "int8",
            bytes([1, 255, 0, 127, 129, 2, 3, 4]),
            0.5,
            [0.5, -0.5, 0, 63.5, -63.5, 1, 1.5, 2],
        ),
        ("ubinary", bytes([0b10011010]), None, [1, 0, 0, 1, 1, 0, 1, 0]),
    ],
)
def test_every_encoding_reads_the_same_from_both_content_types(
    encoding: str, data: bytes, scale: float | None, expected: list[float]
) -> None:
    fields = {"id": "a", "tokens": 3, "dimensions": len(expected), "scale": scale, "error": None}
    coded = base64.b64encode(data).decode()
    in_json = read_result(
        message(json.dumps({**fields, "embedding": coded, "encoding": encoding}).encode())
    )
    number = query_pb2.Encoding.Value(f"ENCODING_{encoding.upper()}")
    in_protobuf = read_result(
        protobuf(
            id="a", tokens=3, dimensions=len(expected), scale=scale, embedding=data, encoding=number
        )
    )
    for result in (in_json, in_protobuf):
        assert (result.id, result.status, result.ok, result.tokens) == ("a", "OK", True, 3)
        assert result.vector is not None
        assert result.vector.tolist() == expected
    assert json.loads(in_json.as_json()) == json.loads(in_protobuf.as_json())


def test_a_line_shows_the_first_numbers_and_the_times() -> None:
    data = np.array(NUMBERS, "<f4").tobytes()
    result = read_result(
        protobuf(
            id="a",
            tokens=7,
            dimensions=8,
            embedding=data,
            encoding=query_pb2.ENCODING_FLOAT32,
            queue_ms=1.26,
            inference_ms=20,
        )
    )
    assert result.as_line() == (
        "a  OK  7 tokens  queue 1.3 ms  inference 20.0 ms  "
        "8 dims [+0.5000 -2.0000 +0.0000 +1.0000 ...]"
    )


def test_json_has_no_more_digits_than_the_numbers_have() -> None:
    values = [0.1, -1.2345678, 1e-7]
    for encoding, kind, texts in (
        ("FLOAT32", "<f4", "[0.1, -1.2345678, 1e-07]"),
        # The nearest of 16 bits, exactly.
        ("FLOAT16", "<f2", "[0.099975586, -1.234375, 1.1920929e-07]"),
    ):
        record = protobuf(
            embedding=np.array(values, kind).tobytes(),
            dimensions=3,
            encoding=f"ENCODING_{encoding}",
            queue_ms=3.7241600000000004,
            inference_ms=20,
        )
        line = read_result(record).as_json()
        assert f'"embedding": {texts}' in line
        assert '"queue_ms": 3.724, "inference_ms": 20.0' in line
    scaled = protobuf(embedding=b"\x7f", dimensions=1, encoding="ENCODING_INT8", scale=0.0012345678)
    assert '"embedding": [127]' in read_result(scaled).as_json()
    assert '"scale": 0.0012345678' in read_result(scaled).as_json()


def test_an_error_has_no_vector_and_names_its_field() -> None:
    error = {"code": "NOT_FOUND", "reason": "MODEL_UNKNOWN", "field": "model", "message": "no such"}
    for record in (
        protobuf(id="b", error=error),
        message(json.dumps({"id": "b", "error": error, "embedding": None}).encode()),
    ):
        result = read_result(record)
        assert (result.ok, result.vector) == (False, None)
        assert result.as_line() == "b  NOT_FOUND  MODEL_UNKNOWN (field model): no such"


class Unreadable(Message):
    """What the client makes of a header's name that is not UTF-8."""

    def value(self, payload: object = None) -> bytes:
        return b"{}"

    def headers(self) -> Any:
        raise SystemError


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (message(None), "it is empty"),
        (message(b"{}", "text/plain"), "content-type is 'text/plain'"),
        (message(b"{"), "can't be read"),
        (message(b"[]"), "not a JSON object"),
        (message(b"{}"), "neither a vector nor an error"),
        (message(b"\xff\xff", "application/protobuf"), "can't be read"),
        (message(b'{"embedding": [1, 2], "dimensions": 3, "encoding": "float32"}'), "2 numbers"),
        (message(b'{"embedding": "??", "dimensions": 3, "encoding": "float32"}'), "can't be read"),
        (message(b'{"embedding": [1], "dimensions": 1, "encoding": "float99"}'), "can't be read"),
        (message(b'{"embedding": [1], "dimensions": 1}'), "can't be read"),
        (message(b'{"error": 5}'), "its error is no object"),
        (message(b'{"error": {}, "tokens": "x"}'), "can't be read"),
        (message(b'{"error": {}, "queue_ms": NaN}'), "queue_ms is no number"),
        (message(b'{"error": {}, "inference_ms": [1]}'), "can't be read"),
        (message(b'{"error": {}, "tokens": 1' + b"0" * 400 + b"}"), "can't be read"),
        (message(b"[" * 100_000), "can't be read"),
        (Unreadable(), "content-type is None"),
    ],
)
def test_what_is_no_result_is_refused(record: Message, why: str) -> None:
    with pytest.raises(NotAResultError, match=why):
        read_result(record)


def test_the_last_header_of_a_name_counts() -> None:
    record = Message(topic="t", headers=[("a", b"1"), ("b", None), ("a", b"2")])
    assert [header(headers_of(record), name) for name in "abc"] == ["2", None, None]


def test_what_anybody_wrote_moves_no_cursor() -> None:
    error = {"code": "INTERNAL", "reason": "X\n", "message": "\x1b]0;title\x07"}
    line = read_result(message(json.dumps({"id": "\x1b[2J", "error": error}).encode())).as_line()
    assert line == r"\x1b[2J  INTERNAL  X\n: \x1b]0;title\x07"
    vector = {"id": "a\rb", "embedding": [1], "dimensions": 1, "encoding": "float32"}
    assert r"a\rb  OK" in read_result(message(json.dumps(vector).encode())).as_line()
