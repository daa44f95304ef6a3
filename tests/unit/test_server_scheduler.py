"""The scheduler's rules, one at a time (DESIGN 3, 4.5, 4.6, 4.8; CONTRACTS, gRPC)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model_server.core import effects as ef
from model_server.core import events as ev
from model_server.core.failures import Code, invalid
from model_server.core.lifecycle import Phase
from tests.harness.scheduler import LIMITS, MS, SchedulerWorld


@pytest.fixture
def world() -> SchedulerWorld:
    """Serving, with stream 1 open: target 100 tokens, maximum 400, one input 150, 16 inputs."""
    made = SchedulerWorld()
    made.open(1)
    return made


# Passes


def test_an_idle_engine_starts_at_once(world: SchedulerWorld) -> None:
    key = world.send([5, 6])
    assert world.inputs() == [(key, 0), (key, 1)]
    assert world.started().tokens == 11


def test_a_pass_takes_the_oldest_inputs_of_all_streams_and_calls(world: SchedulerWorld) -> None:
    world.open(2)
    world.send([10])
    first = world.send([30, 30], stream=2)
    second = world.send([20], stream=ev.UNARY)
    third = world.send([10, 60], stream=1)
    world.done()
    assert world.inputs() == [(first, 0), (first, 1), (second, 0), (third, 0)]
    world.done()
    assert world.inputs() == [(third, 1)]
    world.done()
    assert world.outcome(third) == ["vector", "vector"]
    assert world.idle()


def test_a_pass_is_cut_between_inputs_at_the_target(world: SchedulerWorld) -> None:
    key = world.send([60, 40, 1, 99, 1])
    assert world.inputs() == [(key, 0), (key, 1)]
    world.done()
    assert world.inputs() == [(key, 2), (key, 3)]
    world.done()
    assert world.inputs() == [(key, 4)]


def test_answers_come_pass_by_pass_and_the_final_one_says_so(world: SchedulerWorld) -> None:
    key = world.send([60, 60])
    world.done()
    (answer,) = world.of(ef.Answer)
    assert [(p.request, list(p.indexes), p.row, p.last) for p in answer.parts] == [
        (key, [0], 0, False)
    ]
    world.done()
    assert world.of(ef.Answer)[0].parts[0].last


def test_a_longer_input_goes_alone(world: SchedulerWorld) -> None:
    world.send([1])
    key = world.send([10, 150, 10])
    world.done()
    assert world.inputs() == [(key, 0)]
    world.done()
    assert world.inputs() == [(key, 1)]
    world.done()
    assert world.inputs() == [(key, 2)]


def test_no_pass_has_more_inputs_than_the_maximum(world: SchedulerWorld) -> None:
    world.send([1] * 20)
    assert len(world.inputs()) == 16
    world.done()
    assert len(world.inputs()) == 4


def test_no_pass_has_more_bytes_than_the_maximum(world: SchedulerWorld) -> None:
    world.send([1, 1, 1], text_bytes=[70_000, 61_072, 1])
    assert len(world.inputs()) == 2
    world.done()
    assert len(world.inputs()) == 1


def test_the_next_pass_starts_before_answers_are_made(world: SchedulerWorld) -> None:
    world.send([60, 60])
    world.done()
    kinds = [type(effect) for effect in world.effects]
    assert kinds.index(ef.RunPass) < kinds.index(ef.Answer) < kinds.index(ef.Announce)


# Deadlines


def test_expired_inputs_are_dropped_before_the_pass(world: SchedulerWorld) -> None:
    world.send([1])
    key = world.send([10, 20, 30], timeouts_ms=[5, 0, 50])
    world.done(duration_ms=6)
    assert world.inputs() == [(key, 1), (key, 2)]
    assert world.outcome(key) == ["EXPIRED", None, None]


def test_waiting_inputs_expire_in_time_though_a_pass_runs(world: SchedulerWorld) -> None:
    world.send([1])
    key = world.send([10], timeouts_ms=[100])
    assert world.wake_ns <= world.now_ns + 100 * MS
    world.later(100)
    assert world.outcome(key) == ["EXPIRED"]
    (failed,) = world.of(ef.Fail)
    assert failed.failures[0][1].code is Code.DEADLINE_EXCEEDED


def test_an_input_in_a_pass_does_not_expire(world: SchedulerWorld) -> None:
    key = world.send([10], timeouts_ms=[10])
    world.done(duration_ms=50)
    assert world.outcome(key) == ["vector"]


def test_a_half_that_waits_to_be_run_again_expires(world: SchedulerWorld) -> None:
    key = world.send([10, 10], timeouts_ms=[0, 10])
    world.raised()
    world.done(duration_ms=11)
    assert world.outcome(key) == ["vector", "EXPIRED"]
    assert world.idle()


# Cancellation


def test_a_cancelled_request_leaves_the_queue(world: SchedulerWorld) -> None:
    world.send([1], stream=ev.UNARY)
    gone = world.send([50], stream=ev.UNARY)
    stays = world.send([60], stream=ev.UNARY)
    world.cancel(gone)
    assert world.scheduler.queued_tokens == 60
    world.done()
    assert world.inputs() == [(stays, 0)]


def test_a_closed_stream_takes_its_inputs_along_and_its_answers(world: SchedulerWorld) -> None:
    world.open(2)
    running = world.send([10, 10], stream=2)
    world.send([30], stream=2)
    stays = world.send([40], stream=1)
    world.close(2)
    world.done()
    assert world.outcome(running) == [None, None]
    assert world.inputs() == [(stays, 0)]


# Refusals


def test_what_nobody_waits_for_in_a_pass_is_not_taken_from_the_queue(
    world: SchedulerWorld,
) -> None:
    world.open(2)
    world.send([40])
    world.send([30, 10], stream=1)
    unary = world.send([20], stream=ev.UNARY)
    world.done()
    world.send([80], stream=2)
    assert world.scheduler.queued_tokens == 80
    busy_ms = world.scheduler.busy_ms(world.now_ns)
    world.close(1)
    assert world.scheduler.queued_tokens == 80
    world.cancel(unary)
    assert world.scheduler.queued_tokens == 80
    assert world.scheduler.busy_ms(world.now_ns) == busy_ms
    world.done()
    assert world.scheduler.queued_tokens == 0


def test_deadlines_of_requests_that_are_gone_are_not_kept(world: SchedulerWorld) -> None:
    world.send([1], timeouts_ms=[300])
    for _ in range(2_000):
        world.send([1], timeouts_ms=[86_400_000])
        world.done(duration_ms=0)
        # An earlier deadline is always alive.
        world.send([1], timeouts_ms=[300])
    assert len(world.scheduler._held._expiries._heap) < 200
    soon = world.send([1], timeouts_ms=[20])
    later = world.send([1], timeouts_ms=[60])
    world.later(40)
    assert (world.outcome(soon), world.outcome(later)) == (["EXPIRED"], [None])
    world.later(40)
    assert world.outcome(later) == ["EXPIRED"]


def test_refused_inputs_are_answered_at_once_beside_those_that_run(world: SchedulerWorld) -> None:
    key = world.send([0, 7], failures=[(0, invalid("text", "The text is empty."))])
    assert world.outcome(key) == ["INVALID_FIELD", None]
    world.done()
    assert world.outcome(key) == ["INVALID_FIELD", "vector"]


def test_a_request_of_refused_inputs_only_is_complete_at_once(world: SchedulerWorld) -> None:
    key = world.send([0], failures=[(0, invalid("text", "The text is empty."))])
    assert world.requests[key].last
    assert world.running is None


def test_a_stream_is_refused_only_while_it_holds_more_than_eight_targets(
    world: SchedulerWorld,
) -> None:
    world.send([100] * 8)
    taken = world.send([1])
    assert world.outcome(taken) == [None]
    refused = world.send([1])
    assert world.outcome(refused) == ["TOO_MUCH_HELD"]
    (effect,) = world.of(ef.Refuse)
    assert effect.failure.code is Code.RESOURCE_EXHAUSTED
    assert effect.failure.retry_after_ms is not None
    world.done()
    assert world.outcome(world.send([1])) == [None]


@pytest.mark.parametrize("target", [64, 256])
def test_a_client_that_keeps_to_its_window_is_never_refused(target: int) -> None:
    """The window holds one input of the maximum, here more than eight targets."""
    world = SchedulerWorld(
        replace(LIMITS, batch_tokens_target=target, batch_tokens_max=8_192, input_tokens_max=8_192)
    )
    world.open(1)
    window = world.scheduler.window_tokens(1)
    assert window == 8_192
    for _ in range(window // target):
        world.send([target])
    assert world.scheduler.held_tokens == window
    assert not world.ever(ef.Refuse)
    world.send([1])
    refused = world.send([1])
    assert world.outcome(refused) == ["TOO_MUCH_HELD"]


def test_an_empty_stream_may_send_any_total(world: SchedulerWorld) -> None:
    key = world.send([150] * 16)
    assert world.outcome(key) == [None] * 16


def test_what_one_stream_holds_does_not_refuse_another(world: SchedulerWorld) -> None:
    world.open(2)
    world.send([100] * 9)
    assert world.outcome(world.send([1], stream=2)) == [None]


def test_unary_calls_share_one_bounded_hold(world: SchedulerWorld) -> None:
    for _ in range(9):
        world.send([100], stream=ev.UNARY)
    assert world.outcome(world.send([1], stream=ev.UNARY)) == ["TOO_MUCH_HELD"]
    assert world.outcome(world.send([1], stream=1)) == [None]


def test_nothing_is_taken_before_the_engine_is_ready() -> None:
    world = SchedulerWorld(ready=False)
    key = world.send([1], stream=ev.UNARY)
    assert world.outcome(key) == ["NOT_STARTED"]
    assert world.scheduler.phase is Phase.LOADING


# Priorities and exclusive requests


def test_bulk_rides_in_what_interactive_inputs_leave(world: SchedulerWorld) -> None:
    world.send([1])
    bulk = world.send([30, 30, 30], bulk=True)
    interactive = world.send([50])
    world.done()
    assert world.inputs() == [(interactive, 0), (bulk, 0)]


def test_every_tenth_pass_starts_with_the_oldest_bulk_input(world: SchedulerWorld) -> None:
    world.send([100])
    bulk = world.send([10, 90], bulk=True)
    firsts = []
    for _ in range(12):
        world.send([100])
        world.done()
        firsts.append(world.inputs()[0])
    assert firsts.index((bulk, 0)) < 10
    assert firsts.count((bulk, 0)) == 1


def test_a_pass_that_starts_with_bulk_goes_on_with_interactive(world: SchedulerWorld) -> None:
    world.send([100])
    bulk = world.send([10, 20], bulk=True)
    for _ in range(10):
        interactive = world.send([40, 60])
        world.done()
        if world.inputs()[0] == (bulk, 0):
            break
    assert world.inputs() == [(bulk, 0), (interactive, 0), (bulk, 1)]
    world.done()
    assert world.outcome(bulk) == ["vector", "vector"]


def test_an_exclusive_request_gets_passes_of_its_own_in_its_turn(world: SchedulerWorld) -> None:
    world.send([10])
    before = world.send([20])
    alone = world.send([30, 80], exclusive=True)
    after = world.send([40])
    world.done()
    assert world.inputs() == [(before, 0), (after, 0)]
    world.done()
    world.written()
    assert world.inputs() == [(alone, 0)]
    assert world.started().kind is ef.PassKind.EXCLUSIVE
    world.done()
    world.written()
    assert world.inputs() == [(alone, 1)]


def test_an_exclusive_pass_starts_only_after_its_announcement_is_written(
    world: SchedulerWorld,
) -> None:
    key = world.send([30], exclusive=True)
    other = world.send([1])
    assert world.running is None
    (announce,) = [a for a in world.ever(ef.Announce) if a.awaited is not None]
    assert announce.running == {1: [key]}
    assert world.scheduler.busy_ms(world.now_ns) > 0
    world.written()
    assert world.inputs() == [(key, 0)]
    world.done()
    assert world.inputs() == [(other, 0)]


def test_a_stream_that_closes_before_its_announcement_is_written_frees_the_engine(
    world: SchedulerWorld,
) -> None:
    world.open(2)
    world.send([30], stream=2, exclusive=True)
    other = world.send([1])
    world.close(2)
    assert world.inputs() == [(other, 0)]


def test_a_client_that_does_not_read_its_announcement_is_cut(world: SchedulerWorld) -> None:
    """It holds the engine once, whatever else it has sent."""
    world.open(2)
    for _ in range(3):
        world.send([30], stream=2, exclusive=True)
    world.send([5], stream=2)
    other = world.send([1])
    late = world.awaited
    assert late is not None
    world.later(1_999)
    assert world.ever(ef.CutStream) == []
    world.later(1)
    (cut,) = world.ever(ef.CutStream)
    assert (cut.stream, cut.failure.reason) == (2, "NOT_STARTED")
    assert "did not read" in cut.failure.message
    assert world.inputs() == [(other, 0)]
    world.done()
    assert world.idle()
    assert world.scheduler.held_tokens == 0
    # What still comes of it changes nothing.
    world.feed(ev.AnnouncementWritten(pass_id=late[0]))
    world.send([30], stream=2, exclusive=True)
    world.close(2)
    assert world.running is None
    assert world.awaited is None


def test_two_clients_that_do_not_read_hold_the_engine_once_each(world: SchedulerWorld) -> None:
    for stream in (2, 3):
        world.open(stream)
        for _ in range(5):
            world.send([30], stream=stream, exclusive=True)
    other = world.send([1])
    for _ in range(2):
        world.later(2_000)
    assert sorted(cut.stream for cut in world.ever(ef.CutStream)) == [2, 3]
    assert world.inputs() == [(other, 0)]


def test_a_client_that_reads_in_time_is_not_cut(world: SchedulerWorld) -> None:
    key = world.send([30], exclusive=True)
    world.later(1_999)
    world.written()
    world.later(1_999)
    world.done()
    assert world.ever(ef.CutStream) == []
    assert world.outcome(key) == ["vector"]


def test_the_halves_of_an_exclusive_request_are_announced_first_too(
    world: SchedulerWorld,
) -> None:
    key = world.send([10, 10], exclusive=True)
    world.written()
    world.raised()
    assert world.running is None
    world.written()
    assert world.inputs() == [(key, 0)]
