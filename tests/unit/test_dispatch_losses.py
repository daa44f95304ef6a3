"""One model's dispatch: queries whose stream or server dies, and those that run out of time."""

from __future__ import annotations

import pytest

from aggregator.core.events import Loss
from aggregator.core.failures import Code, Failure, Reason
from tests.unit.dispatch_bench import (
    DIED,
    NOT_STARTED,
    ODD,
    Bench,
    failure,
    make_queries,
    make_query,
    offsets,
    one,
    waiting_phases,
)

NOT_FINITE = failure(Code.INTERNAL, Reason.NOT_FINITE)
FAILED_ALONE = failure(Code.INTERNAL, Reason.ENGINE_FAILED_ALONE)
EXPIRED = failure(Code.DEADLINE_EXCEEDED, Reason.EXPIRED)
REFUSED = failure(Code.INVALID_ARGUMENT, Reason.INVALID_FIELD, field="text")

# Deaths -------------------------------------------------------------------------------------------


def test_a_stream_that_dies_takes_only_what_was_announced() -> None:
    bench = Bench()
    bench.says(busy_ms=30)
    started, waiting = bench.admit(*make_queries(20))
    bench.says(running=[started.claim_id], busy_ms=30)
    bench.lose(started)
    bench.lose(waiting)
    assert {query.deaths for query in started.queries} == {1}
    assert {query.deaths for query in waiting.queries} == {0}
    assert {query.losses for query in waiting.queries} == {1}


def test_a_part_that_was_answered_does_not_keep_a_claim_started() -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(*make_queries(4)))
    bench.says(running=[claim.claim_id], busy_ms=15)
    bench.answer(claim, [0, 1], last=False)
    bench.lose(claim)
    assert [query.deaths for query in claim.queries] == [0, 0, 0, 0]
    assert [query.losses for query in claim.queries] == [0, 0, 1, 1]


@pytest.mark.parametrize("ended", [NOT_FINITE, FAILED_ALONE, ODD])
def test_a_part_that_failed_does_not_keep_a_claim_started(ended: Failure) -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(*make_queries(3)))
    bench.says(running=[claim.claim_id], busy_ms=15)
    bench.answer(claim, [], errors=[(0, ended)], last=False)
    bench.lose(claim)
    assert [query.deaths for query in claim.queries] == [0, 0, 0]
    assert [query.losses for query in claim.queries] == [0, 1, 1]


@pytest.mark.parametrize("unrun", [EXPIRED, REFUSED])
def test_a_part_that_was_never_in_a_pass_does_not_end_one(unrun: Failure) -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(*make_queries(3, ttl_ms=60_000)))
    bench.says(running=[claim.claim_id], busy_ms=15)
    bench.answer(claim, [], errors=[(0, unrun)], last=False)
    bench.lose(claim)
    assert [query.deaths for query in claim.queries] == [0, 1, 1]


def test_a_pass_that_raised_does_not_keep_a_claim_started() -> None:
    """Its halves are passes of their own: after their answers nothing of it has started."""
    bench = Bench()
    bench.says()
    claim = one(bench.admit(*make_queries(3)))
    bench.says(running=[claim.claim_id], busy_ms=15)  # raises
    for half in ([0], [1]):
        bench.says(running=[claim.claim_id], busy_ms=15)
        bench.answer(claim, half, last=False)
    bench.lose(claim)
    assert [query.deaths for query in claim.queries] == [0, 0, 0]
    assert [query.losses for query in claim.queries] == [0, 0, 1]


def test_the_fifth_unannounced_loss_counts_as_a_death() -> None:
    bench = Bench()
    (query,) = make_queries(1)
    sent = bench.admit(query)
    for loss in range(5):
        bench.down()
        sent = bench.says() or bench.tick(20_000)
        bench.lose(one(sent))
        assert query.deaths == (1 if loss == 4 else 0)


def test_a_poisonous_query_is_convicted_and_its_mates_are_answered() -> None:
    bench = Bench()
    bench.says()
    sent = bench.admit(*make_queries(9))
    answered: list[int] = []
    deaths = 0
    for _ in range(40):
        if not sent:
            sent = bench.says() or bench.tick(14_000)
            continue
        claim = sent.pop(0)
        bench.says(running=[claim.claim_id], busy_ms=15)
        if 5 in offsets(claim):
            deaths += 1
            for lost in (claim, *sent):
                bench.lose(lost)
            bench.down()
            sent = []
        else:
            answered += [q.offset for q in bench.answer(claim).vectors[0].queries]
    assert bench.core.waiting == 0
    (query,) = bench.ended
    assert query.offset == 5
    assert query.failure is not None
    assert (query.failure.reason, query.failure.dead_letter) == (Reason.ENGINE_DIED_ALONE, True)
    assert sorted(answered) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert deaths <= 9


def test_suspects_run_one_request_at_a_time_on_a_server() -> None:
    bench = Bench()
    bench.says()
    queries = make_queries(8)
    for query in queries:
        query.deaths = 2
    claim = one(bench.admit(*queries))
    bench.answer(claim, errors=[(i, DIED) for i in range(8)])
    bench.down()
    first = one(bench.says() + bench.tick(1000))
    assert first.exclusive
    assert len(first.queries) == 8
    bench.answer(first, errors=[(i, DIED) for i in range(8)])
    bench.down()
    half = one(bench.says() + bench.tick(1000))
    assert len(half.queries) == 4
    assert bench.tick(1000) == []
    bench.answer(half)
    assert len(one(bench.says()).queries) == 4


def test_inputs_that_died_are_told_from_those_that_did_not_start() -> None:
    bench = Bench()
    bench.says()
    queries = make_queries(4)
    claim = one(bench.admit(*queries))
    bench.answer(claim, errors=[(0, DIED), (1, DIED), (2, NOT_STARTED), (3, NOT_STARTED)])
    assert [query.deaths for query in queries] == [1, 1, 0, 0]
    assert waiting_phases(queries)


# Deadlines ----------------------------------------------------------------------------------------


def test_a_waiting_query_expires_with_a_server_ready_or_without() -> None:
    for ready, reason in ((True, Reason.EXPIRED), (False, Reason.NO_SERVER)):
        bench = Bench()
        if ready:
            bench.says(busy_ms=60_000)
        bench.admit(make_query(0, ttl_ms=100))
        assert bench.wake_ms() == 100
        bench.tick(100)
        (query,) = bench.ended
        assert query.failure is not None
        assert query.failure.reason is reason
        assert query.failure.retryable
        assert not query.failure.dead_letter
        assert (query.failure.retry_after_ms is None) is ready


def test_in_flight_the_aggregator_ends_it_after_the_grace_and_ignores_the_answer() -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(make_query(0, ttl_ms=100), make_query(1)))
    assert bench.wake_ms() == 2100
    bench.tick(2099)
    assert bench.ended == []
    bench.tick(1)
    assert [query.offset for query in bench.ended] == [0]
    (rows,) = bench.answer(claim).vectors
    assert [query.offset for query in rows.queries] == [1]


def test_a_vector_within_the_grace_is_published() -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(make_query(0, ttl_ms=100)))
    bench.tick(1500)
    assert len(bench.answer(claim).vectors) == 1


def test_what_is_past_its_deadline_is_not_retried() -> None:
    for loss in (Loss.UNKNOWN, Loss.NOT_STARTED):
        bench = Bench()
        bench.says()
        claim = one(bench.admit(make_query(0, ttl_ms=100), make_query(1)))
        bench.tick(150)
        assert [query.offset for query in bench.lose(claim, loss)] == [0]
        assert bench.core.waiting == 1


def test_retries_and_suspects_expire_while_they_wait() -> None:
    bench = Bench()
    bench.says()
    queries = make_queries(2, ttl_ms=500)
    queries[1].deaths = 1
    claim = one(bench.admit(*queries))
    bench.answer(claim, errors=[(0, ODD), (1, DIED)])
    bench.down()
    assert bench.core.waiting == 2
    bench.tick(500)
    assert sorted(query.offset for query in bench.ended) == [0, 1]
    assert bench.core.waiting == 0
