"""Passes that do not fit the memory: what they take from the next ones, and what brings it back."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from model_server.core import effects as ef
from model_server.core.curve import Fit
from model_server.core.following import FollowOptions
from model_server.core.memory import RAISE_PASSES, TARGET_PART_MIN, MemoryRoom
from model_server.core.saturation import TargetOptions
from tests.harness.scheduler import LIMITS, SchedulerWorld

SIZES = replace(
    LIMITS, batch_tokens_target=600, batch_tokens_max=2_400, input_tokens_max=512, inputs_max=1_024
)


def make_world(follow: FollowOptions | None = None) -> SchedulerWorld:
    world = SchedulerWorld(SIZES, follow=follow)
    world.open(1)
    return world


def run(world: SchedulerWorld, *, room: int = 10_000) -> None:
    """Passes run until nothing is held; those above `room` don't fit."""
    while world.running is not None:
        if world.running.tokens > room:
            world.raised("CUDA out of memory", out_of_memory=True)
        else:
            world.done()


def good_passes(world: SchedulerWorld, count: int) -> None:
    for _ in range(count):
        world.send([8])
        world.done()


def test_a_text_that_does_not_fit_takes_nothing_from_the_others() -> None:
    world = make_world()
    key = world.send([8] * 64)
    while world.running is not None:
        if world.running.kind is not ef.PassKind.CANARY and (key, 37) in world.inputs():
            world.raised("CUDA out of memory", out_of_memory=True)
        else:
            world.done()
    assert world.outcome(key).count("ENGINE_FAILED_ALONE") == 1
    assert world.scheduler.limits == SIZES
    assert len(world.ever(ef.MaximumLowered)) == len(world.ever(ef.MaximumRaised)) == 1


def test_halves_that_do_not_fit_take_nothing_more() -> None:
    world = make_world()
    world.send([8] * 64)
    for _ in range(5):
        world.raised("CUDA out of memory", out_of_memory=True)
    run(world)
    assert world.scheduler.limits.batch_tokens_target == 256


def test_good_passes_bring_back_all_that_memory_took() -> None:
    world = make_world()
    world.send([8] * 64)
    run(world, room=100)
    assert world.scheduler.limits.batch_tokens_target == 256
    good_passes(world, RAISE_PASSES - 1)
    assert world.scheduler.limits.batch_tokens_target == 256
    good_passes(world, 1)
    assert world.scheduler.limits.batch_tokens_target == 512
    assert world.scheduler.window_tokens(1) == 2 * 512
    good_passes(world, 3 * RAISE_PASSES)
    assert world.scheduler.limits == SIZES
    assert len(world.ever(ef.MaximumRaised)) == 4


def test_the_target_stays_above_a_part_of_what_was_asked() -> None:
    world = make_world()
    for _ in range(20):
        key = world.send([8] * 64)
        run(world, room=8)
        assert world.outcome(key) == ["vector"] * 64
    assert world.scheduler.limits.batch_tokens_target == 600 // TARGET_PART_MIN


def test_a_lone_input_that_does_not_fit_gives_back_only_what_it_took() -> None:
    world = make_world()
    world.send([8] * 64)
    run(world, room=300)
    world.send([8])
    world.raised("CUDA out of memory", out_of_memory=True)
    assert world.started().kind is ef.PassKind.CANARY
    world.done()
    assert world.scheduler.limits.batch_tokens_target == 256


def test_what_fails_again_is_tried_ever_more_seldom() -> None:
    memory = MemoryRoom(SIZES)
    passes = 0
    failed_at: list[int] = []
    while len(failed_at) < 9:
        passes += 1
        if memory.limits.batch_tokens_target > 256:
            memory.ran_out(memory.limits.batch_tokens_target)
            failed_at.append(passes)
        else:
            memory.good_pass()
    waits = [later - earlier - 1 for earlier, later in pairwise(failed_at[1:])]
    assert waits[:7] == [64, 128, 256, 512, 1_024, 2_048, 4_096]


def test_what_fits_for_long_enough_is_forgiven() -> None:
    memory = MemoryRoom(SIZES)
    for _ in range(3):
        memory.ran_out(512)
        for _ in range(10 * RAISE_PASSES):
            memory.good_pass()
        assert memory.limits == SIZES


def test_a_target_that_follows_the_machine_follows_it_as_if_nothing_had_been() -> None:
    curve = Fit(fixed_ms=3.0, slope_ms=0.02)
    slow = curve.scaled(10.0)
    follow = FollowOptions(
        target=TargetOptions(pass_ms_max=100.0),
        curve=curve,
        profile_target=600,
        profile_free=600,
        tokens_min=16,
        tokens_max=2_400,
    )

    def targets(room: int) -> list[int]:
        world = make_world(follow)

        def passes(count: int, machine: Fit) -> int:
            for _ in range(count):
                while world.scheduler.held_tokens < 1_200:
                    world.send([8] * 64)
                world.done(machine.pass_ms(world.started().tokens))
            return world.scheduler.limits.batch_tokens_target

        world.send([8] * 64)
        run(world, room=room)
        return [passes(3 * RAISE_PASSES, curve), passes(3_000, slow), passes(6_000, curve)]

    found = targets(room=100)
    assert found == targets(room=10_000)
    profiled, slowed, back = found
    assert profiled == 600
    assert slow.pass_ms(slowed) <= 115.0
    assert back > slowed


def test_a_target_that_moves_while_memory_is_short_shows_once_there_is_room() -> None:
    memory = MemoryRoom(SIZES)
    assert memory.ran_out(600)
    memory.move_target(500)
    assert memory.limits.batch_tokens_target == 300
    memory.move_target(200)
    assert memory.limits.batch_tokens_target == 200
    memory.move_target(500)
    for _ in range(4 * RAISE_PASSES):
        memory.good_pass()
    assert memory.limits == replace(SIZES, batch_tokens_target=500)
