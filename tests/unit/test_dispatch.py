"""One model's dispatch: where claims go, and when."""

from __future__ import annotations

import pytest

from aggregator.core.effects import Dispatch
from aggregator.core.failures import Code, Reason
from aggregator.core.query import IN_FLIGHT, WAITING
from tests.unit.dispatch_bench import (
    DIED,
    MS,
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


def test_retries_leave_the_line_as_large_as_it_is() -> None:
    bench = Bench()
    bench.says("a")
    bench.says("b")
    for round_ in range(5):
        sent = bench.admit(*make_queries(8, start=8 * round_))
        while sent:
            for claim in sent:
                first = claim.queries[0].attempts == 0
                errors = [(i, ODD) for i in range(len(claim.queries))] if first else []
                bench.answer(claim, errors=errors)
            sent = [claim for server in "ab" for claim in bench.says(server)] + bench.tick(1000)
    assert bench.core.waiting == 0
    assert bench.core.waiting_tokens == 0
    bench.says("a", busy_ms=60)
    bench.says("b", busy_ms=60)
    sent = bench.admit(*make_queries(35, start=1000))
    assert [len(claim.queries) for claim in sent] == [10, 10, 10], "ahead of time, as ever"


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
    assert [server.revision_ok for server in bench.core.servers] == [True, False]
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


def talks_of_others(bench: Bench, seconds: int) -> list[Dispatch]:
    """Once a second a pass of other callers, announced with all that comes with it."""
    sent = []
    for _ in range(seconds):
        sent += bench.tick(990) + bench.says(busy_ms=5)
        sent += bench.tick(10) + bench.says()
        if bench.cancels:
            break
    return sent


def test_a_server_that_forgot_a_claim_is_cut_though_it_speaks() -> None:
    bench = Bench()
    bench.says()
    (query,) = make_queries(1)
    claim = one(bench.admit(query))
    began_ns = bench.now_ns
    bench.tick(10)
    bench.says()
    talks_of_others(bench, 400)
    assert [cancel.server for cancel in bench.cancels] == ["a"]
    assert "idle" in bench.cancels[0].message
    assert (bench.now_ns - began_ns) // MS == 15_010
    bench.lose(claim)
    bench.down()
    assert offsets(one(bench.says())) == [0]
    assert (query.losses, query.deaths, query.attempts) == (1, 0, 0)


def test_nor_does_a_claim_whose_pass_has_ended_wait_for_ever_or_die_by_it() -> None:
    bench = Bench()
    bench.says()
    (query,) = make_queries(1)
    claim = one(bench.admit(query))
    bench.says(running=[claim.claim_id], busy_ms=15)
    bench.tick(15)
    bench.says()
    talks_of_others(bench, 400)
    assert len(bench.cancels) == 1
    bench.lose(claim)
    assert (query.losses, query.deaths) == (1, 0)


def test_a_claim_that_waits_its_turn_is_not_forgotten() -> None:
    """Bulk behind interactive: never started, but queued whenever the server speaks."""
    bench = Bench()
    bench.says()
    bench.admit(make_query(0))
    bench.says()  # before the claim came there
    for _ in range(40):
        bench.tick(1_000)
        bench.says(busy_ms=15, queued=10)
        assert bench.cancels == []
    bench.says(busy_ms=0, queued=10)  # between two passes
    assert bench.cancels == []


def test_nor_one_whose_pass_has_just_ended() -> None:
    bench = Bench()
    bench.says()
    claim = one(bench.admit(make_query(0)))
    bench.says()
    for _ in range(4):
        bench.tick(5_000)
        bench.says(busy_ms=15, queued=10)
    bench.says(running=[claim.claim_id], busy_ms=15)
    bench.tick(15)
    bench.says()  # the answer is on its way
    assert bench.cancels == []
    bench.answer(claim)
    assert bench.wake_ms() is None


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
