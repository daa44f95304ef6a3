"""The target that a server starts with, where none is set: from a stored profile, or a quick one.

A stored profile of this model, engine, precision, device and machine counts; without one a quick
profile of bounded time is measured, remembered for restarts of the engine in this process, and not
stored: it is as good as that moment was. Blocking; runs in the engine's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from model_server.core.following import BOUND_RATIO, FollowOptions
from model_server.core.saturation import (
    Measured,
    Saturation,
    TargetOptions,
    TargetRule,
    TargetSource,
    choose_target,
    saturation,
    splitmix,
)
from model_server.engines.base import Engine, EngineOutOfMemoryError
from model_server.profiling.measure import CurveMeter, MeasureError, MeasureOptions
from model_server.profiling.mix import MixError, PassMaker
from model_server.profiling.store import ProfileKey, profile_key, stored_profile

if TYPE_CHECKING:
    from model_server.telemetry.logs import Logger

TOKENS_MAX = 65_536
"""No profile goes beyond it."""
STOP_RATIO = 2.0
"""A quick profile's range ends behind a pass of so many times `pass_ms_max`."""
QUICK_TARGET_MIN = 64
"""A quick profile that says less is not believed, unless passes would take too long: beside other
work a few slow passes make it say anything, and below this a server sees too few octaves of sizes
to follow the machine back up."""
QUICK_BOUND_RATIO = 4.0
"""How far the target may follow the machine from a quick profile, up and down."""
_SEED = 20_261_130


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetingOptions:
    """What the target is chosen by, and how long a start may measure; 0 ms: not at all."""

    target: TargetOptions
    follow: bool
    """Let the target follow the machine from there."""
    quick_ms_max: int
    tokens_max: int | None
    """No pass may be larger; None: no limit is set."""
    inputs_max: int
    cache_dir: Path | None
    """Where profiles are stored; None: nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTarget:
    """A target, where it came from, and the curve that it was read from."""

    tokens: int
    source: TargetSource
    curve: Saturation
    follow: FollowOptions | None
    """For the scheduler; None: the target stays."""


class TargetFinder:
    """Finds the target of an engine, again at each restart of it."""

    def __init__(
        self,
        options: TargetingOptions,
        log: Logger,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._options = options
        self._log = log
        self._clock_ns = clock_ns
        self._quick: dict[str, Measured] = {}

    def find(self, engine: Engine) -> FoundTarget | None:
        """The target; None: there is no profile, and none could be had in the time.

        Raises:
            EngineDiedError: the engine died while it was measured.
        """
        key = profile_key(engine.info)
        cache_dir = self._options.cache_dir
        measured = stored_profile(cache_dir, key) if cache_dir is not None else None
        source = TargetSource.PROFILE
        if measured is None:
            measured, source = self._measured(engine, key), TargetSource.QUICK_PROFILE
        if measured is None:
            return None
        curve = saturation(measured, self._options.target, splitmix(_SEED))
        quick = source is TargetSource.QUICK_PROFILE
        tokens = curve.target.tokens
        if quick and curve.target.rule is not TargetRule.LIMIT:
            tokens = max(tokens, min(QUICK_TARGET_MIN, self._affordable(curve)))
        tokens = min(tokens, self._options.tokens_max or TOKENS_MAX)
        self._log.info(
            "target chosen",
            batch_tokens_target=tokens,
            source=str(source),
            rule=str(curve.target.rule),
            interval=[curve.target_low, curve.target_high],
            knee_tokens=curve.knee_tokens,
            sizes=len(measured.tokens),
            rounds=len(measured.rounds_ms),
            fixed_ms=round(curve.fit.fixed_ms, 3),
            slope_us_per_token=round(curve.fit.slope_ms * 1e3, 3),
        )
        follow = follow_options(
            curve,
            self._options.target,
            tokens,
            bound_ratio=QUICK_BOUND_RATIO if quick else BOUND_RATIO,
        )
        return FoundTarget(
            tokens=tokens,
            source=source,
            curve=curve,
            follow=follow if self._options.follow else None,
        )

    def _affordable(self, curve: Saturation) -> int:
        """The largest measured pass of at most `pass_ms_max`; 0: none is."""
        limit_ms = self._options.target.pass_ms_max
        return int(max((p.tokens for p in curve.points if p.pass_ms <= limit_ms), default=0))

    def _measured(self, engine: Engine, key: ProfileKey) -> Measured | None:
        """A quick profile, measured once in this process; None: it could not be had."""
        remembered = key.path(Path()).name
        if remembered in self._quick or self._options.quick_ms_max == 0:
            return self._quick.get(remembered)
        options = self._options
        try:
            maker = PassMaker.of(engine, inputs_max=options.inputs_max)
            self._quick[remembered] = CurveMeter(
                engine.embed,
                maker,
                quick_options(options),
                clock_ns=self._clock_ns,
            ).measure()
        except (MeasureError, MixError, EngineOutOfMemoryError) as error:
            self._log.warning("no quick profile", reason=str(error))
        return self._quick.get(remembered)


def follow_options(
    curve: Saturation, target: TargetOptions, tokens: int, *, bound_ratio: float = BOUND_RATIO
) -> FollowOptions:
    """What the scheduler needs of a profile to follow the machine from it."""
    flat_ms = curve.fit.flat_ms if curve.knee_tokens is not None else None
    free = choose_target(curve.points, replace(target, pass_ms_max=math.inf), flat_ms=flat_ms)
    return FollowOptions(
        target=target,
        curve=curve.fit if curve.knee_tokens is not None else curve.line,
        profile_target=tokens,
        profile_free=max(tokens, free.tokens),
        tokens_min=int(curve.points[0].tokens),
        tokens_max=max(tokens, int(curve.points[-1].tokens)),
        bound_ratio=bound_ratio,
    )


def quick_options(options: TargetingOptions) -> MeasureOptions:
    """Half-octaves, two to five rounds, in the time given."""
    return MeasureOptions(
        tokens_min=16,
        tokens_max=min(options.tokens_max or TOKENS_MAX, TOKENS_MAX),
        sizes_per_octave=2,
        rounds_min=2,
        rounds_max=5,
        pass_ms_stop=STOP_RATIO * options.target.pass_ms_max,
        seconds_max=options.quick_ms_max / 1e3,
    )
