"""The follower on anything that passes may take: it never leaves its bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_server.core.curve import Fit, Point
from model_server.core.following import (
    HOLD_PASSES,
    REFIT_PASSES,
    WINDOW_PASSES,
    FollowOptions,
    TargetFollower,
    binned,
    refit,
)
from model_server.core.saturation import TargetOptions

CPU = Fit(fixed_ms=5.5, slope_ms=0.1)
PROFILE = 400
MS = 1_000_000


def options(pass_ms_max: float = 1e9) -> FollowOptions:
    return FollowOptions(
        target=TargetOptions(pass_ms_max=pass_ms_max),
        curve=CPU,
        profile_target=PROFILE,
        profile_free=PROFILE,
        tokens_min=8,
        tokens_max=4_096,
    )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 400),
            st.floats(0.0, 300.0),
            st.floats(0.0, 3.0),
            st.sampled_from([(8, 64), (8, 600), (300, 600), (200, 400)]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([20.0, 100.0, 1e9]),
    st.sampled_from([400, 500, 4_096]),
    st.randoms(use_true_random=False),
)
def test_whatever_passes_take(
    phases: list[tuple[int, float, float, tuple[int, int]]],
    pass_ms_max: float,
    tokens_max: int,
    rng: object,
) -> None:
    follower = TargetFollower(options(pass_ms_max))
    target, since_move, moves = PROFILE, 0, 0
    for count, fixed, slope, sizes in phases:
        for _ in range(count):
            tokens = rng.randint(*sizes)  # type: ignore[attr-defined]
            duration_ns = int((fixed + slope * tokens) * MS)
            moved = follower.observe(tokens, duration_ns, target=target, tokens_max=tokens_max)
            since_move += 1
            if moved is None:
                continue
            moves += 1
            assert moved != target
            assert math.ceil(0.9 * target) <= moved <= max(int(1.1 * target), target + 1)
            assert 1 <= moved <= min(2 * PROFILE, tokens_max)
            if pass_ms_max == 1e9:
                assert moved >= PROFILE / 2
            assert since_move >= (HOLD_PASSES if moves == 1 else REFIT_PASSES)
            target, since_move = moved, 0


def test_the_first_pass_of_a_shape_is_left_out() -> None:
    """Each size once, and each far too long: nothing was learnt of them."""
    follower = TargetFollower(options(pass_ms_max=100.0))
    for tokens in range(200, 600):
        assert follower.observe(tokens, 10**12, target=PROFILE, tokens_max=4_096) is None
    assert follower.implied_tokens == PROFILE
    for _ in range(2 * HOLD_PASSES):
        follower.observe(400, 10**12, target=PROFILE, tokens_max=4_096)
    assert follower.implied_tokens == 8


def test_the_window_is_shorter_than_the_hold() -> None:
    assert WINDOW_PASSES + REFIT_PASSES <= HOLD_PASSES


def on(fit: Fit, *sizes: int) -> list[Point]:
    return [Point(tokens=size, pass_ms=fit.pass_ms(size)) for size in sizes]


def test_a_curve_is_refitted_from_three_octaves_that_reach_the_target() -> None:
    whole = refit(on(CPU, 25, 50, 100, 200), PROFILE)
    assert whole is not None
    assert whole.fixed_ms == pytest.approx(CPU.fixed_ms)
    assert whole.slope_ms == pytest.approx(CPU.slope_ms)
    assert refit(on(CPU, 26, 50, 100, 200), PROFILE) is None
    assert refit(on(CPU, 8, 16, 100, 199), PROFILE) is None
    assert refit([], PROFILE) is None


def test_a_knee_is_followed_only_where_there_is_one() -> None:
    gpu = Fit(fixed_ms=1.0, slope_ms=0.01, flat_ms=7.0)
    found = refit(on(gpu, *(round(8 * 2 ** (i / 2)) for i in range(18))), PROFILE)
    assert found is not None
    assert found.knee_tokens == pytest.approx(600, rel=0.05)
    noisy = on(CPU, 8, 10, 20, 40, 80, 160, 320)
    noisy[0] = Point(tokens=8, pass_ms=noisy[1].pass_ms)
    line = refit(noisy, PROFILE)
    assert line is not None
    assert line.flat_ms is None


@given(st.lists(st.tuples(st.integers(1, 5_000), st.floats(0.01, 1e4)), max_size=60))
def test_bins_hold_passes_of_about_one_size(passes: list[tuple[int, float]]) -> None:
    points = binned(passes)
    sizes = [point.tokens for point in points]
    assert sizes == sorted(sizes)
    for point in points:
        low, high = 2 ** (math.floor(math.log2(point.tokens) * 4 + 1e-9) / 4), point.tokens * 1.2
        near = [ms for tokens, ms in passes if low / 1.2 <= tokens <= high]
        assert min(near) <= point.pass_ms <= max(near)
        assert point.weight >= 2
