"""What is to be done: the only way out of the scheduler.

Effects are commands, carried out in the order of the list they come in. A pass has an id, and the
event that ends it carries that id. Nobody changes an effect once it is made; those made for each
pass are only not frozen because that would make them four times as dear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from model_server.core.failures import Failure


@dataclass(slots=True, kw_only=True)
class Part:
    """The inputs of one request that are in one pass: positions in the request, ascending."""

    request: int
    indexes: Sequence[int]


class PassKind(StrEnum):
    """Why a pass runs."""

    NORMAL = "normal"
    EXCLUSIVE = "exclusive"
    """One request's, never merged."""
    PROBE = "probe"
    """Larger than the target, to see whether that pays."""
    ISOLATION = "isolation"
    """A half of a pass that raised."""
    CANARY = "canary"
    """The canary text alone, to tell a bad input from a broken engine; `parts` is empty. It is done
    only if its vector is the one of the engine's start."""


@dataclass(slots=True, kw_only=True)
class RunPass:
    """Run these inputs in one forward pass, in this order.

    `batch_tokens_target` is what was aimed at when it was cut.
    """

    pass_id: int
    kind: PassKind
    parts: Sequence[Part]
    tokens: int
    batch_tokens_target: int


@dataclass(slots=True, kw_only=True)
class Announce:
    """A pass starts (or, without `pass_id`, the engine fell idle): tell every open stream.

    `running`: per stream the client's request ids in that pass. With `awaited` set, the event
    `AnnouncementWritten` is due once the write to that stream has returned.
    """

    pass_id: int | None
    running: Mapping[int, Sequence[int]]
    awaited: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SayState:
    """Send these streams a `ServerState` alone."""

    streams: Sequence[int]


@dataclass(slots=True, kw_only=True)
class AnsweredPart:
    """The answers to one part; `row` is where its vectors start in the pass.

    `last`: with these, every input of the request is answered.
    """

    request: int
    indexes: Sequence[int]
    row: int
    last: bool


@dataclass(slots=True, kw_only=True)
class Answer:
    """Send the vectors of a pass. Parts whose request is gone are left out."""

    pass_id: int
    parts: Sequence[AnsweredPart]
    started_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Answer inputs of a request with failures."""

    request: int
    failures: Sequence[tuple[int, Failure]]
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Refuse a whole request: none of its inputs has run or will."""

    request: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStreams:
    """End every stream once what is queued for it is written: with OK, or with `failure`."""

    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutStream:
    """End this stream at once, with `failure`: what it held is dropped, it hears nothing more."""

    stream: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartEngine:
    """Close the engine and start it anew after a while; `EngineReady` is due."""

    message: str
    delay_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Answers are out: end the process, with `message` if that is a failure."""

    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MaximumLowered:
    """A pass did not fit the memory: passes are smaller from now on."""

    batch_tokens_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MaximumRaised:
    """Memory is thought to have room again: passes are larger from now on."""

    batch_tokens_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetMoved:
    """Passes of late imply another target: this is the next step towards it."""

    batch_tokens_target: int
    implied_tokens: int


@dataclass(slots=True, kw_only=True)
class WakeAt:
    """Send a `Tick` at this time; replaces the time asked for before."""

    at_ns: int


Effect = (
    RunPass
    | Announce
    | SayState
    | Answer
    | Fail
    | Refuse
    | CloseStreams
    | CutStream
    | RestartEngine
    | Halt
    | MaximumLowered
    | MaximumRaised
    | TargetMoved
    | WakeAt
)
