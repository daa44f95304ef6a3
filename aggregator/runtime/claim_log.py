"""What became of each claim: one canonical log line and its histograms.

Owns the claims that are open, from `Dispatch` to the last answer or the loss. Counting is per claim
or per list of queries, never by a call for each query. It decides nothing, and the core never asks
it anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aggregator.core.effects import Discard, Dispatch
from aggregator.core.events import ClaimAnswered, ClaimLost, ServerChanged
from aggregator.core.query import Answer
from aggregator.telemetry import metrics as m

if TYPE_CHECKING:
    from aggregator.telemetry.logs import Logger


@dataclass(slots=True)
class _Open:
    """A claim that has no last answer yet."""

    dispatch: Dispatch
    dispatched_ns: int
    target: int
    queued_ms: float
    """The wait of its oldest query until it was dispatched."""
    tokens: int = 0
    inference_us: int = 0
    queue_us: int = 0
    messages: int = 0
    errors: int = 0
    fault: str | None = None
    """What was wrong with the message that it was discarded for."""


class ClaimLog:
    """Follows claims by the effects and events that pass the driver."""

    def __init__(self, metrics: m.Metrics, log: Logger) -> None:
        """Start with no claim open."""
        self._metrics = metrics
        self._log = log
        self._open: dict[int, _Open] = {}
        self._targets: dict[tuple[str, str], int] = {}

    def server_changed(self, event: ServerChanged) -> None:
        """Remember the target that claims to this server are measured by."""
        if event.limits is not None:
            self._targets[event.model, event.server] = event.limits.batch_tokens_target

    def dispatched(self, dispatch: Dispatch, now_ns: int) -> None:
        """A claim is being sent."""
        oldest_ns = min([query.arrived_ns for query in dispatch.queries], default=now_ns)
        self._open[dispatch.claim_id] = _Open(
            dispatch,
            now_ns,
            self._targets.get((dispatch.model, dispatch.server), 0),
            (now_ns - oldest_ns) / 1e6,
        )

    def discarded(self, discard: Discard, _now_ns: int) -> None:
        """A message about a claim was bad; this comes before the message itself."""
        claim = self._open.get(discard.claim_id)
        if claim is not None:
            claim.fault = discard.message

    def answered(self, event: ClaimAnswered, now_ns: int) -> None:
        """A message about a claim came."""
        answer = event.answer
        claim = self._open.get(answer.claim_id)
        if claim is None:
            return
        claim.messages += 1
        if claim.fault is None:
            self._take_in(claim, answer, now_ns)
        if not answer.last:
            return
        if claim.fault is not None:
            self._end(claim, "bad_answer", now_ns, claim.fault)
        elif answer.refused is not None:
            self._end(claim, "refused", now_ns, answer.refused.message)
        else:
            self._end(claim, "answered", now_ns, None)

    def _take_in(self, claim: _Open, answer: Answer, now_ns: int) -> None:
        claim.errors += len(answer.errors)
        claim.inference_us += answer.inference_us
        claim.queue_us = max(claim.queue_us, answer.queue_us)
        if not answer.groups:
            return
        metrics, model = self._metrics, claim.dispatch.model
        metrics.observe(m.INFERENCE_SECONDS, [answer.inference_us / 1e6], model)
        queries = claim.dispatch.queries
        passed_ns = now_ns - answer.inference_us * 1000
        for group in answer.groups:
            claim.tokens += sum(group.tokens)
            waits = [(passed_ns - queries[i].arrived_ns) * 1e-9 for i in group.indexes]
            metrics.observe(m.QUEUE_SECONDS, waits, model)

    def lost(self, event: ClaimLost, now_ns: int) -> None:
        """A claim gets no further answer."""
        claim = self._open.get(event.claim_id)
        if claim is not None:
            self._end(claim, "lost", now_ns, f"{event.loss}: {event.message}")

    def _end(self, claim: _Open, outcome: str, now_ns: int, reason: str | None) -> None:
        dispatch = claim.dispatch
        del self._open[dispatch.claim_id]
        model = dispatch.model
        metrics = self._metrics
        metrics.add(m.CLAIMS, 1, model, outcome)
        metrics.observe(m.CLAIM_SECONDS, [(now_ns - claim.dispatched_ns) * 1e-9], model)
        complete = outcome == "answered" and not claim.errors
        fill = claim.tokens / claim.target if claim.target else 0.0
        if complete:
            metrics.observe(m.CLAIM_QUERIES, [len(dispatch.queries)], model)
            metrics.observe(m.CLAIM_TOKENS, [claim.tokens], model)
            metrics.observe(m.CLAIM_FILL, [fill], model)
            metrics.observe(m.ESTIMATE_ERROR, [claim.tokens / max(dispatch.estimate, 1.0)], model)
        write = self._log.info if outcome == "answered" else self._log.warning
        write(
            "claim",
            claim_id=dispatch.claim_id,
            model=model,
            server=dispatch.server,
            outcome=outcome,
            queries=len(dispatch.queries),
            estimate=round(dispatch.estimate, 1),
            tokens=claim.tokens,
            target=claim.target,
            fill=round(fill, 3),
            queued_ms=round(claim.queued_ms, 2),
            server_queue_ms=claim.queue_us / 1000,
            inference_ms=claim.inference_us / 1000,
            total_ms=round((now_ns - claim.dispatched_ns) / 1e6, 2),
            messages=claim.messages,
            errors=claim.errors,
            exclusive=dispatch.exclusive,
            reason=reason,
        )
