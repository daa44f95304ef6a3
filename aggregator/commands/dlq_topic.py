"""The dead letter topic, read from one end to the other.

Owns where a reading ends: at each partition's end as it was when the reading began (of committed
transactions), known by position, since markers of transactions and deleted records leave offsets
without records. Markers lie behind their letters, so the topic is read twice: once for the markers,
of which one bit each is kept, and once for the letters, which are handed out as they come. Memory
is bounded by the client's prefetch, whatever the topic holds. One thread; joins no group and
commits nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from aggregator.adapters.record_headers import read_headers
from aggregator.commands.kafka_client import (
    METADATA_TIMEOUT_S,
    QUIET,
    READ_RECORDS_MAX,
    DeadLetterTopics,
    KafkaClientError,
    looked_up,
    partitions_of,
    passing,
    watermarks_of,
)
from aggregator.core.query import HeaderList
from aggregator.wire.replay import DeadLetter, read_letter, read_marker

STALL_S_MAX = 30.0
"""Without any record or news of a partition's end: then nobody answers."""
PREFETCH_KBYTES_MAX = 8 * 1024
_POLL_S = 0.5
_CHUNK = 4096

Progress = Callable[[int, int], None]
"""Told offsets read and offsets to read in all, both passes counted."""


class OffsetSet:
    """Offsets of one partition, a bit each: dense in a topic that holds letters and markers."""

    def __init__(self) -> None:
        """Begin empty."""
        self._chunks: dict[int, int] = {}

    def add(self, offset: int) -> None:
        """Put one in."""
        chunk, bit = divmod(offset, _CHUNK)
        self._chunks[chunk] = self._chunks.get(chunk, 0) | 1 << bit

    def __contains__(self, offset: int) -> bool:
        """Whether it is in."""
        chunk, bit = divmod(offset, _CHUNK)
        return bool(self._chunks.get(chunk, 0) >> bit & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLetter:
    """A dead letter and where it lies on its topic. `time_ms` None: it has no timestamp."""

    partition: int
    offset: int
    time_ms: int | None
    letter: DeadLetter

    @property
    def place(self) -> str:
        """For people, and for markers: PARTITION-OFFSET on the dead letter topic."""
        return f"{self.partition}-{self.offset}"


@dataclass(slots=True)
class Counts:
    """What was found besides the letters handed out."""

    replayed: int = 0
    foreign: int = 0
    """Records that are neither letters nor markers."""


class LetterReader:
    """Reads the topic once."""

    def __init__(
        self,
        topics: DeadLetterTopics,
        *,
        since_ms: int | None = None,
        progress: Progress = lambda _done, _total: None,
    ) -> None:
        """Look the topic up and fix where reading begins and ends.

        Raises:
            KafkaClientError: no broker answers, or there is no such topic.
        """
        self.counts = Counts()
        self._topic = topics.letters
        self._servers = topics.bootstrap_servers
        self._progress = progress
        self._done = 0
        self._config: dict[str, Any] = {
            **topics.client,
            "group.id": "aggregator-reader",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "queued.max.messages.kbytes": PREFETCH_KBYTES_MAX,
            "fetch.max.bytes": PREFETCH_KBYTES_MAX * 1024 // 2,
            "fetch.wait.max.ms": 10,
            "logger": QUIET,
        }
        self._consumer = Consumer(self._config)
        try:
            self._spans = self._look_up(since_ms)
        finally:
            self._consumer.close()
        self._total = 2 * sum(end - start for start, end in self._spans.values())

    def letters(self) -> Iterator[StoredLetter]:
        """Give the letters that were not replayed, in the order of each partition.

        Raises:
            KafkaClientError: the topic can't be read to its end.
        """
        replayed = self._read_markers()
        for message in self._read():
            found = _stored(message)
            if found is None:
                self.counts.foreign += 1
            elif isinstance(found, StoredLetter):
                if found.offset in replayed[found.partition]:
                    self.counts.replayed += 1
                else:
                    yield found

    def _look_up(self, since_ms: int | None) -> dict[int, tuple[int, int]]:
        """Start and end by partition; those with nothing to read are left out."""
        numbers = partitions_of(self._consumer, self._topic, self._servers)
        starts: dict[int, int] = {}
        if since_ms is not None:
            asked = [TopicPartition(self._topic, number, since_ms) for number in numbers]
            told = looked_up(partial(self._offsets_for_times, asked), self._servers)
            # Negative: nothing is as young as that.
            starts = {place.partition: place.offset for place in told}
        spans = {}
        for number in numbers:
            place = TopicPartition(self._topic, number)
            low, end = watermarks_of(self._consumer, place, self._servers)
            start = low if since_ms is None else starts[number]
            if 0 <= start < end:
                spans[number] = (start, end)
        return spans

    def _offsets_for_times(self, asked: list[TopicPartition]) -> list[TopicPartition]:
        told = self._consumer.offsets_for_times(asked, timeout=METADATA_TIMEOUT_S)
        for place in told:
            if place.error is not None:
                raise KafkaException(place.error)
        return told

    def _read_markers(self) -> dict[int, OffsetSet]:
        replayed = {partition: OffsetSet() for partition in self._spans}
        for message in self._read():
            marked = read_marker(_bytes(message.value()), _headers(message) or ())
            # One may be left of a letter that retention took, or of one before `since`.
            if marked is not None and marked[0] in replayed:
                replayed[marked[0]].add(marked[1])
        return replayed

    def _read(self) -> Iterator[Message[Any, Any]]:
        """Give every record between start and end once."""
        # One for each pass: a partition assigned again keeps its pause and its old position.
        self._consumer = Consumer(self._config)
        try:
            yield from self._read_assigned()
        finally:
            self._consumer.close()

    def _read_assigned(self) -> Iterator[Message[Any, Any]]:
        self._consumer.assign(
            [
                TopicPartition(self._topic, number, start)
                for number, (start, _) in self._spans.items()
            ]
        )
        reading = _Reading(self._spans)
        heard_s = time.monotonic()
        while reading.left:
            messages = self._poll()
            for message in messages:
                if reading.take(message):
                    yield message
            # Both, whether or not there were messages: a position may move without any.
            if reading.move(self._positions(reading)) or messages:
                self._progress(self._done + reading.done, self._total)
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > STALL_S_MAX:
                raise KafkaClientError(
                    f"reading {self._topic} stalled: nothing came for {STALL_S_MAX:g} s"
                )
            self._pause(reading)
        self._done += reading.done

    def _poll(self) -> list[Message[Any, Any]]:
        first = self._consumer.poll(_POLL_S)
        if first is None:
            return []
        messages = [first, *self._consumer.consume(READ_RECORDS_MAX - 1, 0)]
        for message in messages:
            error = message.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                continue
            # What heals by itself is the client library's to heal; silence is a stall.
            if not error.retriable() and not passing(error):
                raise KafkaClientError(f"reading {self._topic} failed: {error.str()}")
        return messages

    def _positions(self, reading: _Reading) -> dict[int, int]:
        places = [TopicPartition(self._topic, number) for number in reading.left]
        return {place.partition: place.offset for place in self._consumer.position(places)}

    def _pause(self, reading: _Reading) -> None:
        """Fetch nothing more of partitions that have just ended: they may be growing."""
        if ended := reading.take_ended():
            self._consumer.pause([TopicPartition(self._topic, number) for number in ended])


class _Reading:
    """One pass: which partitions are still to be read, and how far they are."""

    def __init__(self, spans: dict[int, tuple[int, int]]) -> None:
        self.left = {number: end for number, (_, end) in spans.items()}
        self._at = {number: start for number, (start, _) in spans.items()}
        self._begun = sum(self._at.values())
        self._ended: list[int] = []

    @property
    def done(self) -> int:
        """Offsets passed."""
        return sum(self._at.values()) - self._begun

    def take(self, message: Message[Any, Any]) -> bool:
        """Say whether a message is a record of ours; news of an end counts as a position."""
        partition, offset = message.partition(), message.offset()
        if partition is None or offset is None:
            return False
        if message.error() is not None:
            # The end of the partition was reached: there may have been no record before it.
            self.move({partition: offset})
            return False
        return partition in self.left and offset < self.left[partition]

    def move(self, positions: dict[int, int]) -> bool:
        """Take positions in; logical ones are negative: nothing was read. Whether any moved."""
        moved = False
        for number, position in positions.items():
            end = self.left.get(number)
            if end is None:
                continue
            reached = min(position, end)
            if reached > self._at[number]:
                self._at[number] = reached
                moved = True
            if reached == end:
                del self.left[number]
                self._ended.append(number)
                moved = True
        return moved

    def take_ended(self) -> list[int]:
        """Partitions that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended


def _stored(message: Message[Any, Any]) -> StoredLetter | bool | None:
    """A letter; True for a marker; None for anything else."""
    headers = _headers(message)
    partition, offset = message.partition(), message.offset()
    if headers is None or partition is None or offset is None:
        return None
    value = _bytes(message.value())
    if read_marker(value, headers) is not None:
        return True
    letter = read_letter(_bytes(message.key()), value, headers)
    if letter is None:
        return None
    kind, time_ms = message.timestamp()
    return StoredLetter(
        partition=partition,
        offset=offset,
        time_ms=None if kind == TIMESTAMP_NOT_AVAILABLE else time_ms,
        letter=letter,
    )


def _headers(message: Message[Any, Any]) -> HeaderList | None:
    """None: the client can't read them (a name that is not UTF-8), and must not be asked again."""
    try:
        return read_headers(message) or ()
    except SystemError:
        return None


def _bytes(value: object) -> bytes | None:
    return value if isinstance(value, bytes) else None
