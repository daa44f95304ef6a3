"""A machine whose speed changes under a scheduler that follows it, in virtual time.

One client with one stream keeps to its window, as an aggregator does; what does not fit waits with
it. Passes take what the machine's curve says, with noise, and the first pass of a shape takes far
longer. Deterministic: a seeded generator, no clock.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from model_server.core import effects as ef
from model_server.core.curve import Fit
from model_server.core.following import FollowOptions
from model_server.core.limits import Limits
from model_server.core.saturation import TargetOptions, implied_target
from tests.harness.scheduler import MS, SchedulerWorld

SECOND_NS = 1_000 * MS
CPU = Fit(fixed_ms=5.5, slope_ms=0.1)
RANGE = (8, 4_096)
FAR_MS = 10_000.0
FIRST_OF_A_SHAPE = 20.0


@dataclass(slots=True)
class Seen:
    """What happened, pass by pass."""

    passes: list[tuple[ef.PassKind, int]] = field(default_factory=list)
    targets: list[tuple[int, int]] = field(default_factory=list)
    """(passes so far, target) at each move."""
    windows: list[int] = field(default_factory=list)
    """Of the stream, while each pass ran."""


class FollowingWorld:
    """See the module."""

    def __init__(
        self,
        *,
        machine: Fit = CPU,
        pass_ms_max: float = FAR_MS,
        noise: float = 0.1,
        follow: bool = True,
        batch_tokens_max: int = 4_096,
        first_of_a_shape: float = FIRST_OF_A_SHAPE,
        seed: int = 1,
    ) -> None:
        self.machine = machine
        self._noise = noise
        self._first_of_a_shape = first_of_a_shape
        self._rng = random.Random(seed)
        options = TargetOptions(pass_ms_max=pass_ms_max)
        low, high = RANGE
        self.profile = implied_target(machine, options, tokens_min=low, tokens_max=high).tokens
        limits = Limits(
            batch_tokens_target=self.profile,
            batch_tokens_max=batch_tokens_max,
            input_tokens_max=256,
            inputs_max=1_024,
            request_bytes_max=1 << 20,
        )
        followed = FollowOptions(
            target=options,
            curve=machine,
            profile_target=self.profile,
            profile_free=self.implied(),
            tokens_min=low,
            tokens_max=high,
        )
        self.world = SchedulerWorld(limits, follow=followed if follow else None)
        self.world.open(1)
        self.seen = Seen()
        self._waiting: deque[int] = deque()
        self._shapes: set[int] = set()

    @property
    def target(self) -> int:
        return self.world.scheduler.limits.batch_tokens_target

    def implied(self, *, pass_ms_max: float = FAR_MS) -> int:
        """What the machine of now is best served with."""
        options = TargetOptions(pass_ms_max=pass_ms_max)
        low, high = RANGE
        return implied_target(self.machine, options, tokens_min=low, tokens_max=high).tokens

    # Traffic

    def steady(self, queries_per_s: float, seconds: float) -> None:
        """Queries come at random, at one rate."""
        self._drive(self._poisson(queries_per_s, seconds))

    def backlog(self, passes: int) -> None:
        """There is always more than fits."""
        before = len(self.seen.passes)
        while len(self.seen.passes) < before + passes:
            while len(self._waiting) < 1_000:
                self._waiting.append(self._length())
            self._send()
            self._done()

    def waves(self, passes: int) -> None:
        """What a day brings in a minute: single queries, some load, and then a backlog."""
        before = len(self.seen.passes)
        while len(self.seen.passes) < before + passes:
            for factor in (0.02, 0.1, 0.3, 0.6, 0.9, 1.5):
                capacity = self.target / self.machine.pass_ms(self.target) * 1e3
                rate = factor * capacity / 11
                self.steady(rate, 40 / rate + 0.5)

    def _poisson(self, per_s: float, seconds: float) -> Iterator[int]:
        at_ns = float(self.world.now_ns)
        end_ns = at_ns + seconds * SECOND_NS
        while (at_ns := at_ns + self._rng.expovariate(per_s) * SECOND_NS) < end_ns:
            yield int(at_ns)

    def _length(self) -> int:
        return min(256, 2 + max(1, round(self._rng.lognormvariate(1.95, 0.5))))

    # Time

    def _drive(self, arrivals: Iterator[int]) -> None:
        for at_ns in arrivals:
            while self.world.running is not None and self._ends_ns <= at_ns:
                self._done()
            self.world.now_ns = max(self.world.now_ns, at_ns)
            self._waiting.append(self._length())
            self._send()
        while self.world.running is not None:
            self._done()

    def _send(self) -> None:
        """One request of all that fits the window."""
        scheduler = self.world.scheduler
        room = scheduler.window_tokens(1) - scheduler.held_tokens
        claim: list[int] = []
        while self._waiting and (
            self._waiting[0] <= room or not scheduler.held_tokens + sum(claim)
        ):
            claim.append(self._waiting.popleft())
            room -= claim[-1]
        if claim:
            before = self.world.running
            self.world.send(claim)
            self._look(before)

    def _done(self) -> None:
        """The running pass ends at its time."""
        running = self.world.started()
        self.world.done_at(self._started_ns, self._ends_ns)
        for moved in self.world.of(ef.TargetMoved):
            self.seen.targets.append((len(self.seen.passes), moved.batch_tokens_target))
        self._look(running)
        self._send()

    def _look(self, before: ef.RunPass | None) -> None:
        """A pass that has begun is timed."""
        running = self.world.running
        if running is None or running is before:
            return
        vary = 1 + self._noise * self._rng.uniform(-1, 1)
        if running.tokens not in self._shapes:
            self._shapes.add(running.tokens)
            vary *= self._first_of_a_shape
        self._started_ns = self.world.now_ns
        self._ends_ns = self._started_ns + int(self.machine.pass_ms(running.tokens) * vary * MS)
        self.seen.passes.append((running.kind, running.tokens))
        self.seen.windows.append(self.world.scheduler.window_tokens(1))
        # Kept, they would make an hour's memory.
        self.world.history.clear()
