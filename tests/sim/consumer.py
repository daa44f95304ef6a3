"""The consumer as the adapters know it: what `confluent_kafka.Consumer` offers, in virtual time.

Every call that blocks in the real one gives the world its turn. Rebalance callbacks and reports of
commits are served inside `poll` and `consume` only, as measured on the real client; stored offsets
are forgotten with an assignment and pauses are not; a partition has no position before something of
it is read; its requests reach the broker in their order. What goes wrong is drawn from the seed's
doses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaPartition

from aggregator.core.query import TopicPartition
from tests.sim.broker import Broker, Member, Moves
from tests.sim.doses import Doses
from tests.sim.kernel import MS, SECOND, Fiber, Owner

INVALID_OFFSET = -1001
_STOPPED_NOW = "SIGTERM as partitions come"
_SLOW_START = 0.05
IDLE_NS = SECOND
"""An idle poll lasts so long at once, where nothing that it would look at can have changed."""


def error_of(code: int) -> KafkaException:
    return KafkaException(KafkaError(code))


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """What `consumer_group_metadata` gives: who commits, as of that moment."""

    consumer: SimConsumer
    member: Member | None
    generation: int


@dataclass(slots=True)
class _Callback:
    """A rebalance callback that is due."""

    kind: str
    tps: list[TopicPartition]
    moves: Moves | None = None


class SimConsumer:
    """One `Consumer`."""

    def __init__(
        self, broker: Broker, owner: Owner, doses: Doses, config: Mapping[str, Any]
    ) -> None:
        self.owner = owner
        self.member: Member | None = None
        self.generation = 0
        self.in_callback = False
        self.paused: set[TopicPartition] = set()
        self.assignment: set[TopicPartition] = set()
        self.quiet: Callable[[], bool] = lambda: False
        """Whether nothing waits that a poll's end would be needed for."""
        self.on_stop: Callable[[], None] = lambda: None
        """Sends its process SIGTERM."""
        self.closed = False
        self._broker = broker
        self._kernel = broker.kernel
        self._doses = doses
        self._on_commit = config["on_commit"]
        self._max_poll_ns = int(config["max.poll.interval.ms"]) * MS
        self._callbacks: deque[_Callback] = deque()
        self._reports: deque[tuple[KafkaError | None, list[KafkaPartition]]] = deque()
        self._next_at: dict[TopicPartition, int] = {}
        """What is read next of the partitions whose reading has started."""
        self._positions: dict[TopicPartition, int] = {}
        self._stored: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._epoch_of: dict[TopicPartition, int] = {}
        self._assignments = 0
        self._poller: Fiber | None = None
        self._fenced = False
        self._polled_ns = self._kernel.now_ns
        self._exceeded = False
        self._request_ns = 0

    # The group -----------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Sequence[str],
        *,
        on_assign: Callable[..., None],
        on_revoke: Callable[..., None],
        on_lost: Callable[..., None],
    ) -> None:
        self._on_assign, self._on_revoke, self._on_lost = on_assign, on_revoke, on_lost
        self._join()
        self._watch_polls()

    def _join(self) -> None:
        def joined() -> None:
            if not self.closed and self.member is None:
                self.member = self._broker.group.join(self)

        at_ns = self._broker.up_at_ns() + self._kernel.delay_ns(2 * MS, 300 * MS)
        self._kernel.at(at_ns, self.owner, "join", joined)

    def _watch_polls(self) -> None:
        """The client's own thread leaves the group when nobody polls for too long."""

        def look() -> None:
            if self.closed:
                return
            late_ns = self._kernel.now_ns - self._polled_ns - self._max_poll_ns
            if late_ns >= 0 and self.member is not None and not self._exceeded:
                self._kernel.fire("max.poll.interval exceeded")
                self._exceeded = True
                self._broker.group.leave(self.member)
                self.fence(self.member)
            self._watch_polls()

        self._kernel.after(self._max_poll_ns // 4, self.owner, "poll watch", look)

    def told(self, member: Member, moves: Moves) -> None:
        """The group says what this member is to do next."""
        if self.closed or self._fenced or self.member is not member:
            return
        if moves.revoke:
            self._callbacks.append(_Callback("revoke", moves.revoke, moves))
        if moves.assign or not moves.revoke:
            self._callbacks.append(_Callback("assign", moves.assign, moves))
        self.poke()

    def fence(self, member: Member) -> None:
        """It learns that the group goes on without it, as this member."""
        if self.closed or self._fenced or self.member is not member:
            return
        self._fenced = True
        self.member = None
        self._callbacks.clear()
        lost = sorted(self.assignment)
        if self._kernel.chance(self._doses.chance("assignment gone before its callback")):
            self._kernel.fire("assignment gone before its callback")
            self._unassign(lost)
        self._callbacks.append(_Callback("lost", lost))
        self.poke()

    def _serve(self) -> bool:
        """Run callbacks and reports that are due; whether there were any."""
        served = False
        while self._reports:
            self._on_commit(*self._reports.popleft())
            served = True
        while self._callbacks and not self.in_callback:
            self._run_callback(self._callbacks.popleft())
            served = True
        return served

    def _run_callback(self, callback: _Callback) -> None:
        partitions = [KafkaPartition(*tp) for tp in callback.tps]
        if callback.moves is not None and self.member is not None:
            self.generation = self.member.generation = callback.moves.generation
        member = self.member
        self.in_callback = True
        if callback.kind == "assign":
            if callback.tps and self._kernel.chance(self._doses.chance(_STOPPED_NOW)):
                self._kernel.fire(_STOPPED_NOW)
                self.on_stop()
            self._on_assign(self, partitions)
        elif callback.kind == "revoke":
            began_ns = self._kernel.now_ns, self.owner.monotonic_ns()
            self._on_revoke(self, partitions)
            # Its own clock may stand still, and leap: the wait was as long as either says.
            ended_ns = self._kernel.now_ns, self.owner.monotonic_ns()
            waited_ns = max(ended_ns[0] - began_ns[0], ended_ns[1] - began_ns[1])
            self._broker.observer.revoke_returned(self.owner.process, callback.tps, waited_ns)
            self._unassign(callback.tps)
        else:
            # With what a callback that was under way has assigned since.
            lost = sorted({*callback.tps, *self.assignment})
            self._unassign(lost)
            self._on_lost(self, [KafkaPartition(*tp) for tp in lost])
            self._fenced = self._exceeded = False
            self._join()
        self.in_callback = False
        if callback.moves is not None and member is not None:
            self._tell_group(callback, member)

    def _tell_group(self, callback: _Callback, member: Member) -> None:
        more = any(each.moves is callback.moves for each in self._callbacks)

        def tell() -> None:
            if callback.kind == "revoke":
                self._broker.group.revoked(member, callback.tps)
            if not more:
                self._broker.group.finished(member)

        if not member.gone:
            self._kernel.at(self._arrival_ns(), None, "rejoin", tell)

    def incremental_assign(self, partitions: Sequence[KafkaPartition]) -> None:
        """Nobody else does it: the callback has to."""
        self._assignments += 1
        for partition in partitions:
            tp = (partition.topic, partition.partition)
            self.assignment.add(tp)
            self._epoch_of[tp] = self._assignments
            self._start_reading(tp, partition.offset)

    def _unassign(self, tps: Sequence[TopicPartition]) -> None:
        for tp in tps:
            self.assignment.discard(tp)
            books = (self._next_at, self._positions, self._stored, self._committed, self._epoch_of)
            for book in books:
                book.pop(tp, None)

    def _start_reading(self, tp: TopicPartition, offset: int) -> None:
        """Soon. Without an offset the client asks for it, and may never be told (its #5586)."""
        epoch = self._epoch_of[tp]

        def start() -> None:
            if self._epoch_of.get(tp) == epoch and not self.closed:
                self._read_from(tp, offset)

        if offset != INVALID_OFFSET:
            # An earlier assignment of it may still be ending.
            most_ns = 2 * SECOND if self._kernel.chance(_SLOW_START) else 20 * MS
            self._kernel.after(self._kernel.delay_ns(MS // 100, most_ns), self.owner, "read", start)

    def _read_from(self, tp: TopicPartition, offset: int) -> None:
        start = self._broker.logs[tp].start
        offset = start if offset == OFFSET_BEGINNING else max(offset, start)
        self._next_at[tp] = offset
        self._positions.pop(tp, None)
        self.poke()

    def seek(self, partition: KafkaPartition) -> None:
        tp = (partition.topic, partition.partition)
        if tp not in self._next_at:
            self._kernel.fire("sought before reading has started")
            raise error_of(KafkaError._STATE)
        self._read_from(tp, partition.offset)

    # Reading -------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Something is there for a poll."""
        if self._poller is not None:
            self._poller.wake()

    def poke_soon(self) -> None:
        """A command waits: the poll that runs ends in its time."""
        if self._poller is not None:
            delay_ns = self._kernel.rng.randrange(20 * MS)
            self._kernel.after(delay_ns, self.owner, "poll ends", self._end_poll)

    def _end_poll(self) -> None:
        self._idle_until_ns = self._kernel.now_ns
        self.poke()

    def appended(self, tp: TopicPartition) -> None:
        if tp in self.assignment and tp not in self.paused and self._poller is not None:
            at_ns = self._broker.up_at_ns() + self._kernel.delay_ns(MS // 5, 5 * MS)
            self._kernel.at(at_ns, self.owner, "fetched", self.poke)

    def poll(self, timeout: float) -> Message[Any, Any] | None:
        kernel = self._kernel
        self._polled_ns = kernel.now_ns
        timeout_ns = int(timeout * SECOND)
        self._idle_until_ns = kernel.now_ns + (IDLE_NS if self.quiet() else timeout_ns)
        while True:
            message = None
            between = self._doses.chance("rebalance between poll and consume")
            if self._callbacks and kernel.chance(between):
                message = self._next()
                if message is not None:
                    kernel.fire("rebalance between poll and consume")
            if message is None and self._exceeded:
                self._exceeded = False
                return Message(error=KafkaError(KafkaError._MAX_POLL_EXCEEDED))
            if message is None:
                self._serve()
                message = self._next()
            self._polled_ns = kernel.now_ns
            if message is not None or kernel.now_ns >= self._idle_until_ns:
                return message
            self._poller = kernel.fiber()
            self._poller.wait(self._idle_until_ns - kernel.now_ns)
            self._poller = None

    def consume(self, count: int, timeout: float) -> list[Message[Any, Any]]:
        self._serve()
        self._polled_ns = self._kernel.now_ns
        most = min(count, self._kernel.rng.choice([3, 30, 300, 1000]))
        found: list[Message[Any, Any]] = []
        while len(found) < most and (message := self._next()) is not None:
            found.append(message)
        return found

    def _next(self) -> Message[Any, Any] | None:
        """The next record of any partition, a run of one at a time."""
        if self._kernel.now_ns < self._broker.down_until_ns or self.in_callback:
            return None
        ready = [tp for tp in self._next_at if tp not in self.paused]
        if len(ready) > 1:
            turn = self._kernel.rng.randrange(len(ready))
            ready = ready[turn:] + ready[:turn]
        for tp in ready:
            log, next_at = self._broker.logs[tp], self._next_at[tp]
            if next_at >= log.end:
                continue
            if tp not in self._positions:
                self._broker.observer.taken_over(self, tp, next_at)
            offset, message = log.next_from(max(next_at, log.start))
            if message is not None:
                self._next_at[tp] = self._positions[tp] = offset + 1
                return message
            # Nothing but markers: the position moves past them without a record.
            self._next_at[tp] = self._positions[tp] = log.end
            self._kernel.fire("position moved without records")
        return None

    def consumer_group_metadata(self) -> GroupMetadata:
        return GroupMetadata(self, self.member, self.generation)

    def position(self, partitions: Sequence[KafkaPartition]) -> list[KafkaPartition]:
        return [
            KafkaPartition(
                p.topic, p.partition, self._positions.get((p.topic, p.partition), INVALID_OFFSET)
            )
            for p in partitions
        ]

    def get_watermark_offsets(
        self, partition: KafkaPartition, *, cached: bool
    ) -> tuple[int, int] | None:
        log = self._broker.logs[partition.topic, partition.partition]
        return log.start, log.end

    def committed(self, partitions: list[KafkaPartition], timeout: float) -> list[KafkaPartition]:
        kernel, timeout_ns = self._kernel, int(timeout * SECOND)
        if kernel.chance(self._doses.chance("committed offsets unknown")):
            kernel.fire("committed offsets unknown")
            kernel.fiber().wait(timeout_ns // 10)
            raise error_of(KafkaError._TIMED_OUT)
        wait_ns = self._broker.up_at_ns() - kernel.now_ns + kernel.delay_ns(MS // 2, 5 * MS)
        kernel.fiber().wait(min(wait_ns, timeout_ns))
        held = any(self._broker.transactions.pending((p.topic, p.partition)) for p in partitions)
        if held:
            kernel.fire("reader of offsets waits for an open transaction")
            kernel.fiber().wait(max(timeout_ns - wait_ns, 0))
        if held or wait_ns > timeout_ns:
            raise error_of(KafkaError._TIMED_OUT)
        return [
            KafkaPartition(
                p.topic,
                p.partition,
                self._broker.committed.get((p.topic, p.partition), INVALID_OFFSET),
            )
            for p in partitions
        ]

    def pause(self, partitions: Sequence[KafkaPartition]) -> None:
        self.paused.update((p.topic, p.partition) for p in partitions)

    def resume(self, partitions: Sequence[KafkaPartition]) -> None:
        self.paused.difference_update((p.topic, p.partition) for p in partitions)

    # Commits -------------------------------------------------------------------------------------

    def store_offsets(self, *, offsets: Sequence[KafkaPartition]) -> None:
        for partition in offsets:
            tp = (partition.topic, partition.partition)
            if tp not in self.assignment:
                raise error_of(KafkaError._STATE)
            self._stored[tp] = partition.offset

    def commit(self, *, asynchronous: bool) -> list[KafkaPartition] | None:
        offsets = {
            tp: offset for tp, offset in self._stored.items() if self._committed.get(tp) != offset
        }
        if not offsets:
            if not asynchronous:
                raise error_of(KafkaError._NO_OFFSET)
            self._report(KafkaError(KafkaError._NO_OFFSET), [])
            return None
        if asynchronous:
            self._request(offsets, self._report)
            return None
        return self._commit_and_wait(offsets)

    def _commit_and_wait(self, offsets: dict[TopicPartition, int]) -> list[KafkaPartition]:
        fiber = self._kernel.fiber()
        outcome: list[tuple[KafkaError | None, list[KafkaPartition]]] = []

        def answered(error: KafkaError | None, partitions: list[KafkaPartition]) -> None:
            outcome.append((error, partitions))
            fiber.wake()

        self._request(offsets, answered)
        while not outcome:
            fiber.wait(None)
        error, partitions = outcome[0]
        if error is not None:
            raise KafkaException(error)
        return partitions

    def _report(self, error: KafkaError | None, partitions: list[KafkaPartition]) -> None:
        self._reports.append((error, partitions))
        self.poke()

    def _arrival_ns(self) -> int:
        """When the next request arrives: after all that were sent before it."""
        at_ns = self._broker.up_at_ns() + self._kernel.delay_ns(MS // 5, 4 * MS)
        self._request_ns = max(self._request_ns + 1, at_ns)
        return self._request_ns

    def _request(
        self,
        offsets: dict[TopicPartition, int],
        answer: Callable[[KafkaError | None, list[KafkaPartition]], None],
    ) -> None:
        kernel, doses = self._kernel, self._doses
        generation = self.generation
        if kernel.chance(doses.chance("commit late")):
            kernel.fire("commit late")
            self._request_ns = max(self._request_ns, kernel.now_ns) + kernel.delay_ns(0, 2 * SECOND)
        refused = kernel.chance(doses.chance("commit refused"))
        answer_lost = kernel.chance(doses.chance("commit taken, answer lost"))
        one_failed = kernel.chance(doses.chance("commit failed for one partition"))

        def arrive() -> None:
            error: int | None
            left = dict(offsets)
            failed: list[TopicPartition] = []
            if refused:
                kernel.fire("commit refused")
                error = kernel.rng.choice(
                    [KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.REQUEST_TIMED_OUT]
                )
            else:
                if one_failed and len(left) > 1:
                    kernel.fire("commit failed for one partition")
                    failed.append(min(left))
                    del left[failed[0]]
                error = self._broker.commit(self, left, generation)
                kernel.fire(
                    "commit: taken" if error is None else f"commit: {KafkaError(error).name()}"
                )
                if error is None and answer_lost:
                    kernel.fire("commit taken, answer lost")
                    error, left = KafkaError._TIMED_OUT, {}
            back_ns = kernel.delay_ns(MS // 5, 4 * MS)
            kernel.after(back_ns, self.owner, "commit answered", lambda: reply(error, left, failed))

        def reply(
            error: int | None, taken: dict[TopicPartition, int], failed: list[TopicPartition]
        ) -> None:
            if error is None:
                self._committed |= {tp: o for tp, o in taken.items() if tp in self.assignment}
            partitions: list[Any] = [
                _Outcome(tp, offset, KafkaError.NOT_COORDINATOR if tp in failed else None)
                for tp, offset in offsets.items()
            ]
            answer(None if error is None else KafkaError(error), partitions)

        # The broker's side: it happens though the process may be gone by then.
        kernel.at(self._arrival_ns(), None, "commit arrives", arrive)

    def close(self) -> None:
        """Give up what is assigned and leave."""
        if self.closed or not self.owner.alive:
            return
        if self.assignment:
            tps = sorted(self.assignment)
            self.in_callback = True
            self._on_revoke(self, [KafkaPartition(*tp) for tp in tps])
            self.in_callback = False
            self._unassign(tps)
        self.closed = True
        member = self.member
        if member is not None:
            leave = self._broker.group.leave
            self._kernel.at(self._arrival_ns(), None, "leave", lambda: leave(member))


class _Outcome:
    """A `TopicPartition` of a commit's answer, whose `error` ours can set."""

    def __init__(self, tp: TopicPartition, offset: int, error: int | None) -> None:
        self.topic, self.partition = tp
        self.offset = offset
        self.error = None if error is None else KafkaError(error)
