"""The waiting queries of one model: order, deadlines, retries, removal."""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.core.backlog import NEVER_NS, Backlog, Retry
from aggregator.core.packing import Packer, PackLimits
from aggregator.core.query import Query
from tests.unit.dispatch_bench import MS, make_queries, make_query


def as_raw(queries: Sequence[Query]) -> None:
    for query in queries:
        query.estimate = query.estimate_raw + 2
        query.variance = 0.0


def take(backlog: Backlog, tokens: float, *, now_ns: int = 0, chunk: int = 8) -> list[int]:
    packer: Packer[Query] = Packer(
        PackLimits(tokens=tokens, inputs=1000, size_bytes=1 << 30), look_ahead=4
    )
    backlog.take(packer, as_raw, now_ns, chunk)
    return [query.offset for query in packer.taken]


def filled(sizes: Sequence[int]) -> Backlog:
    backlog = Backlog()
    backlog.add([make_query(i, tokens=size) for i, size in enumerate(sizes)])
    return backlog


def test_claims_are_taken_in_order_of_arrival() -> None:
    backlog = filled([10] * 30)
    assert take(backlog, 100) == list(range(10))
    assert take(backlog, 100) == list(range(10, 20))
    assert len(backlog) == 10
    assert backlog.line_units == 100


def test_a_query_is_passed_over_at_most_once() -> None:
    backlog = filled([80, 50, 10, 10, 70, 10])
    assert take(backlog, 100) == [0, 2, 3]
    assert take(backlog, 45) == [1]  # first: alone, however long
    backlog = filled([80, 50, 10, 60, 10, 10])
    assert take(backlog, 100) == [0, 2, 4]
    assert take(backlog, 55) == [1]  # 3 was passed over as well: nothing may overtake it again
    assert take(backlog, 100) == [3, 5]


def test_looking_ahead_in_vain_passes_nobody_over() -> None:
    backlog = filled([95, 50, 60, 70])
    assert take(backlog, 100) == [0]
    assert backlog.head is not None
    assert not backlog.head.passed_over


def test_what_comes_back_goes_to_its_place() -> None:
    backlog = Backlog()
    queries = make_queries(9)
    backlog.add(queries[6:])
    backlog.put_back(queries[3:6])
    backlog.put_back(queries[:3])
    assert take(backlog, 1000) == list(range(9))
    backlog.put_back(queries[5:])
    backlog.put_back([queries[2], queries[0]])
    assert take(backlog, 1000) == [0, 2, 5, 6, 7, 8]


def test_the_expired_leave_and_never_enter_a_claim() -> None:
    backlog = Backlog()
    queries = make_queries(6, ttl_ms=10)
    queries[4].deadline_ns = 0
    queries[1].deadline_ns = 5 * MS
    backlog.add(queries)
    assert backlog.expire(4 * MS) == []
    assert [q.offset for q in backlog.expire(5 * MS)] == [1]
    assert backlog.wake_at_ns(5 * MS) == 10 * MS
    assert take(backlog, 30, now_ns=5 * MS) == [0, 2, 3]
    assert take(backlog, 30, now_ns=11 * MS) == [4]
    assert backlog.wake_at_ns(11 * MS) == 11 * MS
    assert [q.offset for q in backlog.expire(11 * MS)] == [5]
    assert len(backlog) == 0
    assert backlog.line_units == 0


def test_walks_for_deadlines_are_rare_however_many_deadlines_pass() -> None:
    backlog = Backlog()
    queries = make_queries(10_000)
    for i, query in enumerate(queries):
        query.deadline_ns = (i + 1) * 1000
    backlog.add(queries)
    walks = sum(bool(backlog.expire(now_ns)) for now_ns in range(0, 10 * MS, 1000))
    assert 1 <= walks <= 5
    rest = backlog.expire(1000 * MS)
    assert len(backlog) == 0
    assert rest


def test_retries_wait_and_avoid_a_server() -> None:
    backlog = Backlog()
    query, alone = make_query(1), make_query(2)
    query.not_before_ns = alone.not_before_ns = 20 * MS
    backlog.delay(Retry(query, "a", lone=False))
    backlog.delay(Retry(alone, "a", lone=True))
    assert len(backlog) == 2
    assert not backlog.claimable(19 * MS)
    assert backlog.wake_at_ns(0) == 20 * MS
    assert backlog.due(20 * MS, "a", any_server=False, lone=False) == []
    assert [r.query for r in backlog.due(20 * MS, "b", any_server=False, lone=False)] == [query]
    assert [r.query for r in backlog.due(20 * MS, "a", any_server=True, lone=True)] == [alone]
    backlog.drop_retries([query])
    assert len(backlog) == 1


def test_retries_expire_too() -> None:
    backlog = Backlog()
    query = make_query(1)
    query.not_before_ns, query.deadline_ns = 20 * MS, 10 * MS
    backlog.delay(Retry(query, None, lone=False))
    assert backlog.wake_at_ns(0) == 10 * MS
    assert backlog.expire(10 * MS) == [query]
    assert backlog.wake_at_ns(10 * MS) == NEVER_NS


def test_a_retry_past_its_deadline_is_not_offered() -> None:
    backlog = Backlog()
    query = make_query(1)
    query.deadline_ns = 10 * MS
    backlog.delay(Retry(query, None, lone=False))
    assert backlog.due(10 * MS, "a", any_server=True, lone=False) == []


def test_removal_takes_from_everywhere() -> None:
    backlog = Backlog()
    queries = make_queries(6)
    backlog.add(queries[:4])
    backlog.delay(Retry(queries[4], None, lone=False))
    backlog.delay(Retry(queries[5], None, lone=True))
    removed = backlog.remove(lambda query: query.offset % 2 == 1)
    assert [query.offset for query in removed] == [1, 3, 5]
    assert take(backlog, 1000) == [0, 2]
    assert len(backlog) == 1


def test_a_claim_costs_the_same_whatever_waits() -> None:
    looked_at = []

    def count(queries: Sequence[Query]) -> None:
        looked_at.append(len(queries))
        as_raw(queries)

    backlog = filled([10] * 50_000)
    packer: Packer[Query] = Packer(PackLimits(tokens=100, inputs=99, size_bytes=1 << 30))
    backlog.take(packer, count, 0, 12)
    assert len(packer.taken) == 10
    assert sum(looked_at) <= 24
