"""Dispatch among servers that answer, fail, lie, die, drain and come back, by seeded chance.

Two phases: faults, with an account after every step (every query that was admitted waits, is in
flight, or has left exactly once); then everybody behaves, and whatever has not left must leave.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from aggregator.core.effects import Dispatch
from aggregator.core.events import Loss
from aggregator.core.failures import Code, Reason
from aggregator.core.query import ABANDONED, IN_FLIGHT, WRITING, Query
from tests.unit.dispatch_bench import (
    DIED,
    NOT_STARTED,
    ODD,
    Bench,
    failure,
    make_limits,
    make_query,
)

SERVERS = ["a", "b"]
STEPS = 600
STATUSES = [
    DIED,
    DIED,
    NOT_STARTED,
    ODD,
    failure(Code.INVALID_ARGUMENT, Reason.INVALID_FIELD, field="text"),
    failure(Code.INVALID_ARGUMENT, Reason.SERVER_ERROR),
    failure(Code.DEADLINE_EXCEEDED, Reason.EXPIRED),
    failure(Code.INTERNAL, Reason.ENGINE_FAILED_ALONE),
    failure(Code.RESOURCE_EXHAUSTED, Reason.TOO_MUCH_HELD, retry_after_ms=30),
]

FAULTS = [
    *("claim", "exclusive", "all", "part", "errors", "bad", "refused", "wild"),
    *("lost", "down", "cancelled", "abandoned"),
]


class Chaos:
    """One run."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench()
        self.queries: list[Query] = []
        self.left: set[int] = set()
        self.open: dict[int, Dispatch] = {}
        self.up: set[str] = set()
        self.fired: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    # The account.

    def note_sent(self, sent: Iterable[Dispatch]) -> None:
        for claim in sent:
            assert claim.server in self.up
            assert claim.claim_id not in self.open
            tokens = sum(query.estimate for query in claim.queries)
            assert tokens <= 100.01 or len(claim.queries) == 1 or claim.exclusive
            self.fired["exclusive" if claim.exclusive else "claim"] += 1
            for query in claim.queries:
                assert query.phase == IN_FLIGHT
                assert id(query) not in self.left
            self.open[claim.claim_id] = claim
        self.note_left(self.bench.ended)
        self.bench.ended = []

    def note_left(self, queries: Iterable[Query]) -> None:
        for query in queries:
            assert id(query) not in self.left, "left twice"
            assert query.phase != ABANDONED
            self.left.add(id(query))
            query.phase = WRITING
            self.reasons[query.failure.reason if query.failure else "OK"] += 1

    def check(self) -> None:
        servers = self.bench.core.servers
        open_here = {
            id(query)
            for server in servers
            for claim in server.claims.values()
            for query in claim.queries
            if query.claim_id == claim.claim_id
        }
        staying = [query for query in self.queries if id(query) not in self.left]
        in_flight = sum(id(query) in open_here for query in staying)
        assert len(staying) == in_flight + self.bench.core.waiting
        for server in servers:
            left = sum(claim.tokens_left for claim in server.claims.values())
            assert abs(server.unanswered_tokens - left) < 0.01
            assert server.pending_tokens >= -0.01
        for _ in range(6):
            if self.bench.wake_ms() != 0:
                return
            self.note_sent(self.bench.step())
        raise AssertionError("it wants to be woken at once, for ever")

    # What happens.

    def admit(self) -> None:
        start = len(self.queries)
        queries = [
            make_query(
                start + i,
                tokens=min(150, 3 + int(self.rng.expovariate(0.1))),
                ttl_ms=self.rng.choice([0, 0, 0, 40, 3000]),
                arrived_ns=self.bench.now_ns,
            )
            for i in range(self.rng.randint(1, 12))
        ]
        self.queries += queries
        self.note_sent(self.bench.admit(*queries))

    def says(self) -> None:
        server = self.rng.choice(SERVERS)
        self.up.add(server)
        ours = [claim.claim_id for claim in self.open.values() if claim.server == server]
        running = ours[:2] if self.rng.random() < 0.6 else ()
        limits = make_limits(
            window=self.rng.choice([40, 100, 200, 200]),
            busy_ms=self.rng.choice([0.0, 4.0, 15.0]),
            draining=self.rng.random() < 0.05,
        )
        self.note_sent(self.bench.says(server, limits=limits, running=running))

    def answer(self, kind: str) -> None:
        if not self.open:
            return
        claim = self.open[self.rng.choice(sorted(self.open))]
        count = len(claim.queries)
        status = self.rng.choice(STATUSES)
        last = self.rng.random() < 0.7
        self.fired[kind] += 1
        if kind == "part":
            answered = self.bench.answer(claim, range(self.rng.randrange(count)), last=False)
        elif kind == "errors":
            bad = sorted({self.rng.randrange(count) for _ in range(count)})
            answered = self.bench.answer(claim, errors=[(i, status) for i in bad])
        elif kind == "bad":
            answered = self.bench.answer(claim, fault="a lie", last=last)
        elif kind == "refused":
            answered = self.bench.answer(claim, refused=status)
        elif kind == "wild":
            wild = [self.rng.randrange(count + 1) for _ in range(self.rng.randrange(count + 2))]
            answered = self.bench.answer(claim, wild, last=last)
        else:
            answered = self.bench.answer(claim)
        for rows in answered.vectors:
            assert [claim.queries.index(q) for q in rows.queries] == [
                rows.group.indexes[row] for row in rows.rows
            ]
            self.note_left(rows.queries)
        if not any(claim.claim_id in server.claims for server in self.bench.core.servers):
            del self.open[claim.claim_id]
        self.note_sent(self.bench.step())

    def lose(self) -> None:
        if self.open:
            claim = self.open.pop(self.rng.choice(sorted(self.open)))
            self.fired["lost"] += 1
            self.bench.lose(claim, self.rng.choice(list(Loss)))
            self.note_sent(self.bench.step())

    def down(self, server: str, *, reported: bool) -> None:
        self.fired["down"] += 1
        for claim in [c for c in self.open.values() if c.server == server]:
            del self.open[claim.claim_id]
            if reported:
                self.bench.lose(claim)
        self.up.discard(server)
        self.note_sent(self.bench.down(server))

    def pass_time(self, ms: float) -> None:
        self.note_sent(self.bench.tick(ms))
        for cancel in list(self.bench.cancels):
            self.fired["cancelled"] += 1
            self.down(cancel.server, reported=True)

    def abandon(self) -> None:
        """An epoch ends: what waits is taken out, what is in flight is marked."""
        self.fired["abandoned"] += 1
        modulus = self.rng.randint(4, 9)
        doomed = [q for q in self.queries if q.offset % modulus == 0 and id(q) not in self.left]
        for query in doomed:
            query.phase = ABANDONED
        gone = self.bench.core.remove(lambda query: query.phase == ABANDONED)
        assert {id(query) for query in gone} <= {id(query) for query in doomed}
        self.left.update(map(id, doomed))

    def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.25:
            self.admit()
        elif chance < 0.5:
            self.says()
        elif chance < 0.7:
            kinds = ["all", "part", "errors", "bad", "refused", "wild"]
            self.answer(self.rng.choices(kinds, [4, 2, 4, 1, 1, 1])[0])
        elif chance < 0.76:
            self.lose()
        elif chance < 0.8:
            self.down(self.rng.choice(SERVERS), reported=self.rng.random() < 0.8)
        elif chance < 0.81:
            self.abandon()
        else:
            self.pass_time(self.rng.choice([0, 1, 3, 12, 60, 300, 2500]))
        if self.rng.random() < 0.003:
            self.pass_time(16_000)

    def heal(self) -> None:
        for _ in range(400):
            if all(id(query) in self.left for query in self.queries):
                return
            for claim in list(self.open.values()):
                del self.open[claim.claim_id]
                for rows in self.bench.answer(claim).vectors:
                    self.note_left(rows.queries)
                self.note_sent([])
            for server in SERVERS:
                self.up.add(server)
                self.note_sent(self.bench.says(server, limits=make_limits()))
            self.pass_time(700)
        stuck = [query.offset for query in self.queries if id(query) not in self.left]
        raise AssertionError(f"never left: {stuck}")


def run(seed: int) -> Chaos:
    chaos = Chaos(seed)
    for _ in range(STEPS):
        chaos.step()
        chaos.check()
    chaos.heal()
    return chaos


@pytest.mark.parametrize("seed", range(12))
def test_every_query_leaves_exactly_once(seed: int) -> None:
    chaos = run(seed)
    assert chaos.reasons["OK"] > 0


def test_every_fault_fires_and_every_end_is_met() -> None:
    fired: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for seed in range(100, 112):
        chaos = run(seed)
        fired += chaos.fired
        reasons += chaos.reasons
    print(dict(fired), dict(reasons))
    for fault in FAULTS:
        assert fired[fault] > 0, fault
    for reason in (
        Reason.EXPIRED,
        Reason.NO_SERVER,
        Reason.INVALID_FIELD,
        Reason.ENGINE_FAILED_ALONE,
        Reason.SERVER_ERROR,
        Reason.ENGINE_DIED_ALONE,
        Reason.BAD_ANSWER,
    ):
        assert reasons[reason] > 0, reason
