"""The producer as the adapters know it: what `confluent_kafka.Producer` offers, in virtual time.

A queue for each partition of a topic, produce batches that the broker takes whole or not at all,
and delivery reports that are served in `poll`: late, in any order between partitions, and not
always true. What goes wrong is drawn from the seed's doses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from confluent_kafka import KafkaError

from aggregator.wire.record_size import batch_bytes
from tests.sim.broker import Broker, OutputTopic
from tests.sim.consumer import error_of
from tests.sim.doses import Doses
from tests.sim.kernel import MS, SECOND, Fiber, Owner

Headers = Sequence[tuple[str, bytes | None]]
OnDelivery = Callable[[KafkaError | None, Any], None]


class WriteObserver(Protocol):
    """Who judges what is written."""

    def landed(self, sent: Sent) -> None: ...


@dataclass(eq=False, slots=True)
class Sent:
    """One record on its way."""

    owner: Owner
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    token: Any
    """The adapters' token: which query it is of."""
    on_delivery: OnDelivery
    since_ns: int
    size_bytes: int
    alone: bool


class _Delivered:
    """The message of a delivery report, as far as it is read."""

    def __init__(self, topic: str) -> None:
        self._topic = topic

    def topic(self) -> str:
        return self._topic


class SimProducer:
    """One `Producer`: a queue for each topic, batches of it, and reports in `poll`."""

    PARTITIONS = 3

    def __init__(
        self,
        broker: Broker,
        owner: Owner,
        doses: Doses,
        observer: WriteObserver,
        config: Mapping[str, Any],
    ) -> None:
        self._broker = broker
        self._kernel = broker.kernel
        self._owner = owner
        self._doses = doses
        self._observer = observer
        self._client_bytes_max = int(config["message.max.bytes"])
        self._batch_bytes_max = int(config["batch.size"])
        self._batch_records_max = int(config.get("batch.num.messages", 10_000))
        self._timeout_ns = int(config["message.timeout.ms"]) * MS
        self.alone = self._batch_records_max == 1
        self._queues: dict[tuple[str, int], deque[Sent]] = {}
        self._scheduled: set[tuple[str, int]] = set()
        self._lands_ns: dict[tuple[str, int], int] = {}
        self._reports: deque[tuple[Sent, KafkaError | None]] = deque()
        self._in_flight: dict[int, Sent] = {}
        """Not yet reported, by identity."""
        self._unreported = 0
        self._queue_max = 1 << 30
        self._poller: Fiber | None = None
        self._last_report_ns = 0
        self._nudged = False
        """The adapter's thread has something to look at when a poll ends."""
        self.closing = False

    def __len__(self) -> int:
        return self._unreported

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        *,
        on_delivery: Any,
        headers: Headers,
    ) -> None:
        kernel = self._kernel
        size = batch_bytes(key, value, headers)
        if self._unreported and kernel.chance(self._doses.chance("producer's queue full")):
            kernel.fire("producer's queue full")
            self._nudge()
            raise BufferError
        first = on_delivery.args[0]
        token = getattr(first, "token", first)  # a record of a transaction holds it
        alone = self.alone or getattr(first, "alone", False)
        if size > self._client_bytes_max:
            kernel.fire("record refused by the client")
            self._nudge()
            raise error_of(KafkaError.MSG_SIZE_TOO_LARGE)
        sent = Sent(
            self._owner, topic, key, value, list(headers), token, on_delivery, kernel.now_ns, size,
            alone,
        )  # fmt: skip
        self._unreported += 1
        self._in_flight[id(sent)] = sent
        self._tag(sent)
        queue_key = (topic, kernel.rng.randrange(self.PARTITIONS))
        self._queues.setdefault(queue_key, deque()).append(sent)
        self._schedule(queue_key)

    def _tag(self, sent: Sent) -> None:
        """A record was taken: for those who mark theirs."""

    def _schedule(self, key: tuple[str, int]) -> None:
        if key not in self._scheduled:
            self._scheduled.add(key)
            linger_ns = self._kernel.delay_ns(MS // 10, 2 * MS)
            self._kernel.after(linger_ns, self._owner, "send batch", lambda: self._send(key))

    def _send(self, key: tuple[str, int]) -> None:
        self._scheduled.discard(key)
        queue = self._queues[key]
        batch: list[Sent] = []
        size = 0
        while queue and len(batch) < self._batch_records_max:
            if batch and size + queue[0].size_bytes > self._batch_bytes_max:
                break
            size += queue[0].size_bytes
            batch.append(queue.popleft())
        if queue:
            self._schedule(key)
        if batch:
            self._send_batch(key, batch)

    def _send_batch(self, key: tuple[str, int], batch: list[Sent]) -> None:
        """Decide what becomes of a batch: the broker takes it whole or not at all."""
        kernel = self._kernel
        topic = self._broker.outputs[key[0]]
        at_ns = self._broker.up_at_ns() + kernel.delay_ns(MS // 5, 6 * MS)
        at_ns = max(at_ns, topic.down_until_ns, self._lands_ns.get(key, 0) + 1)
        if at_ns > batch[0].since_ns + self._timeout_ns:
            kernel.fire("batch timed out in an outage")
            give_up_ns = batch[0].since_ns + self._timeout_ns
            self._report_at(max(give_up_ns, kernel.now_ns), batch, KafkaError._MSG_TIMED_OUT)
            return
        self._lands_ns[key] = at_ns
        kernel.at(at_ns, None, "batch arrives", lambda: self._arrive(topic, batch))

    def _arrive(self, topic: OutputTopic, batch: list[Sent]) -> None:
        kernel, doses = self._kernel, self._doses
        now_ns = kernel.now_ns
        if now_ns < topic.refused_until_ns:
            self._report_at(now_ns + MS, batch, KafkaError.TOPIC_AUTHORIZATION_FAILED)
        elif any(sent.size_bytes > topic.message_bytes_max for sent in batch):
            kernel.fire("batch with a record too large" if len(batch) > 1 else "record too large")
            self._report_at(now_ns + MS, batch, KafkaError.MSG_SIZE_TOO_LARGE)
        elif not batch[0].alone and self._happens("batch refused for one record"):
            error = kernel.rng.choice(
                [KafkaError.INVALID_RECORD, KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT]
            )
            self._report_at(now_ns + MS, batch, error)
        elif self._happens("batch refused by its topic"):
            error = kernel.rng.choice(
                [
                    KafkaError.TOPIC_AUTHORIZATION_FAILED,
                    KafkaError.UNKNOWN_TOPIC_OR_PART,
                    KafkaError.NOT_ENOUGH_REPLICAS,
                ]
            )
            self._report_at(now_ns + MS, batch, error)
        elif self._happens("batch timed out"):
            self._report_at(now_ns + MS, batch, KafkaError._MSG_TIMED_OUT)
        elif self._happens("batch timed out, and landed later"):
            self._report_at(now_ns + MS, batch, KafkaError._MSG_TIMED_OUT)
            later_ns = kernel.delay_ns(2 * MS, 800 * MS)
            kernel.after(later_ns, None, "batch lands late", lambda: self._land(batch))
        elif self._happens("batch timed out, though it landed"):
            self._land(batch)
            self._report_at(now_ns + MS, batch, KafkaError._MSG_TIMED_OUT)
        else:
            self._land(batch)
            delay_ns = kernel.delay_ns(MS // 5, 3 * MS)
            if self._happens("report late"):
                delay_ns += kernel.delay_ns(0, SECOND)
            self._report_at(now_ns + delay_ns, batch, None)
        del doses

    def _happens(self, name: str) -> bool:
        if self._kernel.chance(self._doses.chance(name)):
            self._kernel.fire(name)
            return True
        return False

    def _land(self, batch: list[Sent]) -> None:
        for sent in batch:
            self._observer.landed(sent)

    def _report_at(self, at_ns: int, batch: list[Sent], error: int | None) -> None:
        def report() -> None:
            if batch[0].since_ns < self._last_report_ns:
                self._kernel.fire("reports out of order")
            self._last_report_ns = max(self._last_report_ns, batch[0].since_ns)
            failure = None if error is None else KafkaError(error)
            for sent in batch:
                if self._in_flight.pop(id(sent), None) is not None:
                    self._reports.append((sent, failure))
            self._wake()

        self._kernel.at(at_ns, self._owner, "batch reported", report)

    def _wake(self) -> None:
        if self._poller is not None:
            self._poller.wake()

    def _nudge(self) -> None:
        self._nudged = True
        if self._poller is not None:
            delay_ns = self._kernel.rng.randrange(50 * MS)
            self._kernel.after(delay_ns, self._owner, "poll ends", self._wake)

    def wake_to_close(self) -> None:
        self.closing = True
        self._wake()

    def poll(self, timeout: float) -> int:
        if not self._reports:
            # Where nothing is to come there is nothing to be done after it.
            awaited = self.closing or self._unreported or self._nudged
            self._poller = self._kernel.fiber()
            self._poller.wait(int(timeout * SECOND) if awaited else None)
            self._poller = None
        self._nudged = False
        return self._serve(self._kernel.rng.choice([1, 10, 1000]))

    def _serve(self, most: int) -> int:
        """Hand reports out."""
        count = 0
        while self._reports and count < most:
            sent, error = self._reports.popleft()
            self._in_flight.pop(id(sent), None)
            self._unreported -= 1
            count += 1
            sent.on_delivery(error, _Delivered(sent.topic))
        return count

    def purge(self) -> None:
        """Give up what has not been sent; what is in flight may land all the same."""
        for queue in self._queues.values():
            while queue:
                sent = queue.popleft()
                self._in_flight.pop(id(sent), None)
                self._reports.append((sent, KafkaError(KafkaError._PURGE_QUEUE)))
