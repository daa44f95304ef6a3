"""What the core may rely on when it writes: one suite for fake, mock cluster and real Kafka."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from aggregator.adapters.mock_broker import MockBroker
from aggregator.core.events import WriteFault
from aggregator.wire.headers import Headers
from ops.kafka.node import KafkaNode
from tests.contract.kafka_world import (
    ONE_OF_EACH,
    ONE_OF_EACH_TRUTHFUL,
    WAIT_S,
    BrokerWorld,
    Sink,
    Told,
    World,
    make_world,
)
from tests.fakes.murmur2 import partition_of_key

PRODUCE_API = 0
"""Kafka's protocol number of the produce request."""


@pytest.fixture(params=ONE_OF_EACH)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each world in turn."""
    yield from make_world(request)


@pytest.fixture(params=ONE_OF_EACH_TRUTHFUL)
def true_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Each world that knows topic settings."""
    yield from make_world(request)


def test_records_arrive_as_handed_over(world: World) -> None:
    topic = world.topic()
    sink, told = world.sink()
    headers: Headers = [
        ("content-type", b"application/json"),
        ("a", None),
        ("a", b"\x00"),
        ("", b""),
    ]
    written: list[tuple[bytes | None, bytes | None, Headers]] = [
        (b"k", b"value", headers),
        (None, b"no key", []),
        (b"", b"", [("x", b"")]),
        (b"k", None, []),
    ]
    for token, (key, value, sent) in enumerate(written):
        sink.produce(topic, key, value, sent, token, token % 2 == 1)
    told.wait(lambda: len(told.durable) == 4)
    assert sorted(told.durable) == [0, 1, 2, 3]
    assert told.failed == []
    assert sink.flush(WAIT_S) == sink.unconfirmed == 0
    read = [(m.key(), m.value(), m.headers() or []) for m in world.read(topic, 4)]
    assert sorted(map(repr, read)) == sorted(map(repr, written))


def test_every_record_is_reported_once_though_the_queue_is_full(world: World) -> None:
    topic = world.topic(partitions=3)
    sink, told = world.sink(overrides={"queue.buffering.max.messages": 10, "linger.ms": 0})
    for token in range(2_000):
        sink.produce(topic, b"k%d" % token, b"v%d" % token, [], token)
    told.wait(lambda: len(told.durable) == 2_000)
    assert sorted(told.durable) == list(range(2_000))
    assert told.failed == []
    values = Counter(m.value() for m in world.read(topic, 2_000))
    assert values == Counter(b"v%d" % token for token in range(2_000))


def test_keys_land_where_java_clients_put_them(world: World) -> None:
    topic = world.topic(partitions=7)
    sink, told = world.sink()
    keys = [b"key-%d" % i for i in range(200)] + [b"", "\u00e4\u00f6".encode(), b"\x00" * 300]
    for token, key in enumerate(keys):
        sink.produce(topic, key, b"", [], token)
    told.wait(lambda: len(told.durable) == len(keys))
    for message in world.read(topic, len(keys)):
        assert message.partition() == partition_of_key(message.key() or b"", 7)


def test_too_large_for_the_client_is_the_records_fault_and_its_mates_are_unharmed(
    world: World,
) -> None:
    topic = world.topic()
    sink, told = world.sink(message_bytes_max=10_000)
    for token in range(20):
        sink.produce(topic, b"k", b"x" * (20_000 if token == 7 else 100), [], token)
    told.wait(lambda: len(told.durable) + len(told.failed) == 20)
    ((token, fault, message),) = told.failed
    assert (token, fault) == (7, WriteFault.RECORD_ALONE)
    assert topic in message
    assert sorted(told.durable) == [i for i in range(20) if i != 7]


def test_too_large_for_the_topic_is_found_by_sending_each_alone(true_world: World) -> None:
    """The broker refuses a whole batch; the one that is at fault fails alone, its mates do not."""
    topic = true_world.topic(max_message_bytes="5000")
    sink, told = true_world.sink(batch_bytes_max=1_000_000)
    sizes = [100] * 10
    sizes[3] = 6_000
    for token, size in enumerate(sizes):
        sink.produce(topic, b"k", b"x" * size, [], token)
    told.wait(lambda: len(told.durable) + len(told.failed) == 10)
    assert 3 in {token for token, _, _ in told.failed}
    assert {fault for _, fault, _ in told.failed} == {WriteFault.RECORD}
    again = [token for token, _, _ in told.failed]
    told.failed.clear()
    for token in again:
        sink.produce(topic, b"k", b"x" * sizes[token], [], token, True)
    told.wait(lambda: len(told.durable) + len(told.failed) == 10)
    assert [(token, fault) for token, fault, _ in told.failed] == [(3, WriteFault.RECORD_ALONE)]
    assert sorted(told.durable) == [i for i in range(10) if i != 3]


def test_batches_fit_the_smallest_topic(true_world: World) -> None:
    topic = true_world.topic(max_message_bytes="5000")
    sink, told = true_world.sink(batch_bytes_max=5_000, overrides={"linger.ms": 50})
    for token in range(500):
        sink.produce(topic, None, b"x" * 400, [], token)
    told.wait(lambda: len(told.durable) + len(told.failed) == 500)
    assert told.failed == []


@pytest.mark.kafka
def test_a_time_beyond_a_topics_bounds_is_the_topics_fault(kafka: KafkaNode) -> None:
    """It is this host's clock that is wrong, for every record alike."""
    world = BrokerWorld(kafka.bootstrap_servers, "consumer")
    topic = world.topic(message_timestamp_before_max_ms="0")
    sink, told = world.sink()
    for token in range(100):  # one may be there within its millisecond
        sink.produce(topic, b"k", b"v", [], token, True)
    told.wait(lambda: len(told.durable) + len(told.failed) == 100)
    assert told.failed
    assert {fault for _, fault, _ in told.failed} == {WriteFault.TOPIC}
    assert "imestamp" in told.failed[0][2]
    world.close()


@pytest.mark.kafka
@pytest.mark.parametrize("keyless", [{3}, {3, 5}])
def test_an_invalid_record_and_its_mates_are_each_sent_alone(
    kafka: KafkaNode, keyless: set[int]
) -> None:
    """A compacted topic takes no record without a key, and tells of each in a batch by itself."""
    world = BrokerWorld(kafka.bootstrap_servers, "consumer")
    topic = world.topic(cleanup_policy="compact")
    sink, told = world.sink(overrides={"linger.ms": 50})
    for token in range(10):
        sink.produce(topic, None if token in keyless else b"k", b"v", [], token)
    told.wait(lambda: len(told.durable) + len(told.failed) == 10)
    assert {fault for _, fault, _ in told.failed} == {WriteFault.RECORD}
    again = [token for token, _, _ in told.failed]
    told.failed.clear()
    for token in again:
        sink.produce(topic, None if token in keyless else b"k", b"v", [], token, True)
    told.wait(lambda: len(told.durable) + len(told.failed) == 10)
    assert {token for token, _, _ in told.failed} == keyless
    assert {fault for _, fault, _ in told.failed} == {WriteFault.RECORD_ALONE}
    world.close()


def test_missing_topic_is_the_topics_fault(true_world: World) -> None:
    sink, told = true_world.sink(message_timeout_ms=1_000)
    sink.produce("no-such-topic", b"k", b"v", [], 1)
    told.wait(lambda: told.failed)
    ((token, fault, message),) = told.failed
    assert (token, fault) == (1, WriteFault.TOPIC)
    assert message.startswith("no-such-topic: ")


def test_refused_write_is_the_topics_fault(mock: MockBroker) -> None:
    world = BrokerWorld(mock.bootstrap_servers, "consumer", mock)
    topic = world.topic()
    sink, told = world.sink()
    topic_authorization_failed = 29
    mock.push_errors(PRODUCE_API, [topic_authorization_failed])
    sink.produce(topic, b"k", b"v", [], 1)
    told.wait(lambda: told.failed)
    assert [(token, fault) for token, fault, _ in told.failed] == [(1, WriteFault.TOPIC)]
    assert "authoriz" in told.failed[0][2].lower()
    world.close()


def test_outage_is_the_topics_fault_and_ends(mock: MockBroker) -> None:
    world = BrokerWorld(mock.bootstrap_servers, "consumer", mock)
    topic = world.topic()
    sink, told = world.sink(message_timeout_ms=1_000)
    produce_until_durable(sink, told, topic)
    told.failed.clear()
    mock.set_broker_up(1, False)
    sink.produce(topic, b"k", b"v", [], -1)
    told.wait(lambda: told.failed)
    assert [(token, fault) for token, fault, _ in told.failed] == [(-1, WriteFault.TOPIC)]
    assert told.faults  # the connection's trouble was told too
    assert not any(fatal for _, fatal in told.faults)
    mock.set_broker_up(1, True)
    produce_until_durable(sink, told, topic)
    world.close()


def produce_until_durable(sink: Sink, told: Told, topic: str) -> None:
    """Try again until it works, as the core does."""
    before = len(told.durable)
    for token in range(100):
        sink.produce(topic, b"k", b"v", [], token)
        told.wait(lambda: sink.unconfirmed == 0)
        if len(told.durable) > before:
            return
    raise AssertionError(f"nothing got through: {told}")


def test_close_reports_what_is_not_written(mock: MockBroker) -> None:
    world = BrokerWorld(mock.bootstrap_servers, "consumer", mock)
    topic = world.topic()
    sink, told = world.sink(overrides={"queue.buffering.max.messages": 10})
    sink.produce(topic, b"k", b"v", [], 0)
    assert sink.flush(WAIT_S) == 0
    mock.set_broker_up(1, False)
    for token in range(1, 30):  # in the client's queue, and over it
        sink.produce(topic, b"k", b"v", [], token)
    assert sink.flush(0.05) == 29
    sink.close()
    assert told.durable == [0]
    assert Counter(token for token, _, _ in told.failed) == Counter(range(1, 30))
    assert {fault for _, fault, _ in told.failed} == {WriteFault.TOPIC}
    with pytest.raises(RuntimeError):
        sink.produce(topic, b"k", b"v", [], 30)
    sink.close()


@pytest.fixture
def mock(mock_broker: MockBroker) -> MockBroker:
    return mock_broker
