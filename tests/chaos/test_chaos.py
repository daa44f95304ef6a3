"""Every act of the chaos tests once, on a real Kafka, to three groups at the same time.

Both protocols at least once, and exactly once. The ledger judges (`tests.harness.accounts`): every
query has its result; duplicates within the stated bound, none where nobody died, none at all where
it is exactly once; no committed offset ahead of a durable result; dead letters complete. `make
chaos` runs the acts for longer, in an order drawn from a seed, then everything at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from ops.kafka.node import KafkaUnavailableError
from tests.chaos.acts import ACTS, act, kill_broker
from tests.chaos.arena import Arena
from tests.chaos.fleets import FleetOptions
from tests.conftest import unavailable

pytestmark = [pytest.mark.kafka, pytest.mark.chaos]

SEED = 20_261_130
FLEETS = [
    FleetOptions(name="classic", protocol="classic", members=2, seed=SEED),
    FleetOptions(name="consumer", protocol="consumer", members=3, seed=SEED + 1),
    FleetOptions(name="once", protocol="consumer", delivery="exactly_once", rate=60, seed=SEED + 2),
]


class Arenas:
    """One arena for all acts; a test that fails leaves the next one a new one."""

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def get(self) -> Arena:
        if self._arena is None:
            try:
                self._arena = Arena(FLEETS).__enter__()
            except KafkaUnavailableError as error:
                unavailable(str(error))
        return self._arena

    def drop(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


@pytest.fixture(scope="module")
def arenas() -> Iterator[Arenas]:
    arenas = Arenas()
    yield arenas
    arenas.drop()


@pytest.fixture
def arena(arenas: Arenas, request: pytest.FixtureRequest) -> Iterator[Arena]:
    arena = arenas.get()
    yield arena
    if arena.judge() or any(fleet.accounts.period.sent for fleet in arena.fleets):
        arena.autopsy()  # the act did not come to its end
        arenas.drop()


@pytest.mark.parametrize("name", ACTS)
def test_nothing_is_lost(arena: Arena, name: str) -> None:
    arena.everywhere(lambda fleet: act(name, ACTS[name], fleet, 1))
    assert arena.judge() == []


def test_nothing_is_lost_when_the_broker_is_killed(arena: Arena) -> None:
    kill_broker(arena, 1, Random(SEED))
    assert arena.judge() == []
    counts = arena.counts()
    assert counts["commits_judged"] > 0
    assert counts["results"] - counts["duplicates"] == counts["sent"]
    assert counts["groups"]["once"]["duplicates"] == 0
