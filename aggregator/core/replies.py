"""What one message about a claim, or its loss, means for its queries and for its server.

Invariants: each input is answered at most once; of a message that fails the check nothing is used;
every query of a claim leaves it by exactly one of a vector, an end, or a return to the waiting
side. It must not know when and where claims are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from aggregator.core import outcomes
from aggregator.core.calibration import Calibration, Margin
from aggregator.core.claims import Claim
from aggregator.core.effects import VectorRows
from aggregator.core.events import Loss, ServerPhase
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.outcomes import Course
from aggregator.core.query import IN_FLIGHT, Answer, InputFailure, Query, VectorGroup
from aggregator.core.retry import Waiting, end
from aggregator.core.servers import Server

_MS: Final = 1_000_000
_HOLD_NS: Final = 100 * _MS
"""How long a server that holds too much is left alone when it does not say."""
_HOLD_NS_MIN: Final = 5 * _MS


@dataclass(slots=True)
class Answered:
    """What one answer, or one loss, settled.

    `late`: its deadline has passed, so it is not retried; which failure that is depends on whether
    any server is ready, which is not known here. `fault`: why the answer was bad.
    """

    vectors: list[VectorRows] = field(default_factory=list)
    ended: list[Query] = field(default_factory=list)
    late: list[Query] = field(default_factory=list)
    fault: str | None = None


@dataclass(slots=True)
class Counters:
    """What happened so far that no effect shows, for metrics."""

    answered_tokens: int = 0
    """Exact, of the vectors that came."""
    late_answers: int = 0
    """Messages about claims that were given up before."""
    streams_cancelled: int = 0


class Replies:
    """See the module's docstring."""

    def __init__(
        self, waiting: Waiting, calibration: Calibration, margin: Margin, counters: Counters
    ) -> None:
        """Share the dispatcher's waiting side, calibration and counters."""
        self._waiting = waiting
        self._calibration = calibration
        self._margin = margin
        self._counters = counters

    def answered(self, server: Server, claim: Claim, answer: Answer, now_ns: int) -> Answered:
        """Take one message in."""
        result = Answered()
        server.heard_ns = now_ns
        if claim.discarded:
            self._counters.late_answers += 1
        elif answer.refused is not None:
            self._refused(server, claim, answer.refused, now_ns, result)
        else:
            fault = answer.fault or _fault(claim, answer)
            if fault is None:
                self._take_in(server, claim, answer, now_ns, result)
            else:
                self._bad_answer(server, claim, fault, now_ns, result)
        if answer.last or answer.refused is not None:
            self._close(server, claim)
        return result

    def lost(self, server: Server, claim: Claim, loss: Loss, now_ns: int) -> Answered:
        """The claim gets no further answer."""
        result = Answered()
        if loss is Loss.UNKNOWN or server.phase is ServerPhase.READY:
            server.stream_failed(now_ns)
        if not claim.discarded:
            if loss is Loss.NOT_STARTED:
                result.late = self._waiting.not_started(claim, claim.unanswered(), now_ns)
            else:
                result.late, convicted = self._waiting.lost(claim, server, now_ns)
                result.ended = end(convicted, outcomes.DIED_ALONE)
        self._close(server, claim)
        return result

    def _close(self, server: Server, claim: Claim) -> None:
        server.ended(claim)
        self._waiting.settle(claim)
        if claim.tokens_exact is not None and claim.complete and not claim.discarded:
            self._margin.observe(claim.tokens_exact, claim.estimate, claim.variance)

    # Vectors -------------------------------------------------------------------------------------

    def _take_in(
        self, server: Server, claim: Claim, answer: Answer, now_ns: int, result: Answered
    ) -> None:
        if answer.groups or any(outcomes.ran(each.failure) for each in answer.errors):
            claim.running = False
        for group in answer.groups:
            result.vectors += self._vectors(server, claim, answer, group, now_ns)
        if answer.groups:
            server.breaker.succeeded()
            server.seen_working()
            server.timed(claim, (answer.queue_us + answer.inference_us) * 1000, now_ns)
        if answer.errors:
            claim.tokens_exact = None
            self._input_failures(server, claim, answer.errors, now_ns, result)

    def _vectors(
        self, server: Server, claim: Claim, answer: Answer, group: VectorGroup, now_ns: int
    ) -> list[VectorRows]:
        """The vectors of one group, of queries that are still in flight."""
        whole = claim.queries
        queries = [whole[index] for index in group.indexes]
        self._calibration.learn(queries, group.tokens)
        tokens = sum(group.tokens)
        self._counters.answered_tokens += tokens
        if claim.tokens_exact is not None:
            claim.tokens_exact += tokens
        _settle_tokens(server, claim, queries)
        claim_id = claim.claim_id
        rows: Sequence[int] = range(len(queries))
        kept = [q for q in queries if q.phase == IN_FLIGHT and q.claim_id == claim_id]
        if not kept:
            return []
        if len(kept) < len(queries):
            mine = set(map(id, kept))
            rows = [row for row in rows if id(queries[row]) in mine]
        return [
            VectorRows(
                queries=kept,
                group=group,
                rows=rows,
                model_revision=server.model_revision,
                inference_us=answer.inference_us,
                answered_ns=now_ns,
            )
        ]

    # Failures ------------------------------------------------------------------------------------

    def _input_failures(
        self,
        server: Server,
        claim: Claim,
        failures: Sequence[InputFailure],
        now_ns: int,
        result: Answered,
    ) -> None:
        whole = claim.queries
        _settle_tokens(server, claim, [whole[each.index] for each in failures])
        dead: list[Query] = []
        unstarted: list[Query] = []
        courses = [
            outcomes.course(each.failure, deadline=whole[each.index].deadline_ns != 0)
            for each in failures
        ]
        for each, course in zip(failures, courses, strict=True):
            query, failure = whole[each.index], each.failure
            if query.phase != IN_FLIGHT or query.claim_id != claim.claim_id:
                continue
            if course is Course.END:
                result.ended += end([query], outcomes.final(failure))
            elif course is Course.DEATH:
                dead.append(query)
            elif course is Course.ATTEMPT:
                self._attempt_failed(claim, query, failure, now_ns, result)
            else:
                unstarted.append(query)
        self._judge_server(server, failures, courses, now_ns)
        if all(course is Course.END for course in courses):
            server.breaker.succeeded()
        if dead:
            late, convicted = self._waiting.died(claim, dead, server, now_ns)
            result.late += late
            result.ended += end(convicted, outcomes.DIED_ALONE)
        result.late += self._waiting.not_started(claim, unstarted, now_ns)

    @staticmethod
    def _judge_server(
        server: Server, failures: Sequence[InputFailure], courses: Sequence[Course], now_ns: int
    ) -> None:
        """One failure of the server at most, however many inputs met it."""
        if Course.DEATH in courses:
            server.engine_died(now_ns)
        elif Course.NOT_STARTED in courses or Course.ATTEMPT in courses:
            server.failed(now_ns)
        for each, course in zip(failures, courses, strict=True):
            if course is Course.HELD:
                server.hold(now_ns + _hold_ns(each.failure))

    def _attempt_failed(
        self, claim: Claim, query: Query, failure: Failure, now_ns: int, result: Answered
    ) -> None:
        stopped, why = self._waiting.again(query, claim, failure, now_ns)
        if why is None:
            result.late += stopped
        else:
            result.ended += end(stopped, why)

    def _refused(
        self, server: Server, claim: Claim, failure: Failure, now_ns: int, result: Answered
    ) -> None:
        """None of its inputs has run or will."""
        queries = claim.unanswered()
        if failure.reason is Reason.REQUEST_TOO_LARGE and server.too_small_for(claim):
            result.ended = end(queries, outcomes.text_too_large(failure))
            return
        if outcomes.course(failure) is Course.HELD:
            server.hold(now_ns + _hold_ns(failure))
        else:
            server.failed(now_ns)
            if failure.code not in (Code.UNAVAILABLE, Code.NOT_FOUND):
                # It does not like the request itself: that must not go on for ever.
                for query in queries:
                    self._attempt_failed(claim, query, failure, now_ns, result)
                return
        result.late = self._waiting.not_started(claim, queries, now_ns)

    def _bad_answer(
        self, server: Server, claim: Claim, fault: str, now_ns: int, result: Answered
    ) -> None:
        """Discard the request: what is unanswered is retried, what still comes is ignored."""
        server.failed(now_ns)
        claim.discarded = True
        result.fault = fault
        for query in claim.unanswered():
            stopped, why = self._waiting.bad_answer(query, claim, fault, now_ns)
            if why is None:
                result.late += stopped
            else:
                result.ended += end(stopped, why)


def _settle_tokens(server: Server, claim: Claim, queries: Sequence[Query]) -> None:
    """Take the estimates of what is answered off what is left of the claim."""
    if len(queries) == len(claim.queries):
        tokens = claim.tokens_left
    else:
        tokens = min(sum([query.estimate for query in queries]), claim.tokens_left)
    server.answered(claim, tokens)
    claim.tokens_left -= tokens


def _hold_ns(failure: Failure) -> int:
    if failure.retry_after_ms is None:
        return _HOLD_NS
    return max(failure.retry_after_ms * _MS, _HOLD_NS_MIN)


def _fault(claim: Claim, answer: Answer) -> str | None:
    """Note what a message answers; a sentence if that can't be."""
    indexes: Sequence[int]
    if len(answer.groups) == 1 and not answer.errors:
        indexes = answer.groups[0].indexes
    else:
        indexes = list(chain.from_iterable(group.indexes for group in answer.groups))
        indexes.extend(each.index for each in answer.errors)
    missing = len(claim.queries) - claim.answered_inputs - len(indexes)
    if answer.last and missing > 0:
        return f"{missing} inputs of {len(claim.queries)} have no answer"
    if indexes and not claim.mark(indexes):
        return "an input was answered twice, or was never sent"
    return None
