"""The target follows the machine (DESIGN 3, issue "SGLang and the target measured"), in virtual
time: what moves it, how fast, how far, and what does not."""

from __future__ import annotations

from itertools import pairwise

import pytest

from model_server.core.curve import Fit
from model_server.core.effects import PassKind
from model_server.core.following import HOLD_PASSES, STEP_RATIO, FollowOptions
from model_server.core.saturation import TargetOptions
from model_server.core.steering import PROBE_EVERY
from tests.sim.following import CPU, FollowingWorld
from tests.sim.world import MS, TARGET, Setup, World

SEEDS = pytest.mark.parametrize("seed", [1, 2])
ENOUGH = 3_000
"""Passes in which any move has long ended."""


def settled(world: FollowingWorld, passes: int = ENOUGH) -> FollowingWorld:
    """Some time as it was profiled: nothing moves."""
    world.waves(passes)
    assert world.seen.targets == []
    return world


# What moves it


@SEEDS
@pytest.mark.parametrize("ratio", [2.0, 0.5])
def test_a_machine_that_slows_as_a_whole_keeps_its_target(ratio: float, seed: int) -> None:
    world = settled(FollowingWorld(seed=seed))
    world.machine = CPU.scaled(ratio)
    world.waves(ENOUGH)
    world.backlog(1_000)
    assert world.seen.targets == []
    assert world.target == world.profile


@SEEDS
@pytest.mark.parametrize("in_waves", [True, False])
def test_a_limit_on_passes_shrinks_it_even_below_half_the_profile(
    in_waves: bool, seed: int
) -> None:
    world = settled(FollowingWorld(pass_ms_max=100.0, seed=seed))
    assert world.machine.pass_ms(world.profile) < 60
    world.machine = CPU.scaled(5.0)
    wanted = world.implied(pass_ms_max=100.0)
    assert wanted < world.profile / 2
    if in_waves:
        world.waves(ENOUGH)
    else:
        world.backlog(ENOUGH)
    assert world.target == pytest.approx(wanted, rel=0.15)
    assert world.machine.pass_ms(world.target) <= 115
    # And back, when the machine is its old self.
    world.machine = CPU
    world.waves(2 * ENOUGH)
    assert world.target == pytest.approx(world.profile, rel=0.3)


@SEEDS
@pytest.mark.parametrize("fixed_ms", [9.0, 30.0, 2.0])
def test_a_fixed_part_that_changes_alone_moves_it(fixed_ms: float, seed: int) -> None:
    world = settled(FollowingWorld(seed=seed))
    world.machine = Fit(fixed_ms=fixed_ms, slope_ms=CPU.slope_ms)
    world.waves(2 * ENOUGH)
    wanted = min(max(world.implied(), world.profile / 2), world.profile * 2)
    assert world.target != world.profile
    assert world.target == pytest.approx(wanted, rel=0.27)
    assert abs(world.target - world.profile) > 0.2 * world.profile


@SEEDS
def test_an_hour_at_five_queries_a_second_moves_nothing(seed: int) -> None:
    world = FollowingWorld(noise=0.3, seed=seed)
    world.steady(5, 3_600)
    assert len(world.seen.passes) > 10_000
    assert world.seen.targets == []


@SEEDS
def test_short_passes_alone_say_nothing_of_long_ones(seed: int) -> None:
    """At 5 queries a second passes of 4 to 60 tokens may be slow for reasons of their own."""
    world = FollowingWorld(pass_ms_max=100.0, seed=seed)
    world.machine = Fit(fixed_ms=40.0, slope_ms=0.5)
    world.steady(5, 1_200)
    assert world.seen.targets == []


# How far and how fast


@SEEDS
def test_it_moves_by_a_tenth_a_step_after_two_hundred_passes_and_within_its_bounds(
    seed: int,
) -> None:
    world = settled(FollowingWorld(seed=seed))
    changed_at = len(world.seen.passes)
    world.machine = Fit(fixed_ms=60.0, slope_ms=CPU.slope_ms)
    world.waves(2 * ENOUGH)
    first, _ = world.seen.targets[0]
    assert first - changed_at >= HOLD_PASSES
    targets = [world.profile, *(target for _, target in world.seen.targets)]
    assert all(abs(b - a) <= STEP_RATIO * a for a, b in pairwise(targets))
    assert max(targets) <= 2 * world.profile
    assert targets[-1] > 1.9 * world.profile
    world.machine = Fit(fixed_ms=0.2, slope_ms=CPU.slope_ms)
    world.waves(3 * ENOUGH)
    assert world.target == pytest.approx(world.profile / 2, rel=0.27)
    assert min(target for _, target in world.seen.targets) >= world.profile / 2


def test_it_never_exceeds_the_maximum() -> None:
    world = FollowingWorld(batch_tokens_max=600)
    assert world.profile < 500
    world.machine = Fit(fixed_ms=60.0, slope_ms=CPU.slope_ms)
    world.waves(2 * ENOUGH)
    assert world.target == 600
    assert max(tokens for _, tokens in world.seen.passes) == 600


# Probes


@SEEDS
def test_under_backlog_one_pass_in_64_is_half_as_large_again(seed: int) -> None:
    world = FollowingWorld(seed=seed)
    world.backlog(64 * 20)
    kinds = [kind for kind, _ in world.seen.passes]
    probes = [index for index, kind in enumerate(kinds) if kind is PassKind.PROBE]
    assert len(probes) in (19, 20)
    assert {b - a for a, b in pairwise(probes)} == {PROBE_EVERY}
    for index in probes:
        tokens = world.seen.passes[index][1]
        assert 1.35 * world.profile <= tokens <= 1.5 * world.profile
    # The window is wider while the pass before a probe runs, and at no other time.
    wide = {i for i, window in enumerate(world.seen.windows) if window == 3 * world.profile}
    assert wide == {index - 1 for index in probes} | ({len(kinds) - 1} & wide)
    assert set(world.seen.windows) == {2 * world.profile, 3 * world.profile}


def test_a_probe_never_exceeds_the_maximum_and_without_room_there_is_none() -> None:
    little = FollowingWorld(batch_tokens_max=500)
    little.backlog(64 * 4)
    probes = [tokens for kind, tokens in little.seen.passes if kind is PassKind.PROBE]
    assert probes
    assert max(probes) <= 500
    none = FollowingWorld(batch_tokens_max=FollowingWorld().profile)
    none.backlog(64 * 4)
    assert {kind for kind, _ in none.seen.passes} == {PassKind.NORMAL}
    assert set(none.seen.windows) == {2 * none.profile}


def test_without_backlog_there_are_no_probes() -> None:
    world = FollowingWorld(first_of_a_shape=1.0)
    capacity = world.profile / CPU.pass_ms(world.profile) * 1e3 / 11
    world.steady(0.1 * capacity, 120)
    assert len(world.seen.passes) > 500
    assert {kind for kind, _ in world.seen.passes} == {PassKind.NORMAL}


# With aggregators


class Linear(World):
    """Machines without a flat part: 2 ms and 50 us a token."""

    def pass_time_ns(self, tokens: int) -> int:
        return int((2.0 + 0.05 * tokens) * MS)


def followed(curve: Fit, pass_ms_max: float) -> FollowOptions:
    return FollowOptions(
        target=TargetOptions(pass_ms_max=pass_ms_max),
        curve=curve,
        profile_target=TARGET,
        profile_free=TARGET,
        tokens_min=8,
        tokens_max=4_096,
    )


@pytest.mark.parametrize("aggregators", [1, 4])
def test_aggregators_fill_a_probe(aggregators: int) -> None:
    """More comes than runs; the wider window is used, and nothing is above 1.5 targets."""
    same = followed(Fit(fixed_ms=0.0, slope_ms=0.025, flat_ms=15.0), 1e9)
    setup = Setup(aggregators=aggregators, load=1.3, queries=15_000, follow=same)
    outcome = World(setup).run()
    assert outcome.targets == []
    large = [tokens for tokens in outcome.pass_sizes if tokens > TARGET]
    assert len(large) == pytest.approx(len(outcome.pass_sizes) / PROBE_EVERY, abs=2)
    assert min(large) >= 1.3 * TARGET
    assert max(large) <= 1.5 * TARGET


def test_aggregators_follow_a_target_that_moves() -> None:
    """A machine at half the profile's speed: a pass of the target takes 32 ms, 20 are allowed."""
    faster = followed(Fit(fixed_ms=1.0, slope_ms=0.025), 20.0)
    setup = Setup(aggregators=2, load=0.5, queries=30_000, follow=faster)
    outcome = Linear(setup).run()
    assert outcome.targets[-1] == pytest.approx(360, rel=0.1)
    assert sorted(outcome.targets, reverse=True) == outcome.targets
    # Claims are no larger than the target that servers tell of, so passes are full of whole ones.
    late = outcome.pass_sizes[-100:]
    assert max(late) <= 1.5 * outcome.targets[-1]


def test_a_target_that_is_set_stays_and_is_not_probed() -> None:
    world = FollowingWorld(follow=False)
    world.machine = Fit(fixed_ms=60.0, slope_ms=1.0)
    world.waves(ENOUGH)
    world.backlog(500)
    assert world.seen.targets == []
    assert world.world.scheduler.implied_target is None
    assert {kind for kind, _ in world.seen.passes} == {PassKind.NORMAL}
    assert set(world.seen.windows) == {2 * world.profile}
