"""When a lost engine is started again."""

from __future__ import annotations

import pytest

from model_server.core.restarts import FREE_RESTARTS, IN_A_ROW_MAX, INTERVAL_NS, Restarts


def test_the_first_ones_are_at_once() -> None:
    restarts = Restarts()
    assert [restarts.lost(1_000) for _ in range(FREE_RESTARTS)] == [0] * FREE_RESTARTS


def test_then_they_are_spread_out() -> None:
    restarts = Restarts()
    for _ in range(FREE_RESTARTS):
        restarts.lost(0)
    assert [restarts.lost(0) for _ in range(3)] == [INTERVAL_NS, 2 * INTERVAL_NS, 3 * INTERVAL_NS]
    assert restarts.lost(3 * INTERVAL_NS) == INTERVAL_NS


def test_time_gives_free_ones_back_but_never_more() -> None:
    restarts = Restarts()
    for _ in range(FREE_RESTARTS):
        restarts.lost(0)
    restarts.good_pass()
    later = 1_000 * INTERVAL_NS
    delays = [restarts.lost(later) for _ in range(FREE_RESTARTS + 1)]
    assert delays == [0] * FREE_RESTARTS + [INTERVAL_NS]


@pytest.mark.parametrize("good", [True, False])
def test_it_gives_up_when_no_pass_is_good(good: bool) -> None:
    restarts = Restarts()
    for number in range(IN_A_ROW_MAX):
        assert restarts.lost(number * INTERVAL_NS) is not None
    if good:
        restarts.good_pass()
    assert (restarts.lost(IN_A_ROW_MAX * INTERVAL_NS) is not None) is good
