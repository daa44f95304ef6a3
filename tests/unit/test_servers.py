"""Beliefs about servers, and the breaker."""

from __future__ import annotations

from aggregator.core.backlog import NEVER_NS
from aggregator.core.claims import Claim
from aggregator.core.events import ServerPhase
from aggregator.core.servers import Breaker, Server
from tests.unit.dispatch_bench import MS, make_limits, make_queries


def ready(**kwargs: float) -> Server:
    server = Server("a")
    server.opened("r", revision_ok=True, now_ns=0)
    server.told(make_limits(**kwargs), (), 0)  # type: ignore[arg-type]
    return server


def make_claim(claim_id: int, tokens: int, *, exclusive: bool = False) -> Claim:
    queries = make_queries(1, tokens=tokens)
    queries[0].estimate = tokens
    return Claim(claim_id, "a", queries, exclusive=exclusive)


def test_the_breaker_opens_after_failures_in_a_row_and_probes_with_one_claim() -> None:
    breaker = Breaker()
    breaker.failed(0)
    breaker.failed(0)
    breaker.succeeded()
    for _ in range(3):
        assert breaker.allows(0)
        breaker.failed(0)
    assert not breaker.closed
    assert not breaker.allows(Breaker.OPEN_NS_MIN - 1)
    assert breaker.wake_at_ns == Breaker.OPEN_NS_MIN
    assert breaker.allows(Breaker.OPEN_NS_MIN)
    breaker.probing = True
    assert not breaker.allows(Breaker.OPEN_NS_MIN)
    breaker.succeeded()
    assert breaker.closed


def test_the_breaker_stays_open_twice_as_long_after_each_failed_probe() -> None:
    breaker = Breaker()
    now_ns = 0
    for _ in range(3):
        breaker.failed(now_ns)
    spans = []
    for _ in range(9):
        spans.append(breaker.wake_at_ns - now_ns)
        now_ns = breaker.wake_at_ns
        breaker.probing = True
        breaker.failed(now_ns)
    assert spans[:3] == [200 * MS, 400 * MS, 800 * MS]
    assert spans[-1] == Breaker.OPEN_NS_MAX


def test_failures_of_what_was_sent_before_it_opened_do_not_lengthen_it() -> None:
    breaker = Breaker()
    for _ in range(9):
        breaker.failed(0)
    assert breaker.wake_at_ns == Breaker.OPEN_NS_MIN


def test_idle_is_believed_only_with_nothing_of_ours_on_its_way() -> None:
    server = ready()
    assert server.idle
    server.sent(make_claim(1, 50), MS)
    assert not server.idle
    server.told(make_limits(), (), 2 * MS)  # sent before the claim came there
    assert not server.idle
    server.told(make_limits(busy_ms=15), [1], 3 * MS)
    server.ended(server.claims[1])
    server.told(make_limits(), (), 18 * MS)
    assert server.idle


def test_busy_counts_down_from_arrival() -> None:
    server = ready()
    server.told(make_limits(busy_ms=15), (), 10 * MS)
    assert server.next_start_ns() == 25 * MS
    assert server.pass_room() == 100


def test_what_is_queued_there_fills_passes_first() -> None:
    server = ready()
    server.told(make_limits(busy_ms=15), (), 0)  # a pass takes 15 ms
    server.told(make_limits(busy_ms=15 + 15, queued=40), (), 15 * MS)
    assert server.next_start_ns() == 30 * MS
    assert server.pass_room() == 60
    server.told(make_limits(busy_ms=15 + 30, queued=130), (), 30 * MS)
    assert server.next_start_ns() == 60 * MS
    assert server.pass_room() == 70


def test_its_own_queued_claims_are_not_counted_twice() -> None:
    server = ready(busy_ms=15)
    server.sent(make_claim(1, 60), MS)
    server.told(make_limits(busy_ms=28, queued=60), (), 5 * MS)
    assert server.others_tokens == 0
    assert server.pass_room() == 40


def test_after_a_boundary_what_was_sent_is_assumed_to_have_started() -> None:
    server = ready(busy_ms=15)
    server.sent(make_claim(1, 60), 12 * MS)
    assert server.pending_tokens == 60
    server.boundary_passed(14 * MS)
    assert server.pending_tokens == 60
    server.boundary_passed(15 * MS)
    assert server.pending_tokens == 0
    assert server.next_start_ns() == NEVER_NS


def test_partly_answered_claims_keep_their_rest_in_the_window() -> None:
    server = ready(busy_ms=15)
    claim = make_claim(1, 60)
    server.sent(claim, 0)
    assert server.room_tokens() == 140
    server.answered(claim, 20)
    claim.tokens_left -= 20
    assert server.room_tokens() == 160
    server.ended(claim)
    assert server.room_tokens() == 200
    server.ended(claim)  # twice is once
    assert server.room_tokens() == 200


def test_one_stream_is_one_failure_however_many_claims_were_on_it() -> None:
    server = ready()
    for _ in range(5):
        server.stream_failed(0)
    assert server.breaker.closed
    for _ in range(2):
        server.closed(ServerPhase.DOWN)
        server.opened("r", revision_ok=True, now_ns=0)
        server.stream_failed(0)
    assert not server.breaker.closed


def test_a_probe_that_ends_without_a_verdict_lets_the_next_one_out() -> None:
    server = ready()
    for _ in range(3):
        server.failed(0)
    assert not server.usable(0)
    assert server.usable(Breaker.OPEN_NS_MIN)
    server.sent(make_claim(1, 10), Breaker.OPEN_NS_MIN)
    assert not server.usable(Breaker.OPEN_NS_MIN)
    server.ended(server.claims[1])
    assert server.usable(Breaker.OPEN_NS_MIN)


def test_draining_is_no_failure() -> None:
    server = ready()
    server.closed(ServerPhase.DRAINING)
    for _ in range(9):
        server.failed(0)
    assert server.breaker.closed


def test_the_way_there_is_learnt_from_answers() -> None:
    server = ready()
    for _ in range(50):
        claim = make_claim(1, 10)
        server.sent(claim, 0)
        server.timed(claim, 15 * MS, 17 * MS)
        server.ended(claim)
    assert abs(server.reach_ns - 2 * MS) < MS // 10


def test_silence_counts_from_the_last_word_or_the_first_unanswered_claim() -> None:
    server = ready()
    assert server.silent_at_ns(15_000 * MS) == NEVER_NS
    server.sent(make_claim(1, 10), 20_000 * MS)
    assert server.silent_at_ns(15_000 * MS) == 35_000 * MS
    server.sent(make_claim(2, 10), 30_000 * MS)
    assert server.silent_at_ns(15_000 * MS) == 35_000 * MS
    server.told(make_limits(busy_ms=1), (), 34_000 * MS)
    assert server.silent_at_ns(15_000 * MS) == 49_000 * MS
    server.cancelled(49_000 * MS)
    assert server.silent_at_ns(15_000 * MS) == 64_000 * MS
    assert not server.usable(49_000 * MS)


def test_a_cut_stream_does_not_come_back_by_a_late_word() -> None:
    server = ready()
    server.cancelled(0)
    server.resumed()
    assert server.phase is not ServerPhase.READY


def test_its_engine_is_born_again_when_it_is_seen_to_work() -> None:
    server = ready()
    births = server.births
    server.engine_died(0)
    server.engine_died(0)
    server.told(make_limits(busy_ms=15), (), MS)
    assert server.births == births
    server.told(make_limits(busy_ms=15), [7], 2 * MS)
    assert server.births == births + 1


def test_a_server_that_fell_silent_while_nothing_is_there_is_tried() -> None:
    server = ready(busy_ms=15)
    server.boundary_passed(15 * MS)
    at_ns = server.presumed_idle_at_ns()
    assert 15 * MS < at_ns < 5000 * MS
    server.presume_idle(at_ns)
    assert server.idle
    assert server.presumed_idle_at_ns() == NEVER_NS


def test_it_is_held_back_when_it_holds_too_much() -> None:
    server = ready()
    server.hold(50 * MS)
    server.hold(20 * MS)
    assert not server.usable(49 * MS)
    assert server.usable(50 * MS)
