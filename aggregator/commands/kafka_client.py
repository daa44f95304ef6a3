"""The topics as a user's program sees them: queries in, results out.

What `send`, `tail`, `dlq` and `demo` share. Written straight on the client library, without any of
the aggregator's own adapters, so that it also shows how a producer and a consumer look. Every call
on one object comes from one thread. Knows nothing of what a record holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

READ_RECORDS_MAX = 1_000
METADATA_TIMEOUT_S = 5.0
_RETRY_S = 0.05
_NOT_YET = frozenset({KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION})
"""What is said of a topic that was made a moment ago."""
QUIET = logging.getLogger("aggregator.commands.librdkafka")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False

Found = TypeVar("Found")
Headers = list[tuple[str, str | bytes | None]]


class KafkaClientError(Exception):
    """The broker or a topic can't be reached: the message is one line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """Where queries go and results come. `client`: addresses and security, as librdkafka has it."""

    client: Mapping[str, object]
    queries: str
    results: str

    @property
    def bootstrap_servers(self) -> str:
        """HOST:PORT,..."""
        return str(self.client["bootstrap.servers"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterTopics:
    """Where dead letters lie and where they are sent again. `client`: as in `Topics`."""

    client: Mapping[str, object]
    queries: str
    letters: str

    @property
    def bootstrap_servers(self) -> str:
        """HOST:PORT,..."""
        return str(self.client["bootstrap.servers"])


class ResultReader:
    """Reads a topic's partitions without a group: from now on, or from the beginning.

    The start is fixed when the object is made, so what is written later is not missed. A context
    manager.
    """

    def __init__(self, topics: Topics, *, from_beginning: bool = False) -> None:
        """Look the topics up and start at the end, or beginning, of each results partition.

        The queries topic is looked for too, since a producer would create a misspelt one.

        Raises:
            KafkaClientError: no broker answers, or a topic is missing.
        """
        self._consumer = Consumer(
            {
                **topics.client,
                # The library asks for a group's name; none is joined and nothing is committed.
                "group.id": "aggregator-reader",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 10,
                "logger": QUIET,
            }
        )
        try:
            self._consumer.assign(self._starts(topics, from_beginning=from_beginning))
        except KafkaClientError:
            self._consumer.close()
            raise

    def _starts(self, topics: Topics, *, from_beginning: bool) -> list[TopicPartition]:
        servers = topics.bootstrap_servers
        partitions_of(self._consumer, topics.queries, servers)
        starts = []
        for partition in partitions_of(self._consumer, topics.results, servers):
            start = TopicPartition(topics.results, partition, OFFSET_BEGINNING)
            if not from_beginning:
                _, start.offset = watermarks_of(self._consumer, start, servers)
            starts.append(start)
        return starts

    def __enter__(self) -> Self:
        """Read in a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def read(self, timeout_s: float) -> list[Message]:
        """Wait up to `timeout_s` for a record; give it and what else has already come.

        `consume(n, t)` would wait for all n, hence the two steps.

        Raises:
            KafkaClientError: the topic has gone, or access to it.
        """
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        records = [first, *self._consumer.consume(READ_RECORDS_MAX - 1, 0)]
        for record in records:
            error = record.error()
            # What heals by itself is the client library's to heal; silence is the caller's timeout.
            if error is not None and not error.retriable() and not passing(error):
                raise KafkaClientError(f"reading results failed: {error.str()}")
        return [record for record in records if record.error() is None]

    def close(self) -> None:
        """Give the connections up."""
        self._consumer.close()


class QuerySender:
    """Produces records to the queries topic."""

    def __init__(self, topics: Topics, *, idempotent: bool) -> None:
        """Connect in the background; failures show in the delivery reports.

        `idempotent`: a retried send makes no second record; the first one then takes half a second,
        since the library asks for its producer id on a timer.
        """
        self._topic = topics.queries
        self._producer = Producer(
            {
                **topics.client,
                # Where Java clients put a key too; the library's own default differs.
                "partitioner": "murmur2_random",
                "acks": "all",
                "enable.idempotence": idempotent,
                "linger.ms": 1,
                "logger": QUIET,
            }
        )

    def send(
        self,
        value: bytes,
        headers: Headers,
        *,
        key: bytes | None,
        on_delivery: Callable[[KafkaError | None, Message], None],
    ) -> None:
        """Hand a record over; `on_delivery` is called from a later `poll` or `flush`.

        Raises:
            BufferError: the local queue is full: poll, then try again.
            KafkaClientError: the record was refused at once, such as one that is too large.
            KeyboardInterrupt: Ctrl-C came; the record is not handed over.
        """
        try:
            self._producer.produce(
                self._topic, value, key, headers=headers, on_delivery=on_delivery
            )
        except KafkaException as error:
            raise KafkaClientError(f"a query was not accepted: {error.args[0].str()}") from error
        except TypeError as error:
            # Python looks for signals while the client reads a header's name, and whatever a
            # handler raises then the client tells as a name that is no string. Ours always are.
            raise KeyboardInterrupt from error

    def poll(self, timeout_s: float = 0) -> None:
        """Serve delivery reports."""
        self._producer.poll(timeout_s)

    def flush(self, timeout_s: float) -> int:
        """Wait until all is delivered; gives how many records are not."""
        return int(self._producer.flush(timeout_s))


def partitions_of(client: Consumer | Producer, topic: str, servers: str) -> list[int]:
    """The numbers of a topic's partitions.

    `client` must not create topics (a producer by `allow.auto.create.topics`).

    Raises:
        KafkaClientError: no broker answers, or there is no such topic.
    """

    def ask() -> list[int]:
        found = client.list_topics(topic, METADATA_TIMEOUT_S).topics[topic]
        if found.error is not None and found.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
            raise KafkaException(found.error)
        if found.error is not None or not found.partitions:
            raise KafkaClientError(
                f"there is no topic {topic!r} at {servers} (`aggregator topics create` makes those "
                "of the settings)"
            )
        return sorted(found.partitions)

    return looked_up(ask, servers)


def watermarks_of(consumer: Consumer, partition: TopicPartition, servers: str) -> tuple[int, int]:
    """The first offset of a partition and the one behind its last committed record.

    Raises:
        KafkaClientError: no broker answers.
    """

    def ask() -> tuple[int, int]:
        found = consumer.get_watermark_offsets(partition, timeout=METADATA_TIMEOUT_S)
        if found is None:
            raise KafkaClientError(f"no Kafka broker answers at {servers}")
        return found

    return looked_up(ask, servers)


def looked_up(ask: Callable[[], Found], servers: str) -> Found:
    """Ask again what brokers can't tell in the first moment of a topic or of a connection.

    Raises:
        KafkaClientError: they still can't after METADATA_TIMEOUT_S, or say no.
    """
    deadline_s = time.monotonic() + METADATA_TIMEOUT_S
    while True:
        try:
            return ask()
        except KafkaException as error:
            cause = error.args[0]
            heals = passing(cause) or cause.code() in _NOT_YET
            if not heals or time.monotonic() > deadline_s:
                raise KafkaClientError(_sentence(error, servers)) from error
        time.sleep(_RETRY_S)


def passing(error: KafkaError) -> bool:
    """Whether an error of a read is news about connections rather than about the topic."""
    return error.code() in (
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
    )


def _sentence(error: KafkaException, servers: str) -> str:
    """One line for a failed look-up."""
    cause: KafkaError = error.args[0]
    if passing(cause):
        return f"no Kafka broker answers at {servers}"
    return f"looking up the topics at {servers} failed: {cause.str()}"
