"""What the core may rely on when it reads: one suite for the fake, the mock cluster, real Kafka."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest

from aggregator.adapters import kafka_source, kafka_starts
from aggregator.adapters.kafka_offsets import OffsetsRequest
from aggregator.adapters.kafka_source import KafkaSource, RawBatch
from aggregator.adapters.mock_broker import MockBroker
from aggregator.core.effects import Commit, CommitOffset
from aggregator.core.events import (
    CommitDone,
    CommitFailed,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoking,
)
from aggregator.core.query import TopicPartition as Tp
from ops.kafka.node import KafkaNode
from tests.contract.kafka_world import (
    CLIENTS,
    EVERYWHERE,
    TRUTHFUL,
    BrokerWorld,
    Record,
    Source,
    Told,
    World,
    commit_of,
    make_world,
    offset_of,
)

OFFSET_FETCH_API = 9
NOT_COORDINATOR = 16
GROUP_AUTHORIZATION_FAILED = 30


@pytest.fixture(params=EVERYWHERE)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each world in turn."""
    yield from make_world(request)


class NotOurs(OffsetsRequest):
    """Offsets of no assignment: refused, and told so, as soon as commands are served."""

    def __init__(self, tp: Tp, told: Told) -> None:
        offsets = [CommitOffset(tp=tp, epoch=-1, offset_next=0)]
        super().__init__(None, offsets)  # type: ignore[arg-type] # nothing is sent
        self._told = told

    def refuse(self, reason: str) -> None:
        self._told.on_fault(reason, fatal=False)


def records(number: int) -> list[Record]:
    return [(None, str(i).encode(), None) for i in range(number)]


def test_records_come_in_order_with_positions(world: World) -> None:
    topic = world.topic(partitions=3)
    for partition in range(3):
        world.write(topic, records(200), partition=partition)
    _, told = world.source(topic, poll_records_max=70)
    told.wait(lambda: len(told.records) == 600)
    for partition in range(3):
        assert told.offsets((topic, partition)) == list(range(200))
    assert told.positions == {(topic, p): 200 for p in range(3)}
    for batch in told.batches:
        assert len(batch.messages) <= 70
        ends = {(m.topic(), m.partition()): offset_of(m) + 1 for m in batch.messages}
        assert {p.tp: p.offset_next for p in batch.positions} == ends
    assert not told.faults


def test_next_poll_waits_until_the_batch_is_taken(world: World) -> None:
    topic = world.topic()
    world.write(topic, records(3))
    source, told = world.source(topic, poll_records_max=1)
    told.take_at_once = False
    told.wait(lambda: told.batches)
    source.taken()
    told.wait(lambda: len(told.batches) == 2)
    # Commands are served meanwhile: it leaves, and nothing more was polled until then.
    assert source.close(60)
    assert told.offsets((topic, 0)) == [0, 1]


def test_pause_is_in_force_before_the_next_poll(world: World) -> None:
    topic = world.topic(partitions=2)
    world.write(topic, records(50), partition=0)
    source, told = world.source(topic, poll_records_max=10)

    def pause(_batch: RawBatch) -> None:
        told.on_batch_do = None
        source.pause([(topic, 0)])

    told.on_batch_do = pause
    told.wait(lambda: told.records)
    world.write(topic, records(5), partition=1)
    told.wait(lambda: len(told.offsets((topic, 1))) == 5)
    got = len(told.offsets((topic, 0)))
    assert got <= 10
    source.resume([(topic, 0)])
    told.wait(lambda: len(told.offsets((topic, 0))) == 50)
    assert told.offsets((topic, 0)) == list(range(50))


def test_a_pause_that_an_assignment_caused_is_in_force_before_anything_is_read(
    world: World,
) -> None:
    """However late it comes: what is handed over is waited for, as a batch is."""
    topic = world.topic(partitions=2)
    for partition in range(2):
        world.write(topic, records(50), partition=partition)
    source, told = world.source(topic, take_assigned_at_once=False)
    told.wait(lambda: told.of(PartitionsAssigned))
    for number in range(50):  # between two of them was a poll, were polls not held up
        source.send_offsets(NotOurs((topic, 0), told))
        told.wait(lambda: len(told.faults) > number)  # noqa: B023
    assert told.records == []
    source.pause([(topic, 0)])
    source.taken()
    told.take_assigned_at_once = True
    told.wait(lambda: len(told.offsets((topic, 1))) == 50)
    assert told.offsets((topic, 0)) == []
    source.resume([(topic, 0)])
    told.wait(lambda: len(told.offsets((topic, 0))) == 50)
    assert told.offsets((topic, 0)) == list(range(50))


def test_restart_resumes_at_the_committed_offset(world: World) -> None:
    topic = world.topic()
    tp = (topic, 0)
    world.write(topic, records(10))
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 10)
    source.commit(commit_of(told, 7, {tp: 6}))
    told.wait(lambda: told.answer(7))
    assert told.answer(7) == CommitDone(commit_id=7)
    assert world.committed(tp) == 6
    assert source.close(60)
    _, told = world.source(topic)
    told.wait(lambda: len(told.records) == 4)
    assert told.offsets(tp) == [6, 7, 8, 9]


def test_commit_of_another_epoch_is_dropped(world: World) -> None:
    topic = world.topic()
    tp = (topic, 0)
    world.write(topic, records(3))
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 3)
    epoch = told.epochs[tp]
    for synchronous in (False, True):
        commit_id = 1 + synchronous
        source.commit(
            Commit(
                commit_id=commit_id,
                offsets=[CommitOffset(tp=tp, epoch=epoch - 1, offset_next=3)],
                synchronous=synchronous,
            )
        )
        told.wait(partial(told.answer, commit_id))
        assert isinstance(told.answer(commit_id), CommitFailed)
    # The next one carries out nothing of them either.
    source.commit(commit_of(told, 3, {tp: 1}, synchronous=True))
    told.wait(lambda: told.answer(3))
    assert world.committed(tp) == 1


def test_every_commit_is_answered_once_and_the_newest_wins(world: World) -> None:
    topic = world.topic(partitions=2)
    for partition in range(2):
        world.write(topic, records(100), partition=partition)
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 200)
    # Many at once, over each other, the last one synchronous and of one partition only.
    for i in range(1, 50):
        source.commit(commit_of(told, i, {(topic, 0): i, (topic, 1): 2 * i}))
    source.commit(commit_of(told, 50, {(topic, 0): 50}, synchronous=True))
    source.commit(commit_of(told, 51, {(topic, 0): 51}))
    told.wait(lambda: all(told.answer(i) for i in range(1, 52)))
    assert told.of(CommitFailed) == []
    assert (world.committed((topic, 0)), world.committed((topic, 1))) == (51, 98)


def test_a_commit_of_what_is_committed_is_done(world: World) -> None:
    topic = world.topic()
    world.write(topic, records(3))
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 3)
    for i, synchronous in enumerate([False, False, True, True, False]):
        source.commit(commit_of(told, i, {(topic, 0): 2}, synchronous=synchronous))
        told.wait(partial(told.answer, i))
        assert told.answer(i) == CommitDone(commit_id=i)


def test_headers_keys_and_nulls_come_as_written(world: World) -> None:
    topic = world.topic()
    written: list[Record] = [
        (None, b"no key", None),
        (b"", b"empty key", [("a", b"1"), ("b", None), ("a", b"2"), ("", b"")]),
        (b"k", None, [("content-type", b"application/json")]),
        (b"k", b"", None),
    ]
    world.write(topic, written)
    _, told = world.source(topic)
    told.wait(lambda: len(told.records) == 4)
    assert [(m.key(), m.value(), m.headers()) for m in told.records] == written


def join_second(world: World, topic: str, told: Told, **options: Any) -> tuple[Source, Told]:
    """Let a second member join and the first hear of it."""
    second, told_second = world.source(topic, **options)
    told.wait(lambda: told.of(PartitionsRevoking))
    return second, told_second


def test_revoke_is_a_rendezvous(world: World) -> None:
    topic = world.topic(partitions=2)
    for partition in range(2):
        world.write(topic, records(10), partition=partition)
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 20)
    _, told_second = join_second(world, topic, told)
    (revoking,) = told.of(PartitionsRevoking)
    (tp,) = revoking.partitions
    # Whatever is written now, we get nothing while the callback waits, nor does the other.
    for partition in range(2):
        world.write(topic, records(5), partition=partition)
    assert len(told.records) == 20
    assert tp not in told_second.epochs
    source.commit(commit_of(told, 1, {tp: 7}, synchronous=True))
    told.wait(lambda: told.answer(1))
    assert told.answer(1) == CommitDone(commit_id=1)
    assert len(told.records) == 20
    source.release(revoking.revoke_id)
    told_second.wait(lambda: len(told_second.offsets(tp)) == 8)
    assert told_second.offsets(tp) == list(range(7, 15))
    # What we kept goes on where it stood.
    kept = next(other for other in told.epochs if other != tp)
    told.wait(lambda: len(told.offsets(kept)) == 15)
    assert told.offsets(kept) == list(range(15))
    assert len(told.offsets(tp)) == 10
    # A commit that comes too late is dropped, here and not by the broker.
    source.commit(commit_of(told, 2, {tp: 9}))
    told.wait(lambda: told.answer(2))
    assert isinstance(told.answer(2), CommitFailed)
    assert world.committed(tp) == 7


def test_revoke_overtakes_a_commit_in_flight(world: World) -> None:
    topic = world.topic(partitions=2)
    for partition in range(2):
        world.write(topic, records(10), partition=partition)
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 20)
    join_second(world, topic, told)
    (revoking,) = told.of(PartitionsRevoking)
    (tp,) = revoking.partitions
    source.commit(commit_of(told, 1, {tp: 3}))
    source.commit(commit_of(told, 2, {tp: 4}))
    source.commit(commit_of(told, 3, {tp: 5}, synchronous=True))
    told.wait(lambda: told.answer(3))
    assert [told.answer(i) for i in (1, 2, 3)] == [CommitDone(commit_id=i) for i in (1, 2, 3)]
    source.release(revoking.revoke_id)
    kept = next(other for other in told.epochs if other != tp)
    # In the middle of a classic rebalance the broker refuses commits for a moment.
    for i in count(4):
        source.commit(commit_of(told, i, {kept: 6}))
        told.wait(partial(told.answer, i))
        if told.answer(i) == CommitDone(commit_id=i):
            break
    assert (world.committed(tp), world.committed(kept)) == (5, 6)


def test_revoke_gives_up_at_its_deadline(world: World) -> None:
    topic = world.topic(partitions=2)
    options: dict[str, Any] = {"revoke_deadline_ms": 300, "revoke_slack_ms": 100}
    source, told = world.source(topic, **options)
    told.wait(lambda: len(told.epochs) == 2)
    _, told_second = join_second(world, topic, told, **options)
    (revoking,) = told.of(PartitionsRevoking)
    told_second.wait(lambda: told_second.epochs)
    assert list(told_second.epochs) == list(revoking.partitions)
    assert any("not released" in message for message, _ in told.faults)
    source.release(revoking.revoke_id)  # too late, and harmless
    source.commit(commit_of(told, 1, {revoking.partitions[0]: 1}))
    told.wait(lambda: told.answer(1))
    assert isinstance(told.answer(1), CommitFailed)


def lent(world: World, topic: str, source: Source, told: Told) -> Tp:
    """Let a second member have a partition and leave; returns which, once it is back."""
    second, told_second = join_second(world, topic, told)
    revoking: PartitionsRevoking
    (revoking,) = told.of(PartitionsRevoking)
    (tp,) = revoking.partitions
    first_epoch = told.epochs[tp]
    source.release(revoking.revoke_id)
    told_second.wait(lambda: tp in told_second.epochs)
    release_all(second, told_second)
    assert second.close(60)
    told.wait(lambda: told.epochs[tp] != first_epoch)
    assert told.epochs[tp] > first_epoch
    return tp


def test_partition_comes_back_under_another_number(world: World) -> None:
    topic = world.topic(partitions=2)
    for partition in range(2):
        world.write(topic, records(4), partition=partition)
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 8)
    tp = lent(world, topic, source, told)
    # Nothing was committed: it is read from the beginning again.
    told.wait(lambda: len(told.offsets(tp)) == 8)
    assert told.offsets(tp) == [0, 1, 2, 3, 0, 1, 2, 3]


def release_all(source: Source, told: Told) -> None:
    for event in told.of(PartitionsRevoking):
        source.release(event.revoke_id)


def test_paused_partition_stays_paused_through_a_rebalance_when_paused_again(world: World) -> None:
    topic = world.topic(partitions=2)
    for partition in range(2):
        world.write(topic, records(4), partition=partition)
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 8)
    source.pause([(topic, 0), (topic, 1)])
    _, told_second = join_second(world, topic, told)
    (revoking,) = told.of(PartitionsRevoking)
    (tp,) = revoking.partitions
    kept = next(other for other in told.epochs if other != tp)
    source.release(revoking.revoke_id)
    source.pause([(topic, 0), (topic, 1)])  # as the core does; the lost one is ignored
    told_second.wait(lambda: len(told_second.offsets(tp)) == 4)
    world.write(topic, records(4), partition=kept[1])
    world.write(topic, records(4), partition=tp[1])
    told_second.wait(lambda: len(told_second.offsets(tp)) == 8)
    assert told.offsets(kept) == [0, 1, 2, 3]
    source.resume([kept])
    told.wait(lambda: len(told.offsets(kept)) == 8)
    assert told.offsets(kept) == list(range(8))


def test_a_pause_ends_with_the_assignment(world: World) -> None:
    """The client would remember it: what comes back later would stand."""
    topic = world.topic(partitions=2)
    for partition in range(2):
        world.write(topic, records(4), partition=partition)
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 8)
    source.pause([(topic, 0), (topic, 1)])
    tp = lent(world, topic, source, told)
    told.wait(lambda: len(told.offsets(tp)) == 8)
    assert told.offsets(tp) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_paused_consumer_stays_in_the_group(world: World) -> None:
    """A window may be full for longer than `max.poll.interval.ms`: polls go on."""
    topic = world.topic()
    tp = (topic, 0)
    world.write(topic, records(4))
    source, told = world.source(topic, max_poll_interval_ms=1_200, session_timeout_ms=1_200)
    told.wait(lambda: len(told.records) == 4)
    source.pause([tp])
    started = time.monotonic()
    for i in count(1):
        source.commit(commit_of(told, i, {tp: min(i, 4)}))
        told.wait(partial(told.answer, i))
        if time.monotonic() - started > 2.5:
            break
    source.resume([tp])
    world.write(topic, records(4))
    told.wait(lambda: len(told.records) == 8)
    assert told.offsets(tp) == list(range(8))
    assert told.of(PartitionsLost) == told.of(PartitionsRevoking) == []


@pytest.fixture(params=TRUTHFUL)
def true_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each world that knows transactions, retention and topics that don't exist."""
    yield from make_world(request)


def test_positions_pass_over_what_is_no_record(true_world: World) -> None:
    world = true_world
    topic = world.topic()
    tp = (topic, 0)
    world.write(topic, records(2))
    _, told = world.source(topic)
    told.wait(lambda: told.positions.get(tp) == 2)
    world.write_aborted(topic, 3)  # and its marker
    told.wait(lambda: told.positions.get(tp) == 6)
    assert told.batches[-1].messages == []
    world.write(topic, records(1))
    told.wait(lambda: told.positions.get(tp) == 7)
    assert told.offsets(tp) == [0, 1, 6]
    assert told.losses == []


@pytest.fixture
def mock_world() -> Iterator[BrokerWorld]:
    """The mock cluster, which errors can be pushed into."""
    with MockBroker() as mock:
        world = BrokerWorld(mock.bootstrap_servers, "classic", mock)
        yield world
        world.close()


@pytest.fixture(params=CLIENTS)
def broker_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each world in which the client library runs."""
    yield from make_world(request)


def test_lag_is_told_by_position(broker_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of all partitions, and comes to 0 behind what is no record."""
    monkeypatch.setattr(kafka_source, "LAG_EVERY_S", 0.0)
    world = broker_world
    topic = world.topic(partitions=2)
    ends = {(topic, 0): 40, (topic, 1): 10}
    for (_, partition), number in ends.items():
        world.write(topic, records(number), partition=partition)
    source, told = world.source(topic, poll_records_max=1)
    assert isinstance(source, KafkaSource)
    told.take_at_once = False
    seen = 0
    while len(told.positions) < len(ends):
        told.wait(lambda: len(told.batches) > seen)  # noqa: B023
        seen = len(told.batches)
        if len(told.positions) < len(ends):
            source.taken()
    lags = [end - told.positions[tp] for tp, end in ends.items()]
    assert source.lag == (sum(lags), max(lags))
    told.take_at_once = True
    source.taken()
    told.wait(lambda: told.positions == ends)
    if world.real:
        world.write_aborted(topic, 3)  # and its marker
        ends[topic, 0] += 4
        told.wait(lambda: told.positions == ends)
    world.write(topic, records(1), partition=1)
    told.wait(lambda: told.positions[topic, 1] == 11)
    told.wait(lambda: source.lag == (0, 0))
    source.close(60)


def test_a_coordinator_that_refuses_holds_nothing_up(
    mock_world: BrokerWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked by the client itself, its refusal would leave the partitions standing for ever."""
    monkeypatch.setattr(kafka_starts, "HELD_SILENTLY_S", 0.0)
    world = mock_world
    topic = world.topic(partitions=2)
    for partition in range(2):
        world.write(topic, records(6), partition=partition)
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 12)
    source.commit(commit_of(told, 1, {(topic, 1): 2}))
    told.wait(lambda: told.answer(1))
    assert source.close(60)

    assert world.mock is not None
    world.mock.push_errors(OFFSET_FETCH_API, [NOT_COORDINATOR] * 20)
    source, told = world.source(topic, take_assigned_at_once=False)
    told.wait(lambda: told.of(PartitionsAssigned))
    assert isinstance(source, KafkaSource)
    assert source.held == 2
    source.pause([(topic, 0)])  # held, as both are
    source.resume([(topic, 1)])  # as before, however often
    source.taken()
    told.wait(lambda: len(told.records) == 4)
    assert source.held == 0
    assert told.offsets((topic, 1)) == [2, 3, 4, 5]
    told.wait(lambda: [fatal for message, fatal in told.faults if "wait: " in message] == [False])
    source.resume([(topic, 0)])
    told.wait(lambda: len(told.records) == 10)
    assert told.offsets((topic, 0)) == list(range(6))


def test_who_may_not_ask_where_the_group_stopped_is_told_to_end(mock_world: BrokerWorld) -> None:
    topic = mock_world.topic()
    mock_world.write(topic, records(1))
    assert mock_world.mock is not None
    mock_world.mock.push_errors(OFFSET_FETCH_API, [GROUP_AUTHORIZATION_FAILED] * 100)
    _, told = mock_world.source(topic)
    told.wait(lambda: any(fatal for _, fatal in told.faults))
    assert told.records == []


def test_records_deleted_before_the_group_came_back_are_counted(true_world: World) -> None:
    world = true_world
    topic = world.topic(partitions=2)
    tp, other = (topic, 0), (topic, 1)
    world.write(topic, records(20))
    world.write(topic, records(20), partition=1)
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 40)
    source.commit(commit_of(told, 1, {tp: 5, other: 5}))
    told.wait(lambda: told.answer(1))
    assert source.close(60)
    world.delete_records(tp, 12)
    world.delete_records(other, 5)  # nothing that we had not committed
    _, told = world.source(topic)
    told.wait(lambda: len(told.records) == 8 + 15)
    assert told.losses == [(tp, 7)]


def test_records_deleted_while_paused_are_counted(true_world: World) -> None:
    world = true_world
    topic = world.topic()
    tp = (topic, 0)
    world.write(topic, records(10))
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 10)
    # Deleted after they were read: not lost.
    world.delete_records(tp, 8)
    world.write(topic, records(10))
    told.wait(lambda: len(told.records) == 20)
    assert told.losses == []
    source.pause([tp])
    source.commit(commit_of(told, 1, {tp: 20}, synchronous=True))
    told.wait(lambda: told.answer(1))
    world.write(topic, records(10))
    world.delete_records(tp, 26)
    source.resume([tp])
    told.wait(lambda: len(told.records) == 24)
    assert told.losses == [(tp, 6)]


@pytest.mark.kafka
def test_missing_topic_is_one_clear_error(kafka: KafkaNode) -> None:
    """With KIP-848 the group waits for the topic to appear: the check at start finds it missing."""
    world = BrokerWorld(kafka.bootstrap_servers, "classic")
    try:
        _, told = world.source("no-such-topic")
        told.wait(lambda: any(fatal for _, fatal in told.faults))
        assert "no-such-topic" in told.faults[-1][0]
    finally:
        world.close()


def test_stopped_source_reads_nothing_but_commits_and_leaves(world: World) -> None:
    topic = world.topic()
    tp = (topic, 0)
    world.write(topic, records(4))
    source, told = world.source(topic)
    told.wait(lambda: len(told.records) == 4)
    source.stop_polling()
    for i in range(1, 4):
        if i == 2:  # the answer to the first said that the stop is in force
            world.write(topic, records(4))
        source.commit(commit_of(told, i, {tp: i}))
        told.wait(partial(told.answer, i))
    source.resume([tp])  # stopped is stopped
    source.commit(commit_of(told, 4, {tp: 4}, synchronous=True))
    told.wait(lambda: told.answer(4))
    assert len(told.records) == 4
    assert told.positions == {tp: 4}
    assert source.close(60)
    # It has left: the next one need not wait for a session to time out.
    _, told_second = world.source(topic)
    told_second.wait(lambda: len(told_second.records) == 4, timeout_s=5)
    assert told_second.offsets(tp) == [4, 5, 6, 7]


def test_lost_partitions_are_announced_and_come_back(world: World) -> None:
    """Somebody who can't poll for `max.poll.interval.ms` has lost his partitions, and goes on."""
    topic = world.topic()
    tp = (topic, 0)
    world.write(topic, records(4))
    source, told = world.source(topic, max_poll_interval_ms=1_500, session_timeout_ms=1_500)
    told.take_at_once = False
    told.wait(lambda: told.records)
    epoch = told.epochs[tp]
    second, told_second = world.source(topic)
    told_second.wait(lambda: tp in told_second.epochs)  # the broker gave it to another
    source.commit(commit_of(told, 1, {tp: 4}))
    told.take_at_once = True
    source.taken()
    told.wait(lambda: told.of(PartitionsLost))
    assert told.of(PartitionsLost) == [PartitionsLost(partitions=[tp])]
    assert told.of(PartitionsRevoking) == []
    told.wait(lambda: told.answer(1))
    assert second.close(60)
    told.wait(lambda: told.epochs[tp] > epoch)
    assert len(told.of(PartitionsAssigned)) == 2
