"""Kafka in memory: a broker, and a source and a sink with the ports of the real adapters.

No thread, no IO, no clock of its own: `FakeBroker.pump` does one step of everything, and time is
what the given clock says. Held to the same contract as the real thing (`tests/contract`), which is
what makes it a fake and not a guess. What it simplifies: a produce batch is what was produced
between two pumps; leaving a group takes no time.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from confluent_kafka import TIMESTAMP_CREATE_TIME, Message

from aggregator.adapters.kafka_sink import SinkListener, SinkOptions
from aggregator.adapters.kafka_source import RawBatch, SourceListener, SourceOptions
from aggregator.core.effects import Commit, CommitOffset
from aggregator.core.events import (
    CommitDone,
    CommitFailed,
    PartitionsAssigned,
    PartitionsLost,
    PartitionsRevoking,
    Position,
    WriteFault,
)
from aggregator.core.query import TopicPartition
from aggregator.wire.headers import Headers
from tests.fakes.murmur2 import partition_of_key

Token = TypeVar("Token")
Record = tuple[bytes | None, bytes | None, Headers | None]
"""(key, value, headers)."""


@dataclass(slots=True)
class FakeLog:
    """One partition. An entry is None where an offset holds no record: markers, aborted records."""

    entries: list[Record | None] = field(default_factory=list)
    start: int = 0

    @property
    def end(self) -> int:
        return len(self.entries)


@dataclass(slots=True)
class FakeTopic:
    logs: list[FakeLog]
    message_bytes_max: int = 1_048_588


class FakeGroup:
    """Who owns what. Partitions move one way: revoked by their owner, then assigned to another."""

    def __init__(self) -> None:
        self.members: list[FakeSource] = []
        self.committed: dict[TopicPartition, int] = {}
        self.owner: dict[TopicPartition, FakeSource] = {}

    def share_of(self, member: FakeSource, partitions: int) -> int:
        """Return how many partitions a member should have: the earlier ones take the remainder."""
        polling = [other for other in self.members if other is member or not other.sleeping]
        share, rest = divmod(partitions, len(polling))
        return share + (polling.index(member) < rest)


class Transactional(Protocol):
    """A transactional producer, as the broker knows it."""

    @property
    def pending(self) -> set[TopicPartition]:
        """Partitions with offsets in its open transaction."""

    def fence(self) -> None:
        """Abort what it has open; it may commit nothing more."""

    def pump(self) -> None:
        """Do one step."""


class Offsets(Protocol):
    """Offsets to be sent into a transaction, or refused."""

    offsets: Sequence[CommitOffset]

    def carry_out(self, group_metadata: object) -> None: ...
    def refuse(self, reason: str) -> None: ...


class FakeBroker:
    """Topics, groups, and everything connected to them."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self.clock_s = clock_s
        self.topics: dict[str, FakeTopic] = {}
        self.groups: dict[str, FakeGroup] = {}
        self.sinks: list[FakeSink[Any]] = []
        self.transactional: dict[str, Transactional] = {}
        """By transactional id: the producer that has it."""
        self.producers: list[Transactional] = []
        self.up = True
        """Down: writes wait, and fail when they are older than `message_timeout_ms`."""
        self.refuses: dict[str, str] = {}
        """Topics that refuse every write, and with what message."""

    def create_topic(self, name: str, partitions: int, message_bytes_max: int = 1_048_588) -> None:
        self.topics[name] = FakeTopic([FakeLog() for _ in range(partitions)], message_bytes_max)

    def group(self, group_id: str) -> FakeGroup:
        return self.groups.setdefault(group_id, FakeGroup())

    def log(self, tp: TopicPartition) -> FakeLog:
        return self.topics[tp[0]].logs[tp[1]]

    def append_gap(self, tp: TopicPartition, offsets: int) -> None:
        """Take up offsets that hold no record."""
        self.log(tp).entries.extend([None] * offsets)

    def delete_records(self, tp: TopicPartition, before: int) -> None:
        """Delete what is below an offset, as retention does."""
        self.log(tp).start = max(self.log(tp).start, before)

    def message(self, tp: TopicPartition, offset: int) -> Message[Any, Any] | None:
        """Return the record at an offset as a client gets it."""
        record = self.log(tp).entries[offset]
        if record is None:
            return None
        key, value, headers = record
        return Message(
            topic=tp[0],
            partition=tp[1],
            offset=offset,
            key=key,
            value=value,
            headers=headers or None,  # type: ignore[arg-type] # lists are invariant
            timestamp=(TIMESTAMP_CREATE_TIME, int(self.clock_s() * 1_000)),
        )

    def pump(self) -> None:
        """Let everything connected do one step."""
        for group in list(self.groups.values()):
            for member in list(group.members):
                member.pump()
        for sink in self.sinks:
            sink.pump()
        for producer in list(self.producers):
            producer.pump()

    @property
    def pending(self) -> set[TopicPartition]:
        """Partitions with offsets in an open transaction: nobody knows where to read on."""
        return {tp for producer in self.producers for tp in producer.pending}


class FakeSource:
    """The port of `KafkaSource`."""

    def __init__(
        self, broker: FakeBroker, options: SourceOptions, listener: SourceListener
    ) -> None:
        self._broker = broker
        self._options = options
        self._listener = listener
        self._group = broker.group(options.kafka.group_id)
        self._commands: deque[tuple[str, Any]] = deque()
        self._epochs: dict[TopicPartition, int] = {}
        self._next: dict[TopicPartition, int] = {}
        self._told: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._in_flight: list[Commit] = []
        self._epoch = 0
        self._revoke_ids = itertools.count(1)
        self._revoking: PartitionsRevoking | None = None
        self._revoke_by_s = 0.0
        self._out = False
        self._stopped = False
        self._polled_s = broker.clock_s()

    def start(self) -> None:
        self._polled_s = self._broker.clock_s()
        self._group.members.append(self)

    def commit(self, commit: Commit) -> None:
        self._commands.append(("commit", commit))

    def send_offsets(self, request: Offsets) -> None:
        self._commands.append(("offsets", request))

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self._commands.append(("pause", list(partitions)))

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._commands.append(("resume", list(partitions)))

    def release(self, revoke_id: int) -> None:
        self._commands.append(("release", revoke_id))

    def stop_polling(self) -> None:
        self._commands.append(("stop", None))

    def taken(self) -> None:
        self._commands.append(("taken", None))

    def close(self, timeout_s: float) -> bool:
        del timeout_s
        if self in self._group.members:
            self._serve()
            self._settle_commits()
            self._group.members.remove(self)
            self._give_up(list(self._epochs))
        return True

    def pump(self) -> None:
        """Do what the consumer's thread does between two polls, then poll."""
        self._serve()
        if self._fenced():
            return
        if self._revoking is not None:
            self._end_revoke_at_deadline()
        if self._revoking is not None or self._out:
            return
        self._polled_s = self._broker.clock_s()
        self._settle_commits()
        self._rebalance()
        if not (self._revoking or self._out or self._stopped):
            self._poll()

    def _serve(self) -> None:
        while self._commands:
            name, argument = self._commands.popleft()
            match name:
                case "commit":
                    self._in_flight.append(argument)
                    if argument.synchronous:
                        self._settle_commits()
                case "offsets":
                    if all(self._epochs.get(o.tp) == o.epoch for o in argument.offsets):
                        argument.carry_out(None)
                    else:
                        argument.refuse("its partitions are not assigned to us any more")
                case "pause":
                    self._paused.update(tp for tp in argument if tp in self._epochs)
                case "resume":
                    self._paused.difference_update(argument)
                case "release":
                    if self._revoking is not None and argument == self._revoking.revoke_id:
                        self._end_revoke(self._revoking)
                case "stop":
                    self._stopped = True
                case "taken":
                    self._out = False

    # The group -----------------------------------------------------------------------------------

    def _fenced(self) -> bool:
        """Not having polled for too long, it has lost its partitions, and hears so as it polls."""
        if not self.sleeping:
            return False
        for tp in list(self._epochs):
            self._group.owner.pop(tp, None)
        if self._out or self._revoking is not None:
            return True
        lost = list(self._epochs)
        self._give_up(lost)
        self._listener.on_fault("maximum poll interval exceeded", fatal=False)
        if lost:
            self._listener.on_event(PartitionsLost(partitions=lost))
        return False

    def _rebalance(self) -> None:
        """Give up what is over this member's share, take what nobody owns."""
        topic = self._options.topic
        if topic not in self._broker.topics:
            self._listener.on_fault(f"unknown topic {topic}", fatal=True)
            return
        everything = [(topic, p) for p in range(len(self._broker.topics[topic].logs))]
        share = self._group.share_of(self, len(everything))
        mine = sorted(self._epochs)
        if len(mine) > share:
            self._revoke(mine[share:])
            return
        pending = self._broker.pending
        free = [tp for tp in everything if tp not in self._group.owner and tp not in pending]
        if free and len(mine) < share:
            self._assign(free[: share - len(mine)])

    @property
    def sleeping(self) -> bool:
        """Whether the group has given this member up for not polling."""
        limit_s = self._options.kafka.max_poll_interval_ms / 1_000
        return self._broker.clock_s() - self._polled_s > limit_s

    def _assign(self, tps: list[TopicPartition]) -> None:
        self._epoch += 1
        for tp in tps:
            self._group.owner[tp] = self
            self._epochs[tp] = self._epoch
            committed = self._group.committed.get(tp)
            self._next[tp] = self._broker.log(tp).start if committed is None else committed
        self._out = True
        self._listener.on_event(PartitionsAssigned(epoch=self._epoch, partitions=tps))

    def _revoke(self, tps: list[TopicPartition]) -> None:
        self._revoking = PartitionsRevoking(revoke_id=next(self._revoke_ids), partitions=tps)
        options = self._options
        wait_s = (options.revoke_deadline_ms + options.revoke_slack_ms) / 1_000
        self._revoke_by_s = self._broker.clock_s() + wait_s
        self._listener.on_event(self._revoking)

    def _end_revoke_at_deadline(self) -> None:
        revoking = self._revoking
        if revoking is not None and self._broker.clock_s() > self._revoke_by_s:
            message = f"revoke {revoking.revoke_id} was not released"
            self._listener.on_fault(message, fatal=False)
            self._end_revoke(revoking)

    def _end_revoke(self, revoking: PartitionsRevoking) -> None:
        self._revoking = None
        self._give_up(revoking.partitions)

    def _give_up(self, tps: Sequence[TopicPartition]) -> None:
        for tp in tps:
            if self._group.owner.get(tp) is self:
                del self._group.owner[tp]
            self._epochs.pop(tp, None)
            self._next.pop(tp, None)
            self._told.pop(tp, None)
            self._paused.discard(tp)

    # Commits -------------------------------------------------------------------------------------

    def _settle_commits(self) -> None:
        commits, self._in_flight = self._in_flight, []
        for commit in commits:
            current = [o for o in commit.offsets if self._epochs.get(o.tp) == o.epoch]
            for entry in current:
                self._group.committed[entry.tp] = entry.offset_next
            self._listener.on_event(
                CommitDone(commit_id=commit.commit_id)
                if current
                else CommitFailed(commit_id=commit.commit_id, message="not assigned to us any more")
            )

    # Records -------------------------------------------------------------------------------------

    def _poll(self) -> None:
        messages: list[Message[Any, Any]] = []
        for tp in self._epochs:
            if tp not in self._paused:
                self._read(tp, messages)
        moved = [tp for tp, offset in self._next.items() if self._has_moved(tp, offset)]
        self._told |= {tp: self._next[tp] for tp in moved}
        if not (messages or moved):
            return
        self._out = True
        positions = [
            Position(tp=tp, epoch=self._epochs[tp], offset_next=self._next[tp]) for tp in moved
        ]
        self._listener.on_batch(
            RawBatch(messages=messages, epochs=dict(self._epochs), positions=positions)
        )

    def _has_moved(self, tp: TopicPartition, offset: int) -> bool:
        """Whether a position is news; where reading began is none."""
        log = self._broker.log(tp)
        began = self._group.committed.get(tp, log.start)
        return offset != self._told.get(tp, began)

    def _read(self, tp: TopicPartition, messages: list[Message[Any, Any]]) -> None:
        log = self._broker.log(tp)
        offset = self._next[tp]
        if offset < log.start:
            self._listener.on_retention_loss(tp, log.start - offset)
            offset = log.start
        while offset < log.end and len(messages) < self._options.poll_records_max:
            message = self._broker.message(tp, offset)
            if message is not None:
                messages.append(message)
            offset += 1
        self._next[tp] = offset


def size_bytes(record: Record) -> int:
    """What counts against a topic's limit."""
    key, value, headers = record
    size = len(key or b"") + len(value or b"")
    return size + sum(len(name) + len(content or b"") for name, content in headers or ())


@dataclass(slots=True)
class _Pending(Generic[Token]):
    topic: str
    record: Record
    token: Token
    alone: bool
    since_s: float

    @property
    def size_bytes(self) -> int:
        return size_bytes(self.record)


class FakeSink(Generic[Token]):
    """The port of `KafkaSink`."""

    def __init__(
        self, broker: FakeBroker, options: SinkOptions, listener: SinkListener[Token]
    ) -> None:
        self._broker = broker
        self._options = options
        self._listener = listener
        self._pending: list[_Pending[Token]] = []
        self._failed: list[tuple[Token, WriteFault, str]] = []
        self._durable: list[Token] = []
        self._closed = False
        broker.sinks.append(self)

    @property
    def unconfirmed(self) -> int:
        return len(self._pending)

    def produce(  # noqa: PLR0917 - as in the port
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        token: Token,
        alone: bool = False,
    ) -> None:
        if self._closed:
            raise RuntimeError("the sink is closed")
        record = (key, value, list(headers))
        self._pending.append(_Pending(topic, record, token, alone, self._broker.clock_s()))

    def flush(self, timeout_s: float) -> int:
        del timeout_s
        self.pump()
        return self.unconfirmed

    def close(self, timeout_s: float = 5.0) -> None:
        del timeout_s
        if not self._closed:
            self.pump()
            self._fail(self._pending, WriteFault.TOPIC, "the sink was closed")
            self._pending = []
            self._report()
            self._closed = True

    def pump(self) -> None:
        """Write what is pending, in produce batches, and report."""
        pending, self._pending = self._pending, []
        batches: dict[tuple[str, int, int], list[_Pending[Token]]] = {}
        for index, entry in enumerate(pending):
            if entry.size_bytes > self._options.message_bytes_max:
                self._fail([entry], WriteFault.RECORD_ALONE, "message too large for the client")
            elif entry.topic not in self._broker.topics:
                self._fail([entry], WriteFault.TOPIC, "unknown topic")
            elif not self._broker.up:
                self._hold(entry)
            else:
                partition = self._partition(entry)
                batch = index + 1 if entry.alone else 0
                batches.setdefault((entry.topic, partition, batch), []).append(entry)
        for (topic, partition, _), batch_entries in batches.items():
            self._write((topic, partition), batch_entries)
        self._report()

    def _hold(self, entry: _Pending[Token]) -> None:
        timeout_s = self._options.kafka.message_timeout_ms / 1_000
        if self._broker.clock_s() - entry.since_s > timeout_s:
            self._fail([entry], WriteFault.TOPIC, "message timed out")
        else:
            self._pending.append(entry)

    def _partition(self, entry: _Pending[Token]) -> int:
        logs = self._broker.topics[entry.topic].logs
        key = entry.record[0]
        if key is None:
            return sum(log.end for log in logs) % len(logs)
        return partition_of_key(key, len(logs))

    def _write(self, tp: TopicPartition, entries: list[_Pending[Token]]) -> None:
        """Write a produce batch: the broker takes it whole or not at all."""
        refusal = self._broker.refuses.get(tp[0])
        if refusal is not None:
            self._fail(entries, WriteFault.TOPIC, refusal)
            return
        limit = self._broker.topics[tp[0]].message_bytes_max
        if any(entry.size_bytes > limit for entry in entries):
            alone = entries[0].alone
            fault = WriteFault.RECORD_ALONE if alone else WriteFault.RECORD
            self._fail(entries, fault, "message too large")
            return
        self._broker.log(tp).entries.extend(entry.record for entry in entries)
        self._durable.extend(entry.token for entry in entries)

    def _fail(self, entries: list[_Pending[Token]], fault: WriteFault, message: str) -> None:
        self._failed.extend((e.token, fault, f"{e.topic}: {message}") for e in entries)

    def _report(self) -> None:
        durable, self._durable = self._durable, []
        failed, self._failed = self._failed, []
        if durable or failed:
            self._listener.on_reports(durable, failed)
