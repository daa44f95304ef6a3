"""Which waiting inputs go into the next pass.

The rules, in order: the oldest inputs of all streams and calls first, cut between inputs, up to the
target by exact count; a single longer input alone; interactive before bulk, bulk in what is left,
and at least every tenth pass starts with the oldest bulk input; an exclusive request has passes of
its own, in its turn by arrival. Nothing here knows streams, engines or answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from aggregator.core.packing import PackLimits, Room
from model_server.core.effects import Part
from model_server.core.requests import Request

BULK_FIRST_EVERY = 10
"""Of so many passes in a row at least one starts with the oldest bulk input, if there is one."""


class WaitingQueue:
    """Requests with waiting inputs, in order of arrival, in three lines."""

    def __init__(self) -> None:
        self._interactive: deque[Request] = deque()
        self._bulk: deque[Request] = deque()
        self._exclusive: deque[Request] = deque()
        self._passes_since_bulk_first = 0

    def push(self, request: Request) -> None:
        """A request arrived; keys ascend with arrival."""
        if request.exclusive:
            self._exclusive.append(request)
        elif request.bulk:
            self._bulk.append(request)
        else:
            self._interactive.append(request)

    def clear(self) -> None:
        """Everything held has been answered otherwise."""
        for line in (self._interactive, self._bulk, self._exclusive):
            line.clear()

    def note_other_pass(self) -> None:
        """A pass that was not cut here (exclusive, a half, a canary) counts for bulk's turn too."""
        if _head(self._bulk) is not None:
            self._passes_since_bulk_first += 1

    def exclusive_turn(self) -> Request | None:
        """The exclusive request whose turn it is, if the next pass is to be one of its own."""
        exclusive = _head(self._exclusive)
        if exclusive is None:
            return None
        # Bulk inputs wait behind interactive ones, so they count only where there are no others.
        head = _head(self._interactive) or _head(self._bulk)
        return None if head is not None and head.key < exclusive.key else exclusive

    def cut(self, limits: PackLimits) -> tuple[Sequence[Part], int]:
        """Take the next merged pass out; returns its parts and its exact tokens, both 0 if none."""
        room = Room(limits)
        parts: list[Part] = []
        bulk_first = False
        if _head(self._bulk) is not None:
            self._passes_since_bulk_first += 1
            bulk_first = self._passes_since_bulk_first >= BULK_FIRST_EVERY
        if bulk_first or _head(self._interactive) is None:
            self._passes_since_bulk_first = 0
        if bulk_first:
            # The oldest bulk input starts the pass; interactive ones come before further bulk.
            one = Room(PackLimits(tokens=0, inputs=1, size_bytes=0))
            part = self._bulk[0].take(one)
            if part is not None:
                parts.append(part)
                room.add(one.tokens, one.size_bytes)
        _fill(self._interactive, room, parts)
        _fill(self._bulk, room, parts)
        return parts, room.tokens


def _head(line: deque[Request]) -> Request | None:
    """The oldest request with waiting inputs; those that are gone or taken are dropped."""
    while line:
        request = line[0]
        if not request.gone and request.waits:
            return request
        line.popleft()
    return None


def _fill(line: deque[Request], room: Room, parts: list[Part]) -> None:
    """Take from the head of a line until something does not fit."""
    while (request := _head(line)) is not None:
        part = request.take(room)
        if part is None:
            return
        parts.append(part)
        if request.waits:
            return
