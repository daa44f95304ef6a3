"""What the next pass is: a canary, a half of one that raised, an exclusive request, or the oldest.

Owns the inputs that wait and those of passes that raised. It does not know whether the engine is
free, nor when who is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from aggregator.core.packing import PackLimits, Room
from model_server.core.effects import Part, PassKind
from model_server.core.events import UNARY, PassDone
from model_server.core.isolation import Isolation
from model_server.core.limits import Limits
from model_server.core.queue import WaitingQueue
from model_server.core.requests import Request


@dataclass(slots=True, kw_only=True)
class Chosen:
    """The next pass (`kind` None: nothing to run), and the inputs found expired on the way."""

    kind: PassKind | None = None
    parts: Sequence[Part] = ()
    tokens: int = 0
    expired: list[Part] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RunningPass:
    """The pass that runs, or waits for the write of its announcement to the stream `awaited`."""

    pass_id: int
    kind: PassKind
    parts: Sequence[Part]
    tokens: int
    batch_tokens_target: int
    since_ns: int
    awaited: int | None
    held_tokens: int
    """Of its tokens those that somebody waits for."""

    @property
    def started(self) -> bool:
        """Whether it runs."""
        return self.awaited is None

    @property
    def cut(self) -> bool:
        """Whether it was cut out of what waited; a half or a canary was not."""
        return self.kind not in (PassKind.ISOLATION, PassKind.CANARY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubted:
    """A pass that gave no finite vector: a sound engine's only if the canary after it is good."""

    ended: RunningPass
    event: PassDone


class Passes:
    """Forms passes out of what waits; `requests` is the scheduler's table of those alive."""

    def __init__(self, requests: Mapping[int, Request]) -> None:
        self._requests = requests
        self._limits: Limits | None = None
        self._pack = PackLimits(tokens=0, inputs=0, size_bytes=0)
        self.queue = WaitingQueue()
        self.isolation = Isolation()
        self.doubted: Doubted | None = None

    def next(self, limits: Limits, now_ns: int, tokens: int) -> Chosen:
        """Take the next pass out. Isolation goes first: mates of a bad input have waited longest.

        A merged pass holds up to `tokens`, one of its own or a half up to what `limits` say.
        Waiting inputs that have expired must have been taken out before; halves are checked here.
        """
        chosen = Chosen()
        if self.isolation.suspect is not None or self.doubted is not None:
            chosen.kind = PassKind.CANARY
        else:
            self._half(chosen, limits, now_ns)
            if chosen.kind is None:
                self._waiting(chosen, limits, tokens)
        if chosen.kind not in (None, PassKind.NORMAL):
            self.queue.note_other_pass()
        return chosen

    def _half(self, chosen: Chosen, limits: Limits, now_ns: int) -> None:
        while (half := self.isolation.next_half()) is not None:
            live, expired = self.live(half, now_ns)
            chosen.expired += expired
            counts = [self._requests[p.request].tokens[i] for p in live for i in p.indexes]
            if sum(counts) > limits.batch_tokens_max and len(counts) > 1:
                # The maximum was lowered since: halves by inputs may be uneven in tokens.
                self.isolation.halve(live)
            elif live:
                chosen.kind, chosen.parts, chosen.tokens = PassKind.ISOLATION, live, sum(counts)
                return

    def _waiting(self, chosen: Chosen, limits: Limits, tokens: int) -> None:
        if limits is not self._limits:
            self._limits = limits
            self._pack = PackLimits(
                tokens=limits.batch_tokens_target,
                inputs=limits.inputs_max,
                size_bytes=limits.request_bytes_max,
            )
        pack = self._pack
        exclusive = self.queue.exclusive_turn()
        if exclusive is not None:
            room = Room(pack)
            part = exclusive.take(room)
            if part is not None:
                chosen.kind, chosen.parts = PassKind.EXCLUSIVE, (part,)
                chosen.tokens = room.tokens
                return
        if tokens != pack.tokens:
            pack = replace(pack, tokens=tokens)
        parts, chosen.tokens = self.queue.cut(pack)
        if parts:
            chosen.kind, chosen.parts = PassKind.NORMAL, parts

    def live(self, parts: Sequence[Part], now_ns: int) -> tuple[list[Part], list[Part]]:
        """What is left of parts taken earlier, without the gone; and what of them has expired."""
        live: list[Part] = []
        expired: list[Part] = []
        for part in parts:
            request = self._requests.get(part.request)
            if request is None:
                continue
            due = request.expired_of(part.indexes, now_ns)
            if due:
                expired.append(Part(request=part.request, indexes=due))
            left = [i for i in part.indexes if i not in due] if due else part.indexes
            if left:
                live.append(Part(request=part.request, indexes=left))
        return live, expired

    def undecided(self) -> list[Part]:
        """Everything that was taken into a pass that is over and is still to be answered."""
        doubted = self.doubted.ended.parts if self.doubted is not None else ()
        return [*doubted, *self.isolation.parts()]

    def announced(self, parts: Sequence[Part]) -> tuple[dict[int, list[int]], int | None]:
        """The request ids that each stream has in a pass, and the one that is to be told first."""
        running: dict[int, list[int]] = {}
        awaited: int | None = None
        for part in parts:
            request = self._requests[part.request]
            if request.stream != UNARY:
                ids = running.setdefault(request.stream, [])
                if request.request_id not in ids:
                    ids.append(request.request_id)
                if request.exclusive:
                    awaited = request.stream
        return running, awaited

    def clear(self) -> None:
        """Everything held has been answered otherwise."""
        self.queue.clear()
        self.isolation.clear()
        self.doubted = None
