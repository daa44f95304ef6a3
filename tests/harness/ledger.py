"""Who got what: queries put on a topic, and the results and dead letters that came of them.

One record in, one result out: results are matched by `source`, so a lost or a doubled one shows
whatever its id says. `accounts` keeps the books and judges them; this is their side towards a
broker, a mock cluster and a real one alike. May be used by several threads, one a method.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from aggregator.commands.received import ReceivedResult, read_result
from aggregator.wire.headers import REPLAYED
from tests.harness.accounts import Accounts, Answer, Header, Letter, Limits, Place, Sent, Snapshot

WAIT_S = 60.0
ERRORS = "__aggregator.errors."
ANY_NUMBER = Limits(duplicates_max=2**31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The topics, and the group that reads the first."""

    queries: str = "queries"
    results: str = "results"
    dlq: str = "queries.dlq"
    group: str = "aggregator"


@dataclass
class Ledger:
    """Of one broker, one group and its topics."""

    bootstrap_servers: str
    names: Names = field(default_factory=Names)
    accounts: Accounts = field(default_factory=lambda: Accounts(ANY_NUMBER))
    keep_results: bool = True
    """Whether whole results are kept, vectors and all."""
    results: dict[Place, list[ReceivedResult]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read both output topics from their beginning."""
        self.lock = threading.RLock()
        """Of the books."""
        self.failed: list[str] = []
        """Records that could not be sent."""
        self._producer = Producer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "linger.ms": 2,
                "log_level": 2,
                # So that what is sent in an outage is on the topic once, after it.
                "enable.idempotence": True,
                "message.timeout.ms": 300_000,
                "reconnect.backoff.max.ms": 500,
            }
        )
        self._consumer = self._reader("ledger")
        self._partitions = self._number_of_partitions()
        self._outputs = [
            KafkaPartition(topic, number, 0)
            for topic in (self.names.results, self.names.dlq)
            for number in range(self._partitions[topic])
        ]
        self._consumer.assign(self._outputs)
        self._asker: Consumer | None = None

    def _reader(self, group: str, isolation: str = "read_committed") -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": group,
                # Acknowledged records do not vanish: reading again would look like duplicates.
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
                "isolation.level": isolation,
                "fetch.wait.max.ms": 10,
                "reconnect.backoff.max.ms": 500,
                "log_level": 2,
            }
        )

    def _number_of_partitions(self) -> dict[str, int]:
        topics = self._consumer.list_topics(timeout=10).topics
        names = (self.names.queries, self.names.results, self.names.dlq)
        return {name: len(topics[name].partitions) for name in names}

    @property
    def partitions(self) -> int:
        """Of the queries topic."""
        return self._partitions[self.names.queries]

    # Sending -------------------------------------------------------------------------------------

    def send(
        self,
        name: str,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        *,
        partition: int = 0,
    ) -> None:
        """Put a record on the queries topic, under a name of the test's choosing."""
        given = tuple((headers or {}).items())
        self.produce(Sent(name=name, value=value, headers=given), partition)

    def produce(self, sent: Sent, partition: int, *, timestamp_ms: int = 0) -> None:
        """The same with all that is to be known of it; `timestamp_ms` 0: now."""

        def delivered(error: KafkaError | None, message: Message) -> None:
            offset = message.offset()
            if error is not None or offset is None:
                self.failed.append(f"{sent.name}: {error}")
                return
            with self.lock:
                self.accounts.note_sent((partition, offset), sent, message.timestamp()[1])

        self._producer.produce(
            self.names.queries,
            sent.value,
            sent.key,
            partition=partition,
            headers=list(sent.headers),
            timestamp=timestamp_ms,
            on_delivery=delivered,
        )
        self._producer.poll(0)

    def serve(self, seconds: float) -> None:
        """Let delivery reports come in."""
        self._producer.poll(seconds)

    def flush(self) -> None:
        """Wait until all that was sent is on the topic."""
        assert self._producer.flush(WAIT_S) == 0
        assert self.failed == []

    # Reading -------------------------------------------------------------------------------------

    def read(self, seconds: float = 0.2) -> int:
        """Take in what has come of results and letters; returns how many records that were.

        Raises:
            KafkaException: an error that does not pass when the broker comes back.
        """
        records = self._consumer.consume(5000, seconds)
        count = 0
        with self.lock:
            for record in records:
                error = record.error()
                if error is None:
                    self._take(record)
                    count += 1
                elif not _passes(error):
                    raise KafkaException(error)
        return count

    def _take(self, record: Message) -> None:
        place = (record.partition() or 0, record.offset() or 0)
        if record.topic() == self.names.dlq:
            self._take_letter(record, place)
            return
        result = read_result(record)
        fields = result.fields["source"]
        source = (int(fields.get("partition", 0)), int(fields.get("offset", 0)))
        reason = "OK" if result.ok else str(result.fields["error"]["reason"])
        self.accounts.note_answer(source, Answer(reason, place, record.timestamp()[1]))
        if self.keep_results:
            self.results.setdefault(source, []).append(result)

    def _take_letter(self, record: Message, place: Place) -> None:
        headers: list[Header] = list(record.headers() or [])  # type: ignore[arg-type]
        if record.value() is None and REPLAYED in dict(headers):
            return  # no letter: it says that one was sent again
        why = {name: value or b"" for name, value in headers if name.startswith(ERRORS)}
        key, value = record.key(), record.value()
        assert not isinstance(key, str)
        assert not isinstance(value, str)
        self.accounts.note_letter(
            (int(why[ERRORS + "partition"]), int(why[ERRORS + "offset"])),
            Letter(
                reason=why[ERRORS + "reason"].decode(),
                place=place,
                key=key,
                value=value,
                headers=tuple(headers),
            ),
        )

    def wait_for_all(self, timeout_s: float = WAIT_S) -> None:
        """Read until every record sent has a result; fails when that takes too long."""
        self.wait_until(lambda: not self.accounts.lost, timeout_s)
        self.read()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Read until it holds; fails, with what is without a result, when that takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, (
                f"{len(self.lost)} of {len(self.accounts.sent)} without a result: {self.lost[:10]}"
            )
            self.read()

    def read_past(self, snapshot: Snapshot) -> bool:
        """Whether everything below the snapshot's ends has been read."""
        ends = {self.names.results: snapshot.results_ends, self.names.dlq: snapshot.letters_ends}
        # Positions stand behind transaction markers too.
        return all(
            place.offset >= ends[place.topic].get(place.partition, 0)
            or not ends[place.topic].get(place.partition, 0)
            for place in self._consumer.position(self._outputs)
        )

    # Committed offsets ---------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What the group has committed, then the ends of what it writes. From one thread only.

        Raises:
            KafkaException: the broker does not answer; the next call asks by a new client.
        """
        try:
            return self._snapshot()
        except KafkaException:
            asker, self._asker = self._asker, None
            if asker is not None:
                asker.close()
            raise

    def _snapshot(self) -> Snapshot:
        if self._asker is None:  # kept, since each costs a connection
            # Ends are those of all that is written: a transaction's offsets may be seen before its
            # last records are, but never before they are written.
            self._asker = self._reader(self.names.group, "read_uncommitted")
        committed = self._committed(self._asker)
        ends: dict[str, dict[int, int]] = {self.names.results: {}, self.names.dlq: {}}
        for place in self._outputs:
            _, end = self._asker.get_watermark_offsets(
                KafkaPartition(place.topic, place.partition), timeout=5, cached=False
            )
            ends[place.topic][place.partition] = end
        return Snapshot(
            committed=committed,
            results_ends=ends[self.names.results],
            letters_ends=ends[self.names.dlq],
        )

    def committed(self, group_id: str | None = None) -> dict[int, int]:
        """The group's offsets by partition of the queries topic."""
        # Not the admin client: the mock cluster does not answer it.
        member = self._reader(group_id or self.names.group)
        try:
            return self._committed(member)
        finally:
            member.close()

    def _committed(self, member: Consumer) -> dict[int, int]:
        topic = self.names.queries
        asked = [KafkaPartition(topic, number) for number in range(self._partitions[topic])]
        found = member.committed(asked, timeout=10)
        return {entry.partition: entry.offset for entry in found if entry.offset >= 0}

    # Questions -----------------------------------------------------------------------------------

    @property
    def sent(self) -> dict[Place, str]:
        """What each record was called by the test."""
        return {place: sent.name for place, sent in self.accounts.sent.items()}

    @property
    def letters(self) -> Counter[Place]:
        """How many dead letters each record has."""
        return Counter({place: len(found) for place, found in self.accounts.letters.items()})

    def result_of(self, name: str) -> ReceivedResult:
        """The one result of a record; fails if it has none or several."""
        places = [place for place, given in self.sent.items() if given == name]
        (result,) = [result for place in places for result in self.results.get(place, [])]
        return result

    @property
    def lost(self) -> list[str]:
        """Records without a result."""
        return [self.accounts.sent[place].name for place in self.accounts.lost]

    @property
    def errors(self) -> list[str]:
        """The results that hold no vector, as lines."""
        found = itertools.chain.from_iterable(self.results.values())
        return [result.as_line() for result in found if not result.ok]

    @property
    def duplicates(self) -> int:
        """Results beyond the first of each record."""
        return self.accounts.duplicates

    def sent_ends(self) -> dict[int, int]:
        """By partition, the offset behind the last record sent."""
        return self.accounts.ends()

    def close(self) -> None:
        """Let go of the consumers."""
        self._consumer.close()
        if self._asker is not None:
            self._asker.close()


def _passes(error: KafkaError) -> bool:
    """Whether it is an outage, which ends."""
    outage = {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._MAX_POLL_EXCEEDED,
    }
    return error.retriable() or error.code() in outage
