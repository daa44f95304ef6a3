"""The dumb model of the cores: what must hold, whatever happens. One method for each thing seen.

Numbers in violations are those of the guarantees in the design (0: the simulation itself found the
core to spin, crash or stand still). It watches every step of every core, `topic_checks` the broker
and the writes; they keep their own books, and believe nothing that the core says of itself where
they can count.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.query import ABANDONED, SETTLED, Query, TopicPartition
from tests.sim.books import Epoch, Watch
from tests.sim.broker import LETTERS, RESULTS, Broker
from tests.sim.kernel import MS, SECOND, Kernel
from tests.sim.process import Process
from tests.sim.topic_checks import TopicChecks

ACCOUNT_EVERY = 40
"""Steps of a core between two reckonings of its bytes."""
SPINS_MAX = 400
"""Steps of one core within one millisecond."""
_TRANSACTION_ENDS = (
    "fenced: ",
    "no transaction could be committed",
    "the open transaction was not aborted",
    "the open transaction could not be",
)
"""How a process may end over its transactions: it is restarted, and its successor goes on."""


class Checks(TopicChecks):
    """See the module's docstring."""

    def __init__(
        self, kernel: Kernel, broker: Broker, *, window_max: int, poll_max: int, buffer_max: int
    ) -> None:
        super().__init__(kernel, broker, window_max=window_max, poll_max=poll_max)
        self._buffer_max = buffer_max

    def stalled(self, process: Process) -> None:
        """It was held up from outside: it owes no deadline for now."""
        self._watch(process.owner.name).stalled_ns = self._kernel.now_ns + 10 * SECOND

    def stepping(self, process: Process, events: Sequence[ev.Event]) -> None:
        """Before a core sees these."""
        watch = self._watch(process.owner.name)
        watch.steps += 1
        ms = self._kernel.now_ns // MS
        watch.spins = watch.spins + 1 if ms == watch.spin_ms else 0
        watch.spin_ms = ms
        if watch.spins > SPINS_MAX:
            self.violated(0, f"{process.owner.name} spins")
        for event in events:
            self._kernel.fire(f"event: {type(event).__name__}")
            match event:
                case ev.RecordsPolled():
                    self._polled(process, watch, event)
                case ev.PartitionsAssigned():
                    self._assigned(process, watch, event)
                case ev.PartitionsRevoking():
                    self._revoking(process, watch, event)
                case ev.StopRequested():
                    self._stopping(process, watch)
                case ev.WritesDurable():
                    self._durable(watch, event)
                case ev.WritesFailed():
                    self._kernel.fire(f"write failed: {event.fault}")
                    self._failed(watch, event)
                case ev.CommitDone() | ev.CommitFailed():
                    self._commit_ended(watch, event)

    def stepped(
        self, process: Process, events: Sequence[ev.Event], effects: Sequence[fx.Effect]
    ) -> None:
        """What a core wants after it has seen these."""
        watch = self._watch(process.owner.name)
        replaced, watch.replaced = watch.replaced, []
        for epoch in replaced:
            self._end_epoch(watch, epoch, clean=False)
        kernel = self._kernel
        # A drain that is cut off takes what a revoke was still waiting for with it.
        cut_off = any(isinstance(each, fx.Halt) and each.abandoned for each in effects)
        for effect in effects:
            kernel.fire(f"effect: {type(effect).__name__}")
            match effect:
                case fx.Dispatch():
                    self._dispatched(watch, effect)
                case fx.Write():
                    self._written(watch, effect)
                case fx.Commit():
                    self._commits(watch, effect)
                case fx.CommitTransaction():
                    self._commits_transaction(watch, effect)
                case fx.Release():
                    self._released(watch, effect, cut_off)
                case _:
                    pass
        kernel.say(f"{process.owner.name} {len(events)} {[type(e).__name__ for e in effects]}")
        for event in events:
            if isinstance(event, ev.PartitionsLost):
                for tp in event.partitions:
                    self._end_epoch(watch, watch.epochs.get(tp), clean=False)
        self._check_buffers(process, watch)

    # Records

    def _assigned(self, process: Process, watch: Watch, event: ev.PartitionsAssigned) -> None:
        for tp in event.partitions:
            stale = watch.epochs.get(tp)
            if stale is not None:  # its end was never told
                watch.replaced.append(stale)
            epoch = watch.epochs[tp] = Epoch(process.owner.name, tp, event.epoch)
            epoch.closing = watch.drain is not None

    def _polled(self, process: Process, watch: Watch, event: ev.RecordsPolled) -> None:
        """Guarantee 5: no window above its maximum by more than one poll."""
        if len(event.records) > self._poll_max:
            self.violated(5, f"a poll of {len(event.records)} records")
        counted: set[TopicPartition] = set()
        first = bool(event.records) and event.records[0].arrived_ns != watch.polled_ns
        if first:
            watch.polled_ns = event.records[0].arrived_ns
        if first and process.core.buffer_bytes >= self._buffer_max:
            watch.full_polls += 1
            if watch.full_polls > 1:
                self.violated(5, f"{watch.full_polls} polls while the buffer is full")
        for query in event.records:
            epoch = watch.epochs.get(query.tp)
            if epoch is None or epoch.number != query.epoch or epoch.closing:
                self._kernel.fire("records of an epoch that is over")
                continue
            if first and query.tp not in counted:
                counted.add(query.tp)
                if self._window(epoch) >= self._window_max:
                    self.violated(
                        5, f"{query.tp} was polled with {self._window(epoch)} in its window"
                    )
            if epoch.offsets and query.offset <= epoch.offsets[-1]:
                self.violated(1, f"{query.tp}: {query.offset} came after {epoch.offsets[-1]}")
            epoch.queries.append(query)
            epoch.offsets.append(query.offset)
            watch.kept.append(query)

    def _window(self, epoch: Epoch) -> int:
        committed = self._broker.committed.get(epoch.tp, 0)
        return len(epoch.offsets) - bisect_left(epoch.offsets, committed)

    def _check_buffers(self, process: Process, watch: Watch) -> None:
        core = process.core
        if core.buffer_bytes < self._buffer_max:
            watch.full_polls = 0
        if watch.steps % ACCOUNT_EVERY == 0:
            self.account(process)

    def account(self, process: Process) -> None:
        """The bytes that a core counts are those of what it holds."""
        core = process.core
        watch = self._watch(process.owner.name)
        held = sum(
            query.size_bytes
            for epoch in watch.epochs.values()
            for query in epoch.queries
            if query.phase not in (SETTLED, ABANDONED)
        )
        if process.halt is None and held != core._query_bytes:
            self.violated(5, f"{core._query_bytes} bytes of queries are counted, {held} are held")
        if core._delivery.unconfirmed_bytes < 0:
            self.violated(5, "bytes of results were given back twice")

    # Dispatch and writes

    def _dispatched(self, watch: Watch, effect: fx.Dispatch) -> None:
        self._kernel.fire("claim: exclusive" if effect.exclusive else "claim: ordinary")
        seen = set()
        for query in effect.queries:
            seen.add(id(query))
            epoch = watch.epochs.get(query.tp)
            if epoch is None or epoch.number != query.epoch:
                self.violated(4, f"{query.tp} {query.offset} is dispatched after its epoch")
                return
            if epoch.closing and query.offset > epoch.started_last:
                self.violated(4, f"{query.tp} {query.offset} is started while it is given up")
            if watch.writes.get((id(query), False)):
                self.violated(1, f"{query.tp} {query.offset} is dispatched after its outcome")
            epoch.started_last = max(epoch.started_last, query.offset)
        if len(seen) != len(effect.queries):
            self.violated(1, "a query is in a claim twice")

    def _written(self, watch: Watch, effect: fx.Write) -> None:
        for rows in effect.vectors:
            self._kernel.fire("write: vectors alone" if rows.alone else "write: vectors")
            for query in rows.queries:
                self._write_one(watch, query, letter=False)
        for row in effect.errors:
            self._kernel.fire(f"write: error {row.form.name}{' alone' if row.alone else ''}")
            self._write_one(watch, row.query, letter=False)
        for letter in effect.letters:
            self._kernel.fire(f"write: letter {letter.form.name}{' alone' if letter.alone else ''}")
            self._write_one(watch, letter.query, letter=True)

    def _write_one(self, watch: Watch, query: Query, *, letter: bool) -> None:
        """Guarantee 1: one outcome an epoch, re-sends of failed deliveries apart."""
        key = (id(query), letter)
        what = "letter" if letter else "result"
        if watch.writes.get(key):
            self.violated(1, f"a second {what} of {query.tp} {query.offset} in one epoch")
        epoch = watch.epochs.get(query.tp)
        if epoch is None or epoch.number != query.epoch:
            self.violated(4, f"a {what} of {query.tp} {query.offset} is written after its epoch")
            return
        if not letter and not epoch.closing:
            epoch.started_last = max(epoch.started_last, query.offset)
        watch.writes[key] = 1

    def _durable(self, watch: Watch, event: ev.WritesDurable) -> None:
        for topic, queries in ((RESULTS, event.results), (LETTERS, event.letters)):
            if queries:
                watch.last_ok_ns[topic] = self._kernel.now_ns
            for query in queries:
                watch.writes[id(query), topic == LETTERS] = 2

    def _failed(self, watch: Watch, event: ev.WritesFailed) -> None:
        for query in event.results:
            watch.writes.pop((id(query), False), None)
        for query in event.letters:
            watch.writes.pop((id(query), True), None)

    # Commits

    def _commits(self, watch: Watch, effect: fx.Commit) -> None:
        self._kernel.fire("commit: synchronous" if effect.synchronous else "commit: asynchronous")
        if effect.synchronous:
            for offset in effect.offsets:
                epoch = watch.epochs.get(offset.tp)
                if epoch is not None and epoch.number == offset.epoch:
                    epoch.commit_id, epoch.commit_done = effect.commit_id, False

    def _commits_transaction(self, watch: Watch, effect: fx.CommitTransaction) -> None:
        """Guarantee 10: a prefix of each partition, offsets and all, one transaction at a time."""
        if watch.transactions:
            self.violated(10, "two transactions at once")
        watch.transactions[effect.commit_id] = effect
        self._written(watch, effect.write)
        ends = {offset.tp: offset.offset_next for offset in effect.offsets}
        written = [query for rows in effect.write.vectors for query in rows.queries]
        written += [row.query for row in effect.write.errors]
        for query in written:
            if query.offset >= ends.get(query.tp, -1):
                self.violated(10, f"{query.tp} {query.offset} is written, its offset is not")

    def _transaction_ended(self, watch: Watch, effect: fx.CommitTransaction, *, done: bool) -> None:
        rows = effect.write
        results = [query for vectors in rows.vectors for query in vectors.queries]
        results += [row.query for row in rows.errors]
        letters = [row.query for row in rows.letters]
        if done:
            self._durable(watch, ev.WritesDurable(results=results, letters=letters))
            return
        for query in results:
            watch.writes.pop((id(query), False), None)
        for query in letters:
            watch.writes.pop((id(query), True), None)

    def _commit_ended(self, watch: Watch, event: ev.CommitDone | ev.CommitFailed) -> None:
        done = isinstance(event, ev.CommitDone)
        transaction = watch.transactions.pop(event.commit_id, None)
        if transaction is not None:
            self._transaction_ended(watch, transaction, done=done)
        if not done and getattr(event, "retryable", False):
            self._kernel.fire("commit: failed, to be tried again")
        for epoch in watch.epochs.values():
            if epoch.commit_id == event.commit_id:
                epoch.commit_done = done

    # Revokes and the drain

    def _revoking(self, process: Process, watch: Watch, event: ev.PartitionsRevoking) -> None:
        epochs = [watch.epochs[tp] for tp in event.partitions if tp in watch.epochs]
        for epoch in epochs:
            self._close(process, epoch)
        watch.revoking[event.revoke_id] = epochs
        watch.revoke_by_ns[event.revoke_id] = (
            self._kernel.now_ns + process.options.core.revoke_deadline_ns
        )

    def _released(self, watch: Watch, effect: fx.Release, cut_off: bool) -> None:
        by_ns = watch.revoke_by_ns.pop(effect.revoke_id)
        now_ns = self._kernel.now_ns
        # Beyond the deadline there is the commit, whose answer may be late.
        if now_ns > by_ns + 6 * SECOND and now_ns > watch.stalled_ns:
            self.violated(4, f"a revoke was released {(now_ns - by_ns) / 1e9} s after its deadline")
        self._kernel.fire("revoke: abandoned some" if effect.abandoned else "revoke: finished")
        for epoch in watch.revoking.pop(effect.revoke_id):
            epoch.released = True
            # What a drain gave up in the same moment it counts as its own.
            drained = watch.drain_by_ns and now_ns >= watch.drain_by_ns
            clean = not (effect.abandoned or cut_off or drained) and epoch.commit_done
            self._end_epoch(watch, epoch, clean=clean)

    def revoke_returned(
        self, process: Process, tps: Sequence[TopicPartition], waited_ns: int
    ) -> None:
        """A rebalance callback has returned; before `Release`: the source gave up waiting."""
        watch = self._watch(process.owner.name)
        due_ns = process.options.core.revoke_deadline_ns
        # Not those of `revoking` alone: the core may not even have heard of it.
        for epoch in [watch.epochs[tp] for tp in tps if tp in watch.epochs]:
            self._kernel.fire("revoke: the source gave up waiting")
            if waited_ns < due_ns and process.halt is None:
                self.violated(4, f"a revoke of {tps} did not wait for the core")
            epoch.given_up_on = True

    def _stopping(self, process: Process, watch: Watch) -> None:
        if watch.drain is not None:
            return
        watch.drain = list(watch.epochs.values())
        watch.drain_by_ns = self._kernel.now_ns + process.options.core.drain_deadline_ns
        for epoch in watch.drain:
            self._close(process, epoch)

    def _close(self, process: Process, epoch: Epoch) -> None:
        """It is given up: nothing above what has been started of it may be started any more."""
        epoch.closing = True
        ledger = process.core._ledgers.get(epoch.tp)
        if self.exactly_once and ledger is not None:
            # Outcomes that are held count as started and are not seen from outside.
            epoch.started_last = max(epoch.started_last, ledger.started_offset_last)

    def _end_epoch(self, watch: Watch, epoch: Epoch | None, *, clean: bool) -> None:
        """Guarantee 1: of what it admitted, each is settled or abandoned."""
        if epoch is None or epoch.over:
            return
        epoch.over = True
        if watch.epochs.get(epoch.tp) is epoch:
            del watch.epochs[epoch.tp]
        for query in epoch.queries:
            if query.phase not in (SETTLED, ABANDONED):
                self.violated(1, f"{query.tp} {query.offset} is neither settled nor abandoned")
        if clean and not epoch.given_up_on:
            epoch.clean = True
            self._kernel.fire("epoch: ended clean")
        else:
            self._dirty(epoch)
        self._before[epoch.tp] = epoch

    def _dirty(self, epoch: Epoch) -> None:
        self._kernel.fire("epoch: cut off")
        self._budget[epoch.tp] += self._window_max + self._poll_max

    def logged_a_bug(self, process: Process, what: str) -> None:
        self.violated(0, f"{process.owner.name} logged {what!r}")

    def halted(self, process: Process, halt: fx.Halt) -> None:
        """Guarantees 8 and 9: how a process may end by itself."""
        watch = self._watch(process.owner.name)
        kernel = self._kernel
        kernel.fire(f"halt: {halt.exit_code}{' with some abandoned' if halt.abandoned else ''}")
        kernel.say(f"{process.owner.name} halts: {halt.message}")
        if halt.exit_code == 0:
            if watch.drain is None:
                self.violated(8, f"{process.owner.name} stopped unasked")
            late_ns = kernel.now_ns - watch.drain_by_ns - 4 * SECOND
            if late_ns > 0 and kernel.now_ns > watch.stalled_ns:
                self.violated(8, f"{process.owner.name} drained {late_ns / 1e9} s too long")
        elif halt.message == "drained":
            self.violated(8, f"{process.owner.name} drained and exits with {halt.exit_code}")
        elif self.exactly_once and halt.message.startswith(_TRANSACTION_ENDS):
            kernel.fire(f"halt: {halt.message[:32]}")
        elif "could not be written" in halt.message:
            topic = RESULTS if "results" in halt.message else LETTERS
            since_ns = watch.last_ok_ns.get(topic, 0)
            if kernel.now_ns - since_ns < process.options.core.sink_outage_ns_max - SECOND:
                self.violated(9, f"{process.owner.name} gave up though {topic} could be written")
        else:
            self.violated(0, f"{process.owner.name} ended: {halt.message}")
        for epoch in list(watch.epochs.values()):
            clean = halt.exit_code == 0 and not halt.abandoned and epoch.commit_done
            epoch.over = True
            epoch.clean = clean
            del watch.epochs[epoch.tp]
            self._before[epoch.tp] = epoch
            if clean:
                kernel.fire("epoch: ended clean")
            else:
                self._dirty(epoch)

    def killed(self, process: Process) -> None:
        """All that it had is cut off."""
        watch = self._watch(process.owner.name)
        for epoch in list(watch.epochs.values()):
            epoch.over = True
            self._dirty(epoch)
            self._before[epoch.tp] = epoch
        watch.epochs.clear()

    # The end -------------------------------------------------------------------------------------

    def unfinished(self, processes: Iterable[Process]) -> str | None:
        """What is still to be done, if anything: after healing there must come an end of it."""
        lag = self._broker.lag()
        if lag:
            return f"lag {lag}"
        for process in processes:
            if process.consumer.paused & process.consumer.assignment:
                return f"{process.owner.name} has paused {sorted(process.consumer.paused)}"
            gauges = process.core.gauges()
            if gauges.unsettled or gauges.buffer_bytes or gauges.writing_suspended:
                return f"{process.owner.name} holds {gauges}"
        return None

    def at_end(self, processes: Iterable[Process]) -> None:
        """Guarantees 1, 2 and 9, over everything that was put on the topic."""
        for process in processes:
            self.account(process)
            watch = self._watch(process.owner.name)
            for epoch in watch.epochs.values():
                for query in epoch.queries:
                    if query.phase == SETTLED or (epoch.closing and query.phase == ABANDONED):
                        continue
                    self.violated(1, f"{query.tp} {query.offset} is in phase {query.phase}")
        for records in self.records.values():
            for record in records.values():
                self._check_settled(record)
