"""The topics as a user's program sees them: queries in, results out.

What `send`, `tail`, `dlq` and `demo` share. Written straight on the client library, without any of
the aggregator's own adapters, so that it also shows how a producer and a consumer look. Every call
on one object comes from one thread. Knows nothing of what a record holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

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
QUIET = logging.getLogger("aggregator.commands.librdkafka")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False

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
        except KafkaException as error:
            self._consumer.close()
            raise KafkaClientError(sentence(error, topics.bootstrap_servers)) from error
        except KafkaClientError:
            self._consumer.close()
            raise

    def _starts(self, topics: Topics, *, from_beginning: bool) -> list[TopicPartition]:
        partitions: list[int] = []
        for topic in (topics.queries, topics.results):
            found = self._consumer.list_topics(topic, timeout=METADATA_TIMEOUT_S).topics[topic]
            if found.error is not None or not found.partitions:
                raise KafkaClientError(f"there is no topic {topic!r} at {topics.bootstrap_servers}")
            partitions = sorted(found.partitions)
        starts = []
        for partition in partitions:
            start = TopicPartition(topic, partition, OFFSET_BEGINNING)
            if not from_beginning:
                _, start.offset = self._consumer.get_watermark_offsets(
                    start, timeout=METADATA_TIMEOUT_S
                )
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
        """
        try:
            self._producer.produce(
                self._topic, value, key, headers=headers, on_delivery=on_delivery
            )
        except KafkaException as error:
            raise KafkaClientError(f"a query was not accepted: {error.args[0].str()}") from error

    def poll(self, timeout_s: float = 0) -> None:
        """Serve delivery reports."""
        self._producer.poll(timeout_s)

    def flush(self, timeout_s: float) -> int:
        """Wait until all is delivered; gives how many records are not."""
        return int(self._producer.flush(timeout_s))


def passing(error: KafkaError) -> bool:
    """Whether an error of a read is news about connections rather than about the topic."""
    return error.code() in (
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
    )


def sentence(error: KafkaException, servers: str) -> str:
    """One line for a failed look-up."""
    cause: KafkaError = error.args[0]
    if passing(cause):
        return f"no Kafka broker answers at {servers}"
    return f"looking up the topics at {servers} failed: {cause.str()}"
