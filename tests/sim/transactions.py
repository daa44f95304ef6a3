"""Transactions, on the brokers and in the client: records and offsets in, all visible or nothing.

The brokers' side (`TransactionLog`) keeps one open transaction for each transactional id, fences
the older of two that share one, and aborts what stays open for too long; readers of committed
records see its records when it commits. The client's side (`TransactionalProducer`) adds what the
adapter calls to the simulated producer. Calls that block do so for at most their timeout and may
end later than that: whoever calls again learns how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from aggregator.core.query import TopicPartition
from tests.sim.broker import Broker
from tests.sim.consumer import GroupMetadata
from tests.sim.doses import Doses
from tests.sim.kernel import MS, SECOND, Fiber, Kernel, Owner
from tests.sim.producer import Sent, SimProducer, WriteObserver


@dataclass(eq=False, slots=True)
class Open:
    """A transaction that has neither been committed nor aborted."""

    name: str
    epoch: int
    records: list[Sent] = field(default_factory=list)
    offsets: dict[TopicPartition, int] = field(default_factory=dict)
    metadata: GroupMetadata | None = None
    ended: bool = False


class TransactionLog:
    """The transaction coordinator."""

    def __init__(self, kernel: Kernel, broker: Broker, observer: WriteObserver) -> None:
        self._kernel = kernel
        self._broker = broker
        self._observer = observer
        self._epochs: dict[str, int] = {}
        self._open: dict[str, Open] = {}

    def init(self, name: str) -> int:
        """A producer of this id starts: whoever had it is fenced, what it left open aborted."""
        self._epochs[name] = self._epochs.get(name, 0) + 1
        left = self._open.pop(name, None)
        if left is not None:
            self._kernel.fire("transaction: left open, aborted by its successor")
            left.ended = True
        return self._epochs[name]

    def fenced(self, name: str, epoch: int) -> bool:
        return self._epochs[name] != epoch

    def opened(self, name: str, epoch: int, timeout_ns: int) -> Open:
        """The open transaction, begun by this first record or offset of it if there is none."""
        found = self._open.get(name)
        if found is None:
            found = self._open[name] = Open(name, epoch)
            transaction = found
            self._kernel.after(timeout_ns, None, "txn timeout", lambda: self._expire(transaction))
        return found

    def _expire(self, transaction: Open) -> None:
        if transaction.ended:
            return
        self._kernel.fire("transaction: open for too long, aborted by the broker")
        transaction.ended = True
        self._open.pop(transaction.name, None)
        self._epochs[transaction.name] += 1

    def end(self, name: str, epoch: int, *, commit: bool) -> bool:
        """Commit or abort the open transaction; False: its producer is fenced."""
        if self.fenced(name, epoch):
            return False
        transaction = self._open.pop(name, None)
        if transaction is None:
            return True
        transaction.ended = True
        self._kernel.fire("transaction: committed" if commit else "transaction: aborted")
        if commit:
            for sent in transaction.records:
                self._observer.landed(sent)
            metadata = transaction.metadata
            if metadata is not None:
                self._broker.take_offsets(metadata.consumer, transaction.offsets)
        return True

    def pending(self, tp: TopicPartition) -> bool:
        """Whether an offset of it may still be committed: who reads offsets waits for that."""
        return any(tp in transaction.offsets for transaction in self._open.values())


class TransactionalProducer(SimProducer):
    """A `Producer` with a transactional id."""

    def __init__(
        self,
        broker: Broker,
        owner: Owner,
        doses: Doses,
        observer: WriteObserver,
        config: Mapping[str, Any],
    ) -> None:
        super().__init__(broker, owner, doses, observer, config)
        self._id = str(config["transactional.id"])
        self._transaction_timeout_ns = int(config["transaction.timeout.ms"]) * MS
        self._log: TransactionLog = broker.transactions
        self._epoch = 0
        self._number = 0
        self._begun = False
        self._ending: _Call | None = None
        self._numbers: dict[int, int] = {}

    # The life of one -----------------------------------------------------------------------------

    def init_transactions(self, timeout: float) -> None:
        call = _Call(self._kernel.fiber())

        def init() -> None:
            self._epoch = self._log.init(self._id)
            self._kernel.after(MS, self._owner, "txn answer", call.end)

        self._kernel.at(self._arrival_ns(), None, "txn init", init)
        call.wait(timeout)

    def begin_transaction(self) -> None:
        if self._begun:
            raise KafkaException(KafkaError(KafkaError._STATE))
        self._begun = True
        self._number += 1
        self._ending = None

    def produce(self, topic: str, value: bytes | None, key: bytes | None, **named: Any) -> None:
        if not self._begun:
            raise KafkaException(KafkaError(KafkaError._STATE))
        super().produce(topic, value, key, **named)

    def _tag(self, sent: Sent) -> None:
        self._numbers[id(sent)] = self._number

    def _land(self, batch: list[Sent]) -> None:
        """Into the transaction that it was sent in, if that is still open."""
        numbers = {self._numbers.get(id(sent)) for sent in batch}
        if numbers != {self._number} or self._ending is not None or not self._begun:
            self._kernel.fire("transaction: a record came after its end")
            return
        if self._log.fenced(self._id, self._epoch):
            return
        self._log.opened(self._id, self._epoch, self._transaction_timeout_ns).records += batch

    def send_offsets_to_transaction(
        self, partitions: Sequence[KafkaPartition], metadata: GroupMetadata, timeout: float
    ) -> None:
        offsets = {(p.topic, p.partition): p.offset for p in partitions}
        call = _Call(self._kernel.fiber())
        number = self._number
        lost = self._happens("offsets of a transaction not answered")

        def arrive() -> None:
            error = None
            if self._log.fenced(self._id, self._epoch):
                error = self._fatal()
            elif number == self._number and self._ending is None:
                code = self._broker.group.judge_commit(metadata.member, metadata.generation)
                if code is None:
                    transaction = self._log.opened(
                        self._id, self._epoch, self._transaction_timeout_ns
                    )
                    transaction.offsets |= offsets
                    transaction.metadata = metadata
                else:
                    error = KafkaError(code, txn_requires_abort=True)
            if not lost:
                answer_ns = self._kernel.delay_ns(MS // 5, 3 * MS)
                self._kernel.after(answer_ns, self._owner, "txn answer", lambda: call.end(error))

        self._kernel.at(self._arrival_ns(), None, "txn offsets", arrive)
        call.wait(timeout)

    def commit_transaction(self, timeout: float) -> None:
        while len(self):
            self.flush(timeout)
        self._end(timeout, commit=True)

    def abort_transaction(self, timeout: float) -> None:
        self.purge()
        if self._ending is None:
            self._give_up_in_flight()
        self.poll(0)
        self._end(timeout, commit=False)

    def _give_up_in_flight(self) -> None:
        """What is under way is reported as purged, once; whatever comes of it comes too late."""
        for sent in list(self._in_flight.values()):
            self._in_flight.pop(id(sent), None)
            self._reports.append((sent, KafkaError(KafkaError._PURGE_INFLIGHT)))

    def _end(self, timeout: float, *, commit: bool) -> None:
        if self._ending is None:
            call = self._ending = _Call(self._kernel.fiber())
            unanswered = self._happens("end of a transaction never answered")
            arrives = not unanswered or self._kernel.chance(0.5)

            def arrive() -> None:
                ended = self._log.end(self._id, self._epoch, commit=commit)
                error = None if ended else self._fatal()
                if unanswered:
                    return
                answer_ns = self._kernel.delay_ns(MS, 10 * MS)
                self._kernel.after(answer_ns, self._owner, "txn answer", lambda: call.end(error))

            at_ns = self._arrival_ns()
            if self._happens("end of a transaction late"):
                at_ns += self._kernel.delay_ns(MS, 2 * SECOND)
            if arrives:
                self._kernel.at(at_ns, None, "txn end", arrive)
        self._ending.fiber = self._kernel.fiber()
        self._ending.wait(timeout)
        self._begun = False

    def list_topics(self, topic: str | None, timeout: float) -> None:
        """Any broker answers that one is up."""
        del topic
        call = _Call(self._kernel.fiber())
        self._kernel.at(self._arrival_ns(), self._owner, "metadata", call.end)
        call.wait(timeout)

    def _fatal(self) -> KafkaError:
        self._kernel.fire("transaction: its producer is fenced")
        return KafkaError(KafkaError._FENCED, "fenced", fatal=True)

    def _arrival_ns(self) -> int:
        return self._broker.up_at_ns() + self._kernel.delay_ns(MS // 5, 4 * MS)

    # Reports -------------------------------------------------------------------------------------

    def poll(self, timeout: float) -> int:
        if not self._reports and timeout > 0:
            self._poller = self._kernel.fiber()
            self._poller.wait(int(timeout * SECOND))
            self._poller = None
        return self._serve(1 << 30)

    def flush(self, timeout: float) -> int:
        self.poll(timeout)
        return len(self)


class _Call:
    """A request, and who waits for its answer."""

    def __init__(self, fiber: Fiber) -> None:
        self.fiber = fiber
        self._done = False
        self._waited_for = False
        """Its fiber waits for this answer, and not for something else by now."""
        self._error: KafkaError | None = None

    def end(self, error: KafkaError | None = None) -> None:
        self._done = True
        self._error = error
        if self._waited_for:
            self.fiber.wake()

    def wait(self, timeout_s: float) -> None:
        """Return when it is answered; raises what the answer says, or that there is none yet."""
        if not self._done:
            self._waited_for = True
            self.fiber.wait(int(timeout_s * SECOND))
            self._waited_for = False
        if not self._done:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer yet", retriable=True))
        if self._error is not None:
            raise KafkaException(self._error)
