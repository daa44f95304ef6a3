"""From an outcome to durable records: which form is written next, and outages of a topic.

A failed write is of the record or of the topic (DESIGN: failed writes are of two kinds). A record's
own fault is believed only when it was sent alone, since the broker refuses a whole produce batch
for one record; then the next smaller form follows, and where there is none the process ends. A
topic's fault says nothing about records: they are held, one of them is sent as a probe with growing
pauses, and all when anything got through. That a record was refused says as little about its topic:
the client may have refused it, or told of a batch what is the topic's.

Nothing is ever dropped here: a query leaves by `WritesDurable` alone, or with its epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aggregator.core.effects import ErrorRow, Halt, LetterRow, VectorRows, Write
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
from aggregator.core.query import ABANDONED, WRITING, Query

PROBE_PAUSE_NS_MIN = 250_000_000
PROBE_PAUSE_NS_MAX = 5_000_000_000


@dataclass(slots=True)
class _Topic:
    """One of the two topics written to, and whether it can be written."""

    name: str
    held: list[Query]
    failing_since_ns: int | None = None
    probing: bool = False
    """A probe is out: its report will come."""
    probe_at_ns: int = 0
    probe_pause_ns: int = PROBE_PAUSE_NS_MIN
    message: str = ""


class Delivery:
    """Collects the `Write` of one step of the core and follows each record until it is durable."""

    def __init__(self, *, outage_ns_max: int) -> None:
        """Halt is due when a topic has failed for `outage_ns_max`, or refused a smallest form."""
        self._outage_ns_max = outage_ns_max
        self._write = Write()
        self._results = _Topic("results", [])
        self._letters = _Topic("dead letter", [])
        self._hopeless: str | None = None
        self.unconfirmed_bytes = 0
        """Of records handed out in a `Write` or held, and not yet durable."""

    # Outcomes ------------------------------------------------------------------------------------

    def vectors(self, rows: VectorRows) -> None:
        """Write results that hold vectors."""
        self.unconfirmed_bytes += begin_vectors(rows)
        self._write.vectors.append(rows)

    def failure(self, query: Query) -> None:
        """Write the error result of `query.failure`, and its dead letter if due."""
        failure = query.failure
        if failure is None:
            raise ValueError("a query without a failure has no error to write")
        query.phase = WRITING
        query.writes_pending = 1
        self.unconfirmed_bytes += RECORD_OVERHEAD_BYTES
        self._write.errors.append(ErrorRow(query=query))
        if failure.dead_letter:
            query.writes_pending = 2
            self.unconfirmed_bytes += letter_bytes(query)
            self._write.letters.append(LetterRow(query=query))

    def take(self) -> Write | None:
        """Return what has been collected, if anything."""
        write = self._write
        if not (write.vectors or write.errors or write.letters):
            return None
        self._write = Write()
        return write

    # Reports -------------------------------------------------------------------------------------

    def durable(self, results: Sequence[Query], letters: Sequence[Query]) -> None:
        """Account for durable records; whoever calls settles queries with none pending."""
        unconfirmed_bytes = 0
        for query in results:
            group = query.group
            unconfirmed_bytes += RECORD_OVERHEAD_BYTES
            if group is not None:
                unconfirmed_bytes += group.stride
                query.group = None
            query.writes_pending -= 1
        for query in letters:
            unconfirmed_bytes += letter_bytes(query)
            query.writes_pending -= 1
        self.unconfirmed_bytes -= unconfirmed_bytes
        if results and self._results.failing_since_ns is not None:
            self._recover(self._results)
        if letters and self._letters.failing_since_ns is not None:
            self._recover(self._letters)

    def record_failed(
        self, results: Sequence[Query], letters: Sequence[Query], *, alone: bool, message: str
    ) -> None:
        """Send each again by itself, or, when it was alone, in its next smaller form."""
        for topic, refused in ((self._results, results), (self._letters, letters)):
            if refused:  # what is written of them next is a probe too
                topic.probing = any(query.phase != ABANDONED for query in refused)
        for query in results:
            if query.phase == ABANDONED:
                self._forget_result(query)
            elif (hopeless := result_refused(query, message, alone=alone)) is not None:
                self._hopeless = hopeless
            else:
                self._send_result(query, message)
        for query in letters:
            if query.phase == ABANDONED:
                self.unconfirmed_bytes -= letter_bytes(query)
            elif (hopeless := letter_refused(query, message, alone=alone)) is not None:
                self._hopeless = hopeless
            else:
                self._send_letter(query)

    def topic_failed(
        self, results: Sequence[Query], letters: Sequence[Query], *, message: str, now_ns: int
    ) -> None:
        """Hold the records until the topic can be written again."""
        for topic, queries in ((self._results, results), (self._letters, letters)):
            if not queries:
                continue
            topic.message = message
            topic.probing = False
            if topic.failing_since_ns is None:
                topic.failing_since_ns = now_ns
                topic.probe_pause_ns = PROBE_PAUSE_NS_MIN
                topic.probe_at_ns = now_ns + topic.probe_pause_ns
            for query in queries:
                if query.phase != ABANDONED:
                    topic.held.append(query)
                elif topic is self._results:
                    self._forget_result(query)
                else:
                    self.unconfirmed_bytes -= letter_bytes(query)

    def forget(self, _abandoned: Sequence[Query]) -> None:
        """Let go of held records whose epoch is over: no report will come for them."""
        for query in self._results.held:
            if query.phase == ABANDONED:
                self._forget_result(query)
        for query in self._letters.held:
            if query.phase == ABANDONED:
                self.unconfirmed_bytes -= letter_bytes(query)
        for topic in (self._results, self._letters):
            topic.held = [query for query in topic.held if query.phase != ABANDONED]

    # Outages -------------------------------------------------------------------------------------

    @property
    def failing(self) -> bool:
        """Whether a topic can't be written: nothing more is to be taken in."""
        return (
            self._results.failing_since_ns is not None or self._letters.failing_since_ns is not None
        )

    def tend(self, now_ns: int) -> Halt | None:
        """Probe the failing topics; return how to end, if there is no going on."""
        if self._hopeless is not None:
            return Halt(exit_code=1, message=self._hopeless)
        if not self.failing:
            return None
        self._probe(now_ns)
        message = self._outage(now_ns)
        return None if message is None else Halt(exit_code=1, message=message)

    def _probe(self, now_ns: int) -> None:
        """Send one held record of each failing topic whose pause is over."""
        for topic in (self._results, self._letters):
            if topic.failing_since_ns is None or now_ns < topic.probe_at_ns:
                continue
            topic.probe_pause_ns = min(2 * topic.probe_pause_ns, PROBE_PAUSE_NS_MAX)
            topic.probe_at_ns = now_ns + topic.probe_pause_ns
            if topic.held:
                topic.probing = True
                self._resend(topic, topic.held.pop(0))
            elif not topic.probing:  # all that it failed were abandoned: nothing is known of it
                topic.failing_since_ns = None

    def _outage(self, now_ns: int) -> str | None:
        """The one clear line if a topic has failed for too long."""
        for topic in (self._results, self._letters):
            since_ns = topic.failing_since_ns
            if since_ns is not None and now_ns - since_ns >= self._outage_ns_max:
                return (
                    f"the {topic.name} topic could not be written for "
                    f"{(now_ns - since_ns) // 1_000_000_000} s: {topic.message}"
                )
        return None

    def wake_at(self) -> int | None:
        """When `tend` has something to do next."""
        times = [
            min(topic.probe_at_ns, topic.failing_since_ns + self._outage_ns_max)
            for topic in (self._results, self._letters)
            if topic.failing_since_ns is not None
        ]
        return min(times, default=None)

    def _recover(self, topic: _Topic) -> None:
        topic.failing_since_ns = None
        topic.probing = False
        held, topic.held = topic.held, []
        for query in held:
            self._resend(topic, query)

    def _resend(self, topic: _Topic, query: Query) -> None:
        if topic is self._results:
            self._send_result(query, topic.message)
        else:
            self._send_letter(query)

    # Forms ---------------------------------------------------------------------------------------

    def _send_result(self, query: Query, message: str) -> None:
        group = query.group
        if query.write_step >= TOO_LARGE and group is not None:
            self.unconfirmed_bytes -= group.stride
            query.group = None
            query.failure = too_large(message)
            group = None
        if group is not None:
            alone = query.write_step > TOGETHER
            self._write.vectors.append(vector_row(query, group, alone=alone))
        else:
            self._write.errors.append(error_row(query))

    def _send_letter(self, query: Query) -> None:
        self._write.letters.append(letter_row(query))

    def _forget_result(self, query: Query) -> None:
        self.unconfirmed_bytes -= RECORD_OVERHEAD_BYTES
        if query.group is not None:
            self.unconfirmed_bytes -= query.group.stride
            query.group = None
