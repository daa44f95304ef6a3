"""The taxonomy of what can end a query without a vector.

Operating failures are values: a `Failure` says what the query's consumer is told and whether the
record goes to the dead letter topic. Code names are those of google.rpc.Code; reasons are
constants of `embedding.v1`. Broken invariants are not in here: they raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """Names of google.rpc.Code, as they appear in results and in the `embedding-status` header."""

    OK = "OK"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


class Reason(StrEnum):
    """Why, in one constant: `google.rpc.ErrorInfo.reason` on gRPC, `error.reason` in results."""

    UNDECODABLE = "UNDECODABLE"
    INVALID_FIELD = "INVALID_FIELD"
    HEADERS_TOO_LARGE = "HEADERS_TOO_LARGE"
    MODEL_UNKNOWN = "MODEL_UNKNOWN"
    EXPIRED = "EXPIRED"
    NO_SERVER = "NO_SERVER"
    ENGINE_FAILED_ALONE = "ENGINE_FAILED_ALONE"
    ENGINE_DIED_ALONE = "ENGINE_DIED_ALONE"
    ENGINE_DIED = "ENGINE_DIED"
    NOT_STARTED = "NOT_STARTED"
    NOT_FINITE = "NOT_FINITE"
    BAD_ANSWER = "BAD_ANSWER"
    RESULT_TOO_LARGE = "RESULT_TOO_LARGE"
    SERVER_ERROR = "SERVER_ERROR"
    TOO_MUCH_HELD = "TOO_MUCH_HELD"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a query (or an input, or a request) has no vector.

    `message` is one sentence for people; it names the field where there is one and never echoes
    more than a few characters of the user's text. `retry_after_ms` accompanies only what is
    retryable. `dead_letter`: the record goes to the dead letter topic too.
    """

    code: Code
    reason: Reason
    message: str
    field: str | None = None
    retryable: bool = False
    retry_after_ms: int | None = None
    dead_letter: bool = False
