"""Transactions: records and the consumer's offsets in, one committed or aborted transaction out.

Owns the transactional producer and its one thread. Invariants: each transaction handed in is
answered exactly once, by `CommitDone` or, after its abort has ended, by `CommitFailed`, unless the
producer fails for good, which is told as fatal instead; what was refused of it is reported before
that; nothing is produced outside a transaction, and none begins before the last one has ended.

The offsets are sent on the consumer's thread, together with the check of their epochs, since the
broker accepts offsets of partitions that one does not own. Once the commit has begun there is no
way back: an abort that is asked for then changes nothing.

Must not know why anything is committed, nor what to do about a failure.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from aggregator.adapters.kafka_config import KafkaConfigError, KafkaOptions, transactional_config
from aggregator.adapters.kafka_offsets import LOOK_S, SLICE_S, OffsetSender, OffsetsRequest
from aggregator.adapters.kafka_sink import OF_THE_RECORD
from aggregator.adapters.kafka_watch import ConnectionWatch
from aggregator.core.effects import CommitOffset
from aggregator.core.events import CommitDone, CommitFailed, WriteFault
from aggregator.wire.headers import Headers

Token = TypeVar("Token")
Token_contra = TypeVar("Token_contra", contravariant=True)

IDLE_S = 0.5
"""Between two looks at the client's complaints while there is no transaction."""
INIT_TIMEOUT_S = 30.0
ROUND_S = 0.05
"""A pause between two tries of what the client calls retriable."""
ROUND_S_MAX = 2.0
"""What a round of `_end` lasts at the most: a process that was frozen must not count that."""
TIMEOUTS_UNANSWERED = 3
"""For so many transaction timeouts brokers that answer may leave the end of one unanswered."""

_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})
"""Records that went with their transaction, through no fault of their own."""
_FENCED = frozenset(
    {
        KafkaError._FENCED,
        KafkaError.PRODUCER_FENCED,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_PRODUCER_ID_MAPPING,
    }
)


class TransactionsError(Exception):
    """Transactions can't be had; the message is one line."""


class TransactionListener(Protocol[Token_contra]):
    """Who is told, on the thread; must return at once."""

    def on_event(self, event: CommitDone | CommitFailed) -> None:
        """A transaction has ended."""

    def on_reports(
        self,
        durable: Sequence[Token_contra],
        failed: Sequence[tuple[Token_contra, WriteFault, str]],
    ) -> None:
        """Records that were refused, before the `CommitFailed`; `durable` is always empty."""

    def on_fault(self, message: str, *, fatal: bool) -> None:
        """The client complains; `fatal`: nothing more will be committed."""


@dataclass(slots=True)
class TransactionRecord(Generic[Token]):
    """A record to write; `alone`: in a produce batch with no other."""

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    token: Token
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionsOptions:
    """How to write.

    `instance_name` is unique in the group. `message_bytes_max` and `batch_bytes_max`: the largest
    and the smallest `max.message.bytes` of the topics written to.
    """

    kafka: KafkaOptions
    instance_name: str
    timeout_ms: int = 10_000
    message_bytes_max: int = 1_048_588
    batch_bytes_max: int = 1_048_588

    @property
    def transactional_id(self) -> str:
        """Of this member of the group: whoever starts with the same one fences us."""
        return f"{self.kafka.group_id}/{self.instance_name}"


@dataclass(frozen=True, slots=True)
class _Transaction(Generic[Token]):
    commit_id: int
    records: Sequence[TransactionRecord[Token]]
    offsets: Sequence[CommitOffset]


class _AbortedError(Exception):
    """The transaction is to be aborted, and why."""


class _FatalError(Exception):
    """Nothing more can be committed; it has been told."""


class KafkaTransactions(Generic[Token]):
    """What the loop commits with."""

    def __init__(
        self,
        options: TransactionsOptions,
        listener: TransactionListener[Token],
        *,
        logger: logging.Logger | None = None,
    ) -> None:
        """Check the configuration; connect to nothing yet. Raises `KafkaConfigError`."""
        self._options = options
        self._listener = listener
        config = transactional_config(
            options.kafka,
            transactional_id=options.transactional_id,
            timeout_ms=options.timeout_ms,
            message_bytes_max=options.message_bytes_max,
            batch_bytes_max=options.batch_bytes_max,
        )
        if logger is not None:
            config["logger"] = logger
        try:
            watch = ConnectionWatch("producer of transactions", options.kafka, self._tell_fatal)
            self._producer = Producer({**config, **watch.config, "error_cb": self._on_error})
        except (KafkaException, TypeError, ValueError) as error:
            raise KafkaConfigError(f"the Kafka producer's configuration: {error}") from error
        self._requests: queue.SimpleQueue[_Transaction[Token] | None] = queue.SimpleQueue()
        self._abort_id = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kafka-transactions", daemon=True)

        # Everything below belongs to the thread.
        self._source: OffsetSender | None = None
        self._failed: list[tuple[Token, WriteFault, str]] = []
        self._fatal_told = False

    # From any thread -----------------------------------------------------------------------------

    def init(self, timeout_s: float = INIT_TIMEOUT_S) -> None:
        """Fence whoever had this transactional id before, and end what it left open. Blocks.

        Raises:
            TransactionsError: The brokers don't answer or refuse.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._producer.init_transactions(max(deadline_s - time.monotonic(), 0.1))
            except KafkaException as error:
                reason = error.args[0]
                if reason.retriable() and time.monotonic() < deadline_s:
                    time.sleep(ROUND_S)
                    continue
                raise TransactionsError(
                    f"delivery = exactly_once: transactional id {self._options.transactional_id!r} "
                    f"could not be had: {reason.str()}"
                ) from error
            return

    def start(self, source: OffsetSender) -> None:
        """Start the thread; `source` sends the offsets."""
        self._source = source
        self._thread.start()

    def commit(
        self,
        commit_id: int,
        records: Sequence[TransactionRecord[Token]],
        offsets: Sequence[CommitOffset],
    ) -> None:
        """Write these and commit those, all or nothing."""
        self._requests.put(_Transaction(commit_id, records, offsets))

    def abort(self, commit_id: int) -> None:
        """Abort this one unless its commit has begun; it is answered as ever."""
        self._abort_id = commit_id

    def close(self, timeout_s: float = 5.0) -> bool:
        """Abort what is open and end the thread; returns whether it ended in time. Idempotent."""
        self._closing = True
        self._requests.put(None)
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    transaction = self._requests.get(timeout=IDLE_S)
                except queue.Empty:
                    self._producer.poll(0)
                    continue
                if transaction is not None:
                    self._carry_out(transaction)
        except _FatalError:
            return
        except Exception as error:  # noqa: BLE001 - the thread's end must be told, whatever it is
            self._listener.on_fault(f"the transactions' thread failed: {error!r}", fatal=True)

    def _carry_out(self, transaction: _Transaction[Token]) -> None:
        commit_id = transaction.commit_id
        self._failed = []
        request = OffsetsRequest(self._producer, transaction.offsets)
        try:
            try:
                self._producer.begin_transaction()
                request = self._ask(request)
                for record in transaction.records:
                    self._produce(commit_id, record)
                self._await_reports(commit_id)
                self._await_offsets(commit_id, request)
                self._commit(transaction)
            except KafkaException as error:
                raise self._judged(error) from error
        except _AbortedError as aborted:
            self._abort(transaction, request)
            self._report_failed()
            self._listener.on_event(CommitFailed(commit_id=commit_id, message=str(aborted)))
        else:
            self._listener.on_event(CommitDone(commit_id=commit_id))

    def _ask(self, request: OffsetsRequest) -> OffsetsRequest:
        """Have the offsets sent while the records are produced."""
        if self._source is None:
            raise RuntimeError("transactions were not started")
        self._source.send_offsets(request)
        return request

    def _produce(self, commit_id: int, record: TransactionRecord[Token]) -> None:
        if record.alone:
            self._await_reports(commit_id)
        while True:
            try:
                self._producer.produce(
                    record.topic,
                    record.value,
                    record.key,
                    on_delivery=partial(self._on_delivery, record),
                    headers=record.headers,  # type: ignore[arg-type] # lists are invariant
                )
            except BufferError:
                self._look(commit_id)
                self._producer.poll(LOOK_S)
                continue
            except KafkaException as error:
                raise self._not_taken(record, error.args[0]) from error
            break
        if record.alone:
            self._await_reports(commit_id)

    def _not_taken(self, record: TransactionRecord[Token], error: KafkaError) -> _AbortedError:
        """The client took no more records: over this one, or because the transaction has failed.

        The code does not tell whether it can be aborted; the abort will.
        """
        text = _text(record.topic, error)
        if error.code() in OF_THE_RECORD:
            self._failed.append((record.token, WriteFault.RECORD_ALONE, text))
        elif error.code() != KafkaError._STATE:
            self._failed.append((record.token, WriteFault.TOPIC, text))
        return _AbortedError(text)

    def _await_reports(self, commit_id: int) -> None:
        """Return when everything produced is acknowledged."""
        while len(self._producer):
            self._producer.flush(LOOK_S)
            self._look(commit_id)
        self._look(commit_id)

    def _await_offsets(self, commit_id: int, request: OffsetsRequest) -> None:
        """Return when the offsets are in the transaction."""

        def look() -> None:
            self._producer.poll(0)
            self._look(commit_id)

        while True:
            if not request.wait(look):
                raise self._hung()
            if request.refusal is not None:
                raise _AbortedError(request.refusal)
            if request.error is None:
                return
            if not request.error.retriable():
                raise KafkaException(request.error)
            time.sleep(ROUND_S)
            self._look(commit_id)
            request.ended.clear()
            request.error = None
            self._ask(request)

    def _look(self, commit_id: int) -> None:
        """Raise if the transaction is to be aborted."""
        if self._failed:
            raise _AbortedError(self._failed[0][2])
        if self._closing or self._abort_id == commit_id:
            raise _AbortedError("the abort was asked for")

    def _commit(self, transaction: _Transaction[Token]) -> None:
        """Commit, however long an outage takes: only the broker knows by now how it will end."""
        self._end(transaction, "committed", self._producer.commit_transaction)

    def _abort(self, transaction: _Transaction[Token], request: OffsetsRequest) -> None:
        """Abort, however long an outage takes."""
        if not request.give_up():
            raise self._hung()
        try:
            self._end(transaction, "aborted", self._producer.abort_transaction)
        except KafkaException as error:
            self._fail(error.args[0])
            raise _FatalError from error

    def _end(
        self, transaction: _Transaction[Token], ended: str, call: Callable[[float], object]
    ) -> None:
        """Call until it returns.

        A client that has lost its connections in a transaction looks for the coordinator among the
        brokers that it is connected to, and connects to none for that: it called the end retriable
        for ever ("No brokers available for Transactions"). A question for metadata makes it
        connect. Where that does not help either, whoever is started next learns from the group's
        offsets what has become of the transaction.
        """
        limit_s = TIMEOUTS_UNANSWERED * self._options.timeout_ms / 1_000
        unanswered_s = 0.0
        while True:
            began_s = time.monotonic()
            try:
                call(SLICE_S)
            except KafkaException as error:
                reason = error.args[0]
                if not reason.retriable():
                    raise
            else:
                return
            self._producer.poll(0)
            answered = self._brokers_answer(transaction)
            time.sleep(ROUND_S)
            round_s = min(time.monotonic() - began_s, ROUND_S_MAX)
            unanswered_s = unanswered_s + round_s if answered else 0.0
            if unanswered_s >= limit_s:
                self._tell_fatal(
                    f"the open transaction could not be {ended} for {limit_s:g} s, though the "
                    f"brokers answer ({reason.str()})"
                )
                raise _FatalError

    def _brokers_answer(self, transaction: _Transaction[Token]) -> bool:
        """Ask for metadata, which makes the client connect, and return whether any came."""
        topic = transaction.offsets[0].tp[0] if transaction.offsets else None
        try:
            self._producer.list_topics(topic, SLICE_S)
        except KafkaException:
            return False
        return True

    def _judged(self, error: KafkaException) -> Exception:
        """Return what a failed call means for the transaction, by the client's own judgement."""
        reason = error.args[0]
        if reason.txn_requires_abort() and not reason.fatal():
            return _AbortedError(reason.str())
        self._fail(reason)
        return _FatalError()

    def _hung(self) -> _FatalError:
        """Tell that the consumer's thread is stuck in the client."""
        self._tell_fatal("the client did not return from sending a transaction's offsets")
        return _FatalError()

    def _tell_fatal(self, message: str) -> None:
        if not self._fatal_told:
            self._fatal_told = True
            self._listener.on_fault(message, fatal=True)

    def _fail(self, reason: KafkaError) -> None:
        """Tell once that nothing more will be committed, and why."""
        options = self._options
        if reason.code() in _FENCED:
            message = (
                f"fenced: another aggregator has started as instance_name "
                f"{options.instance_name!r} of group {options.kafka.group_id!r}, or a transaction "
                f"outlasted transaction_timeout_ms ({reason.str()})"
            )
        else:
            message = f"the transactional producer failed for good: {reason.str()}"
        self._tell_fatal(message)

    def _report_failed(self) -> None:
        failed, self._failed = self._failed, []
        if failed:
            self._listener.on_reports([], failed)

    def _on_delivery(
        self, record: TransactionRecord[Token], error: KafkaError | None, _message: Any
    ) -> None:
        """Called by the client inside poll, flush, commit and abort."""
        if error is None or error.code() in _PURGED:
            return
        fault = WriteFault.TOPIC
        if error.code() in OF_THE_RECORD:
            fault = WriteFault.RECORD_ALONE if record.alone else WriteFault.RECORD
        self._failed.append((record.token, fault, _text(record.topic, error)))

    def _on_error(self, error: KafkaError) -> None:
        """Called by the client inside poll: its connections, or the client itself, have trouble."""
        if error.fatal():
            self._fail(error)
        else:
            self._listener.on_fault(error.str(), fatal=False)


def _text(topic: str, error: KafkaError) -> str:
    return f"{topic}: {error.str()}"
