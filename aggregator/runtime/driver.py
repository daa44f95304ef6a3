"""Feeds the core its events on the event loop and carries out the effects that come back.

Invariants: the core sees events in the order in which they were handed over, those that came
together in one step, whose effects are carried out before the next; there is one timer, the core's
`WakeAt`. What fails in here is a bug, never a record's fault: it ends the process with one line.

The driver decides nothing. It knows its ports by what they can do, so tests give it fakes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.query import Query, TopicPartition
from aggregator.runtime.claim_log import ClaimLog
from aggregator.runtime.transactions import Record, TransactionsPort, TransactionWriter
from aggregator.telemetry import metrics as m
from aggregator.wire.dead_letter import encode_letter
from aggregator.wire.result import ResultEncoder

if TYPE_CHECKING:
    from aggregator.telemetry.logs import Logger


class Core(Protocol):
    """The state machine."""

    def handle_all(self, events: Sequence[ev.Event], now_ns: int) -> list[fx.Effect]:
        """Take in events that came together; return what is to be done."""


class Source(Protocol):
    """The consumer's thread: commands reach it in order and return at once."""

    def commit(self, commit: fx.Commit) -> None:
        """Answered by CommitDone or CommitFailed."""

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop fetching."""

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        """Fetch again."""

    def release(self, revoke_id: int) -> None:
        """Let the rebalance callback return."""

    def stop_polling(self) -> None:
        """Poll no more records."""


class Sink(Protocol):
    """The producer: every record is answered once by a report event."""

    def send_result(self, query: Query, record: Record, *, alone: bool) -> None:
        """Produce to the results topic."""

    def send_letter(self, query: Query, record: Record, *, alone: bool) -> None:
        """Produce to the dead letter topic."""


class Servers(Protocol):
    """The streams to the servers of one model; neither method emits an event before it returns."""

    def send(self, dispatch: fx.Dispatch) -> None:
        """Answered by ClaimAnswered or ClaimLost."""

    def cancel(self, cancel: fx.Cancel) -> None:
        """Cut a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """What effects are carried out with. `servers` is by model.

    Where the core commits transactions, `transactions` is there and `sink` is never written to.
    """

    source: Source
    sink: Sink
    transactions: TransactionsPort | None = None
    servers: Mapping[str, Servers]
    encoder: ResultEncoder
    clock_ns: Callable[[], int]
    """Monotonic; the event loop's own clock."""


class Driver:
    """One per process; everything is called on the loop."""

    def __init__(
        self,
        core: Core,
        ports: Ports,
        *,
        loop: asyncio.AbstractEventLoop,
        metrics: m.Metrics,
        log: Logger,
    ) -> None:
        """Nothing happens before the first event."""
        self.halted: asyncio.Future[fx.Halt] = loop.create_future()
        self._core = core
        self._ports = ports
        self._loop = loop
        self._metrics = metrics
        self._log = log
        self._claims = ClaimLog(metrics, log)
        self._transactions: TransactionWriter | None = None
        if ports.transactions is not None:
            self._transactions = TransactionWriter(ports.transactions, ports.encoder, log)
        self._pending: deque[ev.Event] = deque()
        self._feeding = False
        self._polling_stopped = False
        self._timer: asyncio.TimerHandle | None = None
        self._carry: dict[type[Any], Callable[[Any, int], None]] = {
            fx.Dispatch: self._dispatch,
            fx.Cancel: self._cancel,
            fx.Discard: self._claims.discarded,
            fx.Write: self._write,
            fx.Commit: self._commit,
            fx.CommitTransaction: self._commit_transaction,
            fx.AbortTransaction: self._abort_transaction,
            fx.Pause: self._pause,
            fx.Resume: self._resume,
            fx.Release: self._release,
            fx.WakeAt: self._wake_at,
            fx.StopPolling: self._stop_polling,
            fx.Halt: self._halt,
        }
        self._note: dict[type[Any], Callable[[Any, int], None]] = {
            ev.ClaimAnswered: self._claims.answered,
            ev.ClaimLost: self._claims.lost,
            ev.WritesDurable: self._note_durable,
            ev.WritesFailed: self._note_failed,
            ev.CommitDone: self._note_commit,
            ev.CommitFailed: self._note_commit,
            ev.PartitionsAssigned: self._note_rebalance,
            ev.PartitionsRevoking: self._note_rebalance,
            ev.PartitionsLost: self._note_rebalance,
        }

    # Events in -----------------------------------------------------------------------------------

    def feed(self, events: Iterable[ev.Event]) -> None:
        """Hand events to the core and carry out what it wants; from within an effect: afterwards.

        A bug anywhere below halts the process instead of raising into the caller's task.
        """
        self._pending.extend(events)
        if self._feeding:
            return
        self._feeding = True
        try:
            pending = self._pending
            while pending:
                events = list(pending)
                pending.clear()
                self._handle(events)
        except Exception as error:  # noqa: BLE001 - any bug in the core or below ends the process
            self._log.exception("bug")
            self.crash(f"internal error: {type(error).__name__}: {error}")
        finally:
            self._feeding = False

    def crash(self, message: str) -> None:
        """End the process without the core, which can't be trusted any more."""
        self._pending.clear()
        if not self.halted.done():
            self.halted.set_result(fx.Halt(exit_code=1, message=message))

    @property
    def reading_is_over(self) -> bool:
        """Whether the core takes no more records: it drains, or has halted."""
        return self._polling_stopped or self.halted.done()

    def _handle(self, events: Sequence[ev.Event]) -> None:
        if self.halted.done():
            return
        now_ns = self._ports.clock_ns()
        for event in events:
            if type(event) is ev.ServerChanged:
                self._claims.server_changed(event)
        carry = self._carry
        for effect in self._core.handle_all(events, now_ns):
            carry[type(effect)](effect, now_ns)
        for event in events:  # after the effects: nobody's result waits for a log line
            note = self._note.get(type(event))
            if note is not None:
                note(event, now_ns)

    # Effects out ---------------------------------------------------------------------------------

    def _dispatch(self, effect: fx.Dispatch, now_ns: int) -> None:
        self._claims.dispatched(effect, now_ns)
        self._ports.servers[effect.model].send(effect)

    def _cancel(self, effect: fx.Cancel, _now_ns: int) -> None:
        self._ports.servers[effect.model].cancel(effect)

    def _write(self, effect: fx.Write, _now_ns: int) -> None:
        send = self._ports.sink.send_result
        for rows in effect.vectors:
            # All are encoded before the first is sent: without pauses between them they leave in
            # few requests, which cost the client as much as the records do.
            for query, record in self._encoded(rows):
                send(query, record, alone=rows.alone)
        for entry in effect.errors:
            self._write_error(entry)
        for letter in effect.letters:
            self._write_letter(letter)

    def _encoded(self, rows: fx.VectorRows) -> list[tuple[Query, Record]]:
        """Encode them; what can't be encoded takes a way of its own."""
        encode = self._ports.encoder.encode_vector
        group, revision = rows.group, rows.model_revision
        inference_us, answered_ns = rows.inference_us, rows.answered_ns
        encoded: list[tuple[Query, Record]] = []
        for query, row in zip(rows.queries, rows.rows, strict=True):
            try:
                record = encode(
                    query,
                    group,
                    row,
                    model_revision=revision,
                    inference_us=inference_us,
                    answered_ns=answered_ns,
                )
            except Exception as error:  # noqa: BLE001 - never a reason to lose its mates
                self._not_encoded(error, results=[query])
                continue
            encoded.append((query, record))
        return encoded

    def _write_error(self, entry: fx.ErrorRow) -> None:
        try:
            record = self._ports.encoder.encode_error(entry.query, entry.form)
        except Exception as error:
            if entry.form is fx.Form.BARE:
                raise  # there is no smaller form: stopping is all that is left
            self._not_encoded(error, results=[entry.query])
            return
        self._ports.sink.send_result(entry.query, record, alone=entry.alone)

    def _write_letter(self, letter: fx.LetterRow) -> None:
        try:
            record = encode_letter(letter.query, letter.form)
        except Exception as error:
            if letter.form is fx.Form.BARE:
                raise
            self._not_encoded(error, letters=[letter.query])
            return
        self._ports.sink.send_letter(letter.query, record, alone=letter.alone)

    def _not_encoded(
        self, error: Exception, *, results: Sequence[Query] = (), letters: Sequence[Query] = ()
    ) -> None:
        """A record that can't even be made is at fault by itself: its next smaller form follows."""
        message = f"not encoded: {type(error).__name__}: {error}"
        self._log.error("record not encoded", error=message)
        self.feed(
            [
                ev.WritesFailed(
                    fault=ev.WriteFault.RECORD_ALONE,
                    message=message,
                    results=results,
                    letters=letters,
                )
            ]
        )

    def _commit(self, effect: fx.Commit, _now_ns: int) -> None:
        self._ports.source.commit(effect)

    def _commit_transaction(self, effect: fx.CommitTransaction, now_ns: int) -> None:
        self.feed(self._writer().begin(effect, now_ns))

    def _abort_transaction(self, effect: fx.AbortTransaction, _now_ns: int) -> None:
        self._writer().abort(effect)

    def _writer(self) -> TransactionWriter:
        if self._transactions is None:
            raise RuntimeError("a transaction without a port for it")
        return self._transactions

    def _pause(self, effect: fx.Pause, _now_ns: int) -> None:
        self._ports.source.pause(effect.partitions)

    def _resume(self, effect: fx.Resume, _now_ns: int) -> None:
        self._ports.source.resume(effect.partitions)

    def _release(self, effect: fx.Release, _now_ns: int) -> None:
        if effect.abandoned:
            self._metrics.add(m.QUERIES_ABANDONED, effect.abandoned, "revoke")
            self._log.warning("revoke deadline", abandoned=effect.abandoned)
        self._ports.source.release(effect.revoke_id)

    def _stop_polling(self, _effect: fx.StopPolling, _now_ns: int) -> None:
        self._polling_stopped = True
        self._ports.source.stop_polling()

    def _wake_at(self, effect: fx.WakeAt, _now_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(effect.at_ns / 1e9, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed([ev.Tick()])

    def _halt(self, effect: fx.Halt, _now_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if effect.abandoned:
            self._metrics.add(m.QUERIES_ABANDONED, effect.abandoned, "drain")
        if not self.halted.done():
            self.halted.set_result(effect)

    # What is counted -----------------------------------------------------------------------------

    def _note_durable(self, event: ev.WritesDurable, now_ns: int) -> None:
        metrics = self._metrics
        results = event.results
        kinds = {(query.model, query.failure is None) for query in results}
        if len(kinds) == 1 and results[0].failure is None:  # the common case: one step
            metrics.add(m.RESULTS, len(results), results[0].model, "OK")
        else:
            for query in results:
                code = "OK" if query.failure is None else query.failure.code
                metrics.add(m.RESULTS, 1, query.model, code)
        if event.results:
            metrics.observe(
                m.LATENCY_SECONDS,
                [(now_ns - query.arrived_ns) * 1e-9 for query in event.results],
            )
        for query in event.letters:
            reason = query.failure.reason if query.failure is not None else m.OTHER
            metrics.add(m.DEAD_LETTERS, 1, reason)

    def _note_failed(self, event: ev.WritesFailed, _now_ns: int) -> None:
        count = len(event.results) + len(event.letters)
        self._metrics.add(m.WRITE_FAILURES, count, event.fault)
        self._log.warning("writes failed", fault=event.fault, records=count, reason=event.message)

    def _note_commit(self, event: ev.CommitDone | ev.CommitFailed, now_ns: int) -> None:
        if self._transactions is not None:
            self._note_transaction(self._transactions.ended(event), now_ns)
        if isinstance(event, ev.CommitFailed):
            self._metrics.add(m.COMMITS, 1, "failed")
            self._log.warning("commit failed", reason=event.message)
        else:
            self._metrics.add(m.COMMITS, 1, "done")

    def _note_transaction(self, ended: tuple[fx.Write, int] | None, now_ns: int) -> None:
        if ended is None:
            return
        write, began_ns = ended
        self._metrics.observe(m.TRANSACTION_SECONDS, [(now_ns - began_ns) * 1e-9])
        results = [query for rows in write.vectors for query in rows.queries]
        results += [row.query for row in write.errors]
        letters = [row.query for row in write.letters]
        if results:
            self._note_durable(ev.WritesDurable(results=results, letters=letters), now_ns)

    def _note_rebalance(
        self,
        event: ev.PartitionsAssigned | ev.PartitionsRevoking | ev.PartitionsLost,
        _now_ns: int,
    ) -> None:
        kind = {
            ev.PartitionsAssigned: "assigned",
            ev.PartitionsRevoking: "revoked",
            ev.PartitionsLost: "lost",
        }[type(event)]
        self._metrics.add(m.REBALANCES, 1, kind)
        self._log.info(f"partitions {kind}", partitions=[f"{t}-{p}" for t, p in event.partitions])
