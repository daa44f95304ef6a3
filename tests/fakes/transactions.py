"""Transactions in memory: the port of `KafkaTransactions` on the fake broker.

Held to the same contract as the real thing. What it simplifies: the records of a transaction take
up their offsets when it ends, committed or aborted, with one more for the marker; a partition with
offsets in an open transaction is assigned to nobody until that has ended, where a real member gets
it at once and waits before it reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from aggregator.adapters.kafka_transactions import (
    TransactionListener,
    TransactionRecord,
    TransactionsOptions,
)
from aggregator.core.effects import CommitOffset
from aggregator.core.events import CommitDone, CommitFailed, WriteFault
from aggregator.core.query import TopicPartition
from tests.fakes.kafka import FakeBroker, Record, size_bytes
from tests.fakes.murmur2 import partition_of_key

Token = TypeVar("Token")


class OffsetSender(Protocol):
    """The fake source."""

    def send_offsets(self, request: FakeOffsets) -> None: ...


@dataclass
class FakeOffsets:
    """What the consumer's side is asked to do, and what came of it."""

    offsets: Sequence[CommitOffset]
    sent: bool = False
    refusal: str | None = None

    def carry_out(self, group_metadata: object) -> None:
        del group_metadata
        self.sent = True

    def refuse(self, reason: str) -> None:
        self.refusal = reason


@dataclass
class _Open(Generic[Token]):
    commit_id: int
    records: Sequence[TransactionRecord[Token]]
    request: FakeOffsets
    began_s: float
    failed: list[tuple[Token, WriteFault, str]] = field(default_factory=list)


class FakeTransactions(Generic[Token]):
    """One transactional producer."""

    def __init__(
        self,
        broker: FakeBroker,
        options: TransactionsOptions,
        listener: TransactionListener[Token],
    ) -> None:
        self._broker = broker
        self._options = options
        self._listener = listener
        self._group = broker.group(options.kafka.group_id)
        self._source: OffsetSender | None = None
        self._waiting: deque[_Open[Token]] = deque()
        self._open: _Open[Token] | None = None
        self._abort_id = 0
        self._fenced = False
        self._told = False
        self._closed = False

    def init(self, timeout_s: float = 30.0) -> None:
        """Fence the one before and abort what it left open."""
        del timeout_s
        before = self._broker.transactional.get(self._options.transactional_id)
        if before is not None:
            before.fence()
        self._broker.transactional[self._options.transactional_id] = self
        self._broker.producers.append(self)

    def start(self, source: OffsetSender) -> None:
        self._source = source

    def commit(
        self,
        commit_id: int,
        records: Sequence[TransactionRecord[Token]],
        offsets: Sequence[CommitOffset],
    ) -> None:
        request = FakeOffsets(offsets)
        self._waiting.append(_Open(commit_id, records, request, self._broker.clock_s()))

    def abort(self, commit_id: int) -> None:
        self._abort_id = commit_id

    def close(self, timeout_s: float = 5.0) -> bool:
        del timeout_s
        if self._open is not None and not self._fenced:
            self._end(self._open, "the abort was asked for")
        self._closed = True
        return True

    # The broker's side ---------------------------------------------------------------------------

    def fence(self) -> None:
        """Another producer has taken the id, or this one's transaction was too old."""
        self._fenced = True
        if self._open is not None:
            self._write(self._open, committed=False)
            self._open = None

    def pump(self) -> None:
        """Do one step of what is open, or open the next."""
        if self._closed:
            return
        self._abort_overdue()
        if self._fenced:
            self._tell_fenced()
        elif self._broker.up and self._open is not None:
            self._step(self._open)
        elif self._broker.up and self._waiting and self._source is not None:
            self._open = self._waiting.popleft()
            self._open.began_s = self._broker.clock_s()
            self._source.send_offsets(self._open.request)

    def _abort_overdue(self) -> None:
        transaction = self._open
        timeout_s = self._options.timeout_ms / 1_000
        if transaction is not None and self._broker.clock_s() - transaction.began_s > timeout_s:
            self.fence()

    def _tell_fenced(self) -> None:
        """It learns of it when it next wants something."""
        if (self._waiting or self._open) and not self._told:
            self._told = True
            name = self._options.instance_name
            self._listener.on_fault(f"fenced: another is instance_name {name!r}", fatal=True)

    def _step(self, transaction: _Open[Token]) -> None:
        if self._abort_id == transaction.commit_id:
            self._end(transaction, "the abort was asked for")
            return
        failed = self._refused(transaction)
        if failed:
            self._listener.on_reports([], failed)
            self._end(transaction, failed[0][2])
            return
        request = transaction.request
        if request.refusal is not None:
            self._end(transaction, request.refusal)
        elif request.sent:
            self._end(transaction, None)

    def _end(self, transaction: _Open[Token], failure: str | None) -> None:
        self._open = None
        self._write(transaction, committed=failure is None)
        commit_id = transaction.commit_id
        self._listener.on_event(
            CommitDone(commit_id=commit_id)
            if failure is None
            else CommitFailed(commit_id=commit_id, message=failure)
        )

    def _write(self, transaction: _Open[Token], *, committed: bool) -> None:
        by_partition: dict[TopicPartition, list[Record | None]] = {}
        for record in transaction.records:
            if record.topic not in self._broker.topics:
                continue
            tp = self._partition(record)
            content: Record = (record.key, record.value, list(record.headers))
            by_partition.setdefault(tp, []).append(content if committed else None)
        for tp, entries in by_partition.items():
            self._broker.log(tp).entries.extend([*entries, None])
        if committed:
            for entry in transaction.request.offsets:
                self._group.committed[entry.tp] = entry.offset_next

    def _partition(self, record: TransactionRecord[Token]) -> TopicPartition:
        logs = self._broker.topics[record.topic].logs
        if record.key is None:
            return record.topic, sum(log.end for log in logs) % len(logs)
        return record.topic, partition_of_key(record.key, len(logs))

    def _refused(self, transaction: _Open[Token]) -> list[tuple[Token, WriteFault, str]]:
        """Every record that the broker refuses: those of a produce batch together."""
        failed: list[tuple[Token, WriteFault, str]] = []
        batches: dict[tuple[TopicPartition, int], list[TransactionRecord[Token]]] = {}
        for index, record in enumerate(transaction.records):
            refusal = self._broker.refuses.get(record.topic)
            if record.topic not in self._broker.topics:
                refusal = "unknown topic"
            if refusal is not None:
                text = f"{record.topic}: {refusal}"
                failed.append((record.token, WriteFault.TOPIC, text))
                continue
            batch = index + 1 if record.alone else 0
            batches.setdefault((self._partition(record), batch), []).append(record)
        for (tp, _), records in batches.items():
            limit = self._broker.topics[tp[0]].message_bytes_max
            if any(size_bytes((r.key, r.value, r.headers)) > limit for r in records):
                fault = WriteFault.RECORD_ALONE if records[0].alone else WriteFault.RECORD
                failed += [(r.token, fault, f"{tp[0]}: message too large") for r in records]
        return failed

    @property
    def pending(self) -> set[TopicPartition]:
        """Partitions with offsets in the open transaction."""
        if self._open is None or not self._open.request.sent:
            return set()
        return {offset.tp for offset in self._open.request.offsets}
