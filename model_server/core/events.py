"""What has happened: the only way into the scheduler.

Events are past-tense facts. Times are monotonic integer nanoseconds. Streams and requests are
numbered by the shell, never twice in a process; `request_id` is the client's number on its stream.
Nobody changes an event; those of each request and pass are not frozen because that is dear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from model_server.core.failures import Failure
from model_server.core.following import FollowOptions
from model_server.core.limits import Limits

UNARY = 0
"""The `stream` of all unary calls together: they share one bounded hold, and hear no states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOpened:
    """A client opened a stream."""

    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """A stream is over, for whatever reason: nothing of it can be answered any more."""

    stream: int


@dataclass(slots=True, kw_only=True)
class RequestRead:
    """A stream's request was read, and waits for the tokenizer.

    `RequestArrived` follows, or `RequestCancelled`, or the end of its stream.
    """

    request: int
    stream: int


@dataclass(slots=True, kw_only=True)
class RequestArrived:
    """A request was tokenized; columns have one entry an input, in their order.

    `tokens` is the exact count of what enters a pass, 0 for an input that `failures` refuses.
    `deadlines_ns` holds 0 for an input without; None: no input has one.
    """

    request: int
    stream: int
    request_id: int
    tokens: Sequence[int]
    text_bytes: Sequence[int]
    deadlines_ns: Sequence[int] | None = None
    failures: Sequence[tuple[int, Failure]] = ()
    exclusive: bool = False
    bulk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCancelled:
    """Nobody waits for this request any more."""

    request: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnouncementWritten:
    """The write of an announcement that was to be waited for has returned."""

    pass_id: int


@dataclass(slots=True, kw_only=True)
class PassDone:
    """The engine returned the vectors of a pass; `finite`: at least one of them is."""

    pass_id: int
    started_ns: int
    ended_ns: int
    finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRaised:
    """The engine raised in a pass; it may be sound itself."""

    pass_id: int
    message: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDied:
    """The engine is gone."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """An engine was loaded, agreed with its golden vectors, and did its warm-up pass.

    The warm-up pass had `limits.batch_tokens_max` tokens. `pass_samples` are (tokens, nanoseconds)
    of passes already measured. `follow`: the profile that the target is from, if it is to follow
    the machine. `killable`: a pass that hangs can be ended without ending ourselves.
    """

    limits: Limits
    pass_samples: Sequence[tuple[int, int]] = ()
    follow: FollowOptions | None = None
    killable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time asked for by `WakeAt` has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """Answer what is held, take nothing new, then stop."""


Event = (
    StreamOpened
    | StreamClosed
    | RequestRead
    | RequestArrived
    | RequestCancelled
    | AnnouncementWritten
    | PassDone
    | PassRaised
    | EngineDied
    | EngineReady
    | Tick
    | DrainRequested
)
