"""Records that are judged by what they hold: every field, header, content type, key and size."""

from __future__ import annotations

from typing import Any

from protos.embedding.v1 import query_pb2
from tests.harness.bad_input import (
    AS_PROTOBUF,
    HEADERS_BYTES_MAX,
    JSON,
    PROTOBUF,
    TEXT_BYTES_MAX,
    TOKENS_MAX,
    Case,
    Headers,
    invalid,
    js,
    pb,
    raw,
)

TEN_MB = 10_000_000
LONG_KEY = bytes(9_000)
HOSTILE_NAME = b"\xff\xfe"
"""A header's name that is not UTF-8: clients for Python can't send it, others can."""


def undecodable(value: bytes | None, headers: Headers | None = None, **expected: Any) -> Case:
    return raw(value, headers, reason="UNDECODABLE", attempts=0, **expected)


def typed(content_type: bytes | None, name: str = "content-type") -> Headers:
    return [(name, content_type)]


UNDECODABLE = {
    "garbage": undecodable(b"\x00\x01garbage\xff"),
    "garbage as JSON": undecodable(b"\x00\x01garbage\xff", typed(JSON)),
    "garbage as Protobuf": undecodable(b"\xff\xff", AS_PROTOBUF, protobuf=True),
    "garbage as x-protobuf": undecodable(
        b"\xff\xff", typed(b"application/x-protobuf"), protobuf=True
    ),
    "Protobuf cut short": undecodable(b"\x1a\x7fabc", AS_PROTOBUF, protobuf=True),
    "Protobuf with text not UTF-8": undecodable(b"\x1a\x02\xff\xfe", AS_PROTOBUF, protobuf=True),
    "Protobuf nested for ever": undecodable(b"\x7b" * 5_000, AS_PROTOBUF, protobuf=True),
    "tombstone": undecodable(None, key=b"k"),
    "tombstone as JSON": undecodable(None, typed(JSON)),
    "tombstone as Protobuf": undecodable(None, AS_PROTOBUF, protobuf=True),
    "empty JSON": undecodable(b""),
    "JSON of spaces": undecodable(b"  \n"),
    "JSON cut short": undecodable(b'{"text": "a'),
    "JSON nested for ever": undecodable(b"[" * 200_000),
    "nested for ever in an unknown field": undecodable(
        b'{"text": "a", "x": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"
    ),
    "JSON not UTF-8": undecodable(b'{"text": "\xff"}'),
    "lone surrogate": undecodable(b'{"text": "\\ud800"}'),
    "lone surrogate in bytes": undecodable(b'{"text": "\xed\xa0\x80"}'),
    "lone surrogate in an unknown field": undecodable(b'{"text": "a", "x": "\\udfff"}'),
    "UTF-16": undecodable('{"text": "a"}'.encode("utf-16")),
    "byte order mark": undecodable(b'\xef\xbb\xbf{"text": "a"}'),
    "not a number": undecodable(b'{"text": "a", "ttl_ms": NaN}'),
    "array": undecodable(b'[{"text": "a"}]'),
    "string": undecodable(b'"text"'),
    "number": undecodable(b"7"),
    "null": undecodable(b"null"),
    "content type unknown": undecodable(b'{"text": "a"}', typed(b"text/csv")),
    "content type avro": undecodable(b"\x00", typed(b"application/avro")),
    "content type no text": undecodable(b'{"text": "a"}', typed(b"\xff\xff")),
    "Protobuf without its content type": undecodable(
        query_pb2.Query(text="a text").SerializeToString()
    ),
    "JSON as Protobuf": undecodable(b'{"text": "a"}', AS_PROTOBUF, protobuf=True),
    "last content type is unknown": undecodable(
        b'{"text": "a"}', [*typed(JSON), *typed(b"text/plain")]
    ),
    "garbage with an id in a header": undecodable(
        b"\xff", [("__aggregator.errors.offset", b"999999"), ("embedding-id", b"mine")], passed=[]
    ),
    "10 MB of garbage": undecodable(bytes(TEN_MB)),
    "10 MB of garbage as Protobuf": undecodable(b"\xff" * TEN_MB, AS_PROTOBUF, protobuf=True),
    "garbage larger than a letter may be": undecodable(
        bytes(13 * 1024 * 1024), [("kept", b"v"), ("none", None)], key=b"k", letter_bare=True
    ),
    "garbage with a header larger than a letter may be": undecodable(
        b"\xff",
        [("a", b"1"), ("large", bytes(13 * 1024 * 1024)), ("b", b"2")],
        passed=[("a", b"1"), ("b", b"2")],
        letter_bare=True,
    ),
    "garbage with a key larger than a letter may be": undecodable(
        b"\xff", key=bytes(13 * 1024 * 1024), bare=True, letter_bare=True
    ),
}

_LONG_ID = "é" * 128 + "x"  # 257 bytes
_LONG_TEXT = "a" * (TEXT_BYTES_MAX + 1)

INVALID_JSON = {
    **{f"id {bad!r}"[:24]: invalid("id", js({"id": bad})) for bad in (7, ["a"], True, _LONG_ID)},
    **{f"model {bad!r}": invalid("model", js({"model": bad})) for bad in (7, ["minilm"])},
    **{
        f"text {bad!r}"[:24]: invalid("text", js(text=bad))
        for bad in (None, "", 7, ["a"], {"a": 1}, True, _LONG_TEXT)
    },
    "no text": invalid("text", raw(b"{}")),
    **{
        f"input type {bad!r}": invalid("input_type", js({"input_type": bad}))
        for bad in ("QUERY", "passage", 1, "")
    },
    **{
        f"dimensions {bad!r}": invalid("dimensions", js({"dimensions": bad}))
        for bad in (0, -1, 64.0, "64", True, 2**32, 2**70, [64], 7, 385)
    },
    "ubinary of 100 dimensions": invalid(
        "encoding", js({"dimensions": 100, "encoding": "ubinary"})
    ),
    **{
        f"encoding {bad!r}": invalid("encoding", js({"encoding": bad}))
        for bad in ("float64", "FLOAT32", 1, "", ["int8"])
    },
    **{f"format {bad!r}": invalid("format", js({"format": bad})) for bad in ("hex", 1)},
    **{f"truncate {bad!r}": invalid("truncate", js({"truncate": bad})) for bad in ("true", 1)},
    **{
        f"ttl_ms {bad!r}": invalid("ttl_ms", js({"ttl_ms": bad}))
        for bad in (-1, 1.5, "60000", True, 2**63)
    },
    "refused with its id": invalid("ttl_ms", js({"id": "mine", "ttl_ms": -1}, id="mine")),
    "text one byte too long, truncated": invalid("text", js({"truncate": True}, text=_LONG_TEXT)),
    "text too long in characters of three bytes": invalid("text", js(text="語" * 43_691)),
    "text over the maximum": invalid("text", js(text="word " * (TOKENS_MAX + 1))),
    "text of 128 KiB over the maximum": invalid("text", js(text="a " * (TEXT_BYTES_MAX // 2))),
    "text without tokens": invalid("text", js(text=" \t ")),
    "text without tokens, truncated": invalid("text", js({"truncate": True}, text="\n")),
    "10 MB of text": invalid("text", js(text="a" * TEN_MB)),
}

INVALID_PROTOBUF = {
    "Protobuf empty": invalid("text", raw(b"", AS_PROTOBUF, protobuf=True)),
    "Protobuf text empty": invalid("text", pb(text="")),
    "Protobuf text of another type": invalid("text", raw(b"\x18\x07", AS_PROTOBUF, protobuf=True)),
    "Protobuf id too long": invalid("id", pb({"id": _LONG_ID})),
    "Protobuf text too long": invalid("text", pb(text=_LONG_TEXT)),
    "Protobuf input type 99": invalid("input_type", pb({"input_type": 99})),
    "Protobuf input type -1": invalid("input_type", pb({"input_type": -1})),
    "Protobuf dimensions 0": invalid("dimensions", pb({"dimensions": 0})),
    "Protobuf dimensions 7": invalid("dimensions", pb({"dimensions": 7})),
    "Protobuf encoding 99": invalid("encoding", pb({"encoding": 99})),
    "Protobuf ttl negative": invalid("ttl_ms", pb({"id": "p", "ttl_ms": -1}, id="p")),
    "Protobuf over the maximum": invalid("text", pb(text="word " * (TOKENS_MAX + 1))),
    "Protobuf without tokens": invalid("text", pb(text=" ")),
    "10 MB of Protobuf text": invalid("text", pb(text="a" * TEN_MB)),
}

MODELS = {
    f"{kind} model {name!r}"[:32]: make(
        {"model": name, "id": "m"}, reason="MODEL_UNKNOWN", field="model", id="m"
    )
    for kind, make in (("JSON", js), ("Protobuf", pb))
    for name in ("gpt", "", "MiniLM", "x" * 10_000)
}

_KILOBYTE = bytes(1_000)
_FIT = HEADERS_BYTES_MAX // 1_004

HEADERS = {
    "a header too large": js(
        reason="HEADERS_TOO_LARGE",
        headers=[("a", b"1"), ("large", bytes(HEADERS_BYTES_MAX)), ("b", None)],
        passed=[("a", b"1"), ("b", None)],
    ),
    "a name too large": pb(
        reason="HEADERS_TOO_LARGE",
        headers=[("n" * (HEADERS_BYTES_MAX + 1), None), ("b", b"2")],
        passed=[("b", b"2")],
    ),
    "many headers too large": js(
        {"id": "many"},
        reason="HEADERS_TOO_LARGE",
        id="many",
        headers=[(f"h{number:02}", _KILOBYTE) for number in range(20)],
        bare=True,
    ),
    "20,000 headers of nothing": js(
        reason="HEADERS_TOO_LARGE", headers=[("", None)] * 20_000, bare=True
    ),
    "a header of 10 MB": js(
        reason="HEADERS_TOO_LARGE", headers=[("large", bytes(TEN_MB))], passed=[]
    ),
    "dropped headers do not count": js(
        headers=[("ce_data", bytes(2 * HEADERS_BYTES_MAX)), ("b", b"2")], passed=[("b", b"2")]
    ),
}

SIZES = {
    "vector and headers too large": js(
        headers=[("h", bytes(6_000))], reason="RESULT_TOO_LARGE", key=b"k"
    ),
    "headers too large for any result": js(
        {"id": "x"}, headers=[("h", bytes(9_000))], reason="RESULT_TOO_LARGE", bare=True, id="x"
    ),
    "key too large for any result": pb(key=LONG_KEY, reason="RESULT_TOO_LARGE", bare=True),
    "error with a key too large": invalid("ttl_ms", js({"ttl_ms": -1}, key=LONG_KEY, bare=True)),
    "garbage with a key too large for its result": undecodable(b"\xff", key=LONG_KEY, bare=True),
    "model unknown and headers too large for its topic": js(
        {"model": "gpt"},
        reason="MODEL_UNKNOWN",
        field="model",
        headers=[("h", bytes(9_000))],
        bare=True,
    ),
    "10 MB of unknown fields": js({"unknown": "x" * TEN_MB}, dimensions=384),
    "10 MB of unknown Protobuf fields": raw(
        query_pb2.Query(text="a text").SerializeToString()
        + b"\xfa\x07\x80\xad\xe2\x04"
        + bytes(TEN_MB),
        AS_PROTOBUF,
        protobuf=True,
    ),
}

OWN_HEADERS: Headers = [
    ("embedding-status", b"OK"),
    ("Embedding-Status", b"forged"),
    ("embedding-id", b"forged"),
    ("Content-Type", JSON),
    ("__aggregator.errors.reason", b"forged"),
    ("__AGGREGATOR.anything", None),
]
REPEATED: Headers = [("a", b"1"), ("b", None), ("a", b"2"), ("a", None), ("", b"x"), ("a", b"")]
CORRELATION: Headers = [("traceparent", b"00-1-2-01"), ("kafka_replyTopic", b"elsewhere")]
DESCRIBING: Headers = [
    *[(name, b"1") for name in ("ce_id", "CE_TYPE", "ce_", "contentType", "content-encoding")],
    *[(name, b"1") for name in ("__TypeId__", "__KeyTypeId__", "__ContentTypeId__")],
    *[(name, b"1") for name in ("__key_schema_id", "__value_schema_id")],
]

GOOD = {
    "plain": js(tokens=2, dimensions=384),
    "plain Protobuf": pb(tokens=2, dimensions=384),
    "unknown fields": js({"unknown": {"a": [1]}, "Text": 7, "embedding": []}),
    "unknown Protobuf fields": raw(
        query_pb2.Query(text="a").SerializeToString() + b"\xf8\x07\x01", AS_PROTOBUF, protobuf=True
    ),
    "nulls are absent": js(
        dict.fromkeys(("id", "model", "input_type", "dimensions", "encoding", "format"))
        | {"truncate": None, "ttl_ms": None}
    ),
    "id empty": js({"id": ""}),
    "Protobuf id empty": pb({"id": ""}),
    "id of 256 bytes": js({"id": "é" * 128}, id="é" * 128),
    "id with line breaks": js({"id": "a\nb\0"}, id="a\nb\0"),
    "truncated": js({"truncate": True}, text="word " * 500, tokens=TOKENS_MAX),
    "text of the maximum": js(text="word " * TOKENS_MAX, tokens=TOKENS_MAX),
    "text of 128 KiB truncated": js({"truncate": True}, text="a " * (TEXT_BYTES_MAX // 2)),
    "one character 128 KiB long": js(text="a" * TEXT_BYTES_MAX, tokens=1),
    "emoji, NUL and special tokens": js(text="👩‍👩‍👧 \0 <|endoftext|> [CLS] </s>"),
    "dimensions 64": js({"dimensions": 64}, dimensions=64),
    "ubinary of 64 dimensions": pb({"dimensions": 64, "encoding": 4}, dimensions=64),
    "int8 base64": js({"encoding": "int8", "format": "base64"}, dimensions=384),
    "unspecified words": js({"encoding": "unspecified", "input_type": "unspecified"}),
    "unspecified numbers": pb({"encoding": 0, "input_type": 0}),
    "no time to live": js({"ttl_ms": 0}, age_ms=86_400_000),
    "time to live of ages": js({"ttl_ms": 2**63 - 1}),
    "timestamp ahead": js(age_ms=-1_800_000),
    "content type empty": js(headers=typed(b"")),
    "content type null": js(headers=typed(None)),
    "content type with parameters": js(headers=typed(b"Application/JSON; charset=utf-8")),
    "Protobuf content type with parameters": raw(
        b"\x1a\x01a", typed(b" APPLICATION/X-Protobuf ;v=1", "Content-TYPE"), protobuf=True
    ),
    "last content type is JSON": js(headers=[*typed(PROTOBUF), *typed(JSON)]),
    "last content type is Protobuf": raw(
        b"\x1a\x01a", [*typed(b"text/csv"), *typed(PROTOBUF)], protobuf=True
    ),
    "last content type is null": js(headers=[*typed(PROTOBUF), *typed(None)]),
    "key null": js({"id": "i"}, id="i"),
    "key empty": js(key=b""),
    "key binary": pb(key=b"\x00\xff\xfe"),
    "headers of its own": js(headers=OWN_HEADERS, passed=[]),
    "headers of its own, Protobuf": pb(headers=[OWN_HEADERS[0], OWN_HEADERS[2]], passed=[]),
    "repeated and null headers": js(headers=REPEATED),
    "repeated and null headers on an error": invalid(
        "ttl_ms", js({"ttl_ms": -1}, headers=REPEATED)
    ),
    "correlation": pb(headers=CORRELATION),
    "describing headers are dropped": js(
        headers=[("a", b"1"), *DESCRIBING, ("ce-id", b"2")], passed=[("a", b"1"), ("ce-id", b"2")]
    ),
    "a replayed letter's id too long": js(
        {"id": "i"}, headers=[("__aggregator.replay.id", b"x" * 281)], passed=[], id="i"
    ),
    "a replayed letter's id not UTF-8": js(
        headers=[("__aggregator.replay.id", b"\xff")], passed=[]
    ),
    "a replayed letter": js(
        {"id": "i"},
        headers=[("__aggregator.replay.id", b"first"), ("__aggregator.replay.attempts", b"1")],
        passed=[],
        id="first",
    ),
}

FLOOD = {f"flood {number}": undecodable(b"\x00\x01\x02" * 100) for number in range(2_000)}
"""From a producer that serialises otherwise."""

RECORDS = {
    **UNDECODABLE,
    **INVALID_JSON,
    **INVALID_PROTOBUF,
    **MODELS,
    **HEADERS,
    **SIZES,
    **GOOD,
}
