"""Measuring the latency curve of an engine: which sizes, in which order, how often.

A sweep upwards comes first: it makes every shape once, so that no measured pass is the first of its
shape, and finds where the range ends (a pass that is long enough, memory, time). Then rounds, each
with one pass of every size in an order of its own, so that a drift of the machine spreads over all
sizes instead of looking like a curve. Only the engine's time is counted. Clock and engine are
handed in; what the curve means is `model_server.core.saturation`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model_server.core.saturation import Measured, splitmix
from model_server.engines.base import EngineOutOfMemoryError, Tokens
from model_server.profiling.mix import PassMaker

Run = Callable[[Sequence[Tokens]], object]
"""One forward pass; returns when its vectors are there."""
_FIRST_PASSES = 3
"""Libraries set themselves up in the first pass or two, whatever its shape."""
_TRIES = 2
"""More passes of a size that took too long, before it ends the range."""
_SEED = 20_261_130
SIZES_MIN = 5
"""A curve of fewer sizes is none."""


class MeasureError(Exception):
    """No curve can be had; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Sizes grow by octaves from `tokens_min`; the sweep ends behind a pass of `pass_ms_stop`.

    Time is bounded by `seconds_max`: the range is cut so that `rounds_min` rounds fit, and rounds
    end when the next would not fit. One pass that takes longer than its smaller ones promise may
    exceed it.
    """

    tokens_min: int = 8
    tokens_max: int
    sizes_per_octave: int
    rounds_min: int
    rounds_max: int
    pass_ms_stop: float
    seconds_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a measurement is: told before each pass."""

    done: int
    of: int
    tokens: int


class CurveMeter:
    """Measures one engine; use once."""

    def __init__(
        self,
        run: Run,
        maker: PassMaker,
        options: MeasureOptions,
        *,
        clock_ns: Callable[[], int],
        tell: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._run = run
        self._maker = maker
        self._options = options
        self._clock_ns = clock_ns
        self._tell = tell
        self._started_ns = clock_ns()
        self._below = splitmix(_SEED)

    def measure(self) -> Measured:
        """The curve.

        Raises:
            MeasureError: fewer than `SIZES_MIN` sizes fit memory and time.
            Exception: what the engine raised.
        """
        sweep_ms = self._sweep()
        if len(sweep_ms) < SIZES_MIN:
            raise MeasureError(
                f"only {len(sweep_ms)} sizes of passes could be measured within "
                f"{self._options.seconds_max:g} s and the memory there is"
            )
        passes = {tokens: self._maker.inputs(tokens) for tokens in sweep_ms}
        total = len(passes) * self._options.rounds_max
        rounds: list[dict[int, float]] = []
        round_s = sum(sweep_ms.values()) / 1e3
        while len(rounds) < self._options.rounds_max:
            if rounds and self._elapsed_s() + round_s > self._options.seconds_max:
                break
            started_s = self._elapsed_s()
            times_ms: dict[int, float] = {}
            for tokens in self._shuffled(list(passes)):
                done = len(rounds) * len(passes) + len(times_ms)
                self._tell(Progress(done=done, of=total, tokens=tokens))
                times_ms[tokens] = self._time_ms(passes[tokens])
            rounds.append(times_ms)
            round_s = self._elapsed_s() - started_s
        self._tell(Progress(done=total, of=total, tokens=0))
        return Measured(
            tokens=tuple(passes),
            rounds_ms=tuple(tuple(one[tokens] for tokens in passes) for one in rounds),
        )

    def _sweep(self) -> dict[int, float]:
        """The sizes to measure, ascending, each run once or more, and about how long they take."""
        options = self._options
        sweep_ms: dict[int, float] = {}
        for _ in range(_FIRST_PASSES):
            self._time_ms(self._maker.inputs(options.tokens_min))
        for tokens in self._sizes():
            if sweep_ms and not self._affords(tokens, sweep_ms):
                break
            self._tell(Progress(done=0, of=0, tokens=tokens))
            inputs = self._maker.inputs(tokens)
            try:
                pass_ms = self._time_ms(inputs)
                # A shape's first pass may be far longer than those after it, and any pass may be
                # held up: the range does not end for that.
                for _ in range(_TRIES):
                    if pass_ms > options.pass_ms_stop:
                        pass_ms = min(pass_ms, self._time_ms(inputs))
            except EngineOutOfMemoryError:
                break
            sweep_ms[tokens] = pass_ms
            if pass_ms > options.pass_ms_stop:
                break
        return sweep_ms

    def _sizes(self) -> list[int]:
        """Whole numbers of tokens, as evenly spaced by factor as that allows."""
        options = self._options
        last = min(options.tokens_max, self._maker.tokens_max)
        sizes: list[int] = []
        step = 0
        while (size := round(options.tokens_min * 2 ** (step / options.sizes_per_octave))) <= last:
            if not sizes or size > sizes[-1]:
                sizes.append(size)
            step += 1
        return sizes

    def _affords(self, tokens: int, sweep_ms: dict[int, float]) -> bool:
        """Whether the time is enough for this size too, in the sweep and in `rounds_min` rounds."""
        last_tokens, last_ms = list(sweep_ms.items())[-1]
        next_ms = last_ms * tokens / last_tokens
        rounds_ms = self._options.rounds_min * (sum(sweep_ms.values()) + next_ms)
        return self._elapsed_s() + (next_ms + rounds_ms) / 1e3 <= self._options.seconds_max

    def _shuffled(self, sizes: list[int]) -> list[int]:
        """Fisher and Yates."""
        for last in range(len(sizes) - 1, 0, -1):
            other = self._below(last + 1)
            sizes[last], sizes[other] = sizes[other], sizes[last]
        return sizes

    def _time_ms(self, inputs: Sequence[Tokens]) -> float:
        started_ns = self._clock_ns()
        self._run(inputs)
        # A clock that did not move still needs a positive time.
        return max(1, self._clock_ns() - started_ns) / 1e6

    def _elapsed_s(self) -> float:
        return (self._clock_ns() - self._started_ns) / 1e9
