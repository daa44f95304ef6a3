"""From an outcome to durable records: which form is written next, and outages of a topic.

A failed write is of the record or of the topic (DESIGN: failed writes are of two kinds). A record's
own fault is believed only when it was sent alone, since the broker refuses a whole produce batch
for one record; then the next smaller form follows. A topic's fault says nothing about records: they
are held, one of them is sent as a probe with growing pauses, and all when anything got through.

Nothing is ever dropped here: a query leaves by `WritesDurable` alone, or with its epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aggregator.core.effects import ErrorRow, Form, LetterRow, VectorRows, Write
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import ABANDONED, WRITING, Query, VectorGroup

RECORD_OVERHEAD_BYTES = 1024
"""What a result in the producer's queue is reckoned to hold besides its vector: headers, key,
names, librdkafka's and our bookkeeping. Generous on purpose: it bounds memory."""

PROBE_PAUSE_NS_MIN = 250_000_000
PROBE_PAUSE_NS_MAX = 5_000_000_000

# Steps of a result: together with others, alone, as the error RESULT_TOO_LARGE, that one bare.
_TOGETHER, _ALONE, _TOO_LARGE, _BARE = range(4)


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
        """Halt is due when a topic has failed for `outage_ns_max`."""
        self._outage_ns_max = outage_ns_max
        self._write = Write()
        self._results = _Topic("results", [])
        self._letters = _Topic("dead letter", [])
        self.unconfirmed_bytes = 0
        """Of records handed out in a `Write` or held, and not yet durable."""

    # Outcomes ------------------------------------------------------------------------------------

    def vectors(self, rows: VectorRows) -> None:
        """Write results that hold vectors."""
        group = rows.group
        for query, row in zip(rows.queries, rows.rows, strict=True):
            query.phase = WRITING
            query.group = group
            query.row = row
            query.writes_pending = 1
            query.model_revision = rows.model_revision
            query.inference_us = rows.inference_us
            query.answered_ns = rows.answered_ns
        self.unconfirmed_bytes += len(rows.queries) * (group.stride + RECORD_OVERHEAD_BYTES)
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
            self.unconfirmed_bytes += _letter_bytes(query)
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
            unconfirmed_bytes += _letter_bytes(query)
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
        for query in results:
            if query.phase == ABANDONED:
                self._forget_result(query)
            else:
                query.write_step = _next_step(query, alone=alone)
                self._send_result(query, message)
        for query in letters:
            if query.phase == ABANDONED:
                self.unconfirmed_bytes -= _letter_bytes(query)
            else:
                query.letter_step = min(query.letter_step + 1, 2) if alone else _ALONE
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
                    self.unconfirmed_bytes -= _letter_bytes(query)

    def forget_abandoned(self) -> None:
        """Let go of held records whose epoch is over: no report will come for them."""
        for query in self._results.held:
            if query.phase == ABANDONED:
                self._forget_result(query)
        for query in self._letters.held:
            if query.phase == ABANDONED:
                self.unconfirmed_bytes -= _letter_bytes(query)
        for topic in (self._results, self._letters):
            topic.held = [query for query in topic.held if query.phase != ABANDONED]

    # Outages -------------------------------------------------------------------------------------

    @property
    def failing(self) -> bool:
        """Whether a topic can't be written: nothing more is to be taken in."""
        return (
            self._results.failing_since_ns is not None or self._letters.failing_since_ns is not None
        )

    def probe(self, now_ns: int) -> None:
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

    def outage(self, now_ns: int) -> str | None:
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
        """When `probe` or `outage` has something to say next."""
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
        alone = query.write_step > _TOGETHER
        group = query.group
        if query.write_step >= _TOO_LARGE and group is not None:
            self.unconfirmed_bytes -= group.stride
            query.group = None
            query.failure = _too_large(message)
            group = None
        if group is not None:
            self._write.vectors.append(_row(query, group, alone=alone))
            return
        form = Form.BARE if query.write_step == _BARE else Form.FULL
        self._write.errors.append(ErrorRow(query=query, form=form, alone=alone))

    def _send_letter(self, query: Query) -> None:
        form = Form.BARE if query.letter_step > _ALONE else Form.FULL
        alone = query.letter_step > _TOGETHER
        self._write.letters.append(LetterRow(query=query, form=form, alone=alone))

    def _forget_result(self, query: Query) -> None:
        self.unconfirmed_bytes -= RECORD_OVERHEAD_BYTES
        if query.group is not None:
            self.unconfirmed_bytes -= query.group.stride
            query.group = None


def _next_step(query: Query, *, alone: bool) -> int:
    """The step after a failure: an error result has no smaller form but the bare one."""
    if not alone:
        return max(query.write_step, _ALONE)
    if query.group is None and query.write_step < _TOO_LARGE:
        return _BARE
    return min(query.write_step + 1, _BARE)


def _row(query: Query, group: VectorGroup, *, alone: bool) -> VectorRows:
    return VectorRows(
        queries=[query],
        group=group,
        rows=[query.row],
        model_revision=query.model_revision,
        inference_us=query.inference_us,
        answered_ns=query.answered_ns,
        alone=alone,
    )


def _letter_bytes(query: Query) -> int:
    return RECORD_OVERHEAD_BYTES + query.size_bytes


def _too_large(message: str) -> Failure:
    return Failure(
        code=Code.OUT_OF_RANGE,
        reason=Reason.RESULT_TOO_LARGE,
        message=f"the result was refused by its topic: {message}",
    )
