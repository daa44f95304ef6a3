"""Backlog and packing under random scripts, against a list that is walked from the start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aggregator.core.backlog import Backlog, Retry
from aggregator.core.packing import Packer, PackLimits
from aggregator.core.query import Query
from tests.unit.dispatch_bench import MS, make_query

SIZES = st.lists(st.integers(3, 60), min_size=1, max_size=30)


def as_raw(queries: Sequence[Query]) -> None:
    for query in queries:
        query.estimate, query.variance = query.estimate_raw + 2, 0.0


class Model:
    """What the backlog should do, in the dumbest way: one sorted list."""

    def __init__(self) -> None:
        self.line: list[Query] = []
        self.passed: set[int] = set()
        """By offset: ids of objects come again."""

    def take(
        self, tokens: int, inputs: int, look_ahead: int, now_ns: int, held: Sequence[Query] = ()
    ) -> tuple[list[Query], list[Query]]:
        """What a claim that holds some already takes, and those it overtook."""
        taken: list[Query] = []
        skipped: list[Query] = []
        overtaken: list[Query] = []
        for query in self.line:
            if 0 < query.deadline_ns <= now_ns:
                continue
            used, count = units_of([*held, *taken]), len(held) + len(taken)
            fits = used + query.estimate_raw + 2 <= tokens and count < inputs
            if not count or fits:
                taken.append(query)
                overtaken = list(skipped)
            else:
                looked_at = len(skipped) + len(taken_after(skipped, taken))
                if query.offset in self.passed or count >= inputs or looked_at >= look_ahead:
                    break
                skipped.append(query)
        return taken, overtaken


def units_of(queries: Iterable[Query]) -> int:
    return sum(query.estimate_raw + 2 for query in queries)


def taken_after(skipped: list[Query], taken: list[Query]) -> list[Query]:
    """Those taken behind the first one skipped."""
    if not skipped:
        return []
    first = (skipped[0].arrived_ns, skipped[0].offset)
    return [query for query in taken if (query.arrived_ns, query.offset) > first]


class BacklogMachine(RuleBasedStateMachine):
    """Drives both; every query is in exactly one place."""

    @initialize()
    def start(self) -> None:
        self.backlog = Backlog()
        self.model = Model()
        self.now_ns = MS
        self.count = 0
        self.out: list[Query] = []
        self.delayed: list[Query] = []

    @rule(sizes=SIZES, ttls=st.lists(st.sampled_from([0, 3, 20, 500]), min_size=1, max_size=4))
    def add(self, sizes: list[int], ttls: list[int]) -> None:
        queries = []
        for i, size in enumerate(sizes):
            query = make_query(self.count, tokens=size, arrived_ns=self.now_ns)
            ttl = ttls[i % len(ttls)]
            query.deadline_ns = self.now_ns + ttl * MS if ttl else 0
            self.count += 1
            queries.append(query)
        self.backlog.add(queries)
        self.model.line += queries

    @rule(
        tokens=st.integers(20, 300),
        inputs=st.integers(1, 40),
        look_ahead=st.integers(0, 8),
        chunk=st.integers(1, 20),
    )
    def take(self, tokens: int, inputs: int, look_ahead: int, chunk: int) -> None:
        packer: Packer[Query] = Packer(
            PackLimits(tokens=tokens, inputs=inputs, size_bytes=1 << 30), look_ahead=look_ahead
        )
        self.fill_from_line(packer, tokens, inputs, look_ahead, chunk)

    @precondition(lambda self: self.delayed)
    @rule(
        tokens=st.integers(60, 300),
        inputs=st.integers(1, 40),
        look_ahead=st.integers(0, 8),
        chunk=st.integers(1, 20),
        server=st.sampled_from(["a", "b"]),
    )
    def take_behind_retries(
        self, tokens: int, inputs: int, look_ahead: int, chunk: int, server: str
    ) -> None:
        """Retries are in the packer before the line is."""
        packer: Packer[Query] = Packer(
            PackLimits(tokens=tokens, inputs=inputs, size_bytes=1 << 30), look_ahead=look_ahead
        )
        due = [r.query for r in self.backlog.due(self.now_ns, server, any_server=False, lone=False)]
        as_raw(due)
        packer.feed(due)
        self.backlog.drop_retries(packer.taken)
        gone = set(map(id, packer.taken))
        self.delayed = [q for q in self.delayed if id(q) not in gone]
        self.out += packer.taken
        if not packer.full:
            self.fill_from_line(packer, tokens, inputs, look_ahead, chunk)

    def fill_from_line(
        self, packer: Packer[Query], tokens: int, inputs: int, look_ahead: int, chunk: int
    ) -> None:
        held = list(packer.taken)
        expected, overtaken = self.model.take(tokens, inputs, look_ahead, self.now_ns, held)
        self.backlog.take(packer, as_raw, self.now_ns, chunk)
        assert [q.offset for q in packer.taken] == [q.offset for q in [*held, *expected]]
        assert sum(q.estimate for q in packer.taken) <= tokens or len(packer.taken) == 1
        for query in overtaken:
            assert query.offset not in self.model.passed, "overtaken twice"
            assert query.passed_over
            self.model.passed.add(query.offset)
        gone = set(map(id, expected))
        self.model.line = [q for q in self.model.line if id(q) not in gone]
        self.out += expected

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        back = data.draw(st.lists(st.sampled_from(self.out), unique_by=id, min_size=1))
        gone = set(map(id, back))
        self.out = [q for q in self.out if id(q) not in gone]
        self.backlog.put_back(back)
        self.model.line = sorted(self.model.line + back, key=lambda q: (q.arrived_ns, q.offset))

    @precondition(lambda self: self.out)
    @rule(wait_ms=st.sampled_from([0, 2, 50]), avoid=st.sampled_from(["a", None]))
    def delay(self, wait_ms: int, avoid: str | None) -> None:
        query = self.out.pop(0)
        query.not_before_ns = self.now_ns + wait_ms * MS
        self.backlog.delay(Retry(query, avoid, lone=False))
        self.delayed.append(query)

    @rule(server=st.sampled_from(["a", "b"]), any_server=st.booleans())
    def retry(self, server: str, any_server: bool) -> None:
        due = [
            r.query
            for r in self.backlog.due(self.now_ns, server, any_server=any_server, lone=False)
        ]
        for query in due:
            assert query.not_before_ns <= self.now_ns
            assert not 0 < query.deadline_ns <= self.now_ns
        self.backlog.drop_retries(due)
        gone = set(map(id, due))
        self.delayed = [q for q in self.delayed if id(q) not in gone]
        self.out += due

    @rule(ms=st.sampled_from([0, 1, 5, 30]))
    def pass_time(self, ms: int) -> None:
        self.now_ns += ms * MS

    @rule()
    def expire(self) -> None:
        for query in self.backlog.expire(self.now_ns):
            assert 0 < query.deadline_ns <= self.now_ns
            self.drop(query)

    @rule(modulus=st.integers(2, 5))
    def remove(self, modulus: int) -> None:
        for query in self.backlog.remove(lambda query: query.offset % modulus == 0):
            self.drop(query)

    def drop(self, query: Query) -> None:
        places = [self.model.line, self.delayed]
        assert sum(query in place for place in places) == 1
        for place in places:
            if query in place:
                place.remove(query)

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "backlog"):
            assert len(self.backlog) == len(self.model.line) + len(self.delayed)

    @invariant()
    def the_line_is_as_large_as_what_is_in_it(self) -> None:
        if hasattr(self, "backlog"):
            assert self.backlog.line_units == units_of(self.backlog._line)

    def teardown(self) -> None:
        """After enough time all that has a deadline expires, and the rest can be taken."""
        if not hasattr(self, "backlog"):
            return
        self.now_ns += 10_000 * MS
        self.expire()
        self.take(1 << 30, 1 << 30, 0, 7)
        assert self.backlog.line_length == 0
        assert self.backlog.line_units == 0


TestBacklog = BacklogMachine.TestCase
TestBacklog.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
