"""One model's dispatch: what becomes of queries that a server answers, well or badly."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aggregator.core.events import Loss
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import ABANDONED, WRITING
from tests.unit.dispatch_bench import (
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

# Vectors ------------------------------------------------------------------------------------------


def test_vectors_come_with_their_rows() -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(*make_queries(5)))
    (first,) = bench.answer(claim, [1, 3], last=False).vectors
    assert ([q.offset for q in first.queries], list(first.rows)) == ([1, 3], [0, 1])
    (rest,) = bench.answer(claim, [4, 0, 2]).vectors
    assert [q.offset for q in rest.queries] == [4, 0, 2]
    assert rest.model_revision == "r"
    assert rest.answered_ns == bench.now_ns


def test_the_abandoned_are_left_out_and_never_come_back() -> None:
    bench = Bench()
    bench.says()
    queries = make_queries(4)
    claim = one(bench.admit(*queries))
    queries[1].phase = ABANDONED
    (rows,) = bench.answer(claim, [0, 1, 2], last=False).vectors
    assert ([q.offset for q in rows.queries], list(rows.rows)) == ([0, 2], [0, 2])
    queries[3].phase = ABANDONED
    assert bench.lose(claim) == []
    assert bench.core.waiting == 0


def test_in_flight_is_what_has_neither_an_answer_nor_an_end() -> None:
    bench = Bench(answer_grace_ns=0)
    bench.says("a")
    bench.says("b")
    first = one(bench.admit(*make_queries(6, ttl_ms=50)))
    queries = first.queries
    assert bench.core.in_flight == 6
    for query in bench.answer(first, [0, 1], last=False).vectors[0].queries:
        query.phase = WRITING  # as the one who writes it does
    assert bench.core.in_flight == 4
    queries[5].phase = ABANDONED
    assert bench.core.in_flight == 3
    second = one(bench.admit(*make_queries(2, start=10)))
    bench.answer(second, fault="not finite", last=False)
    assert bench.core.in_flight == 3, "what is to be retried waits"
    bench.tick(60)
    for query in bench.ended:
        query.phase = WRITING
    assert bench.core.in_flight == 0, "the others are past their deadline"


def test_counts_of_whole_claims_steer_the_margin() -> None:
    bench = Bench()
    bench.core.calibration.learn(make_queries(240, tokens=12), [11, 13] * 120)
    bench.says()
    for i in range(20):
        claim = one(bench.admit(*make_queries(9, start=9 * i)))
        bench.answer(claim)
        bench.says()
    assert bench.core.margin.claims == 20
    assert bench.core.counters.answered_tokens == 20 * 90


# Failures of inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "code", "reason", "dead_letter", "retryable"),
    [
        (
            failure(Code.INVALID_ARGUMENT, Reason.INVALID_FIELD, field="dimensions"),
            Code.INVALID_ARGUMENT,
            Reason.INVALID_FIELD,
            False,
            False,
        ),
        (
            failure(Code.DEADLINE_EXCEEDED, Reason.EXPIRED),
            Code.DEADLINE_EXCEEDED,
            Reason.EXPIRED,
            False,
            True,
        ),
        (
            failure(Code.INTERNAL, Reason.ENGINE_FAILED_ALONE),
            Code.INTERNAL,
            Reason.ENGINE_FAILED_ALONE,
            True,
            False,
        ),
        (
            failure(Code.INTERNAL, Reason.NOT_FINITE),
            Code.INTERNAL,
            Reason.NOT_FINITE,
            True,
            False,
        ),
    ],
)
def test_a_final_status_of_one_input_ends_it_alone(
    told: object, code: Code, reason: Reason, dead_letter: bool, retryable: bool
) -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(*make_queries(3, ttl_ms=10**6)))
    answered = bench.answer(claim, errors=[(1, told)])  # type: ignore[list-item]
    assert [q.offset for q in answered.vectors[0].queries] == [0, 2]
    (query,) = answered.ended
    ended = query.failure
    assert ended is not None
    assert (ended.code, ended.reason, ended.dead_letter, ended.retryable) == (
        code,
        reason,
        dead_letter,
        retryable,
    )
    assert ended.field == ("dimensions" if reason is Reason.INVALID_FIELD else None)


@pytest.mark.parametrize(
    ("told", "ttl_ms"),
    [
        # A consumer can do nothing with a refusal of no field,
        (failure(Code.INVALID_ARGUMENT, Reason.INVALID_FIELD), 0),
        (failure(Code.INVALID_ARGUMENT, Reason.SERVER_ERROR), 0),
        (failure(Code.INVALID_ARGUMENT, Reason.SERVER_ERROR), 10**6),
        # nor with an expiry of what has no time to live, or has not expired as far as we know.
        (failure(Code.DEADLINE_EXCEEDED, Reason.EXPIRED), 0),
        (failure(Code.DEADLINE_EXCEEDED, Reason.SERVER_ERROR), 10**6),
    ],
)
def test_what_a_foreign_server_cannot_mean_is_any_other_status(told: Failure, ttl_ms: int) -> None:
    bench = Bench(attempts_max=2)
    bench.says()
    sent = bench.admit(make_query(0, ttl_ms=ttl_ms))
    for _ in range(2):
        assert bench.ended == []
        bench.answer(one(sent), errors=[(0, told)])
        bench.core.servers[0].breaker.succeeded()
        sent = bench.says() or bench.tick(1100)
    (query,) = bench.ended
    assert query.failure is not None
    assert (query.failure.code, query.failure.reason) == (Code.INTERNAL, Reason.SERVER_ERROR)
    assert query.failure.message == f"{told.code}: told so"
    assert (query.failure.retryable, query.failure.dead_letter) == (True, True)


def test_any_other_status_is_retried_up_to_the_maximum() -> None:
    bench = Bench()
    bench.says("a")
    bench.says("b")
    sent = bench.admit(make_query(0))
    servers = []
    while sent:
        claim = one(sent)
        servers.append(claim.server)
        bench.answer(claim, errors=[(0, ODD)])
        sent = bench.says(claim.server) or bench.tick(1100)
    assert len(servers) == 5
    assert all(a != b for a, b in pairwise(servers))
    (query,) = bench.ended
    assert query.failure is not None
    assert (query.failure.reason, query.failure.dead_letter) == (Reason.SERVER_ERROR, True)
    assert query.attempts == 5


def test_retries_wait_longer_each_time() -> None:
    bench = Bench(attempts_max=99)
    bench.says()
    sent = bench.admit(make_query(0))
    waits = []
    for _ in range(9):
        bench.answer(one(sent), errors=[(0, failure(Code.INTERNAL, Reason.SERVER_ERROR))])
        bench.core.servers[0].breaker.succeeded()
        bench.says()
        waits.append(bench.wake_ms())
        sent = bench.tick(waits[-1] or 0)
    assert waits == [20, 40, 80, 160, 320, 640, 1000, 1000, 1000]


def test_not_started_never_counts() -> None:
    bench = Bench()
    (query,) = make_queries(1)
    bench.says()
    sent = bench.admit(query)
    for _ in range(20):
        bench.answer(one(sent), errors=[(0, NOT_STARTED)])
        bench.core.servers[0].breaker.succeeded()
        sent = bench.says()
        bench.lose(one(sent), Loss.NOT_STARTED)
        bench.core.servers[0].breaker.succeeded()
        sent = bench.says()
    assert (query.attempts, query.deaths, query.losses) == (0, 0, 0)
    assert bench.ended == []


# Bad answers --------------------------------------------------------------------------------------


def test_a_bad_answer_is_retried_elsewhere_and_what_was_answered_stays() -> None:
    bench = Bench()
    bench.says("a")
    claim = one(bench.admit(*make_queries(4)))
    bench.says("b", busy_ms=15)
    bench.answer(claim, [0, 1], last=False)
    answered = bench.answer(claim, fault="not finite", last=False)
    assert (answered.vectors, answered.ended) == ([], [])
    late = bench.answer(claim, [2, 3])
    assert late.vectors == []  # whatever still comes of it is ignored
    bench.says("a")
    bench.tick(30)
    assert bench.tick(300) == []
    again = one(bench.says("b"))
    assert (again.server, offsets(again)) == ("b", [2, 3])


@pytest.mark.parametrize("indexes", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2]])
def test_missing_doubled_and_unknown_inputs_are_bad_answers(indexes: list[int]) -> None:
    bench = Bench()
    bench.says()
    queries = make_queries(3)
    claim = one(bench.admit(*queries))
    assert bench.answer(claim, indexes).vectors == []
    assert waiting_phases(queries)
    assert [query.bad_answers for query in queries] == [1, 1, 1]
    assert bench.core.waiting == 3


def test_an_input_answered_by_two_messages_is_a_bad_answer() -> None:
    bench = Bench()
    bench.says()
    queries = make_queries(3)
    claim = one(bench.admit(*queries))
    bench.answer(claim, [0, 1], last=False)
    bench.answer(claim, [1, 2], last=False)
    assert [query.bad_answers for query in queries] == [0, 0, 1]


def test_after_three_bad_answers_only_those_who_got_one_alone_end() -> None:
    bench = Bench()
    bench.says()
    sent = bench.admit(*make_queries(6))
    answered = 0
    for _ in range(40):
        for claim in sent:
            if 4 in offsets(claim):
                bench.answer(claim, fault="not finite")
            else:
                answered += len(bench.answer(claim).vectors[0].queries)
            bench.core.servers[0].breaker.succeeded()
        sent = bench.says() + bench.tick(100)
    assert [query.offset for query in bench.ended] == [4]
    assert bench.ended[0].failure is not None
    assert bench.ended[0].failure.reason is Reason.BAD_ANSWER
    assert bench.ended[0].failure.dead_letter
    assert answered == 5


# Requests that are too large ----------------------------------------------------------------------

TOO_LARGE = failure(
    Code.RESOURCE_EXHAUSTED, Reason.REQUEST_TOO_LARGE, field="inputs", retry_after_ms=1
)


def test_a_text_that_no_request_can_hold_ends_at_once_and_says_so() -> None:
    bench = Bench()
    bench.says()
    large, *mates = make_queries(5)
    large.text_bytes = 20 << 20
    claim, *others = bench.admit(large, *mates)
    assert offsets(claim) == [0]
    bench.answer(claim, refused=TOO_LARGE)
    (ended,) = bench.ended
    assert ended is large
    assert ended.failure == Failure(
        code=Code.INVALID_ARGUMENT,
        reason=Reason.INVALID_FIELD,
        field="text",
        message="the text is too large for its model server: told so",
    )
    others += bench.says()
    assert sorted(number for claim in others for number in offsets(claim)) == [1, 2, 3, 4]


def test_a_request_of_several_that_is_too_large_costs_an_attempt_and_ends() -> None:
    """Its server takes less than it told: in the end each goes alone, and none is blamed for it."""
    bench = Bench()
    bench.says()
    queries = make_queries(4)
    sent = bench.admit(*queries)
    sizes: list[int] = []
    while len(bench.ended) + sum(query.phase == WRITING for query in queries) < 4:
        assert len(sizes) < 100
        for claim in sent:
            sizes.append(len(claim.queries))
            if len(claim.queries) > 1:
                bench.answer(claim, refused=TOO_LARGE)
            else:
                for rows in bench.answer(claim).vectors:
                    rows.queries[0].phase = WRITING
        sent = bench.says() or bench.tick(bench.wake_ms() or 1)
    assert bench.ended == []
    assert sizes[-4:] == [1, 1, 1, 1]
    assert [query.attempts for query in queries] == [4] * 4


def test_a_server_that_refuses_what_it_says_it_takes_is_at_fault_itself() -> None:
    bench = Bench()
    bench.says()
    sent = bench.admit(make_query(0))
    for _ in range(100):
        for claim in sent:
            bench.answer(claim, refused=TOO_LARGE)
        if bench.ended:
            break
        sent = bench.says() or bench.tick(bench.wake_ms() or 1)
    (query,) = bench.ended
    assert query.attempts == 5
    assert query.failure is not None
    assert query.failure.reason is Reason.SERVER_ERROR
    assert query.failure.message == "RESOURCE_EXHAUSTED: told so"
    assert query.failure.dead_letter


def test_an_input_that_is_too_large_for_its_server_is_not_sent_for_ever() -> None:
    bench = Bench()
    bench.says()
    sent = bench.admit(make_query(0))
    for _ in range(100):
        for claim in sent:
            bench.answer(claim, [], errors=[(0, TOO_LARGE)])
        if bench.ended:
            break
        sent = bench.says() or bench.tick(bench.wake_ms() or 1)
    assert [query.attempts for query in bench.ended] == [5]
