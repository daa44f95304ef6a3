"""What a profile runs, in which order and for how long: in virtual time, on made-up machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from model_server.core.curve import Fit
from model_server.core.saturation import TargetOptions, saturation, splitmix
from model_server.engines.base import EngineOutOfMemoryError, Tokens
from model_server.profiling.measure import CurveMeter, MeasureError, MeasureOptions, Progress
from model_server.profiling.mix import LENGTHS, MixError, PassMaker, lengths_of

MS = 1_000_000
CPU = Fit(fixed_ms=5.0, slope_ms=0.1)
FAR = TargetOptions(pass_ms_max=1e9)


class Machine:
    """Passes take virtual time: `pass_ms(tokens, how often this size ran, ms since start)`."""

    def __init__(self, pass_ms: Callable[[int, int, float], float]) -> None:
        self._pass_ms = pass_ms
        self.now_ns = 10**12
        self._start_ns = self.now_ns
        self.ran: list[int] = []

    def clock_ns(self) -> int:
        return self.now_ns

    @property
    def elapsed_ms(self) -> float:
        return (self.now_ns - self._start_ns) / MS

    def run(self, inputs: Sequence[Tokens]) -> None:
        tokens = sum(len(one.ids) for one in inputs)
        before = self.ran.count(tokens)
        self.ran.append(tokens)
        self.now_ns += round(self._pass_ms(tokens, before, self.elapsed_ms) * MS)


def maker(inputs_max: int = 1_024) -> PassMaker:
    return PassMaker(Tokens(ids=list(range(256))), inputs_max=inputs_max)


def options(**changes: Any) -> MeasureOptions:
    given: dict[str, Any] = {
        "tokens_max": 4_096,
        "sizes_per_octave": 4,
        "rounds_min": 3,
        "rounds_max": 5,
        "pass_ms_stop": 400.0,
        "seconds_max": 1_000.0,
    }
    return MeasureOptions(**{**given, **changes})


def meter(machine: Machine, tell: Any = lambda _: None, **changes: Any) -> CurveMeter:
    return CurveMeter(
        machine.run, maker(), options(**changes), clock_ns=machine.clock_ns, tell=tell
    )


# The mix


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8, 10, 64, 255, 600, 4_096, 65_536])
def test_lengths_add_up_exactly(tokens: int) -> None:
    lengths = lengths_of(tokens, inputs_max=1_024, input_tokens_max=256)
    assert sum(lengths) == tokens
    assert min(lengths) >= min(tokens, 4)
    assert max(lengths) <= 256
    assert len(lengths) <= 1_024


def test_a_pass_of_many_texts_has_the_mix() -> None:
    rounds = 20
    lengths = lengths_of(rounds * sum(LENGTHS), inputs_max=9_999, input_tokens_max=256)
    assert Counter(lengths) == Counter(LENGTHS * rounds)
    # Short and long in turn: a pass of a few hundred tokens has both already.
    some = lengths_of(300, inputs_max=9_999, input_tokens_max=256)
    assert min(some) <= 6
    assert max(some) >= 19


def test_the_same_size_has_the_same_texts() -> None:
    first, second = maker().inputs(700), maker().inputs(700)
    assert [list(one.ids) for one in first] == [list(one.ids) for one in second]
    ids = list(range(256))
    assert all(one.ids[0] == ids[0] and one.ids[-1] == ids[-1] for one in first if len(one.ids) > 1)


def test_texts_get_longer_where_there_may_be_no_more_of_them() -> None:
    lengths = lengths_of(4_000, inputs_max=64, input_tokens_max=256)
    assert len(lengths) <= 64
    assert sum(lengths) == 4_000
    with pytest.raises(MixError, match="do not make"):
        lengths_of(64 * 256 + 1, inputs_max=64, input_tokens_max=256)


# The order


def test_every_round_has_every_size_once_in_an_order_of_its_own() -> None:
    machine = Machine(lambda tokens, *_: CPU.pass_ms(tokens))
    measured = meter(machine).measure()
    count = len(measured.tokens)
    assert len(measured.rounds_ms) == 5
    rounds = [machine.ran[-count * (i + 1) : len(machine.ran) - count * i] for i in range(5)]
    for order in rounds:
        assert sorted(order) == list(measured.tokens)
        assert order != sorted(order)
    assert len({tuple(order) for order in rounds}) == 5
    assert all(abs(b / a - 2**0.25) < 0.1 for a, b in pairwise(measured.tokens))


def test_what_a_machine_takes_is_what_is_measured() -> None:
    machine = Machine(lambda tokens, *_: CPU.pass_ms(tokens))
    measured = meter(machine).measure()
    for times_ms in measured.rounds_ms:
        for tokens, time_ms in zip(measured.tokens, times_ms, strict=True):
            assert time_ms == pytest.approx(CPU.pass_ms(tokens))
    assert measured.tokens[0] == 8
    # The range ends behind the first pass of 400 ms.
    assert CPU.pass_ms(measured.tokens[-2]) <= 400 < CPU.pass_ms(measured.tokens[-1])


def test_the_first_pass_of_a_shape_does_not_count() -> None:
    machine = Machine(lambda tokens, before, _: CPU.pass_ms(tokens) * (1 if before else 30))
    measured = meter(machine).measure()
    assert measured.rounds_ms == meter_of_sound_machine().rounds_ms
    assert measured.tokens == meter_of_sound_machine().tokens


def meter_of_sound_machine() -> Any:
    return meter(Machine(lambda tokens, *_: CPU.pass_ms(tokens))).measure()


def test_a_drift_does_not_look_like_a_curve() -> None:
    """A machine that gets slower all the time, to a third of its speed: the same target."""
    sound = saturation(meter_of_sound_machine(), FAR, splitmix(1))
    whole = Machine(lambda tokens, *_: CPU.pass_ms(tokens))
    meter(whole, rounds_max=15).measure()

    def drifting(tokens: int, _: int, now_ms: float) -> float:
        return CPU.pass_ms(tokens) * (1 + 2 * now_ms / whole.elapsed_ms / 2)

    found = saturation(meter(Machine(drifting), rounds_max=15).measure(), FAR, splitmix(1))
    assert found.knee_tokens is None
    assert sound.target.tokens / 1.5 <= found.target.tokens <= sound.target.tokens * 1.5


def test_a_pass_that_is_held_up_does_not_end_the_range() -> None:
    def held_up(tokens: int, before: int, _: float) -> float:
        return 900.0 if tokens == 64 and before == 0 else CPU.pass_ms(tokens)

    assert meter(Machine(held_up)).measure().tokens == meter_of_sound_machine().tokens


def test_memory_ends_the_range() -> None:
    machine = Machine(lambda tokens, *_: CPU.pass_ms(tokens))
    run = machine.run

    def small(inputs: Sequence[Tokens]) -> None:
        if sum(len(one.ids) for one in inputs) > 500:
            raise EngineOutOfMemoryError("no memory")
        run(inputs)

    found = CurveMeter(small, maker(), options(), clock_ns=machine.clock_ns).measure()
    assert found.tokens[-1] <= 500
    assert found.tokens == meter_of_sound_machine().tokens[: len(found.tokens)]


@pytest.mark.parametrize("seconds_max", [0.7, 2.0, 5.0, 20.0])
def test_time_is_bounded(seconds_max: float) -> None:
    machine = Machine(lambda tokens, *_: CPU.pass_ms(tokens))
    measured = meter(
        machine, seconds_max=seconds_max, rounds_min=2, rounds_max=50, pass_ms_stop=200.0
    ).measure()
    assert machine.elapsed_ms <= seconds_max * 1_000
    assert len(measured.rounds_ms) >= 2
    # It is used, too: another round would not have fitted.
    round_ms = sum(measured.rounds_ms[0])
    assert machine.elapsed_ms + round_ms > seconds_max * 1_000 or len(measured.rounds_ms) == 50


def test_too_few_sizes_are_no_curve() -> None:
    slow = Machine(lambda tokens, *_: 300.0)
    with pytest.raises(MeasureError, match="could be measured within 2 s"):
        meter(slow, seconds_max=2.0).measure()
    assert slow.elapsed_ms <= 2_500


def test_progress_is_told_to_the_end() -> None:
    told: list[Progress] = []
    measured = meter(Machine(lambda tokens, *_: 1.0), tell=told.append).measure()
    assert told[-1].done == told[-1].of == 5 * len(measured.tokens)
    assert [p.done for p in told if p.of] == list(range(told[-1].of + 1))
