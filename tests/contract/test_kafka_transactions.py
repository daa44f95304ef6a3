"""What the core may rely on when it commits transactions: one suite for fake and real Kafka.

Not the mock cluster, whose transactions are empty shells, but for what the client makes of brokers
that can be told to misbehave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from aggregator.adapters.kafka_config import KafkaOptions
from aggregator.adapters.kafka_transactions import (
    KafkaTransactions,
    TransactionRecord,
    TransactionsError,
    TransactionsOptions,
)
from aggregator.adapters.mock_broker import MockBroker
from aggregator.core.effects import CommitOffset
from aggregator.core.events import (
    CommitDone,
    CommitFailed,
    PartitionsAssigned,
    PartitionsRevoking,
    WriteFault,
)
from aggregator.core.query import TopicPartition as Tp
from aggregator.wire.record_size import batch_bytes
from ops.kafka.node import free_port
from tests.contract.kafka_world import (
    TRUTHFUL,
    WAIT_S,
    BrokerWorld,
    Record,
    Source,
    Told,
    Transactions,
    World,
    make_world,
    offset_of,
)


@pytest.fixture(params=TRUTHFUL)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each world that knows transactions."""
    yield from make_world(request)


@pytest.fixture(params=TRUTHFUL[1:])
def broker_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Real brokers."""
    yield from make_world(request)


def numbers(count: int) -> list[Record]:
    return [(None, b"%d" % number, None) for number in range(count)]


class Stuck:
    """A consumer that does not get round to the offsets."""

    def send_offsets(self, request: object) -> None:
        """Forget it."""


def records_of(
    topic: str, values: Sequence[bytes], *, alone: bool = False
) -> list[TransactionRecord[int]]:
    return [
        TransactionRecord(topic, b"key", value, [("a", None)], token, alone)
        for token, value in enumerate(values)
    ]


def offsets_of(told: Told, offsets: dict[Tp, int]) -> list[CommitOffset]:
    """Under the current epochs."""
    return [
        CommitOffset(tp=tp, epoch=told.epochs[tp], offset_next=offset)
        for tp, offset in offsets.items()
    ]


def member(world: World, count: int = 10, partitions: int = 1) -> tuple[str, Source, Told]:
    """A topic with so many records on each partition, and a member that has read them."""
    queries = world.topic(partitions)
    for partition in range(partitions):
        world.write(queries, numbers(count), partition=partition)
    source, told = world.source(queries)
    told.wait(lambda: len(told.records) == count * partitions)
    return queries, source, told


def commit_until_done(
    transactions: Transactions,
    ended: Told,
    records: Sequence[TransactionRecord[int]],
    offsets: Sequence[CommitOffset],
) -> None:
    """Try again as the core does; ten times are enough for anything that passes."""
    for commit_id in range(101, 111):
        transactions.commit(commit_id, records, offsets)
        ended.wait(lambda: ended.answer(commit_id))  # noqa: B023
        if isinstance(ended.answer(commit_id), CommitDone):
            return
    raise AssertionError(f"never committed: {ended}")


def test_records_and_offsets_are_committed_together(world: World) -> None:
    results, letters = world.topic(partitions=2), world.topic()
    queries, source, told = member(world)
    transactions, ended = world.transactions(source)
    written = records_of(results, [b"one", b"two"]) + records_of(letters, [b"letter"])
    transactions.commit(1, written, offsets_of(told, {(queries, 0): 7}))
    ended.wait(lambda: ended.answer(1))
    assert ended.answer(1) == CommitDone(commit_id=1)
    assert world.committed((queries, 0)) == 7
    read = [(m.key(), m.value(), m.headers()) for m in world.read(results, 2)]
    assert sorted(map(repr, read)) == sorted(
        map(repr, [(b"key", b"one", [("a", None)]), (b"key", b"two", [("a", None)])])
    )
    assert [m.value() for m in world.read(letters, 1)] == [b"letter"]
    assert (ended.failed, ended.faults) == ([], [])


def test_offsets_alone_and_one_after_another(world: World) -> None:
    results = world.topic()
    queries, source, told = member(world)
    transactions, ended = world.transactions(source)
    for commit_id in range(1, 6):
        records = records_of(results, [b"%d" % commit_id]) if commit_id % 2 else []
        transactions.commit(commit_id, records, offsets_of(told, {(queries, 0): commit_id}))
    ended.wait(lambda: ended.answer(5))
    assert ended.events == [CommitDone(commit_id=number) for number in range(1, 6)]
    assert world.committed((queries, 0)) == 5
    assert [m.value() for m in world.read(results, 3)] == [b"1", b"3", b"5"]


def test_more_records_than_the_clients_queue_holds(world: World) -> None:
    results = world.topic(partitions=3)
    queries, source, told = member(world)
    transactions, ended = world.transactions(source, overrides={"queue.buffering.max.messages": 50})
    values = [b"%d" % number for number in range(1_000)]
    transactions.commit(1, records_of(results, values), offsets_of(told, {(queries, 0): 10}))
    ended.wait(lambda: ended.answer(1))
    assert ended.answer(1) == CommitDone(commit_id=1)
    assert Counter(m.value() for m in world.read(results, 1_000)) == Counter(values)


def test_of_a_partition_that_is_not_ours_any_more_nothing_is_committed(world: World) -> None:
    results = world.topic()
    queries, source, told = member(world)
    transactions, ended = world.transactions(source)
    stale = [CommitOffset(tp=(queries, 0), epoch=told.epochs[queries, 0] + 1, offset_next=5)]
    transactions.commit(1, records_of(results, [b"stale"]), stale)
    transactions.commit(2, records_of(results, [b"ours"]), offsets_of(told, {(queries, 0): 6}))
    ended.wait(lambda: ended.answer(2))
    first = ended.answer(1)
    assert isinstance(first, CommitFailed)
    assert "not assigned" in first.message
    assert ended.answer(2) == CommitDone(commit_id=2)
    assert world.committed((queries, 0)) == 6
    assert [m.value() for m in world.read(results, 1)] == [b"ours"]


@pytest.mark.parametrize("alone", [False, True])
def test_a_refused_record_aborts_its_mates_and_is_told_before_the_end(
    world: World, alone: bool
) -> None:
    results = world.topic(max_message_bytes="5000")
    queries, source, told = member(world)
    transactions, ended = world.transactions(source)
    records = records_of(results, [b"small", b"x" * 6_000], alone=alone)
    transactions.commit(1, records, offsets_of(told, {(queries, 0): 5}))
    ended.wait(lambda: ended.answer(1))
    assert isinstance(ended.answer(1), CommitFailed)
    fault = WriteFault.RECORD_ALONE if alone else WriteFault.RECORD
    assert {each for _, each, _ in ended.failed} == {fault}
    assert 1 in {token for token, _, _ in ended.failed}
    assert ended.failed[0][2].startswith(f"{results}: ")
    assert ended.durable == []
    # Real brokers refuse the next one too: the refused records' sequence numbers are missing.
    again = records_of(results, [b"again"])
    commit_until_done(transactions, ended, again, offsets_of(told, {(queries, 0): 5}))
    assert [m.value() for m in world.read(results, 1)] == [b"again"]
    assert not any(fatal for _, fatal in ended.faults)


def test_a_record_too_large_for_the_client_is_the_records_fault(world: World) -> None:
    results = world.topic(max_message_bytes="5000")
    queries, source, told = member(world)
    transactions, ended = world.transactions(source, message_bytes_max=5_000)
    records = records_of(results, [b"x" * 6_000], alone=True)
    transactions.commit(1, records, offsets_of(told, {(queries, 0): 5}))
    ended.wait(lambda: ended.answer(1))
    assert [(token, fault) for token, fault, _ in ended.failed] == [(0, WriteFault.RECORD_ALONE)]
    assert world.committed((queries, 0)) < 0


def test_the_broker_counts_as_we_do_to_the_byte(broker_world: World) -> None:
    """What is reckoned to fit does, with mates of all sizes; a byte more does not."""
    limit = 5_000
    results = broker_world.topic(max_message_bytes=str(limit))
    queries, source, told = member(broker_world)
    transactions, ended = broker_world.transactions(source, batch_bytes_max=limit)
    room = limit - batch_bytes(b"key", b"", [("a", None)]) - 2  # two lengths take a byte more
    values = [b"x" * (room - 61 * number) for number in range(80)]
    assert batch_bytes(b"key", values[0], [("a", None)]) == limit
    offsets = offsets_of(told, {(queries, 0): 5})
    transactions.commit(1, records_of(results, values), offsets)
    ended.wait(lambda: ended.answer(1))
    assert ended.answer(1) == CommitDone(commit_id=1)
    transactions.commit(2, records_of(results, [values[0] + b"x"], alone=True), offsets)
    ended.wait(lambda: ended.answer(2))
    assert [fault for _, fault, _ in ended.failed] == [WriteFault.RECORD_ALONE]


def test_a_missing_topic_is_the_topics_fault(world: World) -> None:
    queries, source, told = member(world)
    transactions, ended = world.transactions(source, timeout_ms=6_000)
    records = records_of("no-such-topic", [b"v"])
    transactions.commit(1, records, offsets_of(told, {(queries, 0): 5}))
    ended.wait(lambda: ended.answer(1))
    assert isinstance(ended.answer(1), CommitFailed)
    assert [(token, fault) for token, fault, _ in ended.failed] == [(0, WriteFault.TOPIC)]
    assert world.committed((queries, 0)) < 0


def test_an_abort_that_is_asked_for_leaves_nothing(world: World) -> None:
    results = world.topic()
    queries, _, told = member(world)
    transactions, ended = world.transactions(Stuck())
    transactions.commit(1, records_of(results, [b"never"]), offsets_of(told, {(queries, 0): 5}))
    transactions.abort(1)
    ended.wait(lambda: ended.answer(1))
    assert isinstance(ended.answer(1), CommitFailed)
    assert world.committed((queries, 0)) < 0
    assert not ended.faults


def test_the_same_name_fences_the_one_before_and_ends_what_it_left_open(world: World) -> None:
    results = world.topic()
    queries, source, told = member(world)
    first, told_first = world.transactions(Stuck())
    first.commit(1, records_of(results, [b"first"]), offsets_of(told, {(queries, 0): 5}))
    second, told_second = world.transactions(source)
    second.commit(1, records_of(results, [b"second"]), offsets_of(told, {(queries, 0): 6}))
    told_second.wait(lambda: told_second.answer(1))
    assert told_second.answer(1) == CommitDone(commit_id=1)
    first.abort(1)  # it learns of it as it next wants something of the broker
    told_first.wait(lambda: told_first.faults)
    ((message, fatal),) = told_first.faults
    assert fatal
    assert message.startswith("fenced: ")
    assert "instance_name 'one'" in message
    assert told_first.answer(1) is None
    assert [m.value() for m in world.read(results, 1)] == [b"second"]
    assert world.committed((queries, 0)) == 6


def test_another_name_fences_nobody(world: World) -> None:
    results = world.topic()
    queries, source, told = member(world)
    first, told_first = world.transactions(source)
    _, _ = world.transactions(source, instance_name="two")
    first.commit(1, records_of(results, [b"first"]), offsets_of(told, {(queries, 0): 5}))
    told_first.wait(lambda: told_first.answer(1))
    assert told_first.answer(1) == CommitDone(commit_id=1)


def test_a_transaction_is_committed_inside_a_revoke(world: World) -> None:
    """The next owner begins behind it; what is kept is committed after the rebalance too."""
    results = world.topic()
    queries, source, told = member(world, partitions=2)
    transactions, ended = world.transactions(source)
    second, told_second = world.source(queries)
    del second
    told.wait(lambda: told.of(PartitionsRevoking))
    [revoking] = told.of(PartitionsRevoking)
    [gone] = revoking.partitions
    [kept] = [(queries, number) for number in range(2) if (queries, number) != gone]
    transactions.commit(1, records_of(results, [b"given up"]), offsets_of(told, {gone: 8}))
    ended.wait(lambda: ended.answer(1))
    assert ended.answer(1) == CommitDone(commit_id=1)
    source.release(revoking.revoke_id)
    told_second.wait(lambda: gone in told_second.epochs and len(told_second.offsets(gone)) == 2)
    assert told_second.offsets(gone) == [8, 9]
    # Between two generations it is refused.
    kept_records = records_of(results, [b"kept"])
    commit_until_done(transactions, ended, kept_records, offsets_of(told, {kept: 4}))
    assert world.committed(kept) == 4
    assert [m.value() for m in world.read(results, 2)] == [b"given up", b"kept"]


def test_positions_go_over_the_markers_of_the_queries_own_producers(world: World) -> None:
    results = world.topic()
    queries, source, told = member(world, count=2)
    world.write_aborted(queries, 3)
    told.wait(lambda: told.positions[queries, 0] == 6)
    transactions, ended = world.transactions(source)
    transactions.commit(1, records_of(results, [b"r"]), offsets_of(told, {(queries, 0): 6}))
    ended.wait(lambda: ended.answer(1))
    assert world.committed((queries, 0)) == 6


def test_close_aborts_what_is_open(world: World) -> None:
    results = world.topic()
    queries, source, told = member(world)
    transactions, ended = world.transactions(Stuck())
    transactions.commit(1, records_of(results, [b"never"]), offsets_of(told, {(queries, 0): 5}))
    assert transactions.close(WAIT_S)
    assert transactions.close(WAIT_S)
    assert world.committed((queries, 0)) < 0
    following, ended = world.transactions(source)
    following.commit(1, records_of(results, [b"next"]), offsets_of(told, {(queries, 0): 5}))
    ended.wait(lambda: ended.answer(1))
    assert [m.value() for m in world.read(results, 1)] == [b"next"]


def test_the_next_owner_waits_for_offsets_in_an_open_transaction(broker_world: World) -> None:
    """What makes a kill in the middle of a transaction harmless; the fake takes it as given."""
    assert isinstance(broker_world, BrokerWorld)
    queries = broker_world.topic()
    broker_world.write(queries, numbers(10))
    producer, consumer = broker_world.raw_transaction(queries, offset_next=6)
    consumer.close()  # it leaves with the transaction open
    source, told = broker_world.source(queries)
    told.wait(lambda: told.of(PartitionsAssigned))
    # It waits with the partition only: what it has of others it commits meanwhile.
    transactions, ended = broker_world.transactions(source)
    transactions.commit(1, records_of(broker_world.topic(), [b"other"]), [])
    ended.wait(lambda: ended.answer(1))
    assert ended.answer(1) == CommitDone(commit_id=1)
    producer.commit_transaction(WAIT_S)
    told.wait(lambda: len(told.records) >= 4)
    assert [offset_of(m) for m in told.records] == [6, 7, 8, 9]
    assert not told.faults


def test_no_broker_is_one_clear_line() -> None:
    kafka = KafkaOptions(bootstrap_servers=f"127.0.0.1:{free_port()}", group_id="group")
    options = TransactionsOptions(kafka=kafka, instance_name="one")
    transactions: KafkaTransactions[int] = KafkaTransactions(options, Told())
    with pytest.raises(TransactionsError, match=r"exactly_once: transactional id 'group/one'"):
        transactions.init(0.3)
    assert transactions.close()


PRODUCE, END_TXN = 0, 26
"""Requests, by the numbers of Kafka's protocol; two errors of it follow."""
LOADING, NOT_AUTHORISED = 14, 29


@pytest.mark.mock_broker
@pytest.mark.parametrize("end", ["committed", "aborted"])
def test_live_brokers_that_never_end_a_transaction_end_the_process(end: str) -> None:
    with MockBroker() as broker:
        world = BrokerWorld(broker.bootstrap_servers, "consumer", broker)
        with closing(world):
            queries, source, told = member(world)
            transactions, ended = world.transactions(source, timeout_ms=1_000)
            if end == "aborted":
                broker.push_errors(PRODUCE, [NOT_AUTHORISED])
            broker.push_errors(END_TXN, [LOADING] * 10_000)
            offsets = offsets_of(told, {(queries, 0): 5})
            transactions.commit(1, records_of(world.topic(), [b"r"]), offsets)
            ended.wait(lambda: any(fatal for _, fatal in ended.faults))
    [message] = [message for message, fatal in ended.faults if fatal]
    start = f"the open transaction could not be {end} for 3 s, though the brokers answer ("
    assert message.startswith(start)
    assert ended.answer(1) is None
