"""Moving the target with the machine: what passes take while serving, and what that implies.

A machine shared with others, a clock that falls, a driver update: a profile of yesterday may be
wrong today. Owns the last passes, the curve that they show, and when the target moves. Invariants:

- only engine time counts, and neither the first pass of a shape nor a pass that raised;
- both parts of the curve are refitted only where the last `WINDOW_PASSES` span `OCTAVES_MIN` and
  reach half the target: a line through short passes says nothing of long ones;
- passes of about the target's size alone can't tell the two parts apart. They say how much slower
  the machine has become as a whole, which moves no target (throughput keeps its shape) unless
  passes now take over `pass_ms_max`: then it is cut, and comes back when they no longer do;
- the target moves after the same disagreement for `HOLD_PASSES`, by at most `STEP_RATIO` a step,
  within half and twice the profile's; only `pass_ms_max` may take it lower.

The window is shorter than the hold: short passes from before a change and long ones from after it
make a curve that no machine has, and must not move anything before they have left the window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from model_server.core.curve import Fit, Point, fit_curve, fit_line, knee_of
from model_server.core.saturation import (
    Target,
    TargetOptions,
    TargetRule,
    implied_target,
    largest_within,
)

WINDOW_PASSES = 160
HOLD_PASSES = 200
REFIT_PASSES = 20
OCTAVES_MIN = 3.0
DIFFERENCE_RATIO = 0.25
STEP_RATIO = 0.1
BOUND_RATIO = 2.0
_BINS_PER_OCTAVE = 4
_BIN_PASSES_MIN = 2
"""One pass may be any pass; two that agree are evidence of their size."""
_NEAR_PASSES_MIN = 20
"""Enough for a median to say how much slower or faster passes have become."""
_WEIGHT_MAX = 10
"""Sizes that nearly all passes have must not decide alone what long passes take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """The profile that the target is bound to: its curve, its target, and the range it measured.

    `profile_free` is the target that it would have had without `pass_ms_max`. The target stays
    within `bound_ratio` times the profile's and the same part of it.
    """

    target: TargetOptions
    curve: Fit
    profile_target: int
    profile_free: int
    tokens_min: int
    tokens_max: int
    bound_ratio: float = BOUND_RATIO


class TargetFollower:
    """Watches passes; says when the target is to move, and where to."""

    def __init__(self, options: FollowOptions) -> None:
        self._options = options
        self._window: deque[tuple[int, float]] = deque(maxlen=WINDOW_PASSES)
        self._shapes: set[int] = set()
        self._passes = 0
        self._free = options.profile_free
        """The target by throughput, as far as it is known to have moved."""
        self._differing = 0
        """Passes for which the implied target has been too large (below 0: too small)."""
        self._moving = False
        self.implied_tokens = options.profile_target
        """What the last passes imply, before any bound but the profiled range."""

    def observe(self, tokens: int, duration_ns: int, *, target: int, tokens_max: int) -> int | None:
        """A pass has run; returns the new target if it moves. `tokens_max`: no pass is larger."""
        if tokens not in self._shapes:
            self._shapes.add(tokens)
            return None
        self._window.append((tokens, max(1, duration_ns) / 1e6))
        self._passes += 1
        if self._passes % REFIT_PASSES:
            return None
        implied = self._implied(target)
        if implied is None:
            return None
        self.implied_tokens = implied.tokens
        moved = self._move(target, self._bounded(implied, tokens_max))
        if moved is not None and implied.rule is not TargetRule.LIMIT:
            self._free = moved
        return moved

    def _implied(self, target: int) -> Target | None:
        """What the window implies; None: nothing."""
        options = self._options
        refitted = refit(binned(self._window), target)
        if refitted is not None:
            return implied_target(
                refitted,
                options.target,
                tokens_min=options.tokens_min,
                tokens_max=options.tokens_max,
            )
        ratios = [
            pass_ms / options.curve.pass_ms(tokens)
            for tokens, pass_ms in self._window
            if tokens >= target / 2
        ]
        if len(ratios) < _NEAR_PASSES_MIN:
            return None
        scaled = options.curve.scaled(median(ratios))
        allowed = largest_within(
            scaled, options.target.pass_ms_max, options.tokens_min, options.tokens_max
        )
        if allowed < self._free:
            return Target(tokens=allowed, rule=TargetRule.LIMIT)
        return Target(tokens=self._free, rule=TargetRule.THROUGHPUT)

    def _bounded(self, implied: Target, tokens_max: int) -> int:
        profile, ratio = self._options.profile_target, self._options.bound_ratio
        wanted = min(implied.tokens, int(profile * ratio), tokens_max)
        if implied.rule is TargetRule.LIMIT:
            return max(1, wanted)
        return min(max(wanted, math.ceil(profile / ratio)), tokens_max)

    def _move(self, target: int, wanted: int) -> int | None:
        """The next step towards what is wanted, once that has been so for long enough."""
        if not self._moving:
            if abs(wanted - target) <= DIFFERENCE_RATIO * target:
                self._differing = 0
                return None
            step = REFIT_PASSES if wanted > target else -REFIT_PASSES
            self._differing = step + (self._differing if self._differing * step > 0 else 0)
            self._moving = abs(self._differing) >= HOLD_PASSES
            if not self._moving:
                return None
        lowest = math.ceil(target * (1 - STEP_RATIO))
        highest = max(int(target * (1 + STEP_RATIO)), target + 1)
        moved = min(max(wanted, lowest), highest)
        if moved in (wanted, target):
            self._differing, self._moving = 0, False
        return moved if moved != target else None


def refit(points: Sequence[Point], target: int) -> Fit | None:
    """The curve of these points, if they say enough of passes up to the target."""
    if not points or points[-1].tokens < max(target / 2, points[0].tokens * 2**OCTAVES_MIN):
        return None
    fit = fit_curve(points)
    # A hinge without a knee worth the name is a line that bends to noise.
    return fit_line(points) if fit.flat_ms is not None and knee_of(fit, points) is None else fit


def binned(passes: Iterable[tuple[int, float]]) -> list[Point]:
    """Passes as points, ascending: by quarter octaves of tokens the mean size and median time."""
    bins: dict[int, list[tuple[int, float]]] = {}
    for tokens, pass_ms in passes:
        bins.setdefault(math.floor(math.log2(tokens) * _BINS_PER_OCTAVE), []).append(
            (tokens, pass_ms)
        )
    return [
        Point(
            tokens=fmean(tokens for tokens, _ in some),
            pass_ms=median(pass_ms for _, pass_ms in some),
            weight=min(len(some), _WEIGHT_MAX),
        )
        for _, some in sorted(bins.items())
        if len(some) >= _BIN_PASSES_MIN
    ]
