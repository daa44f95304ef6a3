"""Why an input, a request or a stream got no vectors.

Operating failures are values. `Code` numbers are google.rpc.Code's; a `Reason` travels as
`google.rpc.ErrorInfo.reason` of domain `embedding.v1`. Broken invariants are not in here: they
raise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

RETRY_AFTER_MS = 1_000
"""What is suggested to a client where nothing better is known: about one restart of an engine."""


class Code(IntEnum):
    """Those of google.rpc.Code that a model server answers with."""

    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    INTERNAL = 13
    UNAVAILABLE = 14


class Reason(StrEnum):
    """`google.rpc.ErrorInfo.reason`."""

    INVALID_FIELD = "INVALID_FIELD"
    MODEL_UNKNOWN = "MODEL_UNKNOWN"
    EXPIRED = "EXPIRED"
    ENGINE_FAILED_ALONE = "ENGINE_FAILED_ALONE"
    ENGINE_DIED = "ENGINE_DIED"
    NOT_STARTED = "NOT_STARTED"
    NOT_FINITE = "NOT_FINITE"
    TOO_MUCH_HELD = "TOO_MUCH_HELD"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure, as told to the caller.

    `message` is one sentence for people. `field` names what was invalid, as in the request's
    message. `retry_after_ms` is set for RESOURCE_EXHAUSTED and UNAVAILABLE, and only for them.
    """

    code: Code
    reason: Reason
    message: str
    field: str | None = None
    retry_after_ms: int | None = None


def invalid(field: str, message: str) -> Failure:
    """An input or a request with a field that can't be used."""
    return Failure(
        code=Code.INVALID_ARGUMENT, reason=Reason.INVALID_FIELD, message=message, field=field
    )


def too_large(field: str, message: str) -> Failure:
    """A request over `inputs_max` or `request_bytes_max`; a smaller one is welcome at once."""
    return Failure(
        code=Code.RESOURCE_EXHAUSTED,
        reason=Reason.REQUEST_TOO_LARGE,
        message=message,
        field=field,
        retry_after_ms=1,
    )


def model_unknown(asked: str, served: str) -> Failure:
    """Another model's name; a server serves one."""
    return Failure(
        code=Code.NOT_FOUND,
        reason=Reason.MODEL_UNKNOWN,
        message=f"This server serves {served!r}, not {asked[:64]!r}.",
        field="model",
    )


def not_started(message: str, retry_after_ms: int = RETRY_AFTER_MS) -> Failure:
    """None of this has run: it may be sent elsewhere, and nobody is to blame."""
    return Failure(
        code=Code.UNAVAILABLE,
        reason=Reason.NOT_STARTED,
        message=message,
        retry_after_ms=retry_after_ms,
    )


def engine_died(message: str) -> Failure:
    """The engine died in the pass that this input was in."""
    return Failure(
        code=Code.UNAVAILABLE,
        reason=Reason.ENGINE_DIED,
        message=message,
        retry_after_ms=RETRY_AFTER_MS,
    )


def too_much_held(message: str, retry_after_ms: int) -> Failure:
    """The caller already has more unanswered than the server lets it hold."""
    return Failure(
        code=Code.RESOURCE_EXHAUSTED,
        reason=Reason.TOO_MUCH_HELD,
        message=message,
        retry_after_ms=max(1, retry_after_ms),
    )


EXPIRED = Failure(
    code=Code.DEADLINE_EXCEEDED,
    reason=Reason.EXPIRED,
    message="The input's time ran out before its pass.",
)

NOT_FINITE = Failure(
    code=Code.INTERNAL,
    reason=Reason.NOT_FINITE,
    message="The model's vector for this input holds values that are not finite.",
)


def failed_alone(message: str) -> Failure:
    """The engine failed on this input alone, and was sound right after it."""
    return Failure(
        code=Code.INTERNAL,
        reason=Reason.ENGINE_FAILED_ALONE,
        message=f"The engine failed on this input alone: {message}",
    )
