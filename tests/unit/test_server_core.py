"""The small parts of the model server's core: windows, isolation, limits, lifecycle, pass times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model_server.core.effects import Part
from model_server.core.failures import Code, Reason
from model_server.core.isolation import Isolation, halved
from model_server.core.lifecycle import Lifecycle, Phase
from model_server.core.limits import (
    TEXT_BYTES_MAX,
    TIMEOUT_MS_MAX,
    Limits,
    check_dimensions,
    check_text,
    check_timeout,
    deadline_ns,
)
from model_server.core.pass_times import PassTimes
from model_server.core.windows import WindowShares

SECOND_NS = 1_000_000_000
LIMITS = Limits(
    batch_tokens_target=600,
    batch_tokens_max=2_400,
    input_tokens_max=256,
    inputs_max=64,
    request_bytes_max=1_000_000,
)


def windows(shares: WindowShares, now_ns: int = 0, input_tokens_max: int = 100) -> dict[int, int]:
    return shares.windows(target=600, input_tokens_max=input_tokens_max, now_ns=now_ns)


# Windows


def test_a_lone_stream_has_the_whole_window() -> None:
    shares = WindowShares()
    shares.open(1, 0)
    assert windows(shares) == {1: 1_200}


def test_streams_share_equally_at_first() -> None:
    shares = WindowShares()
    for stream in (1, 2, 3):
        shares.open(stream, 0)
    assert windows(shares) == {1: 400, 2: 400, 3: 400}


def test_a_new_stream_begins_with_an_equal_share_of_busy_ones() -> None:
    shares = WindowShares()
    shares.open(1, 0)
    shares.sent(1, 50_000, 0)
    shares.open(2, 0)
    assert windows(shares) == {1: 600, 2: 600}


def test_shares_follow_what_was_sent() -> None:
    shares = WindowShares()
    for stream in (1, 2):
        shares.open(stream, 0)
    shares.sent(1, 9_000, 0)
    shares.sent(2, 1_000, 0)
    shared = windows(shares)
    assert shared[1] > 4 * shared[2]
    assert sum(shared.values()) == pytest.approx(1_200, abs=2)


def test_what_was_sent_is_forgotten_within_seconds() -> None:
    shares = WindowShares()
    for stream in (1, 2):
        shares.open(stream, 0)
    shares.sent(1, 10_000, 0)
    shares.sent(2, 10_000, 20 * SECOND_NS)
    shared = windows(shares, 20 * SECOND_NS)
    assert shared[2] > 4 * shared[1]


def test_no_window_is_below_a_quarter_of_the_target_or_one_input() -> None:
    shares = WindowShares()
    for stream in range(1, 11):
        shares.open(stream, 0)
    shares.sent(1, 100_000, 0)
    assert min(windows(shares).values()) == 150
    assert min(windows(shares, input_tokens_max=256).values()) == 256
    assert windows(shares)[1] >= max(windows(shares).values())


def test_the_floors_are_not_taken_from_the_stream_with_the_traffic() -> None:
    shares = WindowShares()
    for stream in (1, 2, 3):
        shares.open(stream, 0)
    shares.sent(1, 100_000, 0)
    busy, *quiet = windows(shares, input_tokens_max=512).values()
    assert quiet == [512, 512]
    assert busy > 1_000


def test_a_window_holds_one_input_even_where_that_is_more_than_two_targets() -> None:
    shares = WindowShares()
    shares.open(1, 0)
    assert windows(shares, input_tokens_max=8_192) == {1: 8_192}


def test_streams_limited_by_their_windows_are_drawn_to_equal_shares() -> None:
    shares = WindowShares()
    for stream in (1, 2):
        shares.open(stream, 0)
    shares.sent(1, 9_000, 0)
    shares.sent(2, 1_000, 0)
    now_ns = 0
    for _ in range(400):  # both always fill what they are given
        now_ns += SECOND_NS // 10
        for stream, window in windows(shares, now_ns).items():
            shares.sent(stream, window, now_ns)
    shared = windows(shares, now_ns)
    assert shared[1] == pytest.approx(shared[2], rel=0.1)


def test_a_closed_stream_gives_its_share_back() -> None:
    shares = WindowShares()
    for stream in (1, 2):
        shares.open(stream, 0)
    shares.close(2)
    shares.close(2)
    assert windows(shares) == {1: 1_200}
    shares.close(1)
    assert windows(shares) == {}


# Isolation


def test_halves_are_by_inputs_and_keep_order() -> None:
    parts = [Part(request=1, indexes=[0, 1, 2]), Part(request=2, indexes=[7, 9])]
    first, second = halved(parts)
    assert [(p.request, list(p.indexes)) for p in first] == [(1, [0, 1])]
    assert [(p.request, list(p.indexes)) for p in second] == [(1, [2]), (2, [7, 9])]


def test_the_half_cut_last_runs_next() -> None:
    isolation = Isolation()
    isolation.raised([Part(request=1, indexes=[0, 1, 2, 3])], "x", alone=False)
    first = isolation.next_half()
    assert first is not None
    isolation.raised(first, "x", alone=False)
    order = []
    while (half := isolation.next_half()) is not None:
        order.append([i for part in half for i in part.indexes])
    assert order == [[0], [1], [2, 3]]
    assert not isolation.busy


def test_nobody_can_be_convicted_without_a_suspect() -> None:
    with pytest.raises(RuntimeError):
        Isolation().convicted()


# Limits


@pytest.mark.parametrize(
    "change",
    [
        {"batch_tokens_max": 599},
        {"input_tokens_max": 2_401},
        {"inputs_max": 0},
        {"request_bytes_max": TEXT_BYTES_MAX - 1},
    ],
)
def test_limits_that_contradict_each_other_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        replace(LIMITS, **change)


def test_a_lowered_maximum_still_holds_one_input() -> None:
    lowered = LIMITS.lowered(100)
    assert (lowered.batch_tokens_target, lowered.batch_tokens_max) == (100, 256)
    assert LIMITS.lowered(5_000) == LIMITS


def test_requests_are_checked_by_size() -> None:
    assert LIMITS.check_request(inputs=64, request_bytes=1_000_000) is None
    empty = LIMITS.check_request(inputs=0, request_bytes=0)
    many = LIMITS.check_request(inputs=65, request_bytes=0)
    large = LIMITS.check_request(inputs=1, request_bytes=1_000_001)
    assert empty is not None
    assert (empty.code, empty.field) == (Code.INVALID_ARGUMENT, "inputs")
    for failure in (many, large):
        assert failure is not None
        assert failure.reason is Reason.REQUEST_TOO_LARGE
        assert failure.code is Code.RESOURCE_EXHAUSTED


def test_inputs_are_checked_by_field() -> None:
    assert check_text(1) is None
    assert check_text(TEXT_BYTES_MAX) is None
    assert check_timeout(0) is None
    offered = {384, 100}
    assert check_dimensions(100, offered=offered, multiple_of_8=False) is None
    refused = {
        "text": [check_text(0), check_text(TEXT_BYTES_MAX + 1)],
        "timeout_ms": [check_timeout(-1)],
        "dimensions": [check_dimensions(0, offered=offered, multiple_of_8=False)],
        "encoding": [check_dimensions(100, offered=offered, multiple_of_8=True)],
    }
    for field, failures in refused.items():
        for failure in failures:
            assert failure is not None
            assert failure.field == field
            assert failure.code is Code.INVALID_ARGUMENT


def test_deadlines_are_absolute_and_bounded() -> None:
    assert deadline_ns(5, 0) == 0
    assert deadline_ns(5, 2) == 2_000_005
    assert deadline_ns(0, 2**62) == TIMEOUT_MS_MAX * 1_000_000


# Lifecycle


def test_only_a_serving_server_takes_requests() -> None:
    lifecycle = Lifecycle()
    assert not lifecycle.serving
    lifecycle.to(Phase.SERVING)
    assert lifecycle.serving
    lifecycle.to(Phase.DRAINING)
    assert not lifecycle.serving
    assert lifecycle.running


def test_a_step_that_is_not_in_the_table_is_a_broken_invariant() -> None:
    lifecycle = Lifecycle()
    with pytest.raises(ValueError, match="loading server can't become draining"):
        lifecycle.to(Phase.DRAINING)
    lifecycle.to(Phase.STOPPED)
    with pytest.raises(ValueError, match="stopped"):
        lifecycle.to(Phase.SERVING)


# Pass times


def test_pass_times_learn_a_line() -> None:
    times = PassTimes()
    for tokens in (100, 600, 300, 500, 50):
        times.observe(tokens, int((5 + 0.2 * tokens) * 1_000_000))
    assert times.pass_ms(400) == pytest.approx(85, rel=0.01)
    assert times.queue_ms(1_200, 600) == pytest.approx(2 * 5 + 0.2 * 1_200, rel=0.01)
    assert times.queue_ms(0, 600) == 0


def test_pass_times_follow_an_engine_that_became_slower() -> None:
    times = PassTimes()
    for duration_ms in [10] * 50 + [30] * 300:
        times.observe(600, duration_ms * 1_000_000)
    assert times.pass_ms(600) == pytest.approx(30, rel=0.05)


def test_a_coefficient_is_never_negative() -> None:
    times = PassTimes()
    for tokens, duration_ms in ((100, 30), (600, 10), (300, 20)):
        times.observe(tokens, duration_ms * 1_000_000)
    assert times.pass_ms(10_000) >= times.pass_ms(0) >= 0
