"""The aggregator as a state machine: `handle(event, now_ns)` returns the effects to carry out.

It owns the partitions' ledgers, commits, windows and pauses, the delivery of outcomes, the revoke
rendezvous and the drain. What to claim for which server is the dispatchers' (`dispatch`), one per
model. Everything is single-threaded and deterministic: time is an argument, nothing is read from
outside, and the same events give the same effects.

Invariants:
- An admitted query ends exactly once: SETTLED, or ABANDONED with its epoch.
- A commit is built from a ledger's watermark and from nothing else; a watermark moves only over
  records whose results (and dead letters, if due) were reported durable.
- At most one asynchronous commit is in flight.

It must not know of threads, clocks, bytes, gRPC or Kafka clients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aggregator.core import events as ev
from aggregator.core.commits import Commits
from aggregator.core.delivery import Delivery
from aggregator.core.dispatch import Dispatcher, DispatchOptions
from aggregator.core.effects import (
    Discard,
    Dispatch,
    Effect,
    Halt,
    Pause,
    Release,
    Resume,
    StopPolling,
    WakeAt,
)
from aggregator.core.partitions import Ledger
from aggregator.core.query import ABANDONED, SETTLED, WRITING, Query, TopicPartition
from aggregator.core.transactions import TransactionOptions, Transactions

COMMIT_RETRY_NS = 50_000_000
"""A drain's commit that a rebalance refused is tried again after this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorOptions:
    """Limits and delays; `models` has one entry per served name.

    With `transactions` delivery is exactly once, without it at least once.
    """

    models: Mapping[str, DispatchOptions]
    window_records_max: int = 10_000
    buffer_bytes_max: int = 256 * 1024 * 1024
    commit_interval_ns: int = 100_000_000
    revoke_deadline_ns: int = 5_000_000_000
    drain_deadline_ns: int = 20_000_000_000
    drain_commit_ns_max: int = 1_000_000_000
    """A drain's last commit that is under way at its deadline is waited for this much longer."""
    sink_outage_ns_max: int = 300_000_000_000
    transactions: TransactionOptions | None = None


@dataclass(slots=True, kw_only=True)
class _Rendezvous:
    """Partitions that are to be finished, committed once, and given up."""

    revoke_id: int | None
    """None: the drain."""
    ledgers: list[Ledger]
    deadline_ns: int
    commit_id: int = 0
    """Its synchronous commit, once it is under way."""
    commit_at_ns: int = 0
    """When to try again, after a rebalance refused it."""
    abandoned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The state of the moment, for metrics and tests."""

    partitions: int
    partitions_paused: int
    unsettled: int
    buffer_bytes: int
    writing_suspended: bool
    draining: bool


class Aggregator:
    """The core. Feed it events in the order in which they happened."""

    def __init__(self, options: AggregatorOptions) -> None:
        """Start with no partitions and no servers."""
        self._options = options
        claim_ids = itertools.count(1)
        self.dispatchers: dict[str, Dispatcher] = {
            name: Dispatcher(model, claim_ids) for name, model in options.models.items()
        }
        self._ledgers: dict[TopicPartition, Ledger] = {}
        self._delivery: Delivery | Transactions
        self._commits: Commits | Transactions
        if options.transactions is not None:
            self._delivery = self._commits = Transactions(
                options.transactions,
                self._ledgers,
                interval_ns=options.commit_interval_ns,
                outage_ns_max=options.sink_outage_ns_max,
            )
        else:
            self._delivery = Delivery(outage_ns_max=options.sink_outage_ns_max)
            self._commits = Commits(
                interval_ns=options.commit_interval_ns,
                window_records_max=options.window_records_max,
            )
        self._rendezvous: list[_Rendezvous] = []
        self._query_bytes = 0
        self._all_paused = False
        self._everything_paused = False
        self._windows_moved = False
        """Records were admitted or committed, or partitions came, since pauses were looked at."""
        self._draining = False
        self._halted = False
        self._wake_at_ns: int | None = None
        self._touched: set[str] = set()
        """Models whose dispatcher has something to look at; without that it is left alone."""
        self._dispatcher_wakes: dict[str, int | None] = {}
        self._effects: list[Effect] = []
        self._handlers: dict[type[Any], Callable[[Any, int], None]] = {
            ev.RecordsPolled: self._records_polled,
            ev.PartitionsAssigned: self._partitions_assigned,
            ev.PartitionsRevoking: self._partitions_revoking,
            ev.PartitionsLost: self._partitions_lost,
            ev.ServerChanged: self._server_changed,
            ev.ClaimAnswered: self._claim_answered,
            ev.ClaimLost: self._claim_lost,
            ev.WritesDurable: self._writes_durable,
            ev.WritesFailed: self._writes_failed,
            ev.CommitDone: self._commit_done,
            ev.CommitFailed: self._commit_failed,
            ev.Tick: self._tick,
            ev.StopRequested: self._stop_requested,
            ev.ShellFailed: self._shell_failed,
        }

    def handle(self, event: ev.Event, now_ns: int) -> list[Effect]:
        """Take one event in; return what is to be done, in order. After `Halt`: nothing."""
        return self.handle_all((event,), now_ns)

    def handle_all(self, events: Iterable[ev.Event], now_ns: int) -> list[Effect]:
        """The same for events that came together: what follows from them is decided once."""
        for event in events:
            if not self._halted:
                self._handlers[type(event)](event, now_ns)
        if not self._halted:
            self._advance(now_ns)
        effects, self._effects = self._effects, []
        return effects

    def gauges(self) -> Gauges:
        """Count what there is."""
        ledgers = self._ledgers.values()
        return Gauges(
            partitions=len(ledgers),
            partitions_paused=sum(ledger.paused for ledger in ledgers),
            unsettled=sum(len(ledger.unsettled) for ledger in ledgers),
            buffer_bytes=self.buffer_bytes,
            writing_suspended=self._delivery.failing,
            draining=self._draining,
        )

    @property
    def buffer_bytes(self) -> int:
        """Decoded queries that are not settled, and records that are not durable."""
        return self._query_bytes + self._delivery.unconfirmed_bytes

    def watermarks(self) -> dict[TopicPartition, int | None]:
        """Per partition the offset below which everything is settled."""
        return {tp: ledger.watermark for tp, ledger in self._ledgers.items()}

    # Records -------------------------------------------------------------------------------------

    def _records_polled(self, event: ev.RecordsPolled, now_ns: int) -> None:
        ledgers = self._ledgers
        admitted: dict[str, list[Query]] = {}
        size_bytes = 0
        tp: TopicPartition | None = None
        ledger: Ledger | None = None
        for query in event.records:
            if query.tp is not tp:  # records of a partition come together and share its tuple
                tp = query.tp
                ledger = ledgers.get(tp)
            if ledger is None or ledger.epoch != query.epoch or ledger.closed:
                query.phase = ABANDONED  # its next owner reads it again
                continue
            ledger.unsettled.append(query)
            ledger.admitted += 1
            size_bytes += query.size_bytes
            if query.failure is not None:
                self._fail(query)
            elif query.model in admitted:
                admitted[query.model].append(query)
            else:
                admitted[query.model] = [query]
        self._query_bytes += size_bytes
        self._windows_moved = True
        for model, queries in admitted.items():
            self.dispatchers[model].admit(queries, now_ns)
        self._touched.update(admitted)
        for position in event.positions:
            ledger = ledgers.get(position.tp)
            if ledger is None or ledger.epoch != position.epoch or ledger.closed:
                continue
            ledger.offset_next = position.offset_next
            if not ledger.unsettled:
                self._commits.moved(ledger)

    def _fail(self, query: Query) -> None:
        """Write the error that `query.failure` holds."""
        ledger = self._ledgers[query.tp]
        ledger.started_offset_last = max(ledger.started_offset_last, query.offset)
        self._delivery.failure(query)

    def _fail_all(self, ended: Iterable[Query]) -> None:
        for query in ended:
            if query.phase != ABANDONED:
                self._fail(query)

    # Servers -------------------------------------------------------------------------------------

    def _server_changed(self, event: ev.ServerChanged, now_ns: int) -> None:
        self.dispatchers[event.model].server_changed(event, now_ns)
        self._touched.add(event.model)

    def _claim_answered(self, event: ev.ClaimAnswered, now_ns: int) -> None:
        answered = self.dispatchers[event.model].claim_answered(event, now_ns)
        self._touched.add(event.model)
        for rows in answered.vectors:
            self._delivery.vectors(rows)
        if answered.fault is not None:
            discard = Discard(claim_id=event.answer.claim_id, message=answered.fault)
            self._effects.append(discard)
        self._fail_all(answered.ended)

    def _claim_lost(self, event: ev.ClaimLost, now_ns: int) -> None:
        self._fail_all(self.dispatchers[event.model].claim_lost(event, now_ns))
        self._touched.add(event.model)

    # Writes --------------------------------------------------------------------------------------

    def _writes_durable(self, event: ev.WritesDurable, _now_ns: int) -> None:
        self._delivery.durable(event.results, event.letters)
        self._settle(itertools.chain(event.results, event.letters))

    def _settle(self, queries: Iterable[Query]) -> None:
        """End those of which everything is durable; move the watermarks."""
        moved: set[TopicPartition] = set()
        tp: TopicPartition | None = None
        size_bytes = 0
        for query in queries:
            if query.phase == WRITING and query.writes_pending == 0:
                query.phase = SETTLED
                # It may stay in its ledger behind an unsettled one: without what is accounted for.
                query.text = ""
                query.value = None
                query.headers = ()
                size_bytes += query.size_bytes
                if query.tp is not tp:  # records of a partition mostly come together
                    tp = query.tp
                    moved.add(tp)
        self._query_bytes -= size_bytes
        for each in moved:
            ledger = self._ledgers[each]
            if ledger.advance():
                self._commits.moved(ledger)

    def _writes_failed(self, event: ev.WritesFailed, now_ns: int) -> None:
        if event.fault == ev.WriteFault.TOPIC:
            self._delivery.topic_failed(
                event.results, event.letters, message=event.message, now_ns=now_ns
            )
        else:
            self._delivery.record_failed(
                event.results,
                event.letters,
                alone=event.fault == ev.WriteFault.RECORD_ALONE,
                message=event.message,
            )

    # Commits -------------------------------------------------------------------------------------

    def _commit(self, ledgers: Iterable[Ledger], *, synchronous: bool, now_ns: int) -> int:
        """Ask for a commit of what these have to commit; return its id, 0: there is nothing."""
        commit = self._commits.begin(ledgers, synchronous=synchronous, now_ns=now_ns)
        if commit is None:
            return 0
        self._effects.append(commit)
        return commit.commit_id

    def _commit_done(self, event: ev.CommitDone, _now_ns: int) -> None:
        self._settle(self._commits.done(event.commit_id))
        self._windows_moved = True
        self._commit_ended(event.commit_id)

    def _commit_failed(self, event: ev.CommitFailed, now_ns: int) -> None:
        self._commits.failed(event.commit_id, message=event.message, now_ns=now_ns)
        for rendezvous in self._rendezvous if event.retryable else ():
            # Not that of a revoke: no rebalance goes on before its callback returns.
            drain = rendezvous.revoke_id is None and rendezvous.commit_id == event.commit_id
            if drain and now_ns < rendezvous.deadline_ns:
                rendezvous.commit_id = 0
                rendezvous.commit_at_ns = now_ns + COMMIT_RETRY_NS
        self._commit_ended(event.commit_id)

    def _commit_ended(self, commit_id: int) -> None:
        for rendezvous in [r for r in self._rendezvous if r.commit_id == commit_id]:
            self._part(rendezvous)

    def _commit_if_due(self, now_ns: int) -> None:
        if self._commits.due(now_ns):
            self._commit(self._ledgers.values(), synchronous=False, now_ns=now_ns)

    # Rebalances and the drain --------------------------------------------------------------------

    def _partitions_assigned(self, event: ev.PartitionsAssigned, _now_ns: int) -> None:
        for tp in event.partitions:
            stale = self._ledgers.get(tp)
            if stale is not None:  # its end was never told: nothing of it may be committed
                self._give_up([stale])
            ledger = self._ledgers[tp] = Ledger(tp, event.epoch)
            # The drain does not wait for what comes after it began: it is not even begun here.
            ledger.closed = self._draining
        self._windows_moved = True
        if event.partitions:
            # A pause meant for an earlier assignment may still be on its way to the consumer.
            self._effects.append(Resume(partitions=list(event.partitions)))

    def _partitions_revoking(self, event: ev.PartitionsRevoking, now_ns: int) -> None:
        ledgers = [self._ledgers[tp] for tp in event.partitions if tp in self._ledgers]
        self._meet(
            _Rendezvous(
                revoke_id=event.revoke_id,
                ledgers=ledgers,
                deadline_ns=now_ns + self._options.revoke_deadline_ns,
            )
        )

    def _partitions_lost(self, event: ev.PartitionsLost, _now_ns: int) -> None:
        self._give_up([self._ledgers[tp] for tp in event.partitions if tp in self._ledgers])

    def _stop_requested(self, _event: ev.StopRequested, now_ns: int) -> None:
        if self._draining:
            return
        self._draining = True
        self._effects.append(StopPolling())
        self._meet(
            _Rendezvous(
                revoke_id=None,
                ledgers=list(self._ledgers.values()),
                deadline_ns=now_ns + self._options.drain_deadline_ns,
            )
        )

    def _meet(self, rendezvous: _Rendezvous) -> None:
        """Close the partitions; drop what nothing has been started of."""
        self._rendezvous.append(rendezvous)
        dropped = [query for ledger in rendezvous.ledgers for query in ledger.close()]
        self._forget(dropped)
        self._commits.closing(rendezvous.ledgers)

    def _advance_rendezvous(self, now_ns: int) -> None:
        for rendezvous in list(self._rendezvous):
            if rendezvous.commit_id:
                # That of a revoke is synchronous: only the consumer's thread could give it up.
                if rendezvous.revoke_id is None and now_ns >= self._drain_over_ns(rendezvous):
                    self._part(rendezvous)
                continue
            if now_ns < rendezvous.commit_at_ns:
                continue
            finished = all(map(self._commits.finished, rendezvous.ledgers))
            if not finished and now_ns < rendezvous.deadline_ns:
                continue
            for ledger in rendezvous.ledgers:
                abandoned = ledger.abandon()
                rendezvous.abandoned += len(abandoned)
                self._forget(abandoned)
            rendezvous.commit_id = self._commit(rendezvous.ledgers, synchronous=True, now_ns=now_ns)
            if not rendezvous.commit_id:
                self._part(rendezvous)

    def _drain_over_ns(self, rendezvous: _Rendezvous) -> int:
        """When a drain ends though its last commit is not answered."""
        return rendezvous.deadline_ns + self._options.drain_commit_ns_max

    def _part(self, rendezvous: _Rendezvous) -> None:
        """The commit has ended, or is given up: give the partitions up, and let who waits go on."""
        self._rendezvous.remove(rendezvous)
        self._give_up(rendezvous.ledgers)
        if rendezvous.revoke_id is not None:
            self._effects.append(
                Release(revoke_id=rendezvous.revoke_id, abandoned=rendezvous.abandoned)
            )
            return
        # Revokes that are still waiting will not be released any more.
        abandoned = rendezvous.abandoned + sum(other.abandoned for other in self._rendezvous)
        self._halt(Halt(exit_code=0, message="drained", abandoned=abandoned))

    def _give_up(self, ledgers: Sequence[Ledger]) -> None:
        for ledger in list(ledgers):
            self._forget(ledger.abandon())
            if self._ledgers.get(ledger.tp) is ledger:
                del self._ledgers[ledger.tp]
            for rendezvous in self._rendezvous:
                if ledger in rendezvous.ledgers:
                    rendezvous.ledgers.remove(ledger)

    def _forget(self, abandoned: list[Query]) -> None:
        """Take abandoned queries out of every book; what is in flight answers into the void."""
        if not abandoned:
            return
        self._query_bytes -= sum(query.size_bytes for query in abandoned)
        for dispatcher in self.dispatchers.values():
            dispatcher.remove(lambda query: query.phase == ABANDONED)
        self._touched.update(self.dispatchers)
        self._delivery.forget(abandoned)

    # The end -------------------------------------------------------------------------------------

    def _shell_failed(self, event: ev.ShellFailed, _now_ns: int) -> None:
        self._halt(Halt(exit_code=1, message=event.message))

    def _halt(self, halt: Halt) -> None:
        self._halted = True
        self._effects.append(halt)

    # After every event ---------------------------------------------------------------------------

    def _tick(self, _event: ev.Tick, _now_ns: int) -> None:
        self._wake_at_ns = None
        self._touched.update(self.dispatchers)

    def _advance(self, now_ns: int) -> None:
        """Let everything that time or the event made possible happen."""
        halt = self._delivery.tend(now_ns)
        if halt is not None:
            self._halt(halt)
            return
        if self._touched:
            self._dispatch(now_ns)
        write = self._delivery.take()
        if write is not None:
            self._effects.append(write)
        self._commit_if_due(now_ns)
        if self._rendezvous:
            self._advance_rendezvous(now_ns)
        if self._halted:
            return
        self._pause_and_resume()
        self._wake()

    def _dispatch(self, now_ns: int) -> None:
        for model, dispatcher in self.dispatchers.items():
            if model not in self._touched:
                continue
            self._fail_all(dispatcher.expire(now_ns))
            for effect in dispatcher.dispatch(now_ns):
                if isinstance(effect, Dispatch):
                    self._started(effect.queries)
                self._effects.append(effect)
            self._dispatcher_wakes[model] = dispatcher.wake_at(now_ns)
        self._touched.clear()

    def _started(self, queries: Sequence[Query]) -> None:
        ledgers = self._ledgers
        for query in queries:
            ledger = ledgers[query.tp]
            if query.offset > ledger.started_offset_last:  # noqa: PLR1730 (max() costs thrice)
                ledger.started_offset_last = query.offset

    def _pause_and_resume(self) -> None:
        """Full windows pause their partition, full buffers and outages pause all; hysteresis."""
        options = self._options
        buffer_bytes = self.buffer_bytes
        if buffer_bytes >= options.buffer_bytes_max:
            self._all_paused = True
        elif 4 * buffer_bytes < 3 * options.buffer_bytes_max:
            self._all_paused = False
        everything = self._all_paused or self._delivery.failing
        if everything == self._everything_paused and not self._windows_moved:
            return
        self._everything_paused, self._windows_moved = everything, False
        pause: list[TopicPartition] = []
        resume: list[TopicPartition] = []
        for tp, ledger in self._ledgers.items():
            full = ledger.window_records >= options.window_records_max
            emptied = 2 * ledger.window_records <= options.window_records_max
            if (everything or full) and not ledger.paused:
                ledger.paused = True
                pause.append(tp)
            elif ledger.paused and not everything and emptied:
                ledger.paused = False
                resume.append(tp)
        if pause:
            self._effects.append(Pause(partitions=pause))
        if resume:
            self._effects.append(Resume(partitions=resume))

    def _wake(self) -> None:
        """Ask for the next tick, if it is not the one already asked for."""
        times = [*self._dispatcher_wakes.values(), self._delivery.wake_at()]
        times.append(self._commits.wake_at())
        for r in self._rendezvous:
            if not r.commit_id:
                times.append(r.commit_at_ns or r.deadline_ns)
            elif r.revoke_id is None:
                times.append(self._drain_over_ns(r))
        at_ns = min((at for at in times if at is not None), default=None)
        if at_ns is not None and at_ns != self._wake_at_ns:
            self._wake_at_ns = at_ns
            self._effects.append(WakeAt(at_ns=at_ns))
