"""The packing rule: which of the waiting texts go into one claim, or one forward pass.

Pure arithmetic over token counts; it knows nothing of queues, servers, streams or time, and it is
the one module that both programs share. Two forms of one rule:

- `Room`: in order, until one does not fit. The model server fills its passes with it, by exact
  counts: `room.add(...)` for the oldest waiting input, then the next, until it says False.
- `Packer`: the same by estimates that carry a variance, so that a margin is kept, and with a
  bounded look-ahead for what fills the rest. The aggregator's claims are packed with it.

Invariants of both: nothing goes above a limit, apart from a first text that alone is larger than
the token limit (it goes alone); a text is never cut; order is kept among those taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


@dataclass(frozen=True, slots=True, kw_only=True)
class PackLimits:
    """What one claim or pass may hold: tokens (soft for a first text), texts, bytes of text."""

    tokens: float
    inputs: int
    size_bytes: int


class Room:
    """What is left of one pass while it is filled in order of arrival, by exact counts."""

    __slots__ = ("_limits", "inputs", "size_bytes", "tokens")

    def __init__(self, limits: PackLimits) -> None:
        """Start empty."""
        self._limits = limits
        self.tokens = 0
        self.inputs = 0
        self.size_bytes = 0

    def add(self, tokens: int, size_bytes: int = 0) -> bool:
        """Take one text in, if it fits; the first always does, so that a longer one goes alone.

        After False the caller ends the pass: nothing later may overtake what did not fit.
        """
        limits = self._limits
        if self.inputs and (
            self.tokens + tokens > limits.tokens
            or self.inputs >= limits.inputs
            or self.size_bytes + size_bytes > limits.size_bytes
        ):
            return False
        self.tokens += tokens
        self.inputs += 1
        self.size_bytes += size_bytes
        return True

    def add_all(self, tokens: int, inputs: int, size_bytes: int) -> bool:
        """Take several texts in by their sums, if all of them fit; nothing otherwise.

        The same outcome as `add` for each, at the cost of one.
        """
        limits = self._limits
        if (
            self.tokens + tokens > limits.tokens
            or self.inputs + inputs > limits.inputs
            or self.size_bytes + size_bytes > limits.size_bytes
        ):
            return False
        self.tokens += tokens
        self.inputs += inputs
        self.size_bytes += size_bytes
        return True


class Candidate(Protocol):
    """What the packer reads of a waiting text."""

    estimate: float
    """Expected tokens."""
    variance: float
    """Of the estimate, tokens squared."""
    text_bytes: int
    passed_over: bool
    """A claim has already taken a later one in its place."""


C = TypeVar("C", bound=Candidate)


class Packer(Generic[C]):
    """Fills one claim by estimates: while sum + deviations x sqrt(summed variance) fits.

    What does not fit is passed over, and up to `look_ahead` later candidates are tried in its
    place. A candidate that an earlier claim has already passed over ends the claim instead, so
    nobody is overtaken by more than one claim. Setting `passed_over` on `skipped[:overtaken]` is
    the caller's (only if the claim is really sent).
    """

    __slots__ = (
        "_deviations",
        "_limits",
        "_look_ahead",
        "full",
        "overtaken",
        "size_bytes",
        "skipped",
        "taken",
        "tokens",
        "variance",
    )

    def __init__(self, limits: PackLimits, *, deviations: float = 0.0, look_ahead: int = 0) -> None:
        """Start empty; `deviations` is the margin in standard deviations of the claim's sum."""
        self._limits = limits
        self._deviations = deviations
        self._look_ahead = look_ahead
        self.taken: list[C] = []
        self.skipped: list[C] = []
        self.tokens = 0.0
        """Sum of the estimates taken, without the margin."""
        self.variance = 0.0
        self.size_bytes = 0
        self.overtaken = 0
        """How many of `skipped` precede something taken; the rest was looked at in vain."""
        self.full = False
        """Something did not fit: more candidates would not have made the claim much larger."""

    def feed(self, candidates: Sequence[C]) -> int:
        """Go on with these, in order; returns how many were consumed (taken or skipped).

        Fewer than given: the claim is complete. A first text above the token limit is taken alone:
        callers that must not send it check `len(taken) == 1` against the limit.
        """
        limits, taken, skipped = self._limits, self.taken, self.skipped
        deviations_squared = self._deviations * self._deviations
        tokens_max, inputs_max, bytes_max = limits.tokens, limits.inputs, limits.size_bytes
        tokens, variance, size_bytes = self.tokens, self.variance, self.size_bytes
        tries, count = self._look_ahead, len(taken)
        consumed = 0
        for candidate in candidates:
            sum_next = tokens + candidate.estimate
            variance_next = variance + candidate.variance
            bytes_next = size_bytes + candidate.text_bytes
            room = tokens_max - sum_next
            # deviations x sqrt(variance) > room, without the root
            if count and (
                room < 0.0
                or deviations_squared * variance_next > room * room
                or bytes_next > bytes_max
                or count >= inputs_max
            ):
                self.full = True
                if candidate.passed_over or tries <= 0 or count >= inputs_max:
                    tries = -1
                    break
                skipped.append(candidate)
            else:
                taken.append(candidate)
                count += 1
                tokens, variance, size_bytes = sum_next, variance_next, bytes_next
                if skipped:
                    self.overtaken = len(skipped)
            consumed += 1
            if skipped:
                tries -= 1
        self._look_ahead = tries
        self.tokens, self.variance, self.size_bytes = tokens, variance, size_bytes
        return consumed

    def forget_skipped(self) -> None:
        """The candidates so far were of another kind than those to come."""
        self.skipped = []
        self.overtaken = 0
