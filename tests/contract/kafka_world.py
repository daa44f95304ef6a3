"""The worlds in which the Kafka contract runs: the fake, the mock cluster, real Kafka.

A `World` makes topics, sources and sinks, and looks at the broker from outside. `Told` is the
listener that keeps everything a source or sink says, and waits for it without sleeping.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, Protocol

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from aggregator.adapters.kafka_config import KafkaOptions
from aggregator.adapters.kafka_sink import KafkaSink, SinkOptions
from aggregator.adapters.kafka_source import GroupEvent, KafkaSource, RawBatch, SourceOptions
from aggregator.adapters.kafka_transactions import (
    KafkaTransactions,
    TransactionRecord,
    TransactionsOptions,
)
from aggregator.adapters.mock_broker import MockBroker
from aggregator.core.effects import Commit, CommitOffset
from aggregator.core.events import CommitDone, CommitFailed, PartitionsAssigned, WriteFault
from aggregator.core.query import TopicPartition as Tp
from aggregator.wire.headers import Headers
from tests.conftest import unique_name
from tests.fakes.kafka import FakeBroker, FakeSink, FakeSource
from tests.fakes.transactions import FakeTransactions

WAIT_S = 60.0
"""Generous: the machine that runs this may be busy. Nothing waits longer than it has to."""

Record = tuple[bytes | None, bytes | None, Headers | None]
"""(key, value, headers)."""


class Source(Protocol):
    """The port, as the driver knows it."""

    def start(self) -> None: ...
    def commit(self, commit: Commit) -> None: ...
    def send_offsets(self, request: Any) -> None: ...
    def pause(self, partitions: Sequence[Tp]) -> None: ...
    def resume(self, partitions: Sequence[Tp]) -> None: ...
    def release(self, revoke_id: int) -> None: ...
    def stop_polling(self) -> None: ...
    def taken(self) -> None: ...
    def close(self, timeout_s: float) -> bool: ...


class Sink(Protocol):
    """The port, as the driver knows it."""

    @property
    def unconfirmed(self) -> int: ...

    def produce(  # noqa: PLR0917 - as in the port
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        token: int,
        alone: bool = False,
    ) -> None: ...
    def flush(self, timeout_s: float) -> int: ...
    def close(self, timeout_s: float = 5.0) -> None: ...


class Offsets(Protocol):
    """The source, as a transactional producer knows it."""

    def send_offsets(self, request: Any) -> None: ...


class Transactions(Protocol):
    """The port, as the driver knows it."""

    def init(self, timeout_s: float = 30.0) -> None: ...
    def commit(
        self,
        commit_id: int,
        records: Sequence[TransactionRecord[int]],
        offsets: Sequence[CommitOffset],
    ) -> None: ...
    def abort(self, commit_id: int) -> None: ...
    def close(self, timeout_s: float = 5.0) -> bool: ...


class Told:
    """What a source or a sink said, in order; a driver that admits all at once by itself."""

    def __init__(self, pump: Callable[[], None] | None = None) -> None:
        self.source: Source | None = None
        self.take_at_once = True
        self.take_assigned_at_once = True
        self.batches: list[RawBatch] = []
        self.records: list[Message[Any, Any]] = []
        self.positions: dict[Tp, int] = {}
        self.events: list[GroupEvent] = []
        self.losses: list[tuple[Tp, int]] = []
        self.faults: list[tuple[str, bool]] = []
        self.durable: list[int] = []
        self.failed: list[tuple[int, WriteFault, str]] = []
        self.on_batch_do: Callable[[RawBatch], None] | None = None
        self._changed = threading.Condition()
        self._pump = pump

    def on_batch(self, batch: RawBatch) -> None:
        with self._changed:
            self.batches.append(batch)
            self.records.extend(batch.messages)
            for position in batch.positions:
                assert batch.epochs[position.tp] == position.epoch
                self.positions[position.tp] = position.offset_next
            if self.on_batch_do is not None:
                self.on_batch_do(batch)
            if self.take_at_once and self.source is not None:
                self.source.taken()
            self._changed.notify_all()

    def on_event(self, event: GroupEvent) -> None:
        with self._changed:
            self.events.append(event)
            assigned = isinstance(event, PartitionsAssigned)
            if assigned and self.take_assigned_at_once and self.source is not None:
                self.source.taken()
            self._changed.notify_all()

    def on_retention_loss(self, tp: Tp, count: int) -> None:
        with self._changed:
            self.losses.append((tp, count))
            self._changed.notify_all()

    def on_fault(self, message: str, *, fatal: bool) -> None:
        with self._changed:
            self.faults.append((message, fatal))
            self._changed.notify_all()

    def on_reports(
        self, durable: Sequence[int], failed: Sequence[tuple[int, WriteFault, str]]
    ) -> None:
        with self._changed:
            self.durable.extend(durable)
            self.failed.extend(failed)
            self._changed.notify_all()

    def wait(self, what: Callable[[], object], *, timeout_s: float = WAIT_S) -> None:
        """Return once `what()` is true; fail with all that was said after the timeout."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not what():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise AssertionError(f"in vain after {timeout_s} s; {self}")
                if self._pump is not None:
                    self._pump()
                else:
                    self._changed.wait(left_s)

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def epochs(self) -> dict[Tp, int]:
        """The number under which each partition was last assigned."""
        return {tp: e.epoch for e in self.of(PartitionsAssigned) for tp in e.partitions}

    def offsets(self, tp: Tp) -> list[int]:
        """Return the offsets that came of a partition, in order of coming."""
        return [offset_of(m) for m in self.records if (m.topic(), m.partition()) == tp]

    def answer(self, commit_id: int) -> CommitDone | CommitFailed | None:
        """Return what became of a commit; fails when it was answered twice."""
        ended = self.of(CommitDone) + self.of(CommitFailed)
        answers = [event for event in ended if event.commit_id == commit_id]
        assert len(answers) <= 1
        return answers[0] if answers else None

    def __str__(self) -> str:
        return (
            f"{len(self.records)} records, positions {self.positions}, events {self.events}, "
            f"losses {self.losses}, faults {self.faults}, {len(self.durable)} durable, "
            f"failed {self.failed[:5]}"
        )


def offset_of(message: Message[Any, Any]) -> int:
    offset = message.offset()
    assert offset is not None
    return offset


def transactions_options(kafka: KafkaOptions, options: dict[str, Any]) -> TransactionsOptions:
    """Those of the world's group; `overrides` are the producer's."""
    kafka = replace(kafka, overrides=options.pop("overrides", {}))
    return TransactionsOptions(kafka=kafka, **{"instance_name": "one", **options})


def commit_of(
    told: Told, commit_id: int, offsets: dict[Tp, int], *, synchronous: bool = False
) -> Commit:
    """Make a commit under the current epochs."""
    return Commit(
        commit_id=commit_id,
        offsets=[
            CommitOffset(tp=tp, epoch=told.epochs[tp], offset_next=offset)
            for tp, offset in offsets.items()
        ],
        synchronous=synchronous,
    )


class World(ABC):
    """Somewhere to run the contract. Everything it made is closed by `close`."""

    real = False
    """Whether it knows topic settings, sizes, transactions and deleted records."""
    options: KafkaOptions

    @abstractmethod
    def topic(self, partitions: int = 1, **config: str) -> str:
        """Make a topic; underscores in config keys are dots."""

    @abstractmethod
    def write(self, topic: str, records: Sequence[Record], *, partition: int = 0) -> None:
        """Append records; returns when they are durable."""

    @abstractmethod
    def read(self, topic: str, count: int) -> list[Message[Any, Any]]:
        """Return the first `count` records of all partitions."""

    @abstractmethod
    def committed(self, tp: Tp) -> int:
        """Return the group's committed offset; negative: none."""

    @abstractmethod
    def source(
        self, topic: str, *, take_assigned_at_once: bool = True, **options: Any
    ) -> tuple[Source, Told]:
        """Start a member of the world's one group."""

    @abstractmethod
    def sink(self, **options: Any) -> tuple[Sink, Told]:
        """Make a sink."""

    @abstractmethod
    def transactions(self, source: Offsets, **options: Any) -> tuple[Transactions, Told]:
        """Make a transactional producer whose offsets are those of `source`."""

    @abstractmethod
    def write_aborted(self, topic: str, count: int) -> None:
        """Append an aborted transaction of so many records: offsets without records."""

    @abstractmethod
    def delete_records(self, tp: Tp, before: int) -> None:
        """Delete a partition's records below an offset, as retention does."""

    @abstractmethod
    def close(self) -> None:
        """Close everything that was made."""


class BrokerWorld(World):
    """A broker behind an address: the mock cluster or real Kafka."""

    def __init__(
        self,
        bootstrap_servers: str,
        protocol: Literal["classic", "consumer"],
        mock: MockBroker | None = None,
    ) -> None:
        self._address: Any = {"bootstrap.servers": bootstrap_servers}
        self.mock = mock
        self._closers: list[Callable[[], object]] = []
        self.real = mock is None
        overrides: dict[str, str | int | float | bool] = {}
        if protocol == "classic":
            # A member learns of a rebalance by its heartbeat: 3 s by default.
            overrides["heartbeat.interval.ms"] = 200
        self.options = KafkaOptions(
            bootstrap_servers=bootstrap_servers,
            group_id=unique_name("group"),
            group_protocol=protocol,
            session_timeout_ms=6_000,
            overrides=overrides,
        )

    def topic(self, partitions: int = 1, **config: str) -> str:
        name = unique_name("topic")
        if self.mock is not None:
            self.mock.create_topic(name, partitions)
            return name
        dotted = {key.replace("_", "."): value for key, value in config.items()}
        admin = AdminClient(self._address)
        admin.create_topics([NewTopic(name, partitions, 1, config=dotted)])[name].result(WAIT_S)
        return name

    def write(self, topic: str, records: Sequence[Record], *, partition: int = 0) -> None:
        producer = Producer(self._address)
        errors: list[object] = []
        for key, value, headers in records:
            producer.produce(
                topic,
                value,
                key,
                partition,
                on_delivery=lambda error, _: errors.append(error),
                headers=headers,  # type: ignore[arg-type] # lists are invariant
            )
        assert producer.flush(WAIT_S) == 0
        assert errors == [None] * len(records)

    def read(self, topic: str, count: int) -> list[Message[Any, Any]]:
        reader = self._outsider()
        partitions = reader.list_topics(topic, WAIT_S).topics[topic].partitions
        reader.assign([TopicPartition(topic, p, 0) for p in partitions])
        messages: list[Message[Any, Any]] = []
        deadline = time.monotonic() + WAIT_S
        while len(messages) < count and time.monotonic() < deadline:
            messages += reader.consume(count - len(messages), 1.0)
        reader.close()
        assert len(messages) == count
        assert [m.error() for m in messages] == [None] * count
        return messages

    def committed(self, tp: Tp) -> int:
        reader = self._outsider()
        try:
            return reader.committed([TopicPartition(*tp)], timeout=WAIT_S)[0].offset
        finally:
            reader.close()

    def _outsider(self) -> Consumer:
        """A consumer of the group's name that never joins it."""
        config = {"group.id": self.options.group_id, "enable.auto.commit": False}
        return Consumer({**self._address, **config})

    def source(
        self, topic: str, *, take_assigned_at_once: bool = True, **options: Any
    ) -> tuple[Source, Told]:
        kafka = {k: options.pop(k) for k in list(options) if hasattr(self.options, k)}
        told = Told()
        source = KafkaSource(
            SourceOptions(kafka=replace(self.options, **kafka), topic=topic, **options), told
        )
        told.source = source
        told.take_assigned_at_once = take_assigned_at_once
        self._closers.append(lambda: source.close(WAIT_S))
        source.start()
        return source, told

    def sink(self, **options: Any) -> tuple[Sink, Told]:
        kafka = {k: options.pop(k) for k in list(options) if hasattr(self.options, k)}
        kafka.setdefault("overrides", {})
        told = Told()
        sink: KafkaSink[int] = KafkaSink(
            SinkOptions(kafka=replace(self.options, **kafka), **options), told
        )
        self._closers.append(lambda: sink.close(1.0))
        return sink, told

    def transactions(self, source: Offsets, **options: Any) -> tuple[Transactions, Told]:
        told = Told()
        made: KafkaTransactions[int] = KafkaTransactions(
            transactions_options(self.options, options), told
        )
        self._closers.append(lambda: made.close(WAIT_S))
        made.init(WAIT_S)
        made.start(source)
        return made, told

    def raw_transaction(self, topic: str, *, offset_next: int) -> tuple[Producer, Consumer]:
        """Return an open transaction with an offset, and the member of the group that it is of."""
        consumer = Consumer(
            {
                **self._address,
                "group.id": self.options.group_id,
                "group.protocol": self.options.group_protocol,
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                **(
                    {"partition.assignment.strategy": "cooperative-sticky"}
                    if self.options.group_protocol == "classic"
                    else {}
                ),
            }
        )
        consumer.subscribe([topic])
        assert consumer.poll(WAIT_S) is not None
        producer = Producer({**self._address, "transactional.id": unique_name("raw")})
        producer.init_transactions(WAIT_S)
        producer.begin_transaction()
        producer.send_offsets_to_transaction(
            [TopicPartition(topic, 0, offset_next)], consumer.consumer_group_metadata(), WAIT_S
        )
        return producer, consumer

    def write_aborted(self, topic: str, count: int) -> None:
        producer = Producer({**self._address, "transactional.id": unique_name("writer")})
        producer.init_transactions(WAIT_S)
        producer.begin_transaction()
        for _ in range(count):
            producer.produce(topic, b"aborted", partition=0)
        producer.flush(WAIT_S)
        producer.abort_transaction(WAIT_S)

    def delete_records(self, tp: Tp, before: int) -> None:
        admin = AdminClient(self._address)
        for future in admin.delete_records([TopicPartition(*tp, before)]).values():
            future.result(WAIT_S)

    def close(self) -> None:
        for closer in reversed(self._closers):
            closer()


class FakeWorld(World):
    """Kafka in memory; time passes as it is waited for."""

    real = True

    def __init__(self) -> None:
        self._now_s = 0.0
        self.broker = FakeBroker(lambda: self._now_s)
        self.options = KafkaOptions(bootstrap_servers="fake", group_id="group")

    def _pump(self) -> None:
        self._now_s += 0.01
        self.broker.pump()

    def topic(self, partitions: int = 1, **config: str) -> str:
        name = unique_name("topic")
        limit = int(config.get("max_message_bytes", "1048588"))
        self.broker.create_topic(name, partitions, limit)
        return name

    def write(self, topic: str, records: Sequence[Record], *, partition: int = 0) -> None:
        self.broker.log((topic, partition)).entries.extend(records)

    def read(self, topic: str, count: int) -> list[Message[Any, Any]]:
        logs = enumerate(self.broker.topics[topic].logs)
        offsets = [(p, offset) for p, log in logs for offset in range(log.start, log.end)]
        found = [self.broker.message((topic, p), offset) for p, offset in offsets]
        messages = [message for message in found if message is not None]
        assert len(messages) == count
        return messages

    def committed(self, tp: Tp) -> int:
        return self.broker.group(self.options.group_id).committed.get(tp, -1)

    def source(
        self, topic: str, *, take_assigned_at_once: bool = True, **options: Any
    ) -> tuple[Source, Told]:
        kafka = {k: options.pop(k) for k in list(options) if hasattr(self.options, k)}
        told = Told(self._pump)
        source = FakeSource(
            self.broker,
            SourceOptions(kafka=replace(self.options, **kafka), topic=topic, **options),
            told,
        )
        told.source = source
        told.take_assigned_at_once = take_assigned_at_once
        source.start()
        return source, told

    def sink(self, **options: Any) -> tuple[Sink, Told]:
        kafka = {k: options.pop(k) for k in list(options) if hasattr(self.options, k)}
        told = Told(self._pump)
        sink_options = SinkOptions(kafka=replace(self.options, **kafka), **options)
        sink: FakeSink[int] = FakeSink(self.broker, sink_options, told)
        return sink, told

    def transactions(self, source: Offsets, **options: Any) -> tuple[Transactions, Told]:
        told = Told(self._pump)
        made: FakeTransactions[int] = FakeTransactions(
            self.broker, transactions_options(self.options, options), told
        )
        made.init()
        made.start(source)
        return made, told

    def write_aborted(self, topic: str, count: int) -> None:
        self.broker.append_gap((topic, 0), count + 1)

    def delete_records(self, tp: Tp, before: int) -> None:
        self.broker.delete_records(tp, before)

    def close(self) -> None:
        pass


_FAKE = pytest.param("fake")
_MOCK = pytest.param("mock", marks=pytest.mark.mock_broker)
_CLASSIC = pytest.param("kafka-classic", marks=pytest.mark.kafka)
_CONSUMER = pytest.param("kafka-consumer", marks=pytest.mark.kafka)

TRUTHFUL = [_FAKE, _CLASSIC, _CONSUMER]
"""Parameters of a world fixture: worlds that know transactions, retention and topic settings."""
EVERYWHERE = [*TRUTHFUL, _MOCK]
CLIENTS = [_CLASSIC, _CONSUMER, _MOCK]
"""Those in which the client library runs."""
ONE_OF_EACH_TRUTHFUL = [_FAKE, _CONSUMER]
"""For what is the same in both group protocols."""
ONE_OF_EACH = [*ONE_OF_EACH_TRUTHFUL, _MOCK]


def make_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Make the world that the fixture's parameter names, for one test."""
    with ExitStack() as stack:
        world: World
        if request.param == "fake":
            world = FakeWorld()
        elif request.param == "mock":
            broker = stack.enter_context(MockBroker())
            # Its cooperative-sticky groups are slow; its KIP-848 groups are not.
            world = BrokerWorld(broker.bootstrap_servers, "consumer", broker)
        else:
            node = request.getfixturevalue("kafka")
            classic = request.param == "kafka-classic"
            world = BrokerWorld(node.bootstrap_servers, "classic" if classic else "consumer")
        stack.callback(world.close)
        yield world
