"""Between Kafka's threads and the event loop: lists in, events out, one wake-up a list.

Implements the listeners of the source and the sink. What is called on their threads only takes the
time and hands over; decoding, counting and feeding happen on the loop, in the order of the calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aggregator.adapters.kafka_sink import KafkaSink
from aggregator.adapters.kafka_source import GroupEvent, RawBatch
from aggregator.core import events as ev
from aggregator.core.query import Query, TopicPartition
from aggregator.runtime.driver import Driver
from aggregator.runtime.intake import Intake
from aggregator.runtime.transactions import Record
from aggregator.telemetry import metrics as m

if TYPE_CHECKING:
    from aggregator.telemetry.logs import Logger

FAULT_REPEAT_S = 10.0
"""The same complaint of a client is logged at most this often."""
FAULT_HEAD = 48
"""Complaints that begin alike are the same: what follows are counts and times."""


@dataclass(slots=True)
class Letter:
    """What a dead letter is known by in its delivery report; a result is known by its query."""

    query: Query


Token = Query | Letter
_Reports = tuple[Sequence[Token], Sequence[tuple[Token, ev.WriteFault, str]]]


class Bridge:
    """Listens to the source and the sink of one process."""

    def __init__(
        self,
        intake: Intake,
        *,
        loop: asyncio.AbstractEventLoop,
        metrics: m.Metrics,
        log: Logger,
    ) -> None:
        """It must be attached before the source starts."""
        self._intake = intake
        self._loop = loop
        self._metrics = metrics
        self._log = log
        self._faults: dict[str, float] = {}
        self._reports: deque[_Reports] = deque()
        self._reports_called = False

    def attach(self, driver: Driver, taken: Callable[[], None]) -> None:
        """`taken` tells the source that its last batch, or assignment, is admitted."""
        self._driver = driver
        self._taken = taken

    # On the threads of Kafka's clients -----------------------------------------------------------

    def on_batch(self, batch: RawBatch) -> None:
        """Records came."""
        self._soon(self._admit, batch, time.monotonic_ns(), time.time_ns() // 1_000_000)

    def on_event(self, event: GroupEvent) -> None:
        """Something happened to the group or a commit."""
        self._soon(self._feed, event)

    def on_retention_loss(self, tp: TopicPartition, count: int) -> None:
        """Records were deleted before they were read."""
        self._soon(self._lost, tp, count)

    def on_reports(
        self, durable: Sequence[Token], failed: Sequence[tuple[Token, ev.WriteFault, str]]
    ) -> None:
        """Delivery reports came; those that come while the loop is busy are taken in together."""
        self._reports.append((durable, failed))
        # The loop resets this before it empties the queue, so nothing appended is left behind.
        if not self._reports_called:
            self._reports_called = True
            self._soon(self._reported)

    def on_fault(self, message: str, *, fatal: bool) -> None:
        """A client complains."""
        self._soon(self._fault, message, fatal)

    def _soon(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the process is ending and nobody asks any more
            return

    # On the loop ---------------------------------------------------------------------------------

    def _feed(self, event: GroupEvent) -> None:
        self._driver.feed([event])
        if type(event) is ev.PartitionsAssigned:
            self._taken()

    def _admit(self, batch: RawBatch, arrived_ns: int, wall_ms: int) -> None:
        self._admit_part(self._intake.read(batch, arrived_ns=arrived_ns, wall_ms=wall_ms))

    def _admit_part(self, parts: Iterator[tuple[ev.RecordsPolled, bool]]) -> None:
        """Admit what comes next of a batch; each part has a turn of the loop of its own.

        The source polls no more and serves no rebalance until the last is taken.
        """
        try:
            polled, last = next(parts)
        except Exception as error:  # noqa: BLE001 - a batch that is not admitted must not be lost
            self._log.exception("bug")
            self._driver.crash(f"internal error: {type(error).__name__}: {error}")
            return
        self._metrics.add(m.RECORDS_POLLED, len(polled.records))
        for query in polled.records:
            if query.failure is not None:
                self._metrics.add(m.QUERIES_REFUSED, 1, query.failure.reason)
        self._driver.feed([polled])
        if last:
            self._taken()
        else:
            self._soon(self._go_on, parts)

    def _go_on(self, parts: Iterator[tuple[ev.RecordsPolled, bool]]) -> None:
        """Admit the next part, unless a drain or the end came between: the next owner reads it."""
        if self._driver.reading_is_over:
            self._taken()
        else:
            self._admit_part(parts)

    def _reported(self) -> None:
        self._reports_called = False
        results: list[Query] = []
        letters: list[Query] = []
        failures: list[tuple[Token, ev.WriteFault, str]] = []
        while self._reports:
            durable, failed = self._reports.popleft()
            failures += failed
            queries = [token for token in durable if type(token) is Query]
            results += queries
            if len(queries) < len(durable):
                letters += [token.query for token in durable if type(token) is Letter]
        events: list[ev.Event] = []
        if results or letters:
            events.append(ev.WritesDurable(results=results, letters=letters))
        self._driver.feed(events + _failures(failures))

    def _lost(self, tp: TopicPartition, count: int) -> None:
        self._metrics.add(m.RECORDS_LOST, count)
        self._log.error("records deleted before they were read", partition=_name(tp), count=count)

    def _fault(self, message: str, fatal: bool) -> None:
        if fatal:
            self._driver.feed([ev.ShellFailed(message=message)])
            return
        now_s = self._loop.time()
        head = message[:FAULT_HEAD]
        if now_s - self._faults.get(head, -FAULT_REPEAT_S) >= FAULT_REPEAT_S:
            self._faults = {
                known: at for known, at in self._faults.items() if now_s - at < FAULT_REPEAT_S
            }
            self._faults[head] = now_s
            self._log.warning("kafka", reason=message)


class SinkPort:
    """The producer as the driver knows it: two topics."""

    def __init__(self, sink: KafkaSink[Token], *, results: str, letters: str) -> None:
        """`results` and `letters` are topics."""
        self._produce = sink.produce
        self._results = results
        self._letters = letters

    def send_result(self, query: Query, record: Record, *, alone: bool) -> None:
        """Produce to the results topic."""
        key, value, headers = record
        self._produce(self._results, key, value, headers, query, alone)

    def send_letter(self, query: Query, record: Record, *, alone: bool) -> None:
        """Produce to the dead letter topic."""
        key, value, headers = record
        self._produce(self._letters, key, value, headers, Letter(query), alone)


def _name(tp: TopicPartition) -> str:
    return f"{tp[0]}-{tp[1]}"


def _failures(failed: Sequence[tuple[Token, ev.WriteFault, str]]) -> list[ev.Event]:
    """One event for each fault and message."""
    by_fault: dict[tuple[ev.WriteFault, str], list[Token]] = {}
    for token, fault, message in failed:
        by_fault.setdefault((fault, message), []).append(token)
    return [
        ev.WritesFailed(
            fault=fault,
            message=message,
            results=[token for token in tokens if isinstance(token, Query)],
            letters=[token.query for token in tokens if isinstance(token, Letter)],
        )
        for (fault, message), tokens in by_fault.items()
    ]
