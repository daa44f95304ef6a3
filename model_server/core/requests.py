"""What the scheduler knows of a request: columns of counts, and which inputs are still unanswered.

Invariants: an input is waiting (in `waiting`, from `position` on), in a pass or a half, or
answered; `unanswered` counts the first two kinds and `held_tokens` is their exact sum. Nothing per
input is an object: inputs are positions in columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.core.packing import Room
from model_server.core.effects import Part
from model_server.core.events import RequestArrived


class Request:
    """One request that was taken in."""

    __slots__ = (
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
        "waiting_bytes",
        "waiting_tokens",
    )

    def __init__(self, event: RequestArrived) -> None:
        """Take the columns of an arrival; inputs that it refuses are not among the waiting."""
        self.key = event.request
        self.stream = event.stream
        self.request_id = event.request_id
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
        self.held_tokens = self.waiting_tokens = sum(event.tokens)
        self.waiting_bytes = sum(event.text_bytes)
        """Of the waiting inputs; of those that the arrival refused too, which only wastes room."""
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
        left = _at(deadlines, self.waiting[self.position :])
        earliest = min(left, default=0)
        return earliest or min((deadline for deadline in left if deadline), default=0)

    def take(self, room: Room) -> Part | None:
        """Take waiting inputs in order while the pass has room for them."""
        waiting, tokens, text_bytes = self.waiting, self.tokens, self.text_bytes
        start = position = self.position
        end = len(waiting)
        if room.add_all(self.waiting_tokens, end - start, self.waiting_bytes):
            position = end
        add = room.add
        while position < end:
            index = waiting[position]
            if not add(tokens[index], text_bytes[index]):
                break
            position += 1
        if position == start:
            return None
        self.position = position
        indexes = waiting[start:position]
        self.waiting_tokens -= sum(_at(tokens, indexes))
        self.waiting_bytes -= sum(_at(text_bytes, indexes))
        return Part(request=self.key, indexes=indexes)

    def answered(self, indexes: Sequence[int]) -> bool:
        """Strike inputs off; True when none is left."""
        self.held_tokens -= sum(_at(self.tokens, indexes))
        self.unanswered -= len(indexes)
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
            self.waiting_tokens -= sum(_at(self.tokens, due))
            self.waiting_bytes -= sum(_at(self.text_bytes, due))
        self.earliest_ns = self._earliest()
        return due

    def expired_of(self, indexes: Sequence[int], now_ns: int) -> list[int]:
        """Those of inputs already taken out (a half that waits to be run) that have expired."""
        deadlines = self.deadlines_ns
        if deadlines is None:
            return []
        return [i for i in indexes if 0 < deadlines[i] <= now_ns]


def _at(column: Sequence[int], indexes: Sequence[int]) -> Sequence[int]:
    """Entries of a column; a slice where positions are contiguous, which is the common case."""
    if isinstance(indexes, range):
        return column[indexes.start : indexes.stop]
    return [column[index] for index in indexes]
