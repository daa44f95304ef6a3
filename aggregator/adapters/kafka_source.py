"""The queries topic as a group member reads it: batches out, commands in, one thread.

Owns the `Consumer`: every call on it is made by its one thread, since a second thread's calls block
for as long as the first keeps polling. Invariants:

- A batch is handed over with the positions read right after its poll; the next poll waits for
  `taken()`, and commands sent before it are carried out before it. An assignment waits for it too,
  inside its callback. So a pause that either caused is in force before anything more is read: no
  window grows by more than one poll.
- Assignments are numbered (epochs). A commit of another epoch than a partition's current one is
  dropped, since the broker would accept it. Each commit id is answered exactly once.
- A revoke returns only after `Release`, or its deadline; a loss is announced and returns at once.
- A partition is read from where the group stopped, as this thread was told; until it is told, the
  partition is held: assigned and paused (`kafka_starts`).

Must not know what records hold, nor decide anything: branching and policy live in the core.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
)
from confluent_kafka import (
    TopicPartition as KafkaPartition,
)

from aggregator.adapters.kafka_commits import NOT_OURS, Commits
from aggregator.adapters.kafka_config import KafkaConfigError, KafkaOptions, consumer_config
from aggregator.adapters.kafka_offsets import OffsetsRequest
from aggregator.adapters.kafka_starts import HOPELESS, Starts
from aggregator.adapters.kafka_watch import ConnectionWatch
from aggregator.core.effects import Commit, Pause, Release, Resume, StopPolling
from aggregator.core.events import (
    CommitDone,
    CommitFailed,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoking,
    Position,
)
from aggregator.core.query import TopicPartition

POLL_MS = 20
"""How long a command may have to wait for an idle poll."""
LAG_EVERY_S = 1.0
"""How old `KafkaSource.lag` may be while polls go on."""
RawRecord: TypeAlias = "Message[Any, Any]"  # quoted: no generic at run time
"""A record as the client gives it."""
GroupEvent = PartitionsAssigned | PartitionsRevoking | PartitionsLost | CommitDone | CommitFailed
SourceCommand = Commit | OffsetsRequest | Pause | Resume | Release | StopPolling


@dataclass(frozen=True, slots=True, kw_only=True)
class RawBatch:
    """One poll's records as the client gave them, and the positions right after it.

    `messages` are in offset order per partition and have no error. `epochs` holds every assigned
    partition. `positions` holds each partition whose position moved, those without records too
    (transaction markers); a batch may have positions alone.
    """

    messages: Sequence[RawRecord]
    epochs: Mapping[TopicPartition, int]
    positions: Sequence[Position]


class Lag(NamedTuple):
    """Offsets between what was read and the end of the topic's partitions that are ours.

    By position: markers of transactions and compaction leave offsets that no record ever has. The
    ends are those that the last fetches told, so a paused partition's stands still.
    """

    total: int = 0
    largest: int = 0
    """Of one partition."""


class SourceListener(Protocol):
    """Who is told; every method is called on the consumer's thread and must return at once."""

    def on_batch(self, batch: RawBatch) -> None:
        """Records came: call `KafkaSource.taken` when they are admitted."""

    def on_event(self, event: GroupEvent) -> None:
        """Something happened to the group or a commit.

        Of `PartitionsAssigned` call `KafkaSource.taken` when they are admitted.
        """

    def on_retention_loss(self, tp: TopicPartition, count: int) -> None:
        """Offsets were deleted before this group read them: at most `count` records are gone."""

    def on_fault(self, message: str, *, fatal: bool) -> None:
        """The client complains; `fatal`: nothing more will come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What to read and how long a rebalance may be held up.

    The rebalance callback gives up `revoke_slack_ms` after the core's own deadline. A synchronous
    commit outside a rebalance is answered within `commit_timeout_ms`; inside one it blocks.
    `poll_ms`: how long an idle poll waits, and so a command may have to.
    """

    kafka: KafkaOptions
    topic: str
    poll_records_max: int = 1_000
    revoke_deadline_ms: int = 5_000
    revoke_slack_ms: int = 1_000
    commit_timeout_ms: int = 5_000
    poll_ms: int = POLL_MS


@dataclass(frozen=True, slots=True)
class _Taken:
    """The last batch or assignment is admitted."""


@dataclass(frozen=True, slots=True)
class _Close:
    """Leave the group and end the thread."""


class KafkaSource:
    """The consumer and its thread."""

    def __init__(
        self,
        options: SourceOptions,
        listener: SourceListener,
        *,
        logger: logging.Logger | None = None,
    ) -> None:
        """Check the configuration; connect to nothing yet. Raises `KafkaConfigError`."""
        self._options = options
        self._poll_s = options.poll_ms / 1_000
        self._listener = listener
        self.joined = False
        """The group has said at least once what is ours, if only that nothing is."""
        self.lag = Lag()
        """Replaced as a whole by the consumer's thread, so any thread may read it."""
        self._commands: queue.SimpleQueue[SourceCommand | _Taken | _Close] = queue.SimpleQueue()
        config = consumer_config(options.kafka)
        config |= {"error_cb": self._on_error, "on_commit": self._on_commit}
        self._watch = ConnectionWatch("consumer", options.kafka, self._on_cut_off)
        config |= self._watch.config
        if logger is not None:
            config["logger"] = logger
        try:
            self._consumer = Consumer(config)
        except (KafkaException, TypeError, ValueError) as error:
            raise KafkaConfigError(f"the Kafka consumer's configuration: {error}") from error
        self._thread = threading.Thread(target=self._run, name="kafka-consumer", daemon=True)

        # Everything below belongs to the thread.
        self._epoch = 0
        self._epochs: dict[TopicPartition, int] = {}
        self._partitions: list[KafkaPartition] = []
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        """By command."""
        self._lag_due_s = 0.0
        self._revoke_id = 0
        self._released = False
        self._revoking = False
        self._out = False
        """A batch or an assignment is handed over and not yet admitted."""
        self._stopped = False
        self._closing = False
        self._starts = Starts(self._consumer, listener.on_fault)
        self._commits = Commits(
            self._consumer, listener.on_event, timeout_s=options.commit_timeout_ms / 1_000
        )

    # From any thread -----------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether it was connected to any broker a few seconds ago."""
        return self._watch.connected

    @property
    def held(self) -> int:
        """Partitions of ours that are not read: where the group stopped is not told yet."""
        return len(self._starts.held)

    def start(self) -> None:
        """Start the thread, which joins the group."""
        self._thread.start()

    # Commands are carried out in their order, between two polls or inside a rebalance callback.

    def commit(self, commit: Commit) -> None:
        """Commit; answered by `CommitDone` or `CommitFailed`."""
        self._commands.put(commit)

    def send_offsets(self, request: OffsetsRequest) -> None:
        """Have offsets sent into a transaction, or refused if any of them is not ours by then."""
        self._commands.put(request)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop fetching those of them that are still ours. An assignment forgets it."""
        self._commands.put(Pause(partitions=partitions))

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Fetch them again, from where they stopped."""
        self._commands.put(Resume(partitions=partitions))

    def release(self, revoke_id: int) -> None:
        """Let the rebalance callback of this revoke return."""
        self._commands.put(Release(revoke_id=revoke_id, abandoned=0))

    def stop_polling(self) -> None:
        """Hand over no more records, nor positions; go on serving the group and commands."""
        self._commands.put(StopPolling())

    def taken(self) -> None:
        """Say that the last batch or assignment is admitted, and what it caused was commanded."""
        self._commands.put(_Taken())

    def close(self, timeout_s: float) -> bool:
        """Leave the group and end the thread; returns whether it ended in time. Idempotent.

        Nothing is committed, and revokes are no longer negotiated.
        """
        self._commands.put(_Close())
        if self._thread.ident is None:
            self._consumer.close()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._consumer.subscribe(
                [self._options.topic],
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self._closing:
                self._serve_commands()
                if not self._closing:
                    self._commits.pump(self._epochs)
                    self._poll()
        except Exception as error:  # noqa: BLE001 - the thread's end must be told, whatever it is
            self._listener.on_fault(f"the consumer's thread failed: {error!r}", fatal=True)
        finally:
            self._closing = True
            self._consumer.close()
            self._commits.close()

    def _serve_commands(self) -> None:
        """Carry out what is waiting; while something is out, wait for more until it is taken."""
        while not self._closing:
            try:
                command = self._commands.get(block=self._out)
            except queue.Empty:
                return
            self._execute(command)

    def _execute(self, command: SourceCommand | _Taken | _Close) -> None:
        match command:
            case _Taken():
                self._out = False
            case Commit():
                self._commits.add(command, self._epochs, in_callback=self._revoking)
            case OffsetsRequest():
                if any(self._epochs.get(o.tp) != o.epoch for o in command.offsets):
                    command.refuse(NOT_OURS)
                else:
                    command.carry_out(self._consumer.consumer_group_metadata())
            case Pause():
                self._paused |= self._epochs.keys() & set(command.partitions)
                self._consumer.pause(self._owned(command.partitions))
            case Resume():
                self._paused.difference_update(command.partitions)
                self._resume(command.partitions)
            case Release():
                # A late one, of a revoke that gave up at its deadline, releases nothing.
                self._released |= command.revoke_id == self._revoke_id
            case StopPolling():
                self._stopped = True
                self._consumer.pause(self._partitions)
            case _Close():
                self._closing = True

    def _resume(self, partitions: Iterable[TopicPartition]) -> None:
        """Fetch those for whose pause there is no reason.

        They are paused, or were assigned just now: the client would read a partition that is
        neither again, from where it was last assigned, sought or paused.
        """
        if not self._stopped:
            free = [tp for tp in partitions if tp not in self._paused | self._starts.held]
            self._consumer.resume(self._owned(free))

    def _owned(self, partitions: Iterable[TopicPartition]) -> list[KafkaPartition]:
        return [KafkaPartition(*tp) for tp in partitions if tp in self._epochs]

    def _poll(self) -> None:
        """Poll once and hand over what came."""
        first = self._consumer.poll(self._poll_s)
        messages = []
        if first is not None:
            epochs = self._epochs
            more = self._options.poll_records_max - 1
            messages = self._consumer.consume(more, 0) if more else []
            tp = _partition_of(first)
            # A rebalance may have come between the two.
            if self._epochs.get(tp) == epochs.get(tp):
                messages.insert(0, first)
            messages = [message for message in messages if self._accepted(message)]
        if self._stopped:
            # What still comes is not admitted: no position covers it, and the next owner reads it.
            return
        if self._starts.due:
            self._start_held()
        positions = self._moved_positions(messages)
        self._note_lag()
        if messages or positions:
            self._out = True
            self._listener.on_batch(
                RawBatch(messages=messages, epochs=self._epochs, positions=positions)
            )

    def _accepted(self, message: RawRecord) -> bool:
        """Report a message that is an error; leave out what is no longer ours."""
        error = message.error()
        if error is None:
            return _partition_of(message) in self._epochs
        fatal = error.fatal() or error.code() in HOPELESS
        self._listener.on_fault(error.str(), fatal=fatal)
        return False

    def _moved_positions(self, messages: Sequence[RawRecord]) -> list[Position]:
        moved = []
        for partition in self._consumer.position(self._partitions) if self._partitions else ():
            # Logical offsets are negative: nothing has been read yet.
            if partition.offset < 0:
                continue
            tp = (partition.topic, partition.partition)
            expected = self._positions.get(tp, -1)
            if partition.offset == expected:
                continue
            if expected >= 0:
                self._check_retention(tp, expected, messages)
            self._positions[tp] = partition.offset
            moved.append(Position(tp=tp, epoch=self._epochs[tp], offset_next=partition.offset))
        return moved

    def _note_lag(self) -> None:
        now_s = time.monotonic()
        if now_s < self._lag_due_s:
            return
        self._lag_due_s = now_s + LAG_EVERY_S
        lags = [self._lag_of(partition) for partition in self._partitions]
        self.lag = Lag(sum(lags), max(lags, default=0))

    def _lag_of(self, partition: KafkaPartition) -> int:
        """0 where no fetch has told the end yet: asking for it would hold the thread up."""
        watermarks = self._consumer.get_watermark_offsets(partition, cached=True)
        if watermarks is None:
            return 0
        low, end = watermarks
        position = self._positions.get((partition.topic, partition.partition), low)
        return max(end - max(position, low), 0) if end >= 0 else 0

    def _check_retention(
        self, tp: TopicPartition, expected: int, messages: Sequence[RawRecord]
    ) -> None:
        """Report offsets that were deleted between the last position and this poll's records."""
        watermarks = self._consumer.get_watermark_offsets(KafkaPartition(*tp), cached=True)
        low = watermarks[0] if watermarks else -1
        if low <= expected:
            return
        # What was read just before it was deleted is not lost.
        first = min((_offset_of(m) for m in messages if _partition_of(m) == tp), default=low)
        if first > expected:
            self._listener.on_retention_loss(tp, min(low, first) - expected)

    # Rebalances: called by the client inside poll and consume ------------------------------------

    def _on_assign(self, _consumer: Consumer, partitions: list[KafkaPartition]) -> None:
        self.joined = True
        if not partitions:  # a rebalance that changed nothing for us
            return
        tps = _tuples(partitions)
        self._epoch += 1
        self._set_epochs({**self._epochs, **dict.fromkeys(tps, self._epoch)})
        starts = self._starts.assigned(tps)
        self._watch_from(starts)
        # Here, since what is not assigned yet can't be paused, as the core may want it to be before
        # anything is read.
        self._consumer.incremental_assign([starts.get(tp, KafkaPartition(*tp, 0)) for tp in tps])
        self._consumer.pause(self._owned(self._starts.held))
        # The client remembers a pause from when the partition was ours before.
        self._resume(tps)
        self._out = True
        self._listener.on_event(PartitionsAssigned(epoch=self._epoch, partitions=tps))
        self._serve_commands()
        if self._stopped:
            self._consumer.pause(partitions)

    def _start_held(self) -> None:
        """Read what is held, if we are told now from where."""
        starts = self._starts.sought()
        self._watch_from(starts)
        self._resume(starts)

    def _watch_from(self, starts: Mapping[TopicPartition, KafkaPartition]) -> None:
        """Notice what is deleted between where the group stopped and what is read."""
        self._positions |= {tp: start.offset for tp, start in starts.items() if start.offset >= 0}

    def _on_revoke(self, _consumer: Consumer, partitions: list[KafkaPartition]) -> None:
        tps = [tp for tp in _tuples(partitions) if tp in self._epochs]
        if tps and not self._closing:
            self._revoke_id += 1
            self._released = False
            self._listener.on_event(PartitionsRevoking(revoke_id=self._revoke_id, partitions=tps))
            self._revoking = True
            self._wait_for_release()
            self._revoking = False
        self._forget(tps)

    def _wait_for_release(self) -> None:
        """Serve commands until `Release`, or a little after the deadline of the core."""
        options = self._options
        wait_s = (options.revoke_deadline_ms + options.revoke_slack_ms) / 1_000
        deadline = time.monotonic() + wait_s
        while not (self._released or self._closing):
            try:
                command = self._commands.get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                message = f"revoke {self._revoke_id} was not released within {wait_s} s"
                self._listener.on_fault(message, fatal=False)
                return
            self._execute(command)

    def _on_lost(self, _consumer: Consumer, partitions: list[KafkaPartition]) -> None:
        tps = [tp for tp in _tuples(partitions) if tp in self._epochs]
        self._forget(tps)
        if tps and not self._closing:
            self._listener.on_event(PartitionsLost(partitions=tps))

    def _forget(self, tps: Sequence[TopicPartition]) -> None:
        gone = frozenset(tps)
        self._set_epochs({tp: epoch for tp, epoch in self._epochs.items() if tp not in gone})

    def _set_epochs(self, epochs: dict[TopicPartition, int]) -> None:
        """Replace the assignment; batches already handed over keep the mapping they came with."""
        self._positions = {
            tp: position
            for tp, position in self._positions.items()
            if epochs.get(tp) == self._epochs.get(tp)
        }
        ours = {tp for tp, epoch in epochs.items() if epoch == self._epochs.get(tp)}
        self._starts.held &= ours
        self._paused &= ours
        self._epochs = epochs
        self._partitions = [KafkaPartition(*tp) for tp in epochs]

    def _on_commit(self, error: KafkaError | None, partitions: list[KafkaPartition]) -> None:
        """Called by the client inside poll: an asynchronous commit has ended."""
        self._commits.ended(error, partitions)

    def _on_error(self, error: KafkaError) -> None:
        """Called by the client inside poll: its connections, or the client itself, have trouble."""
        self._listener.on_fault(error.str(), fatal=error.fatal())

    def _on_cut_off(self, message: str) -> None:
        """Called by the client inside poll."""
        self._listener.on_fault(message, fatal=True)


def _tuples(partitions: Iterable[KafkaPartition]) -> list[TopicPartition]:
    return [(partition.topic, partition.partition) for partition in partitions]


def _partition_of(message: RawRecord) -> TopicPartition:
    topic, partition = message.topic(), message.partition()
    # Messages that are errors of the client as a whole have neither.
    return (topic or "", -1 if partition is None else partition)


def _offset_of(message: RawRecord) -> int:
    offset = message.offset()
    if offset is None:
        raise ValueError("a record without an offset")
    return offset
