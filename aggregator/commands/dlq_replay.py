"""Dead letters sent again: a batch out, then marks for what was confirmed.

Owns the order on which a replay's promises stand. Invariants: a letter is marked only after its
send was confirmed by all in-sync replicas, and the next batch begins only after the marks of the
one before are durable, so that a kill at any instant repeats at most `BATCH_LETTERS_MAX` letters;
the first batch is one letter, so that missing rights show before more is sent; no more than the
rate is sent in any second but for one batch; a letter goes to the queries topic of the settings and
nowhere else, whatever its headers say. Knows nothing of how letters are chosen or shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from aggregator.commands.dlq_topic import StoredLetter
from aggregator.commands.kafka_client import (
    QUIET,
    DeadLetterTopics,
    KafkaClientError,
    partitions_of,
)
from aggregator.wire.headers import Headers
from aggregator.wire.replay import encode_replay, marker_headers

BATCH_LETTERS_MAX = 100
BATCH_BYTES_MAX = 8 * 1024 * 1024
"""Of values and keys held between reading and sending; one letter may exceed it."""
RATE_DEFAULT = 100.0
SLICE_S = 0.2
"""How long a signal may have to wait."""
_MESSAGE_TIMEOUT_MS = 30_000
_MESSAGE_BYTES_MAX = 1_000_000_000
"""The largest that the client takes: the broker is the judge of a record's size."""

_OF_THE_RECORD = frozenset(
    {
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
    }
)


class SendError(KafkaClientError):
    """The topic can't be written, so that no other letter can be sent either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What became of a batch. `refused`: with what the broker says of that record alone.

    `broken`: why the topic can't be written; what is in neither list was not confirmed.
    """

    confirmed: list[StoredLetter] = field(default_factory=list)
    refused: list[tuple[StoredLetter, str]] = field(default_factory=list)
    broken: str | None = None


class Port(Protocol):
    """Where a replay writes: Kafka, or a test's double."""

    def send(self, letters: Sequence[StoredLetter]) -> Sent:
        """Send them again and wait for what becomes of them."""

    def mark(self, letters: Sequence[StoredLetter]) -> None:
        """Append their markers and wait until they are durable. Raises SendError."""


@dataclass(slots=True)
class Outcome:
    """What a replay did. `hindered`: chosen, but not to be sent again, and why."""

    sent: int = 0
    hindered: list[tuple[StoredLetter, str]] = field(default_factory=list)
    hindered_count: int = 0
    stopped: bool = False

    def hinder(self, letter: StoredLetter, why: str) -> None:
        """Count it, and keep the first for the report."""
        self.hindered_count += 1
        if len(self.hindered) < HINDERED_SHOWN_MAX:
            self.hindered.append((letter, why))


HINDERED_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """`rate` letters a second; `queries_topic`: letters of other topics are not for this replay."""

    queries_topic: str
    replay_attempts_max: int
    rate: float = RATE_DEFAULT

    def hindrance(self, stored: StoredLetter) -> str | None:
        """Say why a letter can't be sent again; None: it can."""
        letter = stored.letter
        if letter.tp[0] != self.queries_topic:
            return f"it is from topic {letter.tp[0]!r}, not {self.queries_topic!r}"
        return letter.hindrance(self.replay_attempts_max)


class Replay:
    """One run over the letters chosen."""

    def __init__(
        self,
        port: Port,
        options: ReplayOptions,
        *,
        stopping: Callable[[], bool] = lambda: False,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`stopping` is asked between batches: what was begun is finished."""
        self._port = port
        self._options = options
        self._stopping = stopping
        self._clock_s = clock_s
        self._sleep = sleep
        self._next_s = clock_s()
        self.outcome = Outcome()

    def run(self, letters: Iterable[StoredLetter]) -> Outcome:
        """Send the letters until they end or a stop is asked for.

        Raises:
            SendError: a topic can't be written; `outcome` says what was done until then.
        """
        batch: list[StoredLetter] = []
        size = 0
        for stored in letters:
            if self._stopping():
                break
            why = self._options.hindrance(stored)
            if why is not None:
                self.outcome.hinder(stored, why)
                continue
            batch.append(stored)
            size += len(stored.letter.value or b"") + len(stored.letter.key or b"")
            if len(batch) >= self._batch_letters() or size >= BATCH_BYTES_MAX:
                self._replay(batch)
                batch, size = [], 0
        if batch:
            self._replay(batch)
        self.outcome.stopped = self._stopping()
        return self.outcome

    def _batch_letters(self) -> int:
        """At most a second's worth."""
        if self.outcome.sent == 0:
            return 1
        return max(1, min(BATCH_LETTERS_MAX, int(self._options.rate)))

    def _replay(self, batch: list[StoredLetter]) -> None:
        self._wait()
        if self._stopping():
            return
        self._next_s = max(self._next_s, self._clock_s()) + len(batch) / self._options.rate
        done = self._port.send(batch)
        self.outcome.sent += len(done.confirmed)
        self._port.mark(done.confirmed)
        for stored, why in done.refused:
            self.outcome.hinder(stored, why)
        if done.broken is not None:
            raise SendError(done.broken)

    def _wait(self) -> None:
        while (left_s := self._next_s - self._clock_s()) > 0 and not self._stopping():
            self._sleep(min(left_s, SLICE_S))


class KafkaPort:
    """Writes both topics. A context manager."""

    def __init__(self, topics: DeadLetterTopics) -> None:
        """Look both topics up: a producer would create a misspelt one.

        Raises:
            KafkaClientError: no broker answers, or a topic is missing.
        """
        self._topics = topics
        self._producer = Producer(
            {
                **topics.client,
                "partitioner": "murmur2_random",
                "acks": "all",
                "enable.idempotence": True,
                "allow.auto.create.topics": False,
                # The broker refuses a whole produce batch for one record.
                "batch.num.messages": 1,
                "linger.ms": 0,
                "message.max.bytes": _MESSAGE_BYTES_MAX,
                "message.timeout.ms": _MESSAGE_TIMEOUT_MS,
                "logger": QUIET,
            }
        )
        for topic in (topics.queries, topics.letters):
            partitions_of(self._producer, topic, topics.bootstrap_servers)

    def send(self, letters: Sequence[StoredLetter]) -> Sent:
        """As in `Port`."""
        sent = Sent()
        broken: list[str] = []

        def reported(stored: StoredLetter, error: KafkaError | None, _: Message | None) -> None:
            if error is None:
                sent.confirmed.append(stored)
            elif error.code() in _OF_THE_RECORD:
                sent.refused.append((stored, f"the queries topic refused it: {error.str()}"))
            else:
                broken.append(error.str())

        for stored in letters:
            key, value, headers = encode_replay(stored.letter)
            report = partial(reported, stored)
            self._produce(self._topics.queries, key, value, headers, report=report)
        self._flush()
        if not broken:
            return sent
        why = f"topic {self._topics.queries!r} can't be written: {broken[0]}"
        return Sent(confirmed=sent.confirmed, refused=sent.refused, broken=why)

    def mark(self, letters: Sequence[StoredLetter]) -> None:
        """As in `Port`. A marker lies behind its letter, on the same partition: retention takes the
        letter first.
        """
        failed: list[tuple[StoredLetter, str]] = []

        def reported(stored: StoredLetter, error: KafkaError | None, _: Message | None) -> None:
            if error is not None:
                failed.append((stored, error.str()))

        for stored in letters:
            headers = marker_headers(stored.partition, stored.offset, int(time.time() * 1000))
            report = partial(reported, stored)
            self._produce(
                self._topics.letters,
                stored.place.encode(),
                None,
                headers,
                report=report,
                partition=stored.partition,
            )
        self._flush()
        if failed:
            places = ", ".join(stored.place for stored, _ in failed)
            raise SendError(
                f"topic {self._topics.letters!r} can't be written: {failed[0][1]}; sent but not "
                f"marked, so that the next replay sends them again: {places}"
            )

    def _produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        *,
        report: Callable[[KafkaError | None, Message | None], None],
        partition: int = -1,
    ) -> None:
        try:
            self._producer.produce(
                topic,
                value,
                key,
                partition,
                on_delivery=report,
                headers=headers,  # type: ignore[arg-type] # lists are invariant
            )
        except KafkaException as error:  # refused at once, such as for its size
            report(error.args[0], None)

    def _flush(self) -> None:
        """Wait for every report, at most the message timeout; signals are seen between."""
        while self._producer.flush(SLICE_S):
            pass
