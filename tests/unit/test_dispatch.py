"""One model's dispatch: where claims go, and what becomes of their queries on every path."""

from __future__ import annotations

from itertools import pairwise

import pytest

from aggregator.core.events import Loss
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import ABANDONED, IN_FLIGHT, WAITING
from tests.unit.dispatch_bench import (
    DIED,
    NOT_STARTED,
    ODD,
    TARGET,
    Bench,
    failure,
    make_limits,
    make_queries,
    make_query,
    offsets,
    one,
    waiting_phases,
)

# The rule -----------------------------------------------------------------------------------------


def test_an_idle_server_gets_what_there_is_at_once() -> None:
    bench = Bench()
    assert bench.admit(*make_queries(3)) == []
    assert offsets(one(bench.says())) == [0, 1, 2]
    assert bench.core.waiting == 0


def test_queries_are_in_flight_with_their_claim() -> None:
    bench = Bench()
    bench.says()
    (query,) = make_queries(1)
    claim = one(bench.admit(query))
    assert (query.phase, query.claim_id) == (IN_FLIGHT, claim.claim_id)
    assert claim.estimate == pytest.approx(10, abs=0.01)


def test_a_busy_server_is_waited_for_until_the_lead_before_its_boundary() -> None:
    bench = Bench()
    bench.says(busy_ms=15)
    assert bench.admit(make_query(1)) == []
    assert bench.wake_ms() == 12
    assert bench.tick(11.9) == []
    assert offsets(one(bench.tick(0.1))) == [1]


def test_what_comes_after_the_lead_follows_once_more_in_time() -> None:
    bench = Bench()
    bench.says(busy_ms=15)
    bench.admit(make_query(1))
    one(bench.tick(12))
    assert bench.admit(make_query(2)) == []
    wait_ms = bench.wake_ms()
    assert wait_ms is not None
    assert 1.0 < wait_ms < 1.5  # about half the lead, while the way is not known
    assert offsets(one(bench.tick(wait_ms))) == [2]
    assert bench.admit(make_query(3)) == []
    assert bench.tick(1.4) == []


def test_nothing_more_goes_to_a_passed_boundary_before_the_server_speaks() -> None:
    bench = Bench()
    bench.says(busy_ms=15)
    bench.admit(make_query(1))
    claim = one(bench.tick(12))
    bench.tick(4)
    assert bench.admit(make_query(2)) == []
    assert bench.says(running=[claim.claim_id], busy_ms=15) == []
    assert offsets(one(bench.tick(12))) == [2]


def test_the_server_that_is_free_first_is_waited_for() -> None:
    bench = Bench()
    bench.says("a", busy_ms=20)
    bench.says("b", busy_ms=10)
    bench.admit(make_query(1))
    assert bench.wake_ms() == 7
    assert one(bench.tick(7)).server == "b"


def test_a_server_told_busy_is_busy_until_it_says_otherwise() -> None:
    bench = Bench()
    bench.says(busy_ms=15)
    bench.tick(16)
    assert bench.admit(make_query(1)) == []
    assert len(bench.says()) == 1


def test_full_claims_go_ahead_of_time_while_the_window_has_room() -> None:
    bench = Bench()
    bench.says(busy_ms=60)
    sent = bench.admit(*make_queries(35))
    assert [len(claim.queries) for claim in sent] == [10, 10]
    assert bench.core.waiting == 15


def test_no_claim_goes_above_target_window_or_inputs() -> None:
    bench = Bench()
    bench.says(limits=make_limits(window=60))
    assert [len(claim.queries) for claim in bench.admit(*make_queries(20))] == [6]
    bench = Bench()
    bench.says(limits=make_limits(inputs_max=4))
    assert [len(c.queries) for c in bench.admit(*make_queries(20))] == [4, 4, 4]


def test_claims_follow_a_target_that_moves() -> None:
    bench = Bench()
    bench.says(busy_ms=60)
    assert [len(claim.queries) for claim in bench.admit(*make_queries(20))] == [10, 10]
    bench = Bench()
    bench.says(busy_ms=60)
    bench.says(limits=make_limits(target=50, busy_ms=60))
    assert [len(claim.queries) for claim in bench.admit(*make_queries(20))] == [5, 5]
    # Before a larger pass a window is wider: a third claim of the same size.
    sent = bench.says(limits=make_limits(target=50, window=150, busy_ms=60))
    assert [len(claim.queries) for claim in sent] == [5]


def test_streams_that_share_servers_send_half_a_window_for_one_pass() -> None:
    bench = Bench()
    bench.says("a", limits=make_limits(window=80, busy_ms=15))
    bench.says("b", limits=make_limits(window=80, busy_ms=30))
    bench.admit(*make_queries(3))  # 30 tokens: less than a full claim of 40
    assert len(one(bench.tick(12)).queries) == 3
    sent = bench.admit(*make_queries(3, start=3)) + bench.tick(1.5)
    assert [(claim.server, len(claim.queries)) for claim in sent] == [("a", 1)]


def test_what_ends_at_the_boundary_leaves_its_room() -> None:
    bench = Bench()
    bench.says(limits=make_limits(window=100))
    claim = one(bench.admit(*make_queries(9)))
    bench.says(running=[claim.claim_id], limits=make_limits(window=100, busy_ms=15))
    bench.admit(*make_queries(5, start=9))  # 10 tokens are left of the window: no room for a claim
    assert bench.tick(11) == []
    assert len(one(bench.tick(1)).queries) == 5


def test_a_query_larger_than_the_target_goes_alone_where_nothing_of_ours_is() -> None:
    bench = Bench()
    bench.says()
    first = one(bench.admit(make_query(0)))
    assert bench.admit(make_query(1, tokens=300), make_query(2)) == []
    assert bench.tick(1000) == []
    bench.answer(first)
    assert offsets(one(bench.says())) == [1]


def test_a_full_backlog_goes_in_full_claims_only() -> None:
    bench = Bench()
    bench.says(busy_ms=15)
    for _ in range(5):
        sent = bench.admit(*make_queries(30)) + bench.tick(12) + bench.tick(1.5)
        assert all(len(claim.queries) == 10 for claim in sent)
        bench.tick(1.5)
        running = list(bench.claims)[:1]
        bench.answer(bench.claims.pop(running[0]))
        sent = bench.says(busy_ms=15, running=list(bench.claims)[:1])
        assert all(len(claim.queries) == 10 for claim in sent)


def test_nothing_wakes_an_aggregator_without_queries() -> None:
    bench = Bench()
    bench.says(busy_ms=15)
    assert bench.wake_ms() is None


# Which servers ------------------------------------------------------------------------------------


def test_a_draining_server_gets_nothing_and_still_answers() -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(make_query(0)))
    bench.says(draining=True)
    assert bench.core.servers_ready == 0
    assert bench.admit(make_query(1)) == []
    assert len(bench.answer(claim).vectors) == 1
    assert bench.tick(1000) == []


def test_the_first_revision_seen_holds() -> None:
    bench = Bench()
    bench.says("a", revision="one")
    bench.says("b", revision="two")
    assert bench.core.counters.revision_mismatches == 1
    assert bench.core.servers_ready == 1
    assert {claim.server for claim in bench.admit(*make_queries(40))} == {"a"}
    bench.down("a")
    assert bench.says("b", revision="two") == []


def test_a_pinned_revision_holds_before_any_is_seen() -> None:
    bench = Bench(revision="two")
    bench.says("a", revision="one")
    assert bench.admit(make_query(0)) == []
    assert one(bench.says("b", revision="two")).server == "b"


def test_nothing_waits_for_ever_for_a_server_that_has_no_more_to_say() -> None:
    """Found by simulation: a tick that came too late for a boundary was the last one."""
    bench = Bench()
    bench.says("a", limits=make_limits(window=TARGET, busy_ms=20))
    assert bench.admit(make_query(0)) == []
    assert bench.tick(19) == []
    for _ in range(10):
        wake_ms = bench.wake_ms()
        assert wake_ms is not None
        if bench.tick(wake_ms):
            return
    raise AssertionError("never sent")


def test_a_silent_stream_with_unanswered_claims_is_cut() -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(make_query(0)))
    assert bench.wake_ms() == 15_000
    bench.tick(15_000)
    assert [cancel.server for cancel in bench.cancels] == ["a"]
    bench.tick(1)
    assert bench.cancels == []
    bench.lose(claim)
    bench.down()
    assert offsets(one(bench.says())) == [0]


def test_a_server_that_holds_too_much_is_left_alone_as_long_as_it_says() -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(make_query(0)))
    held = failure(Code.RESOURCE_EXHAUSTED, Reason.TOO_MUCH_HELD, retry_after_ms=70)
    bench.answer(claim, refused=held)
    assert bench.says() == []
    assert bench.wake_ms() == 70
    query = one(bench.tick(70)).queries[0]
    assert query.attempts == 0


def test_a_server_that_refuses_again_and_again_is_probed_with_pauses() -> None:
    bench = Bench()
    bench.says()
    sent = bench.admit(make_query(0, ttl_ms=60_000))
    count = 0
    while bench.now_ns < 11_000 * 1_000_000:
        for claim in sent:
            count += 1
            bench.answer(claim, refused=NOT_STARTED)
        sent = bench.says() or bench.tick(bench.wake_ms() or 1)
    assert 5 <= count <= 12
    assert bench.ended == []


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


# Nothing is lost ----------------------------------------------------------------------------------


def test_claims_never_reported_lost_come_back_when_the_stream_opens_anew() -> None:
    bench = Bench()
    bench.says()
    one(bench.admit(make_query(0)))
    bench.down()
    assert bench.tick(60) == []
    assert offsets(one(bench.says())) == [0]


def test_answers_to_unknown_claims_are_ignored() -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(make_query(0)))
    bench.answer(claim)
    assert bench.answer(claim).vectors == []
    assert bench.lose(claim) == []
    assert bench.core.counters.late_answers == 1


def test_removal_reaches_everything_that_waits_and_nothing_in_flight() -> None:
    bench = Bench()
    bench.says()
    queries = make_queries(12)
    queries[1].deaths = 1
    claim = one(bench.admit(*queries[:3]))
    bench.answer(claim, errors=[(0, ODD), (1, DIED)], last=False)
    bench.down()
    bench.admit(*queries[3:])
    removed = bench.core.remove(lambda query: query.offset != 7)
    assert sorted(query.offset for query in removed) == [0, 1, *range(3, 7), *range(8, 12)]
    assert bench.core.waiting == 1
    assert queries[2].phase == IN_FLIGHT
    assert queries[7].phase == WAITING
