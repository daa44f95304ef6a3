"""Curves against deliberately dumb references: every split, every size, every breakpoint tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_server.core.curve import Fit, Point, fit_curve, fit_hinge, fit_line, knee_of, monotone
from model_server.core.saturation import (
    RESAMPLES,
    Measured,
    TargetOptions,
    TargetRule,
    choose_target,
    implied_target,
    saturation,
    splitmix,
    target_interval,
)

TIMES = st.floats(0.1, 1_000.0)
SIZES = st.lists(st.integers(1, 5_000), min_size=1, max_size=14, unique=True).map(sorted)
FAR = TargetOptions(pass_ms_max=1e9)


@st.composite
def curves(draw: Any) -> list[Point]:
    """Any positive times over any ascending sizes."""
    sizes = draw(SIZES)
    return [
        Point(tokens=size, pass_ms=draw(TIMES), weight=draw(st.sampled_from([1.0, 1.0, 3.0])))
        for size in sizes
    ]


@st.composite
def shapes(draw: Any) -> Fit:
    """A line, or a hinge whose fixed part may be negative."""
    flat = draw(st.floats(0.5, 50.0))
    slope = draw(st.floats(0.001, 0.5))
    if draw(st.booleans()):
        return Fit(fixed_ms=flat, slope_ms=slope)
    knee = draw(st.floats(1.0, 3_000.0))
    return Fit(fixed_ms=flat - slope * knee, slope_ms=slope, flat_ms=flat)


def on(fit: Fit, sizes: Sequence[int]) -> list[Point]:
    return [Point(tokens=size, pass_ms=fit.pass_ms(size)) for size in sizes]


def squared_error(fit: Fit, points: Sequence[Point]) -> float:
    """Weighted mean of the squared relative errors."""
    weight = sum(p.weight for p in points)
    return sum(p.weight * (fit.pass_ms(p.tokens) / p.pass_ms - 1) ** 2 for p in points) / weight


@given(curves())
def test_monotone_is_the_min_max_of_means(points: list[Point]) -> None:
    def mean(first: int, last: int) -> float:
        some = points[first : last + 1]
        return sum(p.pass_ms * p.weight for p in some) / sum(p.weight for p in some)

    count = len(points)
    levels = [point.pass_ms for point in monotone(points)]
    for i in range(count):
        expected = max(min(mean(j, k) for k in range(i, count)) for j in range(i + 1))
        assert levels[i] == pytest.approx(expected)
    assert levels == sorted(levels)


@given(curves(), st.floats(0, 2), st.floats(0, 2))
def test_no_line_is_nearer_than_the_fitted_one(
    points: list[Point], fixed_ratio: float, slope_ratio: float
) -> None:
    fit = fit_line(points)
    assert fit.fixed_ms >= 0
    assert fit.slope_ms >= 0
    scale = points[-1].pass_ms
    for fixed in (fit.fixed_ms * fixed_ratio, fixed_ratio * scale):
        for slope in (fit.slope_ms * slope_ratio, slope_ratio * scale / points[-1].tokens):
            other = Fit(fixed_ms=fixed, slope_ms=slope)
            assert squared_error(fit, points) <= squared_error(other, points) * (1 + 1e-6) + 1e-9


@settings(max_examples=60)
@given(curves())
def test_no_hinge_is_nearer_than_the_fitted_one(points: list[Point]) -> None:
    fit = fit_hinge(points)
    if fit is None:
        assert len(points) <= 3
        return
    assert fit.slope_ms >= 0
    error = squared_error(fit, points)
    # Every knee on a fine grid, with the best flat part and slope for it by its own derivation.
    low, high = points[0].tokens, points[-1].tokens
    for step in range(200):
        knee = low + (high - low) * step / 200
        other = best_hinge_at(knee, points)
        assert error <= squared_error(other, points) * (1 + 1e-6) + 1e-9


def best_hinge_at(knee: float, points: Sequence[Point]) -> Fit:
    """Normal equations of y/y_i = flat (1/y_i) + slope (max(0, x - knee)/y_i), solved by hand."""
    rows = [(p.weight, 1 / p.pass_ms, max(0.0, p.tokens - knee) / p.pass_ms) for p in points]
    aa = sum(w * a * a for w, a, _ in rows)
    ab = sum(w * a * b for w, a, b in rows)
    bb = sum(w * b * b for w, _, b in rows)
    a1 = sum(w * a for w, a, _ in rows)
    b1 = sum(w * b for w, _, b in rows)
    determinant = aa * bb - ab * ab
    slope = max(0.0, (aa * b1 - ab * a1) / determinant) if determinant > 1e-9 * aa * bb else 0.0
    flat = (a1 - slope * ab) / aa
    return Fit(fixed_ms=flat - slope * knee, slope_ms=slope, flat_ms=flat)


@given(shapes(), SIZES)
def test_a_curve_of_either_shape_is_found_again(shape: Fit, sizes: list[int]) -> None:
    if shape.flat_ms is not None and len(sizes) < 4:
        return  # a hinge through three points says nothing
    points = on(shape, sizes)
    fit = fit_curve(points)
    for point in points:
        assert fit.pass_ms(point.tokens) == pytest.approx(point.pass_ms, rel=1e-3)


@given(curves())
def test_the_better_fit_is_kept(points: list[Point]) -> None:
    line, hinge = fit_line(points), fit_hinge(points)
    kept = fit_curve(points)
    assert kept.bic == min(fit.bic for fit in (line, hinge) if fit is not None)
    # What BIC is made of: a hinge has to be nearer by enough to pay for its parameter.
    if hinge is not None and kept is hinge:
        assert squared_error(hinge, points) < squared_error(line, points)


@given(curves())
def test_a_knee_has_four_flat_points_that_span_a_factor_of_four(points: list[Point]) -> None:
    fit = fit_curve(points)
    knee = knee_of(fit, points)
    end = fit.knee_tokens
    flat = [p.tokens for p in points if end is not None and p.tokens <= end]
    assert (knee is not None) == (len(flat) >= 4 and max(flat) >= 4 * min(flat))
    if knee is not None:
        assert max(flat) <= knee <= points[-1].tokens


# Targets

ROOMS = st.sampled_from([0.2, 1.0, 5.0, 20.0, 100.0, 1_000.0])


@given(curves(), ROOMS)
def test_the_target_of_measured_sizes(points: list[Point], pass_ms_max: float) -> None:
    points = monotone(points)
    target = choose_target(points, TargetOptions(pass_ms_max=pass_ms_max))
    best = max(p.tokens / p.pass_ms for p in points)
    enough = min(p.tokens for p in points if p.tokens / p.pass_ms >= 0.9 * best)
    allowed = [p.tokens for p in points if p.pass_ms <= pass_ms_max]
    if allowed:
        assert target.tokens == min(enough, max(allowed))
    else:
        assert target.tokens == points[0].tokens
    assert (target.rule is TargetRule.LIMIT) == (target.tokens < enough)


@given(shapes(), st.integers(1, 64), st.integers(2, 60), ROOMS, st.sampled_from([None, 0.0, 0.5]))
def test_the_target_of_a_fitted_curve(
    fit: Fit, low: int, factor: int, pass_ms_max: float, slack: float | None
) -> None:
    high = low * factor
    options = TargetOptions(pass_ms_max=pass_ms_max, latency_slack_ratio=slack)
    target = implied_target(fit, options, tokens_min=low, tokens_max=high)
    sizes = range(low, high + 1)
    if slack is not None and fit.flat_ms is not None:
        longest = (1 + slack) * fit.flat_ms
        either = [max((t for t in sizes if fit.pass_ms(t) <= longest), default=low)]
    else:
        best = max(t / fit.pass_ms(t) for t in sizes)
        # Nine tenths on the dot are enough or not, by rounding.
        shares = (0.9 * (1 - 1e-9) * best, 0.9 * (1 + 1e-9) * best)
        either = [min(t for t in sizes if t / fit.pass_ms(t) >= share) for share in shares]
    allowed = max((t for t in sizes if fit.pass_ms(t) <= pass_ms_max), default=low)
    assert (target.tokens, target.rule is TargetRule.LIMIT) in [
        (min(wanted, allowed), allowed < wanted) for wanted in either
    ]


@given(shapes(), st.floats(0.1, 10))
def test_a_machine_that_slows_as_a_whole_keeps_its_target(fit: Fit, ratio: float) -> None:
    before = implied_target(fit, FAR, tokens_min=8, tokens_max=4_096)
    after = implied_target(fit.scaled(ratio), FAR, tokens_min=8, tokens_max=4_096)
    assert abs(before.tokens - after.tokens) <= 1


@given(
    st.lists(st.lists(TIMES, min_size=5, max_size=5), min_size=1, max_size=6),
    st.integers(0, 2**64 - 1),
)
@settings(max_examples=15)
def test_the_interval_is_of_measured_sizes_and_repeats(
    rounds: list[list[float]], seed: int
) -> None:
    measured = Measured(tokens=(8, 16, 32, 64, 128), rounds_ms=tuple(map(tuple, rounds)))
    low, high = target_interval(measured, FAR, splitmix(seed))
    assert low <= high
    assert {low, high} <= set(measured.tokens)
    assert (low, high) == target_interval(measured, FAR, splitmix(seed))
    if len(rounds) == 1:
        assert low == high == choose_target(monotone(measured.medians()), FAR).tokens


# Machines


def machine(fit: Fit, sizes: Sequence[int], noise: float, seed: int = 1) -> Measured:
    """Nine rounds on a machine whose rounds and passes vary by `noise`."""
    below = splitmix(seed)

    def vary() -> float:
        return 1 + noise * (below(2_001) / 1_000 - 1)

    rounds = []
    for _ in range(9):
        drift = vary()
        rounds.append(tuple(fit.pass_ms(size) * drift * vary() for size in sizes))
    return Measured(tokens=tuple(sizes), rounds_ms=tuple(rounds))


GRID = [round(8 * 2 ** (i / 4)) for i in range(37)]


@pytest.mark.parametrize("seed", range(5))
def test_a_cpu_has_no_flat_part_and_its_target_is_not_ten_tokens(seed: int) -> None:
    cpu = Fit(fixed_ms=5.5, slope_ms=0.2)
    found = saturation(machine(cpu, GRID, 0.03, seed), FAR, splitmix(seed))
    assert found.knee_tokens is None
    true = implied_target(cpu, FAR, tokens_min=GRID[0], tokens_max=GRID[-1]).tokens
    assert true / 1.6 <= found.target.tokens <= true * 1.6
    assert found.target_low <= found.target.tokens <= found.target_high


@pytest.mark.parametrize("seed", range(5))
def test_a_gpu_has_one_and_a_slack_is_reckoned_from_it(seed: int) -> None:
    gpu = Fit(fixed_ms=1.0, slope_ms=0.01, flat_ms=7.0)
    measured = machine(gpu, GRID, 0.04, seed)
    found = saturation(measured, FAR, splitmix(seed))
    assert found.knee_tokens == pytest.approx(600, rel=0.15)
    slack = TargetOptions(pass_ms_max=1e9, latency_slack_ratio=0.25)
    tight = saturation(measured, slack, splitmix(seed))
    assert tight.target.rule is TargetRule.LATENCY_SLACK
    assert 500 <= tight.target.tokens <= 900
    assert tight.target_low <= tight.target.tokens <= tight.target_high


def test_a_slack_means_nothing_without_a_knee() -> None:
    measured = machine(Fit(fixed_ms=5.5, slope_ms=0.2), GRID, 0.0)
    slack = TargetOptions(pass_ms_max=1e9, latency_slack_ratio=0.0)
    assert (
        saturation(measured, slack, splitmix(1)).target
        == saturation(measured, FAR, splitmix(1)).target
    )


def test_what_is_flat_as_far_as_it_was_measured_wants_more() -> None:
    measured = machine(Fit(fixed_ms=7.0, slope_ms=0.0), GRID, 0.0)
    found = saturation(measured, FAR, splitmix(1))
    assert found.target.tokens >= 0.9 * GRID[-1]


def test_two_runs_of_one_machine_overlap() -> None:
    cpu = Fit(fixed_ms=5.5, slope_ms=0.1)
    runs = [saturation(machine(cpu, GRID, 0.1, seed), FAR, splitmix(seed)) for seed in range(8)]
    overlaps = sum(
        a.target_low <= b.target_high and b.target_low <= a.target_high for a in runs for b in runs
    )
    assert overlaps >= 0.95 * len(runs) ** 2
    assert min(run.target_high - run.target_low for run in runs) < GRID[-1] / 4


@pytest.mark.parametrize(
    ("tokens", "rounds"),
    [
        ((), ()),
        ((8,), ()),
        ((8, 8), ((1.0, 1.0),)),
        ((16, 8), ((1.0, 1.0),)),
        ((0, 8), ((1.0, 1.0),)),
        ((8, 16), ((1.0,),)),
        ((8,), ((0.0,),)),
        ((8,), ((math.nan,),)),
        ((8,), ((math.inf,),)),
    ],
)
def test_what_is_no_measurement_is_refused(
    tokens: tuple[int, ...], rounds: tuple[tuple[float, ...], ...]
) -> None:
    with pytest.raises(ValueError, match=r"measured|ascend|times for|a pass takes"):
        Measured(tokens=tokens, rounds_ms=rounds)


def test_a_curve_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="points"):
        fit_curve([])


def test_numbers_below_a_count_are_even() -> None:
    below = splitmix(7)
    counts = [0] * 10
    for _ in range(10_000):
        counts[below(10)] += 1
    assert min(counts) > 850
    assert max(counts) < 1_150
    assert RESAMPLES >= 200  # fewer make an interval of its own noise
