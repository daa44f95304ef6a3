"""What operators are told of requests, passes and limits: canonical lines and metrics.

Reads the scheduler's figures and changes nothing. Invariant: one line a pass, whatever it held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from model_server.core.effects import Answer, MaximumLowered, MaximumRaised, RunPass, TargetMoved
from model_server.core.failures import Failure
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
        self._streams = 0
        metrics.queued_tokens.set_function(lambda: scheduler.queued_tokens)

    def streams(self, count: int) -> None:
        """So many are open."""
        self._streams = count
        self._metrics.streams.set(count)

    def refused(self, failure: Failure) -> None:
        """A request was refused as a whole."""
        self._metrics.requests_refused.labels(str(failure.reason)).inc()

    def failed(self, failures: Iterable[Failure]) -> None:
        """Inputs were answered without vectors."""
        for failure in failures:
            self._metrics.input_failures.labels(str(failure.reason)).inc()

    def answered(self, failures: Iterable[tuple[int, Failure]], queue_us: int) -> None:
        """Inputs of one request were answered by a pass, some perhaps with failures."""
        self.failed(failure for _, failure in failures)
        self._metrics.queue_seconds.observe(queue_us / 1e6)

    def pass_done(self, run: RunPass) -> None:
        """The engine returned the vectors of a pass."""
        self._metrics.passes.labels(str(run.kind), "done").inc()

    def pass_failed(self, run: RunPass, message: str, *, died: bool) -> None:
        """The engine raised in a pass, or died in it."""
        kind = str(run.kind)
        self._metrics.passes.labels(kind, "died" if died else "raised").inc()
        self._log.warning("pass failed", pass_id=run.pass_id, kind=kind, error=message)

    def pass_answered(self, answer: Answer, run: RunPass, ran: Ran, *, inputs: int) -> None:
        """The canonical line of a pass, and its metrics."""
        scheduler, metrics = self._scheduler, self._metrics
        inference_us = (answer.ended_ns - answer.started_ns) // 1_000
        # The pass may have moved the target by now: what it was cut for counts.
        fill = run.tokens / run.batch_tokens_target
        metrics.observe_pass(inputs, run.tokens, fill, inference_us / 1e6)
        metrics.engine_passes.inc(len(ran.passes or ()))
        if scheduler.implied_target is not None:
            metrics.implied_target.set(scheduler.implied_target)
        self._log.info(
            "pass",
            pass_id=answer.pass_id,
            kind=str(run.kind),
            requests=len(run.parts),
            inputs=inputs,
            tokens=run.tokens,
            batch_tokens_target=run.batch_tokens_target,
            fill_ratio=round(fill, 3),
            pass_ms=inference_us / 1_000,
            queued_tokens=scheduler.queued_tokens,
            streams=self._streams,
            **ran.counted(),
        )

    def maximum_lowered(self, effect: MaximumLowered) -> None:
        """A pass did not fit the memory."""
        self._metrics.maximum_lowered.inc()
        self.limits()
        self._log.warning("maximum lowered", batch_tokens_max=effect.batch_tokens_max)

    def maximum_raised(self, effect: MaximumRaised) -> None:
        """Memory is thought to have room again."""
        self.limits()
        self._log.info("maximum raised", batch_tokens_max=effect.batch_tokens_max)

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
