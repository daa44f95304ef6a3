"""The scheduler when things go wrong or it drains, and what it tells streams (DESIGN 4.6, 4.8)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model_server.core import effects as ef
from model_server.core import events as ev
from model_server.core.curve import Fit
from model_server.core.failures import Code
from model_server.core.following import FollowOptions
from model_server.core.lifecycle import Phase
from model_server.core.restarts import FREE_RESTARTS, IN_A_ROW_MAX, INTERVAL_NS
from model_server.core.saturation import TargetOptions
from tests.harness.scheduler import LIMITS, MS, SchedulerWorld


@pytest.fixture
def world() -> SchedulerWorld:
    """Serving, with stream 1 open: target 100 tokens, maximum 400, one input 150, 16 inputs."""
    made = SchedulerWorld()
    made.open(1)
    return made


# Isolation


def test_one_bad_input_does_not_fail_its_mates(world: SchedulerWorld) -> None:
    world.open(2)
    world.send([1])
    mates = world.send([10, 10, 10], stream=1)
    bad = world.send([10, 10], stream=2)
    world.done()
    for _ in range(20):
        if world.running is None:
            break
        if world.running.kind is not ef.PassKind.CANARY and (bad, 1) in world.inputs():
            world.raised("bad weather")
        else:
            world.done()
    assert world.outcome(mates) == ["vector"] * 3
    assert world.outcome(bad) == ["vector", "ENGINE_FAILED_ALONE"]
    (failed,) = world.ever(ef.Fail)
    assert "bad weather" in failed.failures[0][1].message
    assert failed.failures[0][1].code is Code.INTERNAL
    assert world.idle()


@pytest.mark.parametrize("leaves", ["expired", "cancelled"])
def test_whoever_is_left_of_a_pass_that_raised_is_not_blamed(
    world: SchedulerWorld, leaves: str
) -> None:
    world.send([1])
    bad = world.send([10], timeouts_ms=[50])
    mate = world.send([10])
    world.done()
    assert world.inputs() == [(bad, 0), (mate, 0)]
    if leaves == "cancelled":
        world.cancel(bad)
    else:
        world.now_ns += 60 * MS
    world.raised("its mate's fault")
    assert world.started().kind is ef.PassKind.ISOLATION
    world.done()
    assert world.outcome(mate) == ["vector"]
    assert world.idle()


def test_an_input_is_blamed_only_after_a_good_canary(world: SchedulerWorld) -> None:
    key = world.send([10])
    world.raised()
    assert world.started().kind is ef.PassKind.CANARY
    assert world.outcome(key) == [None]
    world.done()
    assert world.outcome(key) == ["ENGINE_FAILED_ALONE"]


def test_nobody_is_blamed_when_the_canary_fails_too(world: SchedulerWorld) -> None:
    suspect = world.send([10])
    waiting = world.send([20])
    world.raised()
    world.raised("broken")
    assert world.outcome(suspect) == world.outcome(waiting) == ["NOT_STARTED"]
    assert world.scheduler.phase is Phase.RESTARTING
    assert [type(e) for e in world.effects[-2:]] == [ef.CloseStreams, ef.RestartEngine]
    assert world.running is None


def test_halves_run_before_what_waits(world: SchedulerWorld) -> None:
    first = world.send([10, 10])
    world.send([20])
    world.raised()
    assert world.inputs() == [(first, 0)]
    assert world.started().kind is ef.PassKind.ISOLATION


def test_a_cancelled_request_is_not_rerun(world: SchedulerWorld) -> None:
    world.open(2)
    world.send([1])
    gone = world.send([10], stream=2)
    stays = world.send([10], stream=1)
    world.done()
    world.close(2)
    world.raised()
    assert world.outcome(gone) == [None]
    # What is left over has not raised alone yet.
    assert world.started().kind is ef.PassKind.ISOLATION
    world.raised()
    assert world.started().kind is ef.PassKind.CANARY
    world.done()
    assert world.outcome(stays) == ["ENGINE_FAILED_ALONE"]


# Vectors that are not finite


def test_a_pass_without_a_finite_vector_is_answered_after_a_good_canary(
    world: SchedulerWorld,
) -> None:
    key = world.send([10, 10])
    waiting = world.send([20])
    world.done(finite=False)
    assert world.started().kind is ef.PassKind.CANARY
    assert world.outcome(key) == [None, None]
    world.done()
    assert world.outcome(key) == ["vector", "vector"]
    assert world.inputs() == [(waiting, 0)]


@pytest.mark.parametrize("how", ["raised", "died"])
def test_nobody_is_blamed_for_the_vectors_of_a_broken_engine(
    world: SchedulerWorld, how: str
) -> None:
    key = world.send([10, 10])
    partly = world.send([90, 20])
    world.done(finite=False)
    if how == "raised":
        world.raised("its vector is not finite")
    else:
        world.died()
    assert world.outcome(key) == world.outcome(partly) == ["NOT_STARTED"] * 2
    assert not world.ever(ef.Answer)
    assert world.scheduler.phase is Phase.RESTARTING
    world.feed(ev.EngineReady(limits=world.limits))
    again = world.send([1])
    assert world.inputs() == [(again, 0)]
    world.done()


def test_an_engine_whose_vectors_are_doubted_has_had_no_good_pass(world: SchedulerWorld) -> None:
    for _ in range(IN_A_ROW_MAX + 1):
        world.send([1])
        world.done(finite=False)
        world.raised("its vector is not finite")
        for restart in world.of(ef.RestartEngine):
            world.now_ns += restart.delay_ns
            world.feed(ev.EngineReady(limits=world.limits))
    assert world.scheduler.phase is Phase.STOPPED


def test_doubted_vectors_of_a_request_that_is_gone_are_no_matter(world: SchedulerWorld) -> None:
    key = world.send([10], stream=ev.UNARY)
    world.done(finite=False)
    world.cancel(key)
    world.feed(ev.DrainRequested())
    assert not world.of(ef.Halt)
    world.done()
    assert world.of(ef.Halt)[0].message is None


# Memory


def test_out_of_memory_halves_the_pass_and_lowers_the_maximum(world: SchedulerWorld) -> None:
    key = world.send([40, 40])
    world.raised(out_of_memory=True)
    assert world.scheduler.limits.batch_tokens_target == 40
    assert world.scheduler.limits.batch_tokens_max == 150
    assert world.of(ef.MaximumLowered)
    assert world.of(ef.SayState)[0].streams == [1]
    world.done()
    world.done()
    assert world.outcome(key) == ["vector", "vector"]
    world.send([30, 30])
    assert len(world.inputs()) == 1


def test_a_probe_that_does_not_fit_takes_nothing_from_the_target() -> None:
    follow = FollowOptions(
        target=TargetOptions(pass_ms_max=1e9),
        curve=Fit(fixed_ms=5.0, slope_ms=0.1),
        profile_target=100,
        profile_free=100,
        tokens_min=8,
        tokens_max=400,
    )
    limits = replace(LIMITS, input_tokens_max=20)
    world = SchedulerWorld(limits, follow=follow)
    world.open(1)
    world.send([20] * 16)
    while world.started().kind is not ef.PassKind.PROBE:
        world.send([20] * 5)
        world.done()
    assert world.started().tokens == 140
    world.raised(out_of_memory=True)
    limits = world.scheduler.limits
    assert (limits.batch_tokens_target, limits.batch_tokens_max) == (100, 100)
    kinds = set()
    while world.running is not None:
        kinds.add(world.started().kind)
        world.done()
    assert kinds == {ef.PassKind.ISOLATION, ef.PassKind.NORMAL}
    assert world.idle()


def test_halves_above_the_lowered_maximum_are_halved_again() -> None:
    world = SchedulerWorld(replace(LIMITS, batch_tokens_max=100, input_tokens_max=40))
    world.send([40, 40, 10, 10], stream=ev.UNARY)
    world.raised(out_of_memory=True)
    passes = []
    while world.running is not None:
        passes.append(world.started().tokens)
        world.done()
    assert passes == [40, 40, 20]


def test_out_of_memory_on_one_input_blames_it_after_a_good_canary(world: SchedulerWorld) -> None:
    key = world.send([150])
    world.raised(out_of_memory=True)
    assert world.scheduler.limits.batch_tokens_target == 100
    world.done()
    assert world.outcome(key) == ["ENGINE_FAILED_ALONE"]


# Death


def test_when_the_engine_dies_only_its_pass_is_suspected(world: SchedulerWorld) -> None:
    in_pass = world.send([60, 60])
    waiting = world.send([10])
    unary = world.send([10], stream=ev.UNARY)
    world.died()
    assert world.outcome(in_pass) == ["ENGINE_DIED", "NOT_STARTED"]
    assert world.outcome(waiting) == world.outcome(unary) == ["NOT_STARTED"]
    assert world.scheduler.phase is Phase.RESTARTING
    refused = world.send([1])
    assert world.outcome(refused) == ["NOT_STARTED"]
    world.feed(ev.EngineReady(limits=world.limits))
    again = world.send([1])
    assert world.inputs() == [(again, 0)]


def test_requests_that_never_ran_are_refused_whole(world: SchedulerWorld) -> None:
    world.send([60])
    waiting = world.send([70, 10])
    world.died()
    assert [effect.request for effect in world.of(ef.Refuse)] == [waiting]


@pytest.mark.parametrize("several", [False, True])
def test_a_death_before_an_announced_pass_has_started_blames_nobody(
    world: SchedulerWorld, several: bool
) -> None:
    key = world.send([60, 60] if several else [10], exclusive=True)
    assert world.awaited is not None
    assert world.running is None
    world.died()
    assert set(world.outcome(key)) == {"NOT_STARTED"}
    assert world.scheduler.phase is Phase.RESTARTING
    world.feed(ev.EngineReady(limits=world.limits))
    again = world.send([10], exclusive=True)
    world.written()
    world.died()
    assert world.outcome(again) == ["ENGINE_DIED"]


def test_halves_and_suspects_are_not_blamed_for_a_death(world: SchedulerWorld) -> None:
    key = world.send([10, 10, 10, 10])
    world.raised()
    assert world.inputs() == [(key, 0), (key, 1)]
    world.died()
    assert world.outcome(key) == ["ENGINE_DIED"] * 2 + ["NOT_STARTED"] * 2


def test_a_pass_over_its_time_is_a_death_that_ends_the_process(world: SchedulerWorld) -> None:
    hung = world.send([60, 60])
    assert world.wake_ns <= world.now_ns + 60_000 * MS
    world.later(59_999)
    assert world.outcome(hung) == [None, None]
    world.later(1)
    assert world.outcome(hung) == ["ENGINE_DIED", "NOT_STARTED"]
    (halt,) = world.of(ef.Halt)
    assert halt.message is not None
    assert "60000 ms" in halt.message
    assert world.scheduler.phase is Phase.STOPPED


def test_a_pass_over_its_time_ends_an_engine_that_can_be_killed() -> None:
    world = SchedulerWorld(ready=False)
    world.feed(ev.EngineReady(limits=world.limits, killable=True))
    world.open(1)
    hung = world.send([60, 60])
    world.later(60_000)
    assert world.outcome(hung) == ["ENGINE_DIED", "NOT_STARTED"]
    (restart,) = world.of(ef.RestartEngine)
    assert "60000 ms" in restart.message
    assert restart.delay_ns == 0
    assert not world.of(ef.Halt)
    assert world.scheduler.phase is Phase.RESTARTING
    world.feed(ev.EngineReady(limits=world.limits, killable=True))
    world.send([1])
    world.done()


def test_an_engine_that_dies_again_and_again_is_started_ever_later_and_then_given_up(
    world: SchedulerWorld,
) -> None:
    delays = []
    while world.scheduler.phase is not Phase.STOPPED:
        world.send([1])
        world.died()
        if restarts := world.of(ef.RestartEngine):
            delays.append(restarts[0].delay_ns)
            world.now_ns += restarts[0].delay_ns
            world.feed(ev.EngineReady(limits=world.limits))
    assert delays[:FREE_RESTARTS] == [0] * FREE_RESTARTS
    assert delays[FREE_RESTARTS:] == [INTERVAL_NS] * (IN_A_ROW_MAX - FREE_RESTARTS)
    (halt,) = world.of(ef.Halt)
    assert halt.message is not None
    assert "without a good pass" in halt.message


def test_the_late_result_of_a_pass_that_was_given_up_is_ignored(world: SchedulerWorld) -> None:
    world.send([60])
    hung = world.started()
    world.later(60_000)
    world.feed(ev.PassDone(pass_id=hung.pass_id, started_ns=0, ended_ns=1))
    assert not world.of(ef.Answer)


# Drain


def test_drain_answers_what_is_held_refuses_the_rest_and_stops(world: SchedulerWorld) -> None:
    held = world.send([60, 60])
    world.feed(ev.DrainRequested())
    assert world.of(ef.SayState)[0].streams == [1]
    refused = world.send([1])
    assert world.outcome(refused) == ["NOT_STARTED"]
    world.done()
    assert not world.of(ef.Halt)
    world.done()
    assert world.outcome(held) == ["vector", "vector"]
    assert world.of(ef.CloseStreams)[0].failure is None
    assert world.of(ef.Halt)[0].message is None
    assert world.scheduler.phase is Phase.STOPPED


def test_an_idle_server_drains_at_once(world: SchedulerWorld) -> None:
    world.feed(ev.DrainRequested())
    assert world.of(ef.Halt)[0].message is None


def test_drain_gives_up_at_its_deadline_and_blames_nobody(world: SchedulerWorld) -> None:
    held = world.send([60, 60])
    world.feed(ev.DrainRequested())
    world.later(20_000)
    assert world.outcome(held) == ["NOT_STARTED", "NOT_STARTED"]
    assert world.of(ef.Halt)[0].message is None


@pytest.mark.parametrize("phase", ["loading", "restarting"])
def test_a_server_without_an_engine_stops_at_once(phase: str) -> None:
    world = SchedulerWorld(ready=phase == "restarting")
    if phase == "restarting":
        world.died()
    world.feed(ev.DrainRequested())
    assert world.of(ef.Halt)[0].message is None
    world.feed(ev.EngineReady(limits=world.limits))
    assert world.scheduler.phase is Phase.STOPPED


def test_an_engine_lost_while_draining_ends_the_drain(world: SchedulerWorld) -> None:
    held = world.send([60])
    world.feed(ev.DrainRequested())
    world.died()
    assert world.outcome(held) == ["ENGINE_DIED"]
    assert world.of(ef.Halt)[0].message is None
    assert not world.of(ef.RestartEngine)


def test_a_second_signal_changes_nothing(world: SchedulerWorld) -> None:
    world.send([60])
    world.feed(ev.DrainRequested())
    world.feed(ev.DrainRequested())
    world.done()
    assert len(world.ever(ef.Halt)) == 1


# What streams are told


def test_a_stream_hears_its_state_first(world: SchedulerWorld) -> None:
    world.open(2)
    assert world.of(ef.SayState)[0].streams[0] == 2


def test_each_pass_start_and_falling_idle_are_announced(world: SchedulerWorld) -> None:
    world.open(2)
    key = world.send([60, 60])
    (start,) = world.of(ef.Announce)
    assert start.running == {1: [key]}
    assert start.pass_id == world.started().pass_id
    world.done()
    assert world.of(ef.Announce)[0].running == {1: [key]}
    world.done()
    (idle,) = world.of(ef.Announce)
    assert idle.pass_id is None
    assert idle.running == {}


def test_a_request_is_announced_once_a_pass(world: SchedulerWorld) -> None:
    world.open(2)
    world.send([1])
    first = world.send([10, 10], stream=1)
    second = world.send([10], stream=2)
    world.done()
    assert world.of(ef.Announce)[0].running == {1: [first], 2: [second]}


def test_unary_requests_are_not_announced(world: SchedulerWorld) -> None:
    world.send([10], stream=ev.UNARY)
    assert world.of(ef.Announce)[0].running == {}


def test_a_stream_that_is_owed_something_hears_of_us_every_five_seconds(
    world: SchedulerWorld,
) -> None:
    world.open(2)
    world.send([60])
    said_ns = world.now_ns
    for _ in range(20):
        assert world.wake_ns - world.now_ns <= 1_000 * MS
        world.later((world.wake_ns - world.now_ns) / MS)
        if world.of(ef.SayState):
            assert world.of(ef.SayState)[0].streams == [1]
            assert world.now_ns - said_ns <= 5_000 * MS
            said_ns = world.now_ns
    assert world.now_ns - said_ns <= 5_000 * MS


@pytest.mark.parametrize("ends", ["arrives", "is cancelled", "goes with its stream"])
def test_a_request_that_waits_for_the_tokenizer_is_owed_something_too(
    world: SchedulerWorld, ends: str
) -> None:
    world.open(2)
    world.feed(ev.RequestRead(request=1, stream=1))
    said = 0
    for _ in range(12):
        assert world.wake_ns - world.now_ns <= 1_000 * MS
        world.later((world.wake_ns - world.now_ns) / MS)
        for say in world.of(ef.SayState):
            assert say.streams == [1]
            said += 1
    assert said >= 2
    if ends == "arrives":
        world.send([10])
        world.done()
    elif ends == "is cancelled":
        world.feed(ev.RequestCancelled(request=1))
    else:
        world.close(1)
    for _ in range(10):
        world.later(1_000)
        assert not world.of(ef.SayState)


def test_idle_streams_are_left_alone(world: SchedulerWorld) -> None:
    world.send([60])
    world.done()
    for _ in range(10):
        world.later(1_000)
        assert not world.of(ef.SayState)


def test_busy_is_the_rest_of_the_pass_plus_all_that_is_queued(world: SchedulerWorld) -> None:
    assert world.scheduler.busy_ms(world.now_ns) == 0
    for tokens in (50, 100, 50, 100):  # 5 ms + 0.1 ms a token
        world.send([tokens])
        world.done(duration_ms=5 + tokens / 10)
    assert world.scheduler.busy_ms(world.now_ns) == 0
    world.send([100])
    assert world.scheduler.busy_ms(world.now_ns) == pytest.approx(15, rel=0.05)
    world.send([100])
    assert world.scheduler.queued_tokens == 100
    assert world.scheduler.busy_ms(world.now_ns) == pytest.approx(30, rel=0.05)
    assert world.scheduler.busy_ms(world.now_ns + 5 * MS) == pytest.approx(25, rel=0.05)
    assert world.scheduler.busy_ms(world.now_ns + 100 * MS) > 15, "an overrun is not idle"


def test_windows_change_with_streams_and_are_told(world: SchedulerWorld) -> None:
    assert world.scheduler.window_tokens(1) == 200
    world.open(2)
    assert sorted(world.of(ef.SayState)[0].streams) == [1, 2]
    assert world.scheduler.window_tokens(1) == world.scheduler.window_tokens(2) == 150
    world.close(2)
    assert world.of(ef.SayState)[0].streams == [1]
    assert world.scheduler.window_tokens(1) == 200
