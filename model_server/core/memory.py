"""The sizes in force: those of the engine and its target, less what the memory has no room for.

A merged pass that runs out of memory halves what passes may hold (`room`); those that fit let them
try twice as much again, until all that was is back. Invariants:

- only a pass as it was cut takes room: of its halves, which run to find out why, none does;
- what a lone input took room for, convicted of not fitting by itself, is given back at once;
- room is never below a part of the target, since passes without memory for that find their way by
  halves, and a target of a few tokens would refuse what streams send;
- the target asked for is kept meanwhile: what moves it moves that, and shows once there is room.

It knows nothing of engines, nor of what is in a pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from model_server.core.limits import Limits

TARGET_PART_MIN: Final = 8
"""Room is at least this part of the target asked for."""
RAISE_PASSES: Final = 64
"""Good passes after which twice as much is tried."""
RAISE_PASSES_MAX: Final = 4_096
"""Twice as many as before, up to these, after each try that failed."""


class MemoryRoom:
    """See the module; `limits` is a new object only where sizes have changed."""

    def __init__(self, limits: Limits) -> None:
        self.asked = limits
        """What the engine started with, with the target as it has moved since."""
        self.limits = limits
        """In force."""
        self._room: int | None = None
        """Tokens of a merged pass; None: as asked."""
        self._room_before: int | None = None
        self._explainable = False
        """The pass that was cut last took room, and its halves still run."""
        self._passes_left = self._passes_wanted = RAISE_PASSES
        self._tried = False
        """Room was raised, and not for long enough to say that it fits."""

    @property
    def short(self) -> bool:
        """Passes hold less than was asked."""
        return self._room is not None

    def pass_cut(self) -> None:
        """A pass was cut out of what waits: the halves of the one before have all run."""
        self._explainable = False

    def move_target(self, tokens: int) -> None:
        """The target asked for is another."""
        self.asked = replace(self.asked, batch_tokens_target=tokens)
        self._reckon()

    def ran_out(self, tokens: int, *, fitted: int = 1) -> bool:
        """A merged pass of so many tokens did not fit, one of `fitted` does; True: room fell."""
        floor = -(-self.asked.batch_tokens_target // TARGET_PART_MIN)
        room = max(tokens // 2, fitted, floor)
        self._room_before, self._explainable = self._room, True
        if self._tried:
            self._passes_wanted = min(2 * self._passes_wanted, RAISE_PASSES_MAX)
        self._passes_left, self._tried = self._passes_wanted, False
        if self._room is not None and room >= self._room:
            return False
        self._room = room
        return self._reckon()

    def explained(self) -> bool:
        """An input did not fit by itself: so its pass says nothing of others; True: room rose."""
        if not self._explainable:
            return False
        self._explainable = False
        self._room = self._room_before
        return self._reckon()

    def good_pass(self) -> bool:
        """A pass as it was cut has run; True: room rose."""
        if self._room is None and not self._tried:
            return False
        self._passes_left -= 1
        if self._passes_left:
            return False
        if self._tried:
            self._passes_wanted = max(self._passes_wanted // 2, RAISE_PASSES)
        self._passes_left = self._passes_wanted
        self._tried = self._room is not None
        if self._room is None:
            return False
        self._room *= 2
        if self._room >= self.asked.batch_tokens_max:
            self._room = None
        return self._reckon()

    def _reckon(self) -> bool:
        limits = self.asked if self._room is None else self.asked.lowered(self._room)
        if limits == self.limits:
            return False
        self.limits = limits
        return True
