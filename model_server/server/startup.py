"""From nothing to an engine that may serve: load, compare golden vectors, find a target, warm up.

Blocking; runs in the engine's thread. Invariant: what it returns has computed the model's own
vectors, and a pass of `limits.batch_tokens_max` tokens, on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from model_server.core.limits import Limits
from model_server.core.saturation import TargetSource
from model_server.engines.base import Engine, EngineOutOfMemoryError, Text, Tokens
from model_server.engines.golden import GOLDEN_TEXTS, check_golden, cosine_bound
from model_server.server.canary import Canary, make_canary
from model_server.server.jobs import embed
from model_server.settings import MESSAGE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from model_server.profiling.targeting import FoundTarget, TargetFinder
    from model_server.telemetry.logs import Logger

_WARM_UP_TEXT = "warm "
_OUTPUT_BYTES = 64
"""More than an output has in a message besides its vector."""


class StartError(Exception):
    """The engine can't serve; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """Sizes asked for, and where golden vectors are kept; None: as the engine has it."""

    batch_tokens_target: int
    """As set; where nothing is set, what to aim at if no profile can be had."""
    batch_tokens_max: int | None
    inputs_max: int
    request_bytes_max: int
    cache_dir: Path | None
    golden_cosine_min: float | None
    target_source: TargetSource = TargetSource.SETTING
    finder: TargetFinder | None = None
    """Finds the target by what the machine does best; None: it is as set."""

    def limits(self, input_tokens_max: int, target: int | None = None) -> Limits:
        """The limits for a model, with the target that was found, if one was.

        Without a setting a pass holds four targets, or one input.

        Raises:
            StartError: the settings contradict each other or the model.
        """
        target = target or self.batch_tokens_target
        default = max(4 * target, input_tokens_max)
        try:
            return Limits(
                batch_tokens_target=target,
                batch_tokens_max=self.batch_tokens_max or default,
                input_tokens_max=input_tokens_max,
                inputs_max=self.inputs_max,
                request_bytes_max=self.request_bytes_max,
            )
        except ValueError as error:
            raise StartError(str(error)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An engine that may serve."""

    engine: Engine
    canary: Canary
    limits: Limits
    pass_samples: Sequence[tuple[int, int]]
    """(tokens, nanoseconds) of the warm-up passes."""
    target_source: TargetSource
    found: FoundTarget | None
    """The profile that the target is from; None: it is as set, or the default."""


def start_engine(load: Callable[[], Engine], options: StartOptions, log: Logger) -> Started:
    """Load, check, warm up.

    Raises:
        StartError: a limit contradicts the model, or not even a small pass fits the memory.
        Exception: what loading or checking raised.
    """
    started = time.monotonic()
    engine = load()
    try:
        options = _answerable(options, engine.info.dimensions, log)
        options.limits(engine.info.input_tokens_max)  # contradictions come before what takes long
        log.info("engine loaded", seconds=round(time.monotonic() - started, 3))
        report = check_golden(
            engine,
            options.cache_dir,
            options.golden_cosine_min,
            inputs_max=options.inputs_max,
        )
        if report is not None:
            log.info(
                "golden vectors agree",
                cosine=round(min(report.cosines), 6),
                cosine_min=report.cosine_min,
                from_cache=report.from_cache,
            )
            if report.not_kept:
                log.warning("golden vectors not kept", reason=report.not_kept)
        found = options.finder.find(engine) if options.finder is not None else None
        limits = options.limits(engine.info.input_tokens_max, found.tokens if found else None)
        first = _tokens(engine, GOLDEN_TEXTS[0])
        limits, samples = _warm_up(engine, first, limits, log)
        ran = embed(engine, [first])
        samples.append((len(first.ids), ran.ended_ns - ran.started_ns))
        canary = make_canary(first, ran, cosine_bound(engine, options.golden_cosine_min))
    except BaseException:
        engine.close()
        raise
    return Started(
        engine=engine,
        canary=canary,
        limits=limits,
        pass_samples=samples,
        target_source=found.source if found is not None else options.target_source,
        found=found,
    )


def _answerable(options: StartOptions, dimensions: int, log: Logger) -> StartOptions:
    """With no more inputs to a request than one message has room for the vectors of."""
    inputs_max = MESSAGE_BYTES_MAX // (4 * dimensions + _OUTPUT_BYTES)
    if options.inputs_max <= inputs_max:
        return options
    log.warning(
        "inputs_max lowered",
        inputs_max=inputs_max,
        reason=f"a message of {MESSAGE_BYTES_MAX} bytes holds no more vectors of {dimensions}",
    )
    return replace(options, inputs_max=inputs_max)


def _tokens(engine: Engine, text: str) -> Tokens:
    (answer,) = engine.tokenize([Text(text=text, truncate=True)])
    if not isinstance(answer, Tokens):
        raise StartError(f"the tokenizer refuses a text of our own: {answer.message}")
    return answer


def _warm_up(
    engine: Engine, small: Tokens, limits: Limits, log: Logger
) -> tuple[Limits, list[tuple[int, int]]]:
    """A pass at the maximum must succeed; where memory says no, the maximum is halved.

    A pass of the target follows, and the canary's, so that pass times are known at once.
    """
    longest = _tokens(engine, _WARM_UP_TEXT * limits.input_tokens_max)
    while True:
        try:
            samples = [_timed(engine, _filled(longest, small, limits.batch_tokens_max, limits))]
            break
        except EngineOutOfMemoryError as error:
            lowered = limits.lowered(limits.batch_tokens_max // 2)
            if lowered == limits:
                raise StartError(f"one input of the maximum does not fit: {error}") from error
            log.warning(
                "maximum lowered",
                batch_tokens_max=lowered.batch_tokens_max,
                reason=str(error),
            )
            limits = lowered
    samples.append(_timed(engine, _filled(longest, small, limits.batch_tokens_target, limits)))
    return limits, samples


def _filled(longest: Tokens, small: Tokens, tokens: int, limits: Limits) -> list[Tokens]:
    """Inputs of so many tokens or a few less: the longest there are, then small ones."""
    count = min(tokens // len(longest.ids), limits.inputs_max)
    rest = tokens - count * len(longest.ids)
    others = min(rest // len(small.ids), limits.inputs_max - count)
    return [longest] * count + [small] * others or [small]


def _timed(engine: Engine, inputs: Sequence[Tokens]) -> tuple[int, int]:
    started = time.monotonic_ns()
    engine.embed(inputs)
    return sum(len(one.ids) for one in inputs), time.monotonic_ns() - started
