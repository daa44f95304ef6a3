"""Who got what: queries put on a topic, and the results that came of them.

One record in, one result out: results are matched by `source`, so a lost or a doubled one shows
whatever its id says. Used against the mock cluster and real brokers alike.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from aggregator.commands.received import ReceivedResult, read_result

WAIT_S = 60.0

Place = tuple[int, int]
"""(partition, offset) on the queries topic."""


@dataclass
class Ledger:
    """Of one broker and one set of topics."""

    bootstrap_servers: str
    queries_topic: str = "queries"
    results_topic: str = "results"
    dlq_topic: str = "queries.dlq"
    sent: dict[Place, str] = field(default_factory=dict)
    """What each record was called by the test."""
    results: dict[Place, list[ReceivedResult]] = field(default_factory=dict)
    letters: Counter[Place] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Read both output topics from their beginning."""
        self._producer = Producer(
            {"bootstrap.servers": self.bootstrap_servers, "linger.ms": 2, "log_level": 2}
        )
        self._consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": "ledger",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
                "log_level": 2,
            }
        )
        partitions = []
        for topic in (self.results_topic, self.dlq_topic):
            count = len(self._consumer.list_topics(topic, timeout=10).topics[topic].partitions)
            partitions += [KafkaPartition(topic, number, 0) for number in range(count)]
        self._consumer.assign(partitions)

    def send(
        self,
        name: str,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        *,
        partition: int = 0,
    ) -> None:
        """Put a record on the queries topic, under a name of the test's choosing."""

        def delivered(error: object, message: object) -> None:
            if error is not None:
                raise KafkaException(error)
            self.sent[message.partition(), message.offset()] = name  # type: ignore[attr-defined]

        self._producer.produce(
            self.queries_topic,
            value,
            partition=partition,
            headers=list((headers or {}).items()),
            on_delivery=delivered,
        )
        self._producer.poll(0)

    def flush(self) -> None:
        """Wait until all that was sent is on the topic."""
        assert self._producer.flush(WAIT_S) == 0

    def read(self, seconds: float = 0.2) -> None:
        """Take in what has come of results and letters."""
        for record in self._consumer.consume(5000, seconds):
            assert record.error() is None, record.error()
            if record.topic() == self.dlq_topic:
                headers = dict(record.headers() or [])
                partition = int(headers["__aggregator.errors.partition"] or b"")
                offset = int(headers["__aggregator.errors.offset"] or b"")
                self.letters[partition, offset] += 1
                continue
            result = read_result(record)
            source = result.fields["source"]
            place = (int(source["partition"]), int(source["offset"]))
            self.results.setdefault(place, []).append(result)

    def wait_for_all(self, timeout_s: float = WAIT_S) -> None:
        """Read until every record sent has a result; fails when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while len(self.results) < len(self.sent):
            assert time.monotonic() < deadline, (
                f"{len(self.sent) - len(self.results)} of {len(self.sent)} without a result"
            )
            self.read()
        self.read()

    def result_of(self, name: str) -> ReceivedResult:
        """The one result of a record; fails if it has none or several."""
        places = [place for place, given in self.sent.items() if given == name]
        (result,) = [result for place in places for result in self.results.get(place, [])]
        return result

    @property
    def lost(self) -> list[str]:
        """Records without a result."""
        return [name for place, name in self.sent.items() if place not in self.results]

    @property
    def errors(self) -> list[str]:
        """The results that hold no vector, as lines."""
        found = itertools.chain.from_iterable(self.results.values())
        return [result.as_line() for result in found if not result.ok]

    @property
    def duplicates(self) -> int:
        """Results beyond the first of each record."""
        return sum(len(results) - 1 for results in self.results.values())

    def committed(self, group_id: str = "aggregator") -> dict[int, int]:
        """The group's offsets by partition of the queries topic."""
        # Not the admin client: the mock cluster does not answer it.
        member = Consumer({"bootstrap.servers": self.bootstrap_servers, "group.id": group_id})
        try:
            topic = self._consumer.list_topics(self.queries_topic, timeout=10)
            numbers = topic.topics[self.queries_topic].partitions
            asked = [KafkaPartition(self.queries_topic, number) for number in numbers]
            found = member.committed(asked, timeout=10)
        finally:
            member.close()
        return {entry.partition: entry.offset for entry in found if entry.offset >= 0}

    def sent_ends(self) -> dict[int, int]:
        """By partition, the offset behind the last record sent."""
        ends: dict[int, int] = {}
        for partition, offset in self.sent:
            ends[partition] = max(ends.get(partition, 0), offset + 1)
        return ends

    def close(self) -> None:
        """Let go of the consumer."""
        self._consumer.close()
