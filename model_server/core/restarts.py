"""When a lost engine is started again: at once as a rule, never in a tight loop, not for ever.

An input that ends the engine costs about ten starts until it is found (DESIGN 4.6), so the first
ones are free; from then on starts are spread out. An engine that dies so often without one good
pass is not ended by its inputs. It knows nothing of engines.
"""

from __future__ import annotations

from typing import Final

_SECOND_NS: Final = 1_000_000_000
FREE_RESTARTS: Final = 10
"""At once, one after the other."""
INTERVAL_NS: Final = 10 * _SECOND_NS
"""Another restart is free after so long; none comes sooner once they are used up."""
IN_A_ROW_MAX: Final = 30
"""Deaths without a good pass in between, after which the process ends."""


class Restarts:
    """A bucket of free restarts that fills with time."""

    def __init__(self) -> None:
        self._free_at_ns = 0
        """When the bucket is full again; it may lie in the past."""
        self._in_a_row = 0

    def lost(self, now_ns: int) -> int | None:
        """The engine was lost: start it again after so many nanoseconds; None: give up."""
        self._in_a_row += 1
        if self._in_a_row > IN_A_ROW_MAX:
            return None
        self._free_at_ns = max(self._free_at_ns, now_ns) + INTERVAL_NS
        return max(0, self._free_at_ns - now_ns - FREE_RESTARTS * INTERVAL_NS)

    def good_pass(self) -> None:
        """A pass ended well."""
        self._in_a_row = 0
