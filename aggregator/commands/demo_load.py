"""The demo's load: queries through the topics, flooding or paced, and what became of each.

Owns the clock of both phases. Invariants: a latency runs from the time at which a query was meant
to be sent, so that a slow sender can't hide a wait; what is unanswered is bounded in number and in
bytes, so that the embedded broker never holds more than it keeps; a query without a result in
`SILENCE_S` of silence is counted as missing. Knows nothing of processes, models or screens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from confluent_kafka import Message

from aggregator.commands.exchange import Exchange

UNANSWERED_MAX = 2_000
UNANSWERED_BYTES_MAX = 4 << 20
SILENCE_S = 60.0
_POLL_S = 0.02

Advance = Callable[[int], None]
"""Told of results as they come, how many at a time; may raise to end the phase."""


@dataclass(slots=True)
class Query:
    """One query of a phase. Times are of the monotonic clock, in seconds."""

    text_index: int
    due_s: float
    """When it was meant to be sent."""
    done_s: float = 0.0
    """When its result was read; 0: it has none."""
    record: Message | None = None


@dataclass(slots=True)
class Phase:
    """What was sent, and how long it took from the first send to the last result."""

    queries: list[Query]
    elapsed_s: float = 0.0

    @property
    def answered(self) -> list[Query]:
        """Those that have a result, in the order of sending."""
        return [query for query in self.queries if query.record is not None]

    @property
    def per_second(self) -> float:
        """Results a second over the whole phase, filling and emptying the pipeline included."""
        return len(self.answered) / self.elapsed_s if self.elapsed_s else 0.0

    def latencies_ms(self) -> list[float]:
        """Of the answered queries, from the intended time of sending; sorted."""
        return sorted((query.done_s - query.due_s) * 1e3 for query in self.answered)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest rank: the smallest value that `percent` of all values do not exceed; 0 of none."""
    if not ordered:
        return 0.0
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def poisson_times(count: int, per_second: float, *, seed: int) -> list[float]:
    """Times of arrival in seconds from 0: exponential gaps, as independent users make them."""
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(per_second)
        times.append(now)
    return times


@dataclass(slots=True)
class Load:
    """Runs phases over one exchange; numbers of queries go on from phase to phase."""

    exchange: Exchange
    texts: Sequence[str]
    clock: Callable[[], float] = time.monotonic
    sent: int = 0
    _open: dict[int, Query] = field(default_factory=dict)
    _open_bytes: int = 0

    def flood(self, indexes: Sequence[int], advance: Advance) -> Phase:
        """Send these texts as fast as the bounds allow; returns when all are answered."""
        return self._run(indexes, None, advance)

    def paced(self, indexes: Sequence[int], times_s: Sequence[float], advance: Advance) -> Phase:
        """Send each text at its time (seconds from now); returns when all are answered."""
        return self._run(indexes, times_s, advance)

    def late(self, seconds: float) -> None:
        """Listen on, for results that should not be: they count as duplicates."""
        end_s = self.clock() + seconds
        while self.clock() < end_s:
            self._collect(_POLL_S)

    def _run(
        self, indexes: Sequence[int], times_s: Sequence[float] | None, advance: Advance
    ) -> Phase:
        start_s = heard_s = self.clock()
        phase = Phase([])
        while len(phase.queries) < len(indexes) or self._open:
            wait_s = _POLL_S
            while len(phase.queries) < len(indexes) and self._room():
                position = len(phase.queries)
                now_s = self.clock()
                due_s = now_s if times_s is None else start_s + times_s[position]
                if due_s > now_s:
                    wait_s = min(wait_s, due_s - now_s)
                    break
                phase.queries.append(self._send(indexes[position], due_s))
            arrived = self._collect(wait_s)
            advance(arrived)
            now_s = self.clock()
            if arrived or not self._open:
                heard_s = now_s
            elif now_s - heard_s > SILENCE_S:
                self._give_up()
        phase.elapsed_s = self.clock() - start_s
        return phase

    def _room(self) -> bool:
        return len(self._open) < UNANSWERED_MAX and self._open_bytes < UNANSWERED_BYTES_MAX

    def _send(self, text_index: int, due_s: float) -> Query:
        query = Query(text_index, due_s)
        self.sent += 1
        self._open[self.sent] = query
        self._open_bytes += len(self.texts[text_index])
        self.exchange.send(self.sent, self.texts[text_index])
        return query

    def _collect(self, timeout_s: float) -> int:
        arrivals = self.exchange.collect(timeout_s)
        now_s = self.clock()
        for arrival in arrivals:
            query = self._open.pop(arrival.number)
            self._open_bytes -= len(self.texts[query.text_index])
            query.record = arrival.record
            query.done_s = now_s
        return len(arrivals)

    def _give_up(self) -> None:
        for number in self._open:
            self.exchange.forget(number)
        self._open.clear()
        self._open_bytes = 0
