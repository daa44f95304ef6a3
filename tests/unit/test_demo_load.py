"""The demo's load in virtual time: pacing, latencies from the intended time, bounds, losses."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from aggregator.commands import demo_load
from aggregator.commands.demo_load import Load, percentile, poisson_times
from aggregator.commands.exchange import Arrival, Exchange


@dataclass
class FakeExchange:
    """Answers each query `service_s` after the one before, at the earliest `delay_s` after it came.

    Time stands still but while somebody waits for results.
    """

    service_s: float = 0.01
    delay_s: float = 0.0
    swallow: frozenset[int] = frozenset()
    now_s: float = 100.0
    free_s: float = 0.0
    ready: list[tuple[float, int]] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    sent_s: dict[int, float] = field(default_factory=dict)
    most_waiting: int = 0

    def clock(self) -> float:
        return self.now_s

    def send(self, number: int, text: str) -> None:
        self.sent_s[number] = self.now_s
        self.waiting.add(number)
        self.most_waiting = max(self.most_waiting, len(self.waiting))
        if number not in self.swallow:
            self.free_s = max(self.free_s + self.service_s, self.now_s + self.delay_s)
            self.ready.append((self.free_s, number))

    def collect(self, timeout_s: float) -> list[Arrival]:
        until_s = self.now_s + timeout_s
        self.now_s = min(until_s, self.ready[0][0]) if self.ready else until_s
        done = [number for at_s, number in self.ready if at_s <= self.now_s]
        self.ready = self.ready[len(done) :]
        self.waiting -= set(done)
        return [Arrival(number=number, record=Message(value=b"x")) for number in done]

    def forget(self, number: int) -> bool:
        self.waiting.remove(number)
        return True


def load(fake: FakeExchange, texts: list[str]) -> Load:
    return Load(cast("Exchange", fake), texts, clock=fake.clock)


def test_a_flood_keeps_the_bound_and_measures_the_rate() -> None:
    fake = FakeExchange(service_s=0.001)
    arrived: list[int] = []
    phase = load(fake, ["text"] * 10_000).flood(range(10_000), arrived.append)
    assert fake.most_waiting == demo_load.UNANSWERED_MAX
    assert sum(arrived) == len(phase.answered) == 10_000
    assert phase.per_second == pytest.approx(1_000, rel=0.02)


def test_large_texts_are_bounded_by_their_bytes() -> None:
    fake = FakeExchange()
    text = "x" * (demo_load.UNANSWERED_BYTES_MAX // 4)
    load(fake, [text] * 20).flood(range(20), lambda _: None)
    assert fake.most_waiting == 4


def test_pacing_sends_each_query_at_its_time() -> None:
    fake = FakeExchange(service_s=0.0, delay_s=0.005)
    times = poisson_times(500, 50, seed=1)
    phase = load(fake, ["text"] * 500).paced(range(500), times, lambda _: None)
    for query, sent_s, time_s in zip(phase.queries, fake.sent_s.values(), times, strict=True):
        assert query.due_s == 100.0 + time_s
        assert sent_s == pytest.approx(query.due_s, abs=1e-6)
    assert phase.latencies_ms() == pytest.approx([5.0] * 500, abs=0.01)


def test_latency_runs_from_the_intended_time_however_late_the_send() -> None:
    # One second to answer each of three queries which were all due at once; the second and third
    # are sent in time but wait for their turn, as if the sender itself had been held up.
    fake = FakeExchange(service_s=1.0, delay_s=1.0)
    phase = load(fake, ["text"] * 3).paced(range(3), [0.0, 0.0, 0.0], lambda _: None)
    assert phase.latencies_ms() == pytest.approx([1000, 2000, 3000])


def test_what_never_comes_is_missing_and_the_phase_ends() -> None:
    fake = FakeExchange(swallow=frozenset({2}))
    phase = load(fake, ["text"] * 3).flood(range(3), lambda _: None)
    assert [query.record is None for query in phase.queries] == [False, True, False]
    assert (len(phase.answered), fake.waiting) == (2, set())
    assert phase.elapsed_s > demo_load.SILENCE_S


def test_numbers_go_on_over_phases() -> None:
    fake = FakeExchange()
    running = load(fake, ["a", "b"])
    running.flood([0, 1], lambda _: None)
    phase = running.flood([1], lambda _: None)
    assert (sorted(fake.sent_s), phase.queries[0].text_index, running.sent) == ([1, 2, 3], 1, 3)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 100))
def test_a_percentile_is_a_value_with_so_many_at_or_below(
    values: list[float], percent: float
) -> None:
    ordered = sorted(values)
    found = percentile(ordered, percent)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= percent * len(values) - 1e-6
    assert sum(value < found for value in values) * 100 <= percent * len(values) + 1e-6


def test_percentiles_by_hand() -> None:
    hundred = [float(n) for n in range(1, 101)]
    assert [percentile(hundred, p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([], 50) == 0


def test_arrivals_are_bursty_and_of_the_rate_asked_for() -> None:
    times = poisson_times(5_000, 40, seed=3)
    gaps = [later - time for time, later in pairwise(times)]
    assert times[-1] == pytest.approx(5_000 / 40, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)
    assert times == poisson_times(5_000, 40, seed=3)
