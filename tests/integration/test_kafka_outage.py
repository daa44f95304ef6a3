"""The Kafka adapters through outages of the broker: nothing lost, nothing hangs."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from aggregator.adapters.mock_broker import MockBroker
from aggregator.core.events import CommitFailed
from ops.kafka.node import KafkaNode, NodeOptions
from tests.contract.kafka_world import BrokerWorld, Record, commit_of


def records(first: int, last: int) -> list[Record]:
    return [(None, str(i).encode(), None) for i in range(first, last)]


@pytest.mark.kafka
def test_killed_broker_comes_back(kafka: KafkaNode) -> None:
    """Records handed to the sink meanwhile are written once; reading and commits go on."""
    del kafka  # only for its check that Kafka can run here
    with KafkaNode(NodeOptions()) as node:
        world = BrokerWorld(node.bootstrap_servers, "consumer")
        topic = world.topic()
        tp = (topic, 0)
        source, told = world.source(topic)
        sink, reports = world.sink(message_timeout_ms=120_000)
        for token in range(50):
            sink.produce(topic, None, b"%d" % token, [], token)
        told.wait(lambda: len(told.records) == 50)
        source.commit(commit_of(told, 1, {tp: 10}))
        told.wait(lambda: told.answer(1))
        node.kill()
        for token in range(50, 100):
            sink.produce(topic, None, b"%d" % token, [], token)
        source.commit(commit_of(told, 2, {tp: 20}))
        node.start()
        reports.wait(lambda: len(reports.durable) == 100, timeout_s=120)
        assert reports.failed == []
        told.wait(lambda: len(told.records) == 100, timeout_s=120)
        assert Counter(m.value() for m in told.records) == Counter(b"%d" % i for i in range(100))
        assert told.offsets(tp) == list(range(100))
        # The commit of then has ended one way or the other, and commits work again.
        told.wait(lambda: told.answer(2), timeout_s=120)
        commit_id = 3
        source.commit(commit_of(told, commit_id, {tp: 100}))
        told.wait(lambda: told.answer(commit_id), timeout_s=120)
        while isinstance(told.answer(commit_id), CommitFailed):
            commit_id += 1
            source.commit(commit_of(told, commit_id, {tp: 100}))
            told.wait(lambda: told.answer(commit_id), timeout_s=120)  # noqa: B023
        assert world.committed(tp) == 100
        assert not any(fatal for _, fatal in told.faults + reports.faults)
        world.close()


@pytest.mark.mock_broker
def test_last_commit_in_an_outage_is_given_up(mock_broker: MockBroker) -> None:
    """A process that is told to end does end, though no broker answers."""
    world = BrokerWorld(mock_broker.bootstrap_servers, "consumer", mock_broker)
    topic = world.topic()
    world.write(topic, records(0, 5))
    source, told = world.source(topic, commit_timeout_ms=300)
    told.wait(lambda: len(told.records) == 5)
    mock_broker.set_broker_up(1, False)
    started = time.monotonic()
    source.stop_polling()
    source.commit(commit_of(told, 1, {(topic, 0): 3}))
    source.commit(commit_of(told, 2, {(topic, 0): 5}, synchronous=True))
    told.wait(lambda: told.answer(2))
    for commit_id in (1, 2):  # not for good: a drain tries again while it has time
        answer = told.answer(commit_id)
        assert isinstance(answer, CommitFailed)
        assert answer.retryable
    # The client waits for that commit however long it takes; we don't wait for the client.
    source.close(0.1)
    # Far from the 46 s that the client takes: not a measurement, a difference in kind.
    assert time.monotonic() - started < 30
    mock_broker.set_broker_up(1, True)  # or its client looks for it until the tests end
    assert source.close(60)
