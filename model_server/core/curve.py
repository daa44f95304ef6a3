"""The latency curve of passes: how long a pass takes against its total tokens.

Owns what is read out of measured points: latency made monotone, the two shapes it may have, which
of them describes the points better, and whether there is a flat part worth the name. Invariants: a
fitted curve never falls with the tokens and is positive for positive points; a knee is named only
by the rules of `knee_of`. Errors are relative (a millisecond off matters at 5 ms, not at 500), so
short passes count as much as long ones. Pure arithmetic: it knows no engines, clocks or targets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KNEE_POINTS_MIN = 4
KNEE_SPAN_MIN = 4.0
"""A flat part has at least so many measured points, and spans this factor in tokens."""
_RELATIVE_ERROR_MIN = 1e-4
"""No timer is better: below this a closer fit says nothing, and a perfect one is not minus
infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A pass of `tokens` takes `pass_ms`; `weight` says how much is known about it."""

    tokens: float
    pass_ms: float
    weight: float = 1.0

    @property
    def tokens_per_ms(self) -> float:
        """Throughput of passes of this size."""
        return self.tokens / self.pass_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """`pass_ms = max(flat_ms, fixed_ms + slope_ms x tokens)`; without `flat_ms` the line alone.

    `bic` is the Bayesian information criterion of the fit, comparable between fits of the same
    points only; the lower is the better.
    """

    fixed_ms: float
    slope_ms: float
    flat_ms: float | None = None
    bic: float = 0.0

    def pass_ms(self, tokens: float) -> float:
        """How long a pass of so many tokens takes."""
        line = self.fixed_ms + self.slope_ms * tokens
        return line if self.flat_ms is None else max(self.flat_ms, line)

    @property
    def knee_tokens(self) -> float | None:
        """Where the flat part ends; None: this shape has none. Infinite if nothing rises."""
        if self.flat_ms is None:
            return None
        if self.slope_ms <= 0:
            return math.inf
        return (self.flat_ms - self.fixed_ms) / self.slope_ms

    def scaled(self, ratio: float) -> Fit:
        """The same machine when everything takes `ratio` times as long."""
        flat_ms = None if self.flat_ms is None else self.flat_ms * ratio
        return Fit(
            fixed_ms=self.fixed_ms * ratio,
            slope_ms=self.slope_ms * ratio,
            flat_ms=flat_ms,
            bic=self.bic,
        )


def monotone(points: Sequence[Point]) -> list[Point]:
    """The nearest latencies (weighted least squares) that never fall with the tokens.

    Points ascend in tokens. Source: pool adjacent violators, Barlow et al. 1972.
    """
    pools: list[tuple[float, float, int]] = []  # weighted sum, weight, points
    for point in points:
        total, weight, count = point.pass_ms * point.weight, point.weight, 1
        while pools and pools[-1][0] / pools[-1][1] > total / weight:
            before = pools.pop()
            total, weight, count = total + before[0], weight + before[1], count + before[2]
        pools.append((total, weight, count))
    levels = [total / weight for total, weight, count in pools for _ in range(count)]
    return [
        Point(tokens=point.tokens, pass_ms=level, weight=point.weight)
        for point, level in zip(points, levels, strict=True)
    ]


def fit_line(points: Sequence[Point]) -> Fit:
    """Fit `fixed + slope x tokens`, neither negative.

    Raises:
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("a curve needs points")
    fixed, slope = _least_squares([(point.tokens, point) for point in points], fixed_min=0.0)
    return Fit(
        fixed_ms=fixed,
        slope_ms=slope,
        bic=_bic(points, Fit(fixed_ms=fixed, slope_ms=slope), parameters=2),
    )


def fit_hinge(points: Sequence[Point]) -> Fit | None:
    """Fit `max(flat, fixed + slope x tokens)`, the slope not negative; None: too few points.

    The fixed part may be negative: right behind the flat part passes get cheaper by the token.
    Exact: the best hinge lies on a measured point, or where the two lines of a split meet between
    its points.
    """
    if len(points) <= 3:
        return None
    best: Fit | None = None
    for knee in _knees(points):
        flat, slope = _least_squares([(max(0.0, p.tokens - knee), p) for p in points])
        fit = Fit(fixed_ms=flat - slope * knee, slope_ms=slope, flat_ms=flat)
        fit = Fit(
            fixed_ms=fit.fixed_ms,
            slope_ms=slope,
            flat_ms=flat,
            bic=_bic(points, fit, parameters=3),
        )
        if best is None or fit.bic < best.bic:
            best = fit
    return best


def _knees(points: Sequence[Point]) -> Iterator[float]:
    """Where a hinge of these points may be best."""
    for split in range(1, len(points)):
        left, right = points[:split], points[split:]
        yield left[-1].tokens
        flat, _ = _least_squares([(0.0, point) for point in left])
        fixed, slope = _least_squares([(point.tokens, point) for point in right])
        if slope > 0:
            meets = (flat - fixed) / slope
            if left[-1].tokens < meets < right[0].tokens:
                yield meets


def fit_curve(points: Sequence[Point]) -> Fit:
    """Of the two shapes the better by BIC.

    Raises:
        ValueError: there are no points.
    """
    line, hinge = fit_line(points), fit_hinge(points)
    return line if hinge is None or line.bic <= hinge.bic else hinge


def knee_of(fit: Fit, points: Sequence[Point]) -> float | None:
    """The saturation knee in tokens, or None: this machine has no flat part to speak of.

    Fitted blindly, the curve of a CPU has a knee at a few tokens, and batching would be switched
    off. So the flat part needs `KNEE_POINTS_MIN` measured points and a span of `KNEE_SPAN_MIN`. A
    knee beyond the last point is the last point: it is flat as far as was measured.
    """
    knee = fit.knee_tokens
    if knee is None or not points:
        return None
    flat = [point.tokens for point in points if point.tokens <= knee]
    if len(flat) < KNEE_POINTS_MIN or flat[-1] < KNEE_SPAN_MIN * flat[0]:
        return None
    return min(knee, points[-1].tokens)


def _least_squares(
    samples: Sequence[tuple[float, Point]], fixed_min: float = -math.inf
) -> tuple[float, float]:
    """Fixed part and slope over x by weighted relative least squares; the slope is at least 0."""
    weight = sum_x = sum_y = sum_xx = sum_xy = 0.0
    for x, point in samples:
        w = point.weight / (point.pass_ms * point.pass_ms)
        weight += w
        sum_x += w * x
        sum_y += w * point.pass_ms
        sum_xx += w * x * x
        sum_xy += w * x * point.pass_ms
    spread = weight * sum_xx - sum_x * sum_x
    slope = 0.0
    if spread > 1e-12 * weight * sum_xx:
        slope = max(0.0, (weight * sum_xy - sum_x * sum_y) / spread)
    fixed = (sum_y - slope * sum_x) / weight
    if fixed < fixed_min:
        return fixed_min, max(0.0, (sum_xy - fixed_min * sum_x) / sum_xx)
    return fixed, slope


def _bic(points: Sequence[Point], fit: Fit, *, parameters: int) -> float:
    """n ln(mean squared relative error) + k ln n (Schwarz 1978), with a floor on the error."""
    count = len(points)
    weight = sum(point.weight for point in points)
    squares = sum(
        point.weight * (fit.pass_ms(point.tokens) / point.pass_ms - 1.0) ** 2 for point in points
    )
    error = max(squares / weight, _RELATIVE_ERROR_MIN**2)
    return count * math.log(error) + parameters * math.log(count)
