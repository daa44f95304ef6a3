"""What operators are told of passes and limits: the canonical line of each, and their metrics.

Reads the scheduler's figures and changes nothing. Invariant: one line a pass, whatever it held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_server.core.effects import Answer, MaximumLowered, RunPass, TargetMoved
from model_server.core.scheduler import Scheduler
from model_server.server.jobs import Ran

if TYPE_CHECKING:
    from model_server.telemetry.logs import Logger
    from model_server.telemetry.metrics import Metrics


class Telling:
    """See the module."""

    def __init__(self, scheduler: Scheduler, log: Logger, metrics: Metrics) -> None:
        self._scheduler = scheduler
        self._log = log
        self._metrics = metrics

    def pass_ran(
        self, answer: Answer, run: RunPass, ran: Ran, *, inputs: int, streams: int
    ) -> None:
        """The canonical line of a pass, and its metrics."""
        scheduler, metrics = self._scheduler, self._metrics
        inference_us = (answer.ended_ns - answer.started_ns) // 1_000
        fill = run.tokens / scheduler.limits.batch_tokens_target
        metrics.observe_pass(inputs, run.tokens, fill, inference_us / 1e6)
        metrics.engine_passes.inc(len(ran.passes or ()))
        metrics.queued_tokens.set(scheduler.queued_tokens)
        if scheduler.implied_target is not None:
            metrics.implied_target.set(scheduler.implied_target)
        self._log.info(
            "pass",
            pass_id=answer.pass_id,
            kind=str(run.kind),
            requests=len(run.parts),
            inputs=inputs,
            tokens=run.tokens,
            fill_ratio=round(fill, 3),
            pass_ms=inference_us / 1_000,
            queued_tokens=scheduler.queued_tokens,
            streams=streams,
            **ran.counted(),
        )

    def maximum_lowered(self, effect: MaximumLowered) -> None:
        """A pass did not fit the memory."""
        self._metrics.maximum_lowered.inc()
        self.limits()
        self._log.warning("maximum lowered", batch_tokens_max=effect.batch_tokens_max)

    def target_moved(self, effect: TargetMoved) -> None:
        """The target followed the machine by a step."""
        self._metrics.target_moves.inc()
        self.limits()
        self._log.info(
            "target moved",
            batch_tokens_target=effect.batch_tokens_target,
            implied_tokens=effect.implied_tokens,
        )

    def limits(self) -> None:
        """The sizes in force."""
        limits = self._scheduler.limits
        self._metrics.batch_tokens_target.set(limits.batch_tokens_target)
        self._metrics.batch_tokens_max.set(limits.batch_tokens_max)
