"""Which pass size a machine should aim at: the target, from the curve of its passes.

The rule: the smallest size whose throughput is at least `THROUGHPUT_RATIO` of the best, cut to the
largest whose pass takes at most `pass_ms_max`. Where the curve has a knee and a latency slack is
asked for, the largest size whose pass takes at most (1 + slack) times the flat latency instead,
with the same cut. `choose_target` applies it to measured sizes (a profile), `implied_target` to a
fitted curve (while serving), so that the two agree. Knows nothing of engines, and takes its random
numbers from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median

from model_server.core.curve import Fit, Point, fit_curve, fit_line, knee_of, monotone

THROUGHPUT_RATIO = 0.9
"""More throughput than this part of the best costs latency out of proportion."""
TOKENS_MAX = 2**31
PASS_MS_MIN, PASS_MS_MAX = 1e-6, 1e9
"""Of anything that could have been measured: fits of what lies beyond lose all digits."""
RESAMPLES = 500
_TAIL = 0.025
"""Of resampled targets left out at each end: a 95% interval."""


class TargetRule(StrEnum):
    """What decided a target."""

    THROUGHPUT = "throughput"
    LATENCY_SLACK = "latency slack"
    LIMIT = "pass_ms_max"
    """A pass of the size that the other rules want would take too long."""


class TargetSource(StrEnum):
    """Where a server's target came from, as `GetModelInfo` says."""

    SETTING = "setting"
    DEFAULT = "default"
    """Of the engine: neither set nor measured."""
    PROFILE = "profile"
    QUICK_PROFILE = "quick profile"
    """Measured at start, for want of a stored one."""
    FOLLOWED = "followed"
    """Moved from a profile's by what passes took while serving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """`latency_slack_ratio` counts only where there is a knee."""

    pass_ms_max: float
    latency_slack_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The size to aim at and what decided it."""

    tokens: int
    rule: TargetRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Sizes, ascending, and for each round the milliseconds of one pass of each of them.

    Raises:
        ValueError: a round has not one time a size that a pass can take, sizes don't ascend or are
            beyond all passes, or all is empty.
    """

    tokens: tuple[int, ...]
    rounds_ms: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.tokens or not self.rounds_ms:
            raise ValueError("nothing was measured")
        if self.tokens[0] < 1 or any(a >= b for a, b in pairwise(self.tokens)):
            raise ValueError("sizes must ascend from 1")
        if self.tokens[-1] > TOKENS_MAX:
            raise ValueError(f"a pass has at most {TOKENS_MAX} tokens")
        for times_ms in self.rounds_ms:
            if len(times_ms) != len(self.tokens):
                raise ValueError(f"{len(times_ms)} times for {len(self.tokens)} sizes")
            if not all(PASS_MS_MIN <= time_ms <= PASS_MS_MAX for time_ms in times_ms):
                raise ValueError(f"a pass takes {PASS_MS_MIN:g} to {PASS_MS_MAX:g} ms")

    def medians(self, rounds: Sequence[int] | None = None) -> list[Point]:
        """The median of each size, over all rounds or those chosen."""
        chosen = self.rounds_ms if rounds is None else [self.rounds_ms[i] for i in rounds]
        return [
            Point(tokens=tokens, pass_ms=median(times_ms))
            for tokens, times_ms in zip(self.tokens, zip(*chosen, strict=True), strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """What a measured curve says."""

    medians: tuple[Point, ...]
    points: tuple[Point, ...]
    """The medians made monotone: what the target is chosen from."""
    line: Fit
    fit: Fit
    """The better of the two shapes."""
    knee_tokens: float | None
    target: Target
    target_low: int
    target_high: int
    """The target's 95% interval."""


def saturation(
    measured: Measured, options: TargetOptions, below: Callable[[int], int]
) -> Saturation:
    """Read a curve. `below(n)` gives random integers from 0 to n - 1, for the interval."""
    medians = measured.medians()
    points = monotone(medians)
    fit = fit_curve(medians)
    knee = knee_of(fit, medians)
    low, high = target_interval(measured, options, below)
    return Saturation(
        medians=tuple(medians),
        points=tuple(points),
        line=fit_line(medians),
        fit=fit,
        knee_tokens=knee,
        target=choose_target(points, options, flat_ms=fit.flat_ms if knee is not None else None),
        target_low=low,
        target_high=high,
    )


def choose_target(
    points: Sequence[Point], options: TargetOptions, *, flat_ms: float | None = None
) -> Target:
    """The target among measured sizes; points are monotone, `flat_ms` is set where a knee is."""
    slack = options.latency_slack_ratio
    if flat_ms is not None and slack is not None:
        wanted = _largest(points, (1.0 + slack) * flat_ms)
        rule = TargetRule.LATENCY_SLACK
    else:
        best = max(point.tokens_per_ms for point in points)
        enough = THROUGHPUT_RATIO * best
        wanted = next(point.tokens for point in points if point.tokens_per_ms >= enough)
        rule = TargetRule.THROUGHPUT
    allowed = _largest(points, options.pass_ms_max)
    if allowed < wanted:
        return Target(tokens=int(allowed), rule=TargetRule.LIMIT)
    return Target(tokens=int(wanted), rule=rule)


def _largest(points: Sequence[Point], pass_ms_max: float) -> float:
    """The largest size whose pass is no longer than this; the smallest there is, if none is."""
    return max((p.tokens for p in points if p.pass_ms <= pass_ms_max), default=points[0].tokens)


def target_interval(
    measured: Measured, options: TargetOptions, below: Callable[[int], int]
) -> tuple[int, int]:
    """95% of the targets of resampled rounds (percentile bootstrap, Efron 1979).

    Whole rounds are drawn: what slows a machine down for a while slows all sizes of a round.
    """
    rounds = len(measured.rounds_ms)
    targets = []
    for _ in range(RESAMPLES):
        medians = measured.medians([below(rounds) for _ in range(rounds)])
        fit = fit_curve(medians) if options.latency_slack_ratio is not None else None
        flat_ms = fit.flat_ms if fit is not None and knee_of(fit, medians) is not None else None
        targets.append(choose_target(monotone(medians), options, flat_ms=flat_ms).tokens)
    targets.sort()
    last = len(targets) - 1
    return targets[math.floor(_TAIL * last)], targets[math.ceil((1.0 - _TAIL) * last)]


def implied_target(fit: Fit, options: TargetOptions, *, tokens_min: int, tokens_max: int) -> Target:
    """The target that a fitted curve implies within a range of sizes, to the token."""
    knee = fit.knee_tokens
    slack = options.latency_slack_ratio
    if fit.flat_ms is not None and slack is not None:
        wanted = largest_within(fit, (1.0 + slack) * fit.flat_ms, tokens_min, tokens_max)
        rule = TargetRule.LATENCY_SLACK
    else:
        # Throughput rises to the end of the range, or to the knee where it falls behind that.
        peak = tokens_max
        if knee is not None and fit.fixed_ms < 0:
            nearest = (math.floor(min(knee, tokens_max)), math.ceil(min(knee, tokens_max)))
            peak = max(*nearest, tokens_min, key=lambda t: t / fit.pass_ms(t))
        enough = THROUGHPUT_RATIO * peak / fit.pass_ms(peak)
        wanted = _first(lambda t: t / fit.pass_ms(t) >= enough, tokens_min, peak)
        rule = TargetRule.THROUGHPUT
    allowed = largest_within(fit, options.pass_ms_max, tokens_min, tokens_max)
    if allowed < wanted:
        return Target(tokens=allowed, rule=TargetRule.LIMIT)
    return Target(tokens=wanted, rule=rule)


def largest_within(fit: Fit, pass_ms_max: float, tokens_min: int, tokens_max: int) -> int:
    """The largest size of a range whose pass is no longer than this; its smallest, if none is."""
    beyond = _first(lambda t: fit.pass_ms(t) > pass_ms_max, tokens_min, tokens_max + 1)
    return max(tokens_min, beyond - 1)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The first integer from `low` for which a condition holds that then stays; at most `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def splitmix(seed: int) -> Callable[[int], int]:
    """A seeded source for `below`: splitmix64, https://prng.di.unimi.it/splitmix64.c."""
    state = seed & _MASK

    def below(count: int) -> int:
        nonlocal state
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
        return (mixed * count) >> 64

    return below


_MASK = (1 << 64) - 1
