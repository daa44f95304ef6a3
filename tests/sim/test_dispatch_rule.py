"""The dispatch rule in virtual time, against one shared queue that every server pops from.

Independent aggregators must come within a round trip of it: the median within 1 ms plus a round
trip, the 99th percentile within 1.2 times plus a round trip. `python -m tests.sim.report` prints
the whole table, and what jitter and unequal aggregators do.
"""

from __future__ import annotations

import pytest

from tests.sim.world import MS, TARGET, Outcome, Setup, World, shared_queue

ROUND_TRIP_MS = 1.0
LOADS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9)
FLEETS = ((1, 1), (1, 4), (4, 1), (4, 4))


def run(setup: Setup) -> tuple[Outcome, Outcome]:
    """The shared queue and the real rule on the same arrivals."""
    return shared_queue(setup), World(setup).run()


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("aggregators", "servers"), FLEETS)
def test_within_a_round_trip_of_a_shared_queue(aggregators: int, servers: int, load: float) -> None:
    setup = Setup(aggregators=aggregators, servers=servers, load=load, queries=5000)
    ideal, real = run(setup)
    assert real.quantile(0.5) <= ideal.quantile(0.5) + 1.0 + ROUND_TRIP_MS
    assert real.quantile(0.99) <= 1.2 * ideal.quantile(0.99) + ROUND_TRIP_MS


def test_messages_stay_large_for_one_aggregator_at_high_load() -> None:
    real = World(Setup(servers=4, load=0.9, queries=5000)).run()
    assert 5000 / real.claims >= 25  # 5 when sent as they come


def test_no_pass_is_above_the_target() -> None:
    real = World(Setup(aggregators=4, load=0.9, queries=3000, estimate_noise=True)).run()
    assert real.pass_tokens_max <= TARGET


@pytest.mark.parametrize(("aggregators", "servers"), [(1, 1), (4, 4)])
def test_estimates_that_are_off_cost_little(aggregators: int, servers: int) -> None:
    setup = Setup(
        aggregators=aggregators, servers=servers, load=0.6, queries=5000, estimate_noise=True
    )
    ideal, real = run(setup)
    assert real.quantile(0.5) <= ideal.quantile(0.5) + 1.0 + ROUND_TRIP_MS
    assert real.quantile(0.99) <= 1.2 * ideal.quantile(0.99) + ROUND_TRIP_MS


@pytest.mark.parametrize(("aggregators", "servers"), FLEETS)
def test_jitter_of_pass_times_does_not_pile_queries_up(aggregators: int, servers: int) -> None:
    setup = Setup(aggregators=aggregators, servers=servers, load=0.6, queries=5000, jitter=0.2)
    ideal, real = run(setup)
    assert real.quantile(0.5) <= ideal.quantile(0.5) + 5.0 + ROUND_TRIP_MS
    assert real.quantile(0.99) <= 1.6 * ideal.quantile(0.99) + ROUND_TRIP_MS


def test_an_aggregator_with_most_of_the_traffic_gets_most_of_the_room() -> None:
    setup = Setup(
        aggregators=4,
        servers=1,
        load=0.6,
        queries=8000,
        shares=(0.9, 0.034, 0.033, 0.033),
        warm_up_ns=1000 * MS,
    )
    ideal, real = run(setup)
    assert real.quantile(0.5, 0) <= ideal.quantile(0.5) + 1.0 + ROUND_TRIP_MS
    assert real.quantile(0.99, 0) <= 1.2 * ideal.quantile(0.99) + ROUND_TRIP_MS


def test_the_same_seed_gives_the_same_run() -> None:
    setup = Setup(aggregators=4, servers=4, load=0.6, queries=1000)
    assert World(setup).run().latencies == World(setup).run().latencies
