"""What becomes of a record: every rule of the contract about reading queries."""

from __future__ import annotations

import pytest

from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import QUERY_OVERHEAD_BYTES, HeaderList, Query
from aggregator.wire.headers import HeaderRules
from aggregator.wire.query import DecodeOptions
from protos.embedding.v1 import query_pb2
from tests.unit.wire_builders import (
    ARRIVED_NS,
    DEFAULT_ID,
    OPTIONS,
    PROTOBUF_HEADERS,
    TP,
    WALL_MS,
    decoded,
    from_json,
    from_protobuf,
)

Message = query_pb2.Query


def refusal(query: Query) -> Failure:
    assert query.failure is not None
    assert query.deadline_ns == 0
    return query.failure


def assert_undecodable(query: Query) -> None:
    failure = refusal(query)
    assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, Reason.UNDECODABLE)
    assert failure.dead_letter
    assert not failure.retryable
    assert query.id == DEFAULT_ID


def assert_invalid(query: Query, field: str) -> None:
    failure = refusal(query)
    assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, Reason.INVALID_FIELD)
    assert failure.field == field
    assert field in failure.message
    assert not failure.dead_letter
    assert not failure.retryable


# Whole records ----------------------------------------------------------------------------------


def test_json_with_every_field() -> None:
    query = from_json(
        id="q-1",
        model="minilm",
        text="grüß dich",
        input_type="document",
        dimensions=128,
        encoding="int8",
        format="base64",
        truncate=True,
        ttl_ms=1000,
    )

    assert query.failure is None
    assert (query.id, query.model, query.text, query.text_bytes) == (
        "q-1",
        "minilm",
        "grüß dich",
        11,
    )
    assert query.input_type == query_pb2.INPUT_TYPE_DOCUMENT
    assert query.encoding == query_pb2.ENCODING_INT8
    assert (query.dimensions, query.truncate, query.base64, query.protobuf) == (
        128,
        True,
        True,
        False,
    )
    assert query.deadline_ns == ARRIVED_NS + 1_000_000_000
    assert (query.tp, query.epoch, query.offset) == (TP, 7, 41)


def test_protobuf_with_every_field() -> None:
    query = from_protobuf(
        Message(
            id="q-1",
            model="minilm",
            text="grüß dich",
            input_type=query_pb2.INPUT_TYPE_QUERY,
            dimensions=128,
            encoding=query_pb2.ENCODING_UBINARY,
            truncate=True,
            ttl_ms=1000,
        )
    )

    assert query.failure is None
    assert (query.id, query.model, query.text, query.text_bytes) == (
        "q-1",
        "minilm",
        "grüß dich",
        11,
    )
    assert query.input_type == query_pb2.INPUT_TYPE_QUERY
    assert query.encoding == query_pb2.ENCODING_UBINARY
    assert (query.dimensions, query.truncate, query.base64, query.protobuf) == (
        128,
        True,
        False,
        True,
    )
    assert query.deadline_ns == ARRIVED_NS + 1_000_000_000


@pytest.mark.parametrize("query", [from_json(), from_protobuf(Message(text="hello"))])
def test_defaults(query: Query) -> None:
    assert query.failure is None
    assert (query.id, query.model, query.text) == (DEFAULT_ID, "minilm", "hello")
    assert (query.input_type, query.dimensions, query.truncate) == (0, 0, False)
    assert query.encoding == query_pb2.ENCODING_FLOAT32
    assert not query.base64
    assert query.deadline_ns == ARRIVED_NS + 60_000 * 1_000_000
    assert (query.estimate_raw, query.script) == (0, 0)


def test_null_is_absent() -> None:
    names = ("id", "model", "input_type", "dimensions", "encoding", "format", "truncate", "ttl_ms")
    query = from_json(**dict.fromkeys(names))

    assert query.failure is None
    assert (query.id, query.model) == (DEFAULT_ID, "minilm")


def test_unspecified_is_absent() -> None:
    query = from_json(input_type="unspecified", encoding="unspecified")

    assert query.failure is None
    assert (query.input_type, query.encoding) == (0, query_pb2.ENCODING_FLOAT32)


def test_unknown_fields_are_ignored() -> None:
    assert from_json(colour="red", Text="x", ttlMs=-1).failure is None
    unknown = b"\xfa\x07\x03abc" + Message(text="hello").SerializeToString()
    assert decoded(unknown, PROTOBUF_HEADERS).failure is None


def test_key_value_and_headers_are_kept_as_they_came_and_counted() -> None:
    headers = [("traceparent", b"12345"), ("x", None)]
    query = decoded(b'{"text":"a"}', headers, key=b"key")

    assert query.key == b"key"
    assert query.value == b'{"text":"a"}'
    assert query.headers == headers
    assert query.size_bytes == QUERY_OVERHEAD_BYTES + 3 + 12 + (11 + 5 + 1) + len("a")


# Content types ----------------------------------------------------------------------------------

PROTOBUF_VALUE = Message(text="hello").SerializeToString()


@pytest.mark.parametrize(
    "headers",
    [
        [("content-type", b"application/protobuf")],
        [("content-type", b"application/x-protobuf")],
        [("Content-Type", b"Application/Protobuf")],
        [("content-type", b' application/protobuf ; proto="embedding.v1.Query"')],
        [("content-type", b"application/json"), ("content-type", b"application/protobuf")],
        [("content-type", b"application/protobuf"), ("traceparent", b"x")],
    ],
)
def test_protobuf_content_types(headers: HeaderList) -> None:
    query = decoded(PROTOBUF_VALUE, headers)

    assert query.failure is None
    assert query.protobuf


@pytest.mark.parametrize(
    "headers",
    [
        None,
        [],
        [("content-type", None)],
        [("content-type", b"")],
        [("content-type", b" ")],
        [("content-type", b"application/json")],
        [("CONTENT-TYPE", b"application/JSON; charset=utf-8")],
        [("content-type", b";charset=utf-8")],
        [("content-type", b"application/protobuf"), ("content-type", b"application/json")],
        [("content-type", b"application/protobuf"), ("Content-Type", None)],
        [("contentType", b"application/protobuf")],
    ],
)
def test_json_content_types(headers: HeaderList | None) -> None:
    query = decoded(b'{"text":"hello"}', headers)

    assert query.failure is None
    assert not query.protobuf


@pytest.mark.parametrize(
    "content_type", [b"text/plain", b"application/cloudevents+json", b"json", b"\xff\xfe", b"*/*"]
)
@pytest.mark.parametrize("value", [b'{"text":"hello"}', PROTOBUF_VALUE, None, b""])
def test_unknown_content_types(content_type: bytes, value: bytes | None) -> None:
    query = decoded(value, [("content-type", content_type)])

    assert_undecodable(query)
    assert not query.protobuf


# Undecodable ------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [None, PROTOBUF_HEADERS])
def test_a_null_value(headers: HeaderList | None) -> None:
    query = decoded(None, headers)

    assert_undecodable(query)
    assert query.protobuf is (headers is not None)
    assert query.size_bytes == QUERY_OVERHEAD_BYTES + (0 if headers is None else 12 + 20)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"1",
        b"true",
        b"NaN",
        b'{"text":"a","ttl_ms":NaN}',
        b'{"text":"a","ttl_ms":Infinity}',
        b'{"text":"\\ud800"}',
        b'{"text":"\\udc00\\ud800"}',
        b'{"text":"\xed\xa0\x80"}',
        b'{"text":"\xff"}',
        b'{"id":"\\ud83d","text":"a"}',
        b'\xef\xbb\xbf{"text":"a"}',
        b'{"text":"a"} x',
        b"{'text':'a'}",
        b'{"text":"a",}',
        b'{"text":"a\x00b"}',
        b"[" * 100_000,
        b'{"text":' * 5000,
        b'{"text":"a","x":1e999}',
        b"\x1f\x8b\x08\x00",
    ],
)
def test_json_that_is_none(value: bytes) -> None:
    assert_undecodable(decoded(value))


@pytest.mark.parametrize(
    "value",
    [b"\xff\xff", b"\x1a\x05ab", b"\x1a\x02\xff\xff", b"\x1a\x03\xed\xa0\x80", b"\x0b" * 5000],
)
def test_protobuf_that_is_none(value: bytes) -> None:
    query = decoded(value, PROTOBUF_HEADERS)

    assert_undecodable(query)
    assert query.protobuf


def test_an_empty_protobuf_value_is_a_query_without_text() -> None:
    assert_invalid(decoded(b"", PROTOBUF_HEADERS), "text")


def test_messages_are_short_and_do_not_echo_the_text() -> None:
    failure = refusal(decoded(b'{"text": secret' + b"x" * 10_000))

    assert len(failure.message) < 300
    assert "secret" not in failure.message


# Fields -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5, True, False, 1.5, [], {}, ["a"]])
@pytest.mark.parametrize("field", ["id", "model", "text", "input_type", "encoding", "format"])
def test_json_strings_are_strictly_strings(field: str, value: object) -> None:
    assert_invalid(from_json(**{field: value}), field)


@pytest.mark.parametrize("value", ["5", True, False, 5.0, [], {}, -1, 2**32, 0])
def test_json_dimensions(value: object) -> None:
    assert_invalid(from_json(dimensions=value), "dimensions")


@pytest.mark.parametrize("value", ["5", True, False, 5.0, [], {}, -1, -(2**63)])
def test_json_ttl(value: object) -> None:
    assert_invalid(from_json(ttl_ms=value), "ttl_ms")


@pytest.mark.parametrize("number", [b"9223372036854775808", b"18446744073709551616", b"1" * 400])
def test_json_numbers_beyond_64_bits(number: bytes) -> None:
    query = decoded(b'{"text":"a","ttl_ms":' + number + b"}")

    assert query.failure is not None
    assert query.failure.reason in {Reason.INVALID_FIELD, Reason.UNDECODABLE}


@pytest.mark.parametrize("value", [0, 1, "true", "", [], 1.0])
def test_json_truncate_is_strictly_a_bool(value: object) -> None:
    assert_invalid(from_json(truncate=value), "truncate")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_type", "QUERY"),
        ("input_type", "INPUT_TYPE_QUERY"),
        ("input_type", ""),
        ("encoding", "Float32"),
        ("encoding", "binary"),
        ("format", "float"),
        ("format", "unspecified"),
    ],
)
def test_json_words_are_exact(field: str, value: str) -> None:
    assert_invalid(from_json(**{field: value}), field)


def test_the_words_there_are_leave_out_the_one_for_none() -> None:
    failure = refusal(from_json(encoding="float64"))
    assert failure.message == "encoding must be one of: float32, float16, int8, ubinary"


@pytest.mark.parametrize("headers", [None, [], [("content-type", b"")], [("other", b"x")]])
def test_protobuf_without_its_content_type_is_told_so(headers: HeaderList | None) -> None:
    query = decoded(Message(text="hello").SerializeToString(), headers)
    assert_undecodable(query)
    message = refusal(query).message
    assert message.startswith("read as JSON, since there is no content-type header")
    assert "application/protobuf" in message
    assert "unexpected character" in message


def test_what_says_that_it_is_json_is_not_taken_for_protobuf() -> None:
    message = refusal(decoded(b"{", [("Content-Type", b"application/json")])).message
    assert "content-type" not in message


def test_duplicate_json_keys_take_the_last() -> None:
    assert decoded(b'{"text":"a","text":"b"}').text == "b"
    assert_invalid(decoded(b'{"text":"a","text":null}'), "text")


@pytest.mark.parametrize("number", [3, -1, 2**31 - 1])
def test_protobuf_unknown_input_types(number: int) -> None:
    message = Message(text="a")
    message.input_type = number  # type: ignore[assignment]
    assert_invalid(from_protobuf(message), "input_type")


@pytest.mark.parametrize("number", [5, -1, 2**31 - 1])
def test_protobuf_unknown_encodings(number: int) -> None:
    message = Message(text="a")
    message.encoding = number  # type: ignore[assignment]
    assert_invalid(from_protobuf(message), "encoding")


def test_protobuf_zero_enums_are_absent() -> None:
    message = Message(text="a", input_type=query_pb2.INPUT_TYPE_UNSPECIFIED)
    message.encoding = query_pb2.ENCODING_UNSPECIFIED

    assert from_protobuf(message).failure is None


def test_protobuf_zero_dimensions_are_present() -> None:
    assert_invalid(from_protobuf(Message(text="a", dimensions=0)), "dimensions")


def test_protobuf_negative_ttl() -> None:
    assert_invalid(from_protobuf(Message(text="a", ttl_ms=-1)), "ttl_ms")


@pytest.mark.parametrize(
    "query",
    [
        from_json(text=None),
        from_json(text=""),
        from_protobuf(Message()),
        from_protobuf(Message(text="")),
        from_protobuf(Message(id="x")),
    ],
)
def test_text_is_required(query: Query) -> None:
    assert_invalid(query, "text")


def test_text_limit_counts_utf8_bytes() -> None:
    options = DecodeOptions(models=frozenset({"minilm"}), text_bytes_max=10)

    assert from_json(None, options, text="é" * 5).failure is None
    assert from_json(None, options, text="x" * 10).failure is None
    assert_invalid(from_json(None, options, text="é" * 5 + "x"), "text")
    assert_invalid(from_json(None, options, text="x" * 11, truncate=True), "text")
    assert from_json(None, options, text="x" * 11).text == ""


@pytest.mark.parametrize("text", [" ", "\x00", "\u202e", "😀" * 100, "<|endoftext|>", "\ufeff"])
def test_odd_texts_are_texts(text: str) -> None:
    for query in (from_json(text=text), from_protobuf(Message(text=text))):
        assert query.failure is None
        assert query.text == text


@pytest.mark.parametrize("identifier", ["x" * 256, "é" * 128, "😀" * 64, "\x00", " "])
def test_ids_up_to_256_bytes(identifier: str) -> None:
    assert from_json(id=identifier).id == identifier
    assert from_protobuf(Message(id=identifier, text="a")).id == identifier


@pytest.mark.parametrize("identifier", ["x" * 257, "é" * 129, "😀" * 64 + "x"])
def test_a_refused_id_is_not_echoed(identifier: str) -> None:
    for query in (from_json(id=identifier), from_protobuf(Message(id=identifier, text="a"))):
        assert_invalid(query, "id")
        assert query.id == DEFAULT_ID
        assert identifier[:40] not in refusal(query).message


def test_an_empty_id_is_absent() -> None:
    assert from_json(id="").id == DEFAULT_ID
    assert from_protobuf(Message(id="", text="a")).id == DEFAULT_ID


def test_the_first_bad_field_is_named() -> None:
    query = from_json(id="ok", text="", dimensions=-1, ttl_ms=-1)

    assert_invalid(query, "text")
    assert (query.id, query.model) == ("ok", "minilm")


# Models -----------------------------------------------------------------------------------------

SEVERAL = DecodeOptions(models=frozenset({"a", "b"}))


@pytest.mark.parametrize("model", ["c", "", "A", "x" * 100_000])
def test_a_model_that_is_not_configured(model: str) -> None:
    for query in (
        from_json(None, SEVERAL, model=model),
        from_protobuf(Message(text="a", model=model), SEVERAL),
    ):
        failure = refusal(query)
        assert (failure.code, failure.reason) == (Code.NOT_FOUND, Reason.MODEL_UNKNOWN)
        assert not failure.dead_letter
        assert query.model == ""
        assert failure.message.endswith(" is not configured; served: 'a', 'b'")
        assert len(failure.message) < 100


def test_many_served_names_are_cut() -> None:
    names = frozenset(f"model-{number}" for number in range(1_000))
    options = DecodeOptions(models=names, default_model="model-1")
    message = refusal(from_json(None, options, model="other")).message
    assert message.startswith("model 'other' is not configured; served: 'model-0', 'model-1'")
    assert message.endswith("...")
    assert len(message) < 250


def test_several_models_need_a_name_or_a_default() -> None:
    assert_invalid(from_json(None, SEVERAL), "model")
    assert_invalid(from_protobuf(Message(text="a"), SEVERAL), "model")
    assert from_json(None, SEVERAL, model="b").model == "b"
    with_default = DecodeOptions(models=frozenset({"a", "b"}), default_model="b")
    assert from_json(None, with_default).model == "b"
    assert from_json(None, with_default, model="a").model == "a"


def test_the_default_must_be_a_model() -> None:
    with pytest.raises(ValueError, match="'c'"):
        DecodeOptions(models=frozenset({"a"}), default_model="c")


# Deadlines --------------------------------------------------------------------------------------


def deadline_ms(
    ttl_ms: int, age_ms: int | None, options: DecodeOptions = OPTIONS, arrived_ns: int = ARRIVED_NS
) -> float:
    timestamp_ms = None if age_ms is None else WALL_MS - age_ms
    value = b'{"text":"a","ttl_ms":%d}' % ttl_ms
    query = decoded(value, None, options, timestamp_ms=timestamp_ms, arrived_ns=arrived_ns)
    assert query.failure is None
    return (query.deadline_ns - arrived_ns) / 1e6


@pytest.mark.parametrize(
    ("ttl_ms", "age_ms", "left_ms"),
    [
        (1000, 0, 1000),
        (1000, 300, 700),
        (1000, 1000, 0),
        (1000, 5000, 0),
        (1000, -5000, 1000),
        (1000, None, 1000),
    ],
)
def test_the_age_is_held_within_0_and_the_ttl(ttl_ms: int, age_ms: int, left_ms: int) -> None:
    assert deadline_ms(ttl_ms, age_ms) == left_ms


def test_ttl_from_arrival_ignores_the_age() -> None:
    options = DecodeOptions(models=frozenset({"minilm"}), ttl_from="arrival")

    assert deadline_ms(1000, 300, options) == 1000


def test_ttl_0_is_no_deadline_for_the_query_and_as_the_setting() -> None:
    options = DecodeOptions(models=frozenset({"minilm"}), ttl_ms=0)

    assert from_json(ttl_ms=0).deadline_ns == 0
    assert from_protobuf(Message(text="a", ttl_ms=0)).deadline_ns == 0
    assert from_json(None, options).deadline_ns == 0
    assert from_protobuf(Message(text="a"), options).deadline_ns == 0
    assert from_json(None, options, ttl_ms=5).deadline_ns == ARRIVED_NS + 5_000_000


def test_a_deadline_is_never_mistaken_for_none() -> None:
    query = decoded(b'{"text":"a","ttl_ms":5}', timestamp_ms=0, arrived_ns=0)

    assert query.deadline_ns == 1


def test_the_longest_ttl_stays_within_64_bits() -> None:
    for query in (from_json(ttl_ms=2**63 - 1), from_protobuf(Message(text="a", ttl_ms=2**63 - 1))):
        assert query.failure is None
        assert query.deadline_ns == 2**63 - 1


# Headers ----------------------------------------------------------------------------------------

SMALL = DecodeOptions(models=frozenset({"minilm"}), headers=HeaderRules(bytes_max=20))


def test_headers_over_the_limit() -> None:
    query = from_json([("x", b"1" * 20)], SMALL, id="q")

    failure = refusal(query)
    assert (failure.code, failure.reason) == (Code.INVALID_ARGUMENT, Reason.HEADERS_TOO_LARGE)
    assert not failure.dead_letter
    assert query.id == "q"


def test_only_headers_that_would_be_passed_on_count() -> None:
    headers = [("ce_x", b"1" * 50), ("content-type", b"application/json"), ("x", b"1" * 19)]

    assert from_json(headers, SMALL).failure is None


def test_a_bad_field_is_named_before_the_headers() -> None:
    assert_invalid(from_json([("x", b"1" * 20)], SMALL, text=""), "text")


# Replay -----------------------------------------------------------------------------------------


def test_a_replayed_letter_keeps_its_first_id() -> None:
    headers = [("__aggregator.replay.id", b"queries-0-5")]

    assert from_json(headers, id="own").id == "queries-0-5"
    assert from_json(headers).id == "queries-0-5"
    assert decoded(b"{", headers).id == "queries-0-5"


@pytest.mark.parametrize("value", [None, b"", b"x" * 281, b"\xff", b"\xed\xa0\x80"])
def test_a_replay_id_that_no_replay_wrote_is_ignored(value: bytes | None) -> None:
    assert from_json([("__aggregator.replay.id", value)], id="own").id == "own"
