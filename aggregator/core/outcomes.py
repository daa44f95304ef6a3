"""How a query ends without a vector: the failures of CONTRACTS' table, with their flags.

Pure constructors, so that one place decides what is retryable and what goes to the dead letter
topic. It must not know why the query got here.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from aggregator.core.failures import Code, Failure, Reason

_RETRY_AFTER_MS: Final = 1000

EXPIRED: Final = Failure(
    code=Code.DEADLINE_EXCEEDED,
    reason=Reason.EXPIRED,
    message="the query's time to live ended before its vector was there",
    retryable=True,
)
NO_SERVER: Final = Failure(
    code=Code.UNAVAILABLE,
    reason=Reason.NO_SERVER,
    message="the query's time to live ended while no server of its model was ready",
    retryable=True,
    retry_after_ms=_RETRY_AFTER_MS,
)
DIED_ALONE: Final = Failure(
    code=Code.INTERNAL,
    reason=Reason.ENGINE_DIED_ALONE,
    message="the engine died twice with this text alone in its pass",
    dead_letter=True,
)


def bad_answer(fault: str) -> Failure:
    """Answers of its requests failed the check too often."""
    return Failure(
        code=Code.INTERNAL,
        reason=Reason.BAD_ANSWER,
        message=f"answers failed the check: {fault}",
        dead_letter=True,
    )


def server_error(failure: Failure) -> Failure:
    """Any other status, after the last attempt."""
    return Failure(
        code=Code.INTERNAL,
        reason=Reason.SERVER_ERROR,
        message=f"{failure.code}: {failure.message}",
        retryable=True,
        dead_letter=True,
    )


def text_too_large(failure: Failure) -> Failure:
    """Its request, which held nothing else, was larger than its server takes any."""
    return Failure(
        code=Code.INVALID_ARGUMENT,
        reason=Reason.INVALID_FIELD,
        message=f"the text is too large for its model server: {failure.message}",
        field="text",
    )


class Course(IntEnum):
    """What a status of one input, or of a whole request, asks for."""

    END = 0
    """The query ends with `final`."""
    DEATH = 1
    """The engine died with it in the pass."""
    NOT_STARTED = 2
    """It was not started, through no fault of its own."""
    HELD = 3
    """The server holds too much: again, but not there at once."""
    ATTEMPT = 4
    """A started attempt failed: again, up to the maximum."""


def course(failure: Failure, *, deadline: bool = True) -> Course:
    """Classify a failure that a server reported; `deadline`: the query has one.

    A refusal that names no field and an expiry of what can't expire are any other status: the
    consumer could do nothing with them. So is a request that is too large: sent again it stays so.
    """
    code, reason = failure.code, failure.reason
    if reason is Reason.ENGINE_DIED:
        return Course.DEATH
    if code is Code.RESOURCE_EXHAUSTED and reason is not Reason.REQUEST_TOO_LARGE:
        return Course.HELD
    if reason is Reason.NOT_STARTED:
        return Course.NOT_STARTED
    if reason is Reason.INVALID_FIELD and failure.field is not None:
        return Course.END
    if reason is Reason.EXPIRED and deadline:
        return Course.END
    if reason in (Reason.ENGINE_FAILED_ALONE, Reason.NOT_FINITE):
        return Course.END
    return Course.ATTEMPT


def ran(failure: Failure) -> bool:
    """Whether an input with this failure was in a pass, which has ended then."""
    if failure.reason in (Reason.ENGINE_FAILED_ALONE, Reason.NOT_FINITE):
        return True
    return course(failure) in (Course.DEATH, Course.ATTEMPT)


def final(failure: Failure) -> Failure:
    """The failure that a consumer is told for `Course.END`, with the flags of the table."""
    if failure.reason is Reason.EXPIRED:
        return EXPIRED
    return Failure(
        code=failure.code,
        reason=failure.reason,
        message=failure.message,
        field=failure.field,
        dead_letter=failure.code is Code.INTERNAL,
    )
