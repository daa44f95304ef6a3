"""What the scheduler knows of a request: columns of counts, and which inputs are still unanswered.

Invariants: an input is waiting (in `waiting`, from `position` on), in a pass or a half, or
answered; `unanswered` counts the first two kinds and `held_tokens` is their exact sum. Nothing per
input is an object: inputs are positions in columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aggregator.core.packing import Room
from model_server.core.effects import Part
from model_server.core.events import RequestArrived


class Request:
    """One request that was taken in."""

    __slots__ = (
        "arrived_ns",
        "bulk",
        "deadlines_ns",
        "earliest_ns",
        "exclusive",
        "gone",
        "held_tokens",
        "key",
        "position",
        "request_id",
        "stream",
        "text_bytes",
        "tokens",
        "unanswered",
        "waiting",
    )

    def __init__(self, event: RequestArrived) -> None:
        """Take the columns of an arrival; inputs that it refuses are not among the waiting."""
        self.key = event.request
        self.stream = event.stream
        self.request_id = event.request_id
        self.arrived_ns = event.arrived_ns
        self.exclusive = event.exclusive
        self.bulk = event.bulk
        self.tokens = event.tokens
        self.text_bytes = event.text_bytes
        self.deadlines_ns = event.deadlines_ns
        self.waiting: Sequence[int] = range(len(event.tokens))
        if event.failures:
            refused = {index for index, _ in event.failures}
            self.waiting = [index for index in self.waiting if index not in refused]
        self.position = 0
        self.unanswered = len(self.waiting)
        self.held_tokens = sum(event.tokens)
        self.gone = False
        self.earliest_ns = self._earliest()

    @property
    def waits(self) -> bool:
        """Whether inputs are left that no pass has taken."""
        return self.position < len(self.waiting)

    def _earliest(self) -> int:
        """The earliest deadline among the waiting inputs; 0: none has one."""
        deadlines = self.deadlines_ns
        if deadlines is None:
            return 0
        return min((deadlines[i] for i in self.waiting[self.position :] if deadlines[i]), default=0)

    def take(self, room: Room) -> Part | None:
        """Take waiting inputs in order while the pass has room for them."""
        waiting, tokens, text_bytes = self.waiting, self.tokens, self.text_bytes
        start = position = self.position
        end = len(waiting)
        add = room.add
        while position < end:
            index = waiting[position]
            if not add(tokens[index], text_bytes[index]):
                break
            position += 1
        if position == start:
            return None
        self.position = position
        return Part(request=self.key, indexes=waiting[start:position])

    def answered(self, indexes: Iterable[int]) -> bool:
        """Strike inputs off; True when none is left."""
        tokens = self.tokens
        for index in indexes:
            self.held_tokens -= tokens[index]
            self.unanswered -= 1
        return self.unanswered == 0

    def expired(self, now_ns: int) -> list[int]:
        """Take out the waiting inputs whose deadline has passed."""
        deadlines = self.deadlines_ns
        if deadlines is None or not self.earliest_ns or self.earliest_ns > now_ns:
            return []
        left = self.waiting[self.position :]
        due = [i for i in left if 0 < deadlines[i] <= now_ns]
        if due:
            self.waiting = [i for i in left if not 0 < deadlines[i] <= now_ns]
            self.position = 0
        self.earliest_ns = self._earliest()
        return due

    def expired_of(self, indexes: Sequence[int], now_ns: int) -> list[int]:
        """Those of inputs already taken out (a half that waits to be run) that have expired."""
        deadlines = self.deadlines_ns
        if deadlines is None:
            return []
        return [i for i in indexes if 0 < deadlines[i] <= now_ns]
