"""From one Kafka record to a `Query`: the content types, the JSON schema, the fields' checks.

Owns how a record of the queries topic is read. Invariants: `decode_record` never raises and always
gives a `Query` with every field of the wire's half set; a refused one carries its `Failure`; an id
that was refused is nowhere echoed; no tokenizer sees a text whose size was not checked.

One failure a record, the first in this order: undecodable (unknown content type, null value,
parser); the fields `id`, `model`, `text`, `input_type`, `dimensions`, `encoding`, `format`,
`truncate`, `ttl_ms`, as in the proto file; the size of the headers, last, so that its result still
has the query's id and model.

Knows no clock: both times are arguments. What only a model can judge (its dimensions, its maximum)
is left to the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import orjson
from google.protobuf.message import DecodeError

from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import QUERY_OVERHEAD_BYTES, HeaderList, Query, TopicPartition
from aggregator.wire.headers import (
    CONTENT_TYPE,
    JSON_TYPES,
    PROTOBUF,
    PROTOBUF_TYPES,
    REPLAY_ID,
    HeaderRules,
    header_bytes,
    headers_bytes,
)
from protos.embedding.v1 import query_pb2

ID_BYTES_MAX = 256
REPLAY_ID_BYTES_MAX = 249 + 1 + 10 + 1 + 19
"""A replayed query keeps its default id: topic (of Kafka's longest), partition and offset."""
_UINT32_MAX = 2**32 - 1
_INT64_MAX = 2**63 - 1
_ECHO_MAX = 32
_MESSAGE_MAX = 200
_ONE_BYTE_LENGTH = 128
"""Of a Protobuf field: lengths below this take one byte."""
_ID_CHARACTERS_SAFE = ID_BYTES_MAX // 4
_CONTENT_TYPE_LENGTH = len(CONTENT_TYPE)

_AS_JSON, _AS_PROTOBUF, _UNKNOWN = range(3)
_ARRAY, _BASE64 = range(2)
_FORMATS: Mapping[str, int] = {"array": _ARRAY, "base64": _BASE64}

INPUT_TYPES: Mapping[str, int] = {
    name.removeprefix("INPUT_TYPE_").lower(): number for name, number in query_pb2.InputType.items()
}
ENCODINGS: Mapping[str, int] = {
    name.removeprefix("ENCODING_").lower(): number for name, number in query_pb2.Encoding.items()
}
_INPUT_TYPE_NUMBERS = frozenset(INPUT_TYPES.values())
_ENCODING_NUMBERS = frozenset(ENCODINGS.values())
FLOAT32 = int(query_pb2.ENCODING_FLOAT32)

_PARSE_PROTOBUF = query_pb2.Query.FromString
_NO_HEADERS: HeaderList = ()
_PROTOBUF_ALONE: HeaderList = [(CONTENT_TYPE, PROTOBUF)]
_PROTOBUF_ALONE_READ = (_AS_PROTOBUF, "", headers_bytes(_PROTOBUF_ALONE))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """What the settings say about reading queries.

    `models`: the served names. `default_model` stands in where a query names none; with one model
    it is that one. `ttl_ms` 0: none. `ttl_from`: where the time to live starts, the record's
    timestamp or its arrival.
    """

    models: frozenset[str]
    default_model: str | None = None
    text_bytes_max: int = 131072
    ttl_ms: int = 60000
    ttl_from: Literal["record", "arrival"] = "record"
    headers: HeaderRules = field(default_factory=HeaderRules)

    def __post_init__(self) -> None:
        """Resolve the default model; raises ValueError if it is not one of `models`."""
        if self.default_model is None and len(self.models) == 1:
            object.__setattr__(self, "default_model", next(iter(self.models)))
        if self.default_model is not None and self.default_model not in self.models:
            raise ValueError(f"default_model {self.default_model!r} is not among the models")


class _RefusedError(Exception):
    """Carries the failure out of the parsers; never leaves this module."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def decode_record(
    options: DecodeOptions,
    *,
    tp: TopicPartition,
    epoch: int,
    offset: int,
    key: bytes | None,
    value: bytes | None,
    headers: HeaderList | None,
    timestamp_ms: int | None,
    arrived_ns: int,
    wall_ms: int,
) -> Query:
    """Read one record; never raises.

    `tp` is kept as it is, so callers share one tuple a partition. `timestamp_ms` None: the record
    has none. `arrived_ns` is monotonic; `wall_ms` is the wall clock at the same moment (Unix time).
    """
    query = Query()
    query.tp = tp
    query.offset = offset
    query.epoch = epoch
    query.key = key
    query.value = value
    query.headers = headers or _NO_HEADERS
    query.timestamp_ms = timestamp_ms
    query.arrived_ns = arrived_ns
    query.deadline_ns = 0
    value_bytes = len(value) if value else 0
    query.size_bytes = QUERY_OVERHEAD_BYTES + value_bytes + (len(key) if key else 0)
    query.id = ""
    query.model = ""
    query.text = ""
    query.text_bytes = 0
    query.input_type = 0
    query.dimensions = 0
    query.encoding = FLOAT32
    query.truncate = False
    query.protobuf = False
    query.base64 = False
    query.estimate_raw = 0
    query.script = 0
    content_type, replay_id, headers_size = _read_headers(headers) if headers else (_AS_JSON, "", 0)
    query.size_bytes += headers_size
    try:
        if content_type == _AS_PROTOBUF:
            query.protobuf = True
            ttl_ms = _read_protobuf(query, value, options)
        else:
            ttl_ms = _read_json(query, value, options, known=content_type == _AS_JSON)
        if headers_size > options.headers.bytes_max:
            _check_headers(query, options)
        if ttl_ms:
            query.deadline_ns = _deadline_ns(query, options, ttl_ms=ttl_ms, wall_ms=wall_ms)
    except _RefusedError as refused:
        query.failure = refused.failure
    query.size_bytes += query.text_bytes  # the decoded text is held beside the value
    query.id = replay_id or query.id or f"{tp[0]}-{tp[1]}-{offset}"
    return query


def _read_headers(headers: HeaderList) -> tuple[int, str, int]:
    """Give the content type, the id of a replayed letter (or ""), and the size of all, bytes."""
    if headers == _PROTOBUF_ALONE:
        return _PROTOBUF_ALONE_READ
    content_type: bytes | None = None
    replay_id: bytes | None = None
    size = 0
    for name, value in headers:
        size += header_bytes(name, value)
        if len(name) == _CONTENT_TYPE_LENGTH and name.lower() == CONTENT_TYPE:
            content_type = value
        elif name == REPLAY_ID:
            replay_id = value
    return (
        _content_type(content_type) if content_type else _AS_JSON,
        _replay_id(replay_id) if replay_id else "",
        size,
    )


def _content_type(value: bytes) -> int:
    if value == PROTOBUF:
        return _AS_PROTOBUF
    media_type = value.split(b";", 1)[0].strip().lower()
    if media_type in PROTOBUF_TYPES:
        return _AS_PROTOBUF
    return _AS_JSON if media_type in JSON_TYPES else _UNKNOWN


def _replay_id(value: bytes) -> str:
    """Give the id that our replay put there; anything that it can't have put there is ignored."""
    try:
        return value.decode() if len(value) <= REPLAY_ID_BYTES_MAX else ""
    except UnicodeDecodeError:
        return ""


def _read_protobuf(query: Query, value: bytes | None, options: DecodeOptions) -> int:
    """Fill `query`; give its time to live, ms. Raises _RefusedError."""
    if value is None:
        raise _undecodable("the value is null")
    try:
        # A new message each time: one parsed into again and again never frees what it held.
        message = _PARSE_PROTOBUF(value)
    except DecodeError as error:
        raise _undecodable(str(error)) from None
    text, identifier = message.text, message.id
    size = len(text) if text.isascii() else len(text.encode())
    if identifier:
        query.id = _checked_id(identifier)
    # A field takes its tag, its length and what it holds. Where that is all of the value, nothing
    # else is set and need not be asked for: most queries.
    least = size + (2 if size < _ONE_BYTE_LENGTH else 3)
    if len(value) == (least + len(identifier) + 2 if identifier else least) and size:
        query.model = _checked_model(None, options)
        _set_text(query, text, size, options)
        return options.ttl_ms
    model = message.model
    query.model = _checked_model(model if model or message.HasField("model") else None, options)
    _set_text(query, text, size, options)
    if input_type := message.input_type:
        if input_type not in _INPUT_TYPE_NUMBERS:
            raise _invalid("input_type", f"input_type {input_type} is unknown")
        query.input_type = input_type
    if dimensions := message.dimensions:
        query.dimensions = dimensions
    elif message.HasField("dimensions"):
        raise _invalid("dimensions", "dimensions must be at least 1")
    if encoding := message.encoding:
        if encoding not in _ENCODING_NUMBERS:
            raise _invalid("encoding", f"encoding {encoding} is unknown")
        query.encoding = encoding
    query.truncate = message.truncate
    ttl_ms: int = message.ttl_ms
    if ttl_ms < 0:
        raise _invalid("ttl_ms", "ttl_ms must not be negative")
    return ttl_ms if ttl_ms or message.HasField("ttl_ms") else options.ttl_ms


def _read_json(query: Query, value: bytes | None, options: DecodeOptions, *, known: bool) -> int:
    """Fill `query`; give its time to live, ms. Raises _RefusedError."""
    if not known:
        raise _undecodable("the content type is neither JSON nor Protobuf")
    if value is None:
        raise _undecodable("the value is null")
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise _undecodable(_not_json(query, error)) from None
    if type(document) is not dict:
        raise _undecodable("the value is not a JSON object")
    get = document.get
    if (identifier := get("id")) is not None:
        if type(identifier) is not str:
            raise _invalid("id", "id must be a string")
        if identifier:
            query.id = _checked_id(identifier)
    model = get("model")
    if model is not None and type(model) is not str:
        raise _invalid("model", "model must be a string")
    query.model = _checked_model(model, options)
    text = get("text")
    if text is not None and type(text) is not str:
        raise _invalid("text", "text must be a string")
    size = 0 if text is None else len(text) if text.isascii() else len(text.encode())
    _set_text(query, text, size, options)
    return _read_json_options(query, document, options)


def _not_json(query: Query, error: orjson.JSONDecodeError) -> str:
    """Why, and where no content type was given, that it was taken for JSON."""
    if any(value and name.lower() == CONTENT_TYPE for name, value in query.headers):
        return str(error)
    return (
        "read as JSON, since there is no content-type header (Protobuf needs one: "
        f"{PROTOBUF.decode()}): {error}"
    )


def _read_json_options(query: Query, document: dict[str, object], options: DecodeOptions) -> int:
    get = document.get
    if (input_type := get("input_type")) is not None:
        query.input_type = _word("input_type", input_type, INPUT_TYPES)
    if (dimensions := get("dimensions")) is not None:
        query.dimensions = _whole_number("dimensions", dimensions, 1, _UINT32_MAX)
    if (encoding := get("encoding")) is not None:
        query.encoding = _word("encoding", encoding, ENCODINGS) or FLOAT32
    if (form := get("format")) is not None:
        query.base64 = _word("format", form, _FORMATS) == _BASE64
    if (truncate := get("truncate")) is not None:
        if type(truncate) is not bool:
            raise _invalid("truncate", "truncate must be true or false")
        query.truncate = truncate
    if (ttl_ms := get("ttl_ms")) is not None:
        return _whole_number("ttl_ms", ttl_ms, 0, _INT64_MAX)
    return options.ttl_ms


def _checked_id(identifier: str) -> str:
    # 64 characters are at most 256 bytes.
    if len(identifier) > _ID_CHARACTERS_SAFE and len(identifier.encode()) > ID_BYTES_MAX:
        raise _invalid("id", f"id is longer than {ID_BYTES_MAX} bytes")
    return identifier


def _checked_model(model: str | None, options: DecodeOptions) -> str:
    if model is None:
        if options.default_model is None:
            raise _invalid("model", "model is required: several are configured and none by default")
        return options.default_model
    if model not in options.models:
        raise _RefusedError(
            Failure(
                code=Code.NOT_FOUND,
                reason=Reason.MODEL_UNKNOWN,
                message=_unknown_model(model, options.models),
                field="model",
            )
        )
    return model


def _unknown_model(model: str, served: frozenset[str]) -> str:
    names = ", ".join(_echo(name) for name in sorted(served))
    message = f"model {_echo(model)} is not configured; served: {names}"
    return message if len(message) <= _MESSAGE_MAX else message[:_MESSAGE_MAX] + "..."


def _set_text(query: Query, text: str | None, size: int, options: DecodeOptions) -> None:
    """Check a text of `size` bytes."""
    if not text:
        raise _invalid("text", "text is required and must not be empty")
    if size > options.text_bytes_max:
        raise _invalid(
            "text", f"text has {size} bytes, more than text_bytes_max ({options.text_bytes_max})"
        )
    query.text = text
    query.text_bytes = size


def _word(name: str, value: object, words: Mapping[str, int]) -> int:
    number = words.get(value) if type(value) is str else None
    if number is None:
        known = ", ".join(word for word in words if word != "unspecified")
        raise _invalid(name, f"{name} must be one of: {known}")
    return number


def _whole_number(name: str, value: object, least: int, most: int) -> int:
    # Integers that 64 bits can't hold arrive from the parser as floats, and true is no number.
    if type(value) is not int or not least <= value <= most:
        raise _invalid(name, f"{name} must be a whole number from {least} to {most}")
    return value


def _deadline_ns(query: Query, options: DecodeOptions, *, ttl_ms: int, wall_ms: int) -> int:
    """Monotonic; at least 1, since 0 means none, and within 64 bits."""
    age_ms = 0
    if query.timestamp_ms is not None and options.ttl_from == "record":
        age_ms = min(max(wall_ms - query.timestamp_ms, 0), ttl_ms)
    return min(max(query.arrived_ns + (ttl_ms - age_ms) * 1_000_000, 1), _INT64_MAX)


def _undecodable(why: str) -> _RefusedError:
    return _RefusedError(
        Failure(
            code=Code.INVALID_ARGUMENT,
            reason=Reason.UNDECODABLE,
            message=why.strip()[:_MESSAGE_MAX],
            dead_letter=True,
        )
    )


def _invalid(name: str, message: str) -> _RefusedError:
    return _RefusedError(
        Failure(
            code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_FIELD, message=message, field=name
        )
    )


def _check_headers(query: Query, options: DecodeOptions) -> None:
    # What is passed on is at most all of them, so most records never come here.
    if not options.headers.too_large(query.headers):
        return
    limit = options.headers.bytes_max
    raise _RefusedError(
        Failure(
            code=Code.INVALID_ARGUMENT,
            reason=Reason.HEADERS_TOO_LARGE,
            message=f"the headers have more than headers_bytes_max ({limit}) bytes",
        )
    )


def _echo(text: str) -> str:
    return repr(text if len(text) <= _ECHO_MAX else text[:_ECHO_MAX] + "...")
