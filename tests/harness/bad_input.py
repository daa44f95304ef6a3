"""What a bad record is to come to: the words of the tables in `bad_input_records` and `..._faults`.

One record in, one result out: `OUTCOMES` is that table of the contracts, by reason. A `Case` is a
record and what must come of it. Everything not said is as for a plain query.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from protos.embedding.v1 import query_pb2

Headers = list[tuple[str, bytes | None]]

MEBIBYTE = 1024 * 1024
QUERY_BYTES_MAX = 16 * MEBIBYTE
LETTER_BYTES_MAX = 12 * MEBIBYTE
RESULT_BYTES_MAX = 8 * 1024
"""`max.message.bytes` of the topics: results of ordinary queries fit, and not much more."""
HEADERS_BYTES_MAX = 16 * 1024
TEXT_BYTES_MAX = 128 * 1024
TTL_MS = 600_000
"""Longer than a slow machine takes for all of it."""
TOKENS_MAX = 64
DIMENSIONS = 384
MATRYOSHKA = (64, 100)
FAULTS = {
    "please raise": "raise",
    "please die": "die",
    "please nan": "nan",
    "please cut short": "short",
    "please use up memory": "out_of_memory",
}
MODEL = "minilm"
ABSENT = "absent"
"""A model without a server."""

JSON = b"application/json"
PROTOBUF = b"application/protobuf"
AS_PROTOBUF: Headers = [("content-type", PROTOBUF)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A row of the table."""

    code: str
    retryable: bool = False
    retry_after: bool = False
    stage: str = ""
    """Of its dead letter; empty: none is due."""


OUTCOMES = {
    "OK": Outcome(code="OK"),
    "UNDECODABLE": Outcome(code="INVALID_ARGUMENT", stage="decode"),
    "INVALID_FIELD": Outcome(code="INVALID_ARGUMENT"),
    "HEADERS_TOO_LARGE": Outcome(code="INVALID_ARGUMENT"),
    "MODEL_UNKNOWN": Outcome(code="NOT_FOUND"),
    "EXPIRED": Outcome(code="DEADLINE_EXCEEDED", retryable=True),
    "NO_SERVER": Outcome(code="UNAVAILABLE", retryable=True, retry_after=True),
    "ENGINE_FAILED_ALONE": Outcome(code="INTERNAL", stage="inference"),
    "ENGINE_DIED_ALONE": Outcome(code="INTERNAL", stage="inference"),
    "NOT_FINITE": Outcome(code="INTERNAL", stage="inference"),
    "BAD_ANSWER": Outcome(code="INTERNAL", stage="answer"),
    "RESULT_TOO_LARGE": Outcome(code="OUT_OF_RANGE"),
    "SERVER_ERROR": Outcome(code="INTERNAL", retryable=True, stage="request"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A record and what must come of it."""

    value: bytes | None
    headers: Headers
    key: bytes | None = None
    age_ms: int = 0
    """Of the record's timestamp, when it is sent."""
    reason: str = "OK"
    field: str | None = None
    protobuf: bool = False
    """The result is."""
    id: str | None = None
    """Of the result; None: the default."""
    passed: Headers | None = None
    """The headers that the result carries on; None: all but `content-type`."""
    bare: bool = False
    """The result is too large with the query's key and headers."""
    letter_bare: bool = False
    """The dead letter is too large with its value."""
    attempts: int | None = None
    """That the dead letter tells; None: not fixed."""
    tokens: int | None = None
    """Of a vector; None: not checked."""
    dimensions: int | None = None

    @property
    def outcome(self) -> Outcome:
        """What its reason means."""
        return OUTCOMES[self.reason]

    @property
    def passed_on(self) -> Headers:
        """The headers that its result must carry after our own."""
        if self.bare:
            return []
        if self.passed is not None:
            return self.passed
        return [(name, value) for name, value in self.headers if name.lower() != "content-type"]


def raw(value: bytes | None, headers: Headers | None = None, **expected: Any) -> Case:
    """A record as it is."""
    return Case(value=value, headers=headers or [], **expected)


def js(fields: dict[str, Any] | None = None, /, text: Any = "a text", **expected: Any) -> Case:
    """A JSON query of these fields; the rest is what is expected, and the record's other parts."""
    value = json.dumps({"text": text, **(fields or {})}).encode()
    return Case(value=value, headers=expected.pop("headers", []), **expected)


def pb(fields: dict[str, Any] | None = None, /, text: str = "a text", **expected: Any) -> Case:
    """The same in Protobuf."""
    value = query_pb2.Query(**{"text": text, **(fields or {})}).SerializeToString()
    headers = AS_PROTOBUF + expected.pop("headers", [])
    return Case(value=value, headers=headers, protobuf=True, **expected)


def invalid(field: str, case: Case) -> Case:
    """The same record, with that field refused."""
    changes = {name: getattr(case, name) for name in case.__slots__}
    return Case(**{**changes, "reason": "INVALID_FIELD", "field": field})
