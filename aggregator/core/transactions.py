"""Exactly once: outcomes are held until they and their offsets can be committed as one transaction.

Stands where `Delivery` and `Commits` stand for at-least-once, both of them, since here a result
becomes durable by the commit of its own offset. Invariants:

- One transaction at a time, and no record is written outside one.
- A result is in a transaction only when every earlier record of its partition is in the same one or
  in an earlier one that was committed: a transaction takes a prefix of each partition's unsettled
  queries, and the offset behind that prefix. Results behind an unfinished query are held.
- A query of a committed transaction is settled; of an aborted one it is held again, in the form of
  its next step if its record was refused, or dropped if its epoch is over.

A transaction begins as soon as none is under way and a result may enter one, so under load results
gather while one commits, without a timer. Offsets alone (transaction markers of the queries' own
producers) wait for the commit interval, unless their partition is being given up.

It must not know of producers, topics or what a transaction costs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from aggregator.core.effects import (
    AbortTransaction,
    CommitOffset,
    CommitTransaction,
    Halt,
    VectorRows,
    Write,
)
from aggregator.core.forms import (
    RECORD_OVERHEAD_BYTES,
    TOGETHER,
    TOO_LARGE,
    begin_vectors,
    error_row,
    letter_bytes,
    letter_refused,
    letter_row,
    result_refused,
    too_large,
    vector_row,
)
from aggregator.core.partitions import Ledger
from aggregator.core.query import ABANDONED, WRITING, Query, TopicPartition

PAUSE_NS_MIN: Final = 50_000_000
PAUSE_NS_MAX: Final = 2_000_000_000
"""After an abort: doubled with each further one."""
FAILURES_BORNE: Final = 3
"""Aborts in a row from which on nothing more is taken in. A rebalance alone makes one or two."""
ALONE_MAX: Final = 64
"""Records that each need a produce batch of their own, in one transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionOptions:
    """How large a transaction may be, and when the brokers would abort it (`timeout_ns`)."""

    timeout_ns: int = 10_000_000_000
    records_max: int = 1_000
    bytes_max: int = 16 * 1024 * 1024


@dataclass(slots=True, kw_only=True)
class _Share:
    """What a transaction holds of one partition: queries from the first unsettled one on."""

    ledger: Ledger
    queries: list[Query]
    offset_next: int
    settled: int
    """Records below `offset_next`."""


@dataclass(slots=True, kw_only=True)
class _Transaction:
    commit_id: int
    began_ns: int
    shares: Mapping[TopicPartition, _Share]
    abort_by_ns: int | None = None
    """An abort was asked for, and must have ended by then."""


@dataclass(slots=True)
class _Room:
    """What a transaction that is being filled still takes."""

    records: int
    size_bytes: int
    alone: int = ALONE_MAX
    empty: bool = True

    def take(self, query: Query) -> bool:
        """Whether the query goes in; the first one always does."""
        alone = query.write_step > TOGETHER or query.letter_step > TOGETHER
        self.records -= 1
        self.alone -= alone
        self.size_bytes -= _held_bytes(query)
        fits = self.records >= 0 and self.alone >= 0 and self.size_bytes >= 0
        taken, self.empty = fits or self.empty, False
        return taken


class Transactions:
    """The held outcomes and the one transaction of a process."""

    def __init__(
        self,
        options: TransactionOptions,
        ledgers: Mapping[TopicPartition, Ledger],
        *,
        interval_ns: int,
        outage_ns_max: int,
    ) -> None:
        """`ledgers` are the machine's own, looked at and never changed.

        Offsets alone are committed every `interval_ns`; when no transaction has succeeded for
        `outage_ns_max`, a halt is due.
        """
        self._options = options
        self._ledgers = ledgers
        self._interval_ns = interval_ns
        self._outage_ns_max = outage_ns_max
        self._ids = itertools.count(1)
        self._under_way: _Transaction | None = None
        self._touched: set[TopicPartition] = set()
        """Partitions of which a result may be first in line."""
        self._moved = False
        """Offsets without results may be there to commit."""
        self._urgent = False
        self._last_ns = 0
        self._not_before_ns = 0
        self._reformed = False
        """The transaction under way fails over records that will be written in another form."""
        self._failures = 0
        """Aborts in a row."""
        self._late = False
        """The transaction under way has outlasted its timeout."""
        self._failing_since_ns: int | None = None
        self._message = ""
        self._hopeless: str | None = None
        self.unconfirmed_bytes = 0
        """Of records held or in the transaction under way."""

    # In the place of Delivery --------------------------------------------------------------------

    def vectors(self, rows: VectorRows) -> None:
        """Hold results that hold vectors."""
        self._touched.update([query.tp for query in rows.queries])
        self.unconfirmed_bytes += begin_vectors(rows)

    def failure(self, query: Query) -> None:
        """Hold the error result of `query.failure`, and its dead letter if due."""
        failure = query.failure
        if failure is None:
            raise ValueError("a query without a failure has no error to write")
        query.phase = WRITING
        query.writes_pending = 2 if failure.dead_letter else 1
        self.unconfirmed_bytes += _held_bytes(query)
        self._touched.add(query.tp)

    def take(self) -> Write | None:
        """Nothing is written outside a transaction."""
        return None

    def durable(self, results: Sequence[Query], letters: Sequence[Query]) -> None:
        """Raise RuntimeError: here a record becomes durable with its transaction only."""
        raise RuntimeError(f"{len(results) + len(letters)} records outside a transaction")

    def record_failed(
        self, results: Sequence[Query], letters: Sequence[Query], *, alone: bool, message: str
    ) -> None:
        """Take the next form of each for the next transaction: this one is lost."""
        self._reformed = True
        for query in results:
            if query.phase == ABANDONED:
                continue
            hopeless = result_refused(query, message, alone=alone)
            self._hopeless = hopeless or self._hopeless
            if query.write_step >= TOO_LARGE and query.group is not None:
                self.unconfirmed_bytes -= query.group.stride
                query.group = None
                query.failure = too_large(message)
        for query in letters:
            if query.phase == ABANDONED:
                continue
            hopeless = letter_refused(query, message, alone=alone)
            self._hopeless = hopeless or self._hopeless

    def topic_failed(
        self, results: Sequence[Query], letters: Sequence[Query], *, message: str, now_ns: int
    ) -> None:
        """Do nothing yet: that the transaction fails over it is told next."""

    def forget(self, abandoned: Sequence[Query]) -> None:
        """Let go of held records whose epoch is over, those apart that are in the transaction."""
        for query in abandoned:
            if query.writes_pending and not self._is_under_way(query):
                self._let_go(query)

    @property
    def failing(self) -> bool:
        """Whether transactions don't succeed: nothing more is to be taken in."""
        return self._late or self._failures >= FAILURES_BORNE

    def tend(self, now_ns: int) -> Halt | None:
        """Return how to end, if there is no going on."""
        if self._hopeless is not None:
            return Halt(exit_code=1, message=self._hopeless)
        transaction = self._under_way
        timeout_ns = self._options.timeout_ns
        abort_by_ns = None
        if transaction is not None:
            self._late = now_ns - transaction.began_ns >= timeout_ns
            if self._late and self._failing_since_ns is None:
                self._failing_since_ns = transaction.began_ns
                self._message = "the one under way does not end"
            abort_by_ns = transaction.abort_by_ns
        if abort_by_ns is not None and now_ns >= abort_by_ns:
            message = f"the open transaction was not aborted within {timeout_ns / 1e9:g} s"
            return Halt(exit_code=1, message=message, at_once=True)
        since_ns = self._failing_since_ns
        if since_ns is not None and now_ns - since_ns >= self._outage_ns_max:
            failing_s = (now_ns - since_ns) // 1_000_000_000
            message = f"no transaction could be committed for {failing_s} s: {self._message}"
            return Halt(exit_code=1, message=message, at_once=abort_by_ns is not None)
        return None

    def wake_at(self) -> int | None:
        """When `tend` or `due` has something to say next."""
        times: list[int] = []
        transaction = self._under_way
        if self._failing_since_ns is not None:
            times.append(self._failing_since_ns + self._outage_ns_max)
        if transaction is not None:
            if not self._late:
                times.append(transaction.began_ns + self._options.timeout_ns)
            if transaction.abort_by_ns is not None:
                times.append(transaction.abort_by_ns)
        elif self._any_ready():
            times.append(self._not_before_ns)
        elif self._moved:
            due_ns = 0 if self._urgent else self._last_ns + self._interval_ns
            times.append(max(self._not_before_ns, due_ns))
        return min(times, default=None)

    # In the place of Commits ---------------------------------------------------------------------

    def moved(self, ledger: Ledger) -> None:
        """The watermark of this partition may have moved, without a result."""
        if not ledger.unsettled and ledger.to_commit is not None:
            self._moved = True

    def closing(self, _ledgers: Sequence[Ledger]) -> None:
        """These are being given up: their offsets wait for no interval."""
        self._moved = self._urgent = True

    def finished(self, ledger: Ledger) -> bool:
        """Whether everything of it is committed."""
        return not ledger.unsettled and ledger.to_commit is None

    def due(self, now_ns: int) -> bool:
        """Whether a transaction should begin now."""
        if self._under_way is not None or now_ns < self._not_before_ns:
            return False
        if self._any_ready():
            return True
        return self._moved and (self._urgent or now_ns - self._last_ns >= self._interval_ns)

    def begin(
        self, ledgers: Iterable[Ledger], *, synchronous: bool, now_ns: int
    ) -> CommitTransaction | AbortTransaction | None:
        """A transaction of what these have ready; None if there is nothing.

        `synchronous`: they are being given up and time is over, so that the transaction under way,
        if it holds anything of them, is to be aborted.
        """
        if synchronous:
            return self._abort(list(ledgers), now_ns)
        self._moved = self._urgent = self._reformed = False
        self._last_ns = now_ns
        shares = self._shares(ledgers)
        if not shares:  # nor is anything left that the failures before were about
            self._recovered()
            return None
        commit_id = next(self._ids)
        self._under_way = _Transaction(commit_id=commit_id, began_ns=now_ns, shares=shares)
        return CommitTransaction(
            commit_id=commit_id,
            write=_write(q for share in shares.values() for q in share.queries),
            offsets=[
                CommitOffset(tp=tp, epoch=share.ledger.epoch, offset_next=share.offset_next)
                for tp, share in shares.items()
            ],
        )

    def done(self, commit_id: int) -> Sequence[Query]:
        """It is committed: return what is settled by it."""
        transaction = self._end(commit_id)
        if transaction is None:
            return ()
        self._recovered()
        settled: list[Query] = []
        for share in transaction.shares.values():
            share.ledger.committed_offset = share.offset_next
            share.ledger.committed = share.settled
            for query in share.queries:
                self._let_go(query)
                if query.phase == WRITING:
                    settled.append(query)
        return settled

    def failed(self, commit_id: int, *, message: str, now_ns: int) -> None:
        """It is aborted: what it held enters the next one, if its epoch is not over."""
        transaction = self._end(commit_id)
        if transaction is None:
            return
        self._moved = True
        for share in transaction.shares.values():
            self._urgent |= share.ledger.closed
            for query in share.queries:
                if query.phase == ABANDONED:
                    self._let_go(query)
        if self._reformed or transaction.abort_by_ns is not None:
            return
        pause_ns = min(PAUSE_NS_MIN << min(self._failures, 16), PAUSE_NS_MAX)
        self._not_before_ns = now_ns + pause_ns
        self._failures += 1
        self._message = message
        if self._failing_since_ns is None:
            self._failing_since_ns = now_ns

    # Inside --------------------------------------------------------------------------------------

    def _any_ready(self) -> bool:
        """Whether a result is first in line of its partition."""
        for tp in self._touched:
            ledger = self._ledgers.get(tp)
            if ledger is not None and _ready(ledger):
                return True
        self._touched.clear()
        return False

    def _shares(self, ledgers: Iterable[Ledger]) -> dict[TopicPartition, _Share]:
        """Fill a transaction: partitions whose first query came first go first."""
        shares: dict[TopicPartition, _Share] = {}
        ready: list[Ledger] = []
        for ledger in ledgers:
            if _ready(ledger):
                ready.append(ledger)
            elif not ledger.unsettled and (offset_next := ledger.to_commit) is not None:
                shares[ledger.tp] = _Share(
                    ledger=ledger, queries=[], offset_next=offset_next, settled=ledger.settled
                )
        ready.sort(key=lambda ledger: ledger.unsettled[0].arrived_ns)
        room = _Room(self._options.records_max, self._options.bytes_max)
        for ledger in ready:
            share = _prefix(ledger, room)
            if share is not None:
                shares[ledger.tp] = share
        return shares

    def _abort(self, ledgers: Collection[Ledger], now_ns: int) -> AbortTransaction | None:
        transaction = self._under_way
        if transaction is None:
            return None
        if not any(share.ledger in ledgers for share in transaction.shares.values()):
            return None
        if transaction.abort_by_ns is None:
            transaction.abort_by_ns = now_ns + self._options.timeout_ns
        return AbortTransaction(commit_id=transaction.commit_id)

    def _end(self, commit_id: int) -> _Transaction | None:
        """Take the transaction under way, if it has this id."""
        transaction = self._under_way
        if transaction is None or transaction.commit_id != commit_id:
            return None
        self._under_way = None
        self._late = False
        return transaction

    def _recovered(self) -> None:
        self._failures = 0
        self._failing_since_ns = None

    def _is_under_way(self, query: Query) -> bool:
        if self._under_way is None:
            return False
        share = self._under_way.shares.get(query.tp)
        return (
            share is not None
            and share.ledger.epoch == query.epoch
            and query.offset < share.offset_next
        )

    def _let_go(self, query: Query) -> None:
        """Its record is durable, or nobody's any more."""
        self.unconfirmed_bytes -= _held_bytes(query)
        query.group = None
        query.writes_pending = 0


def _ready(ledger: Ledger) -> bool:
    """Whether a result is first in line; without an offset to commit it could not go."""
    unsettled = ledger.unsettled
    return bool(unsettled) and unsettled[0].phase == WRITING and ledger.offset_next is not None


def _prefix(ledger: Ledger, room: _Room) -> _Share | None:
    """The results that are first in line, as many as there is room for."""
    queries: list[Query] = []
    offset_next = ledger.offset_next
    for query in ledger.unsettled:
        if query.phase != WRITING or not room.take(query):
            offset_next = query.offset
            break
        queries.append(query)
    if not queries or offset_next is None:
        return None
    settled = ledger.settled + len(queries)
    return _Share(ledger=ledger, queries=queries, offset_next=offset_next, settled=settled)


def _write(queries: Iterable[Query]) -> Write:
    """Records of these, in the forms of their steps; vectors of one answer stay together."""
    write = Write()
    rows_of_group: dict[int, tuple[VectorRows, list[int]]] = {}
    for query in queries:
        group = query.group
        if group is None:
            write.errors.append(error_row(query))
        elif query.write_step > TOGETHER:
            write.vectors.append(vector_row(query, group, alone=True))
        elif (known := rows_of_group.get(id(group))) is not None:
            rows, numbers = known
            rows.queries.append(query)
            numbers.append(query.row)
        else:
            rows, numbers = vector_row(query, group, alone=False), [query.row]
            rows.rows = numbers
            rows_of_group[id(group)] = rows, numbers
            write.vectors.append(rows)
        if query.writes_pending > 1:
            write.letters.append(letter_row(query))
    return write


def _held_bytes(query: Query) -> int:
    """What its records hold in memory until they are durable."""
    size_bytes = RECORD_OVERHEAD_BYTES
    if query.group is not None:
        size_bytes += query.group.stride
    if query.writes_pending > 1:
        size_bytes += letter_bytes(query)
    return size_bytes
