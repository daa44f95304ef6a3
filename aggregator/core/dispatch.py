"""Everything between the admission of a query and its outcome, for one model.

Owns the beliefs about servers, the claims in flight and the calibration; the waiting side is
`aggregator.core.retry`'s. Invariants: a query that was admitted waits, or is in exactly one open
claim, or has been returned as answered, ended or removed, once; nothing is retried for ever (each
retry is counted against a maximum, or waits for a server within the query's deadline).

It must not know of partitions, offsets, results or Kafka. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from aggregator.core import outcomes, rule
from aggregator.core.backlog import NEVER_NS
from aggregator.core.calibration import Calibration, Margin
from aggregator.core.claims import Claim
from aggregator.core.effects import Cancel, Dispatch, VectorRows
from aggregator.core.events import (
    ClaimAnswered,
    ClaimLost,
    Loss,
    ServerChanged,
    ServerLimits,
    ServerPhase,
)
from aggregator.core.failures import Code, Failure
from aggregator.core.outcomes import Course
from aggregator.core.packing import Packer, PackLimits
from aggregator.core.query import IN_FLIGHT, Answer, InputFailure, Query, VectorGroup
from aggregator.core.retry import RetryOptions, Waiting, end
from aggregator.core.servers import Server
from aggregator.core.suspects import Group

_MS: Final = 1_000_000
_HOLD_NS: Final = 100 * _MS
"""How long a server that holds too much is left alone when it does not say."""
_WALK_NS_MIN: Final = 20 * _MS
"""Walks over all claims in flight for deadlines are at least this long apart."""
_SILENT: Final = "silent for too long with requests unanswered"
_SERVERS_KEPT: Final = 256
"""Addresses that are down are forgotten beyond this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """How one model is dispatched; times in nanoseconds."""

    model: str
    revision: str | None = None
    """Pinned: a server with another is not used. None: the first seen holds."""
    exact_estimates: bool = False
    """The estimator is the model's own tokenizer."""
    lead_ns: int = 3 * _MS
    attempts_max: int = 5
    answer_grace_ns: int = 2_000 * _MS
    stream_silence_ns_max: int = 15_000 * _MS
    backoff_ns_min: int = 20 * _MS
    backoff_ns_max: int = 1_000 * _MS
    bad_answers_max: int = 3
    look_ahead: int = 48
    """Later queries that are tried in place of one that does not fit."""


@dataclass(slots=True)
class Answered:
    """What one answer settled."""

    vectors: list[VectorRows] = field(default_factory=list)
    ended: list[Query] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """What happened so far, for metrics."""

    claims: int = 0
    claims_exclusive: int = 0
    claims_lost: int = 0
    claims_refused: int = 0
    claimed_queries: int = 0
    claimed_tokens_estimated: float = 0.0
    answered_tokens: int = 0
    bad_answers: int = 0
    late_answers: int = 0
    revision_mismatches: int = 0
    streams_cancelled: int = 0


class Dispatcher:
    """One model's queries and servers; see the module's docstring."""

    def __init__(self, options: DispatchOptions, claim_ids: Iterator[int]) -> None:
        """`claim_ids` gives the next number, from 1, never twice in this process."""
        self._options = options
        self._claim_ids = claim_ids
        self._revision = options.revision
        self._servers: dict[str, Server] = {}
        self._waiting = Waiting(
            RetryOptions(
                attempts_max=options.attempts_max,
                bad_answers_max=options.bad_answers_max,
                backoff_ns_min=options.backoff_ns_min,
                backoff_ns_max=options.backoff_ns_max,
            )
        )
        self._deadline_bound_ns = NEVER_NS
        self._walk_after_ns = 0
        self.calibration = Calibration(exact=options.exact_estimates)
        self.margin = Margin()
        self.counters = Counters()

    # Gauges --------------------------------------------------------------------------------------

    @property
    def servers(self) -> Sequence[Server]:
        """What is believed of each server, to be read only."""
        return list(self._servers.values())

    @property
    def servers_ready(self) -> int:
        """Servers that are serving with the right revision and not broken."""
        return sum(server.ready for server in self._servers.values())

    @property
    def waiting(self) -> int:
        """Queries that wait, retries and suspects included."""
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> float:
        """About how many tokens the line holds."""
        return self._waiting.backlog.line_units * self.calibration.tokens_per_unit

    @property
    def retried(self) -> int:
        """Queries put back so far."""
        return self._waiting.retried

    @property
    def deaths(self) -> int:
        """Of queries with an engine or stream, so far."""
        return self._waiting.deaths

    @property
    def revision(self) -> str | None:
        """The revision whose vectors are used; None: none seen yet."""
        return self._revision

    # Queries come and go -------------------------------------------------------------------------

    def admit(self, queries: Sequence[Query], now_ns: int) -> None:  # noqa: ARG002 (one shape for all)
        """Take queries in, in order of arrival; their phase is WAITING."""
        self._waiting.backlog.add(queries)

    def remove(self, doomed: Callable[[Query], bool]) -> list[Query]:
        """Take waiting queries of which `doomed` says so out, retries and suspects included."""
        return self._waiting.remove(doomed)

    def expire(self, now_ns: int) -> list[Query]:
        """End what is past its deadline: waiting at once, in flight after the grace."""
        late = self._waiting.expire(now_ns)
        grace_ns = self._options.answer_grace_ns
        if now_ns >= self._deadline_bound_ns + grace_ns and now_ns >= self._walk_after_ns:
            late += self._walk_in_flight(now_ns - grace_ns)
            self._walk_after_ns = now_ns + _WALK_NS_MIN
        return self._end_late(late)

    def _walk_in_flight(self, deadline_ns_max: int) -> list[Query]:
        late = []
        bound = NEVER_NS
        for server in self._servers.values():
            for claim in server.claims.values():
                for query in claim.queries:
                    if query.phase != IN_FLIGHT or query.claim_id != claim.claim_id:
                        continue
                    if 0 < query.deadline_ns <= deadline_ns_max:
                        late.append(query)
                    elif 0 < query.deadline_ns < bound:
                        bound = query.deadline_ns
        self._deadline_bound_ns = bound
        return late

    def _end_late(self, late: Sequence[Query]) -> list[Query]:
        if not late:
            return []
        return end(late, outcomes.EXPIRED if self.servers_ready else outcomes.NO_SERVER)

    # Servers -------------------------------------------------------------------------------------

    def server_changed(self, event: ServerChanged, now_ns: int) -> None:
        """A stream opened, ended, or brought a ServerState."""
        server = self._servers.get(event.server)
        if server is None:
            server = self._servers[event.server] = Server(event.server)
        if event.phase is ServerPhase.DOWN or event.limits is None:
            self._server_down(server)
            return
        if server.phase is ServerPhase.DOWN:
            server.opened(event.model_revision, self._accepts(event.model_revision), now_ns)
        elif event.phase is ServerPhase.READY and server.phase is ServerPhase.DRAINING:
            server.resumed()
        server.told(event.limits, event.running, now_ns)
        self._adopt_target(event.limits)
        if event.phase is ServerPhase.DRAINING or event.limits.draining:
            server.closed(ServerPhase.DRAINING)

    def _accepts(self, revision: str) -> bool:
        """The first seen holds, unless one is pinned."""
        if self._revision is None:
            self._revision = revision
        if self._revision == revision:
            return True
        self.counters.revision_mismatches += 1
        return False

    def _adopt_target(self, limits: ServerLimits) -> None:
        self.calibration.claim_tokens = float(limits.batch_tokens_target)

    def _server_down(self, server: Server) -> None:
        server.closed(ServerPhase.DOWN)
        if len(self._servers) > _SERVERS_KEPT and not server.claims:
            del self._servers[server.address]

    # Answers -------------------------------------------------------------------------------------

    def claim_answered(self, event: ClaimAnswered, now_ns: int) -> Answered:
        """Check one message about a claim and say what it settles."""
        result = Answered()
        answer = event.answer
        server = self._servers.get(event.server)
        claim = server.claims.get(answer.claim_id) if server is not None else None
        if server is None or claim is None:
            self.counters.late_answers += 1
            return result
        server.heard_ns = now_ns
        if claim.discarded:
            self.counters.late_answers += 1
        elif answer.refused is not None:
            result.ended = self._refused(server, claim, answer.refused, now_ns)
        else:
            fault = answer.fault or _fault(claim, answer)
            if fault is None:
                self._take_in(server, claim, answer, result, now_ns)
            else:
                result.ended = self._bad_answer(server, claim, fault, now_ns)
        if answer.last or answer.refused is not None:
            self._close(server, claim)
        return result

    def _close(self, server: Server, claim: Claim) -> None:
        server.ended(claim)
        self._waiting.settle(claim)
        if claim.tokens_exact is not None and claim.complete:
            self.margin.observe(claim.tokens_exact, claim.estimate, claim.variance)

    def _take_in(
        self, server: Server, claim: Claim, answer: Answer, result: Answered, now_ns: int
    ) -> None:
        if claim.starts and not answer.last:
            claim.starts -= 1
        for group in answer.groups:
            result.vectors += self._vectors(server, claim, answer, group, now_ns)
        if answer.groups:
            server.breaker.succeeded()
            server.seen_working()
            server.timed(claim, (answer.queue_us + answer.inference_us) * 1000, now_ns)
        if answer.errors:
            claim.tokens_exact = None
            result.ended = self._input_failures(server, claim, answer.errors, now_ns)

    def _vectors(
        self, server: Server, claim: Claim, answer: Answer, group: VectorGroup, now_ns: int
    ) -> list[VectorRows]:
        """The vectors of one group, of queries that are still in flight."""
        whole = claim.queries
        queries = [whole[index] for index in group.indexes]
        self.calibration.learn(queries, group.tokens)
        tokens = sum(group.tokens)
        self.counters.answered_tokens += tokens
        if claim.tokens_exact is not None:
            claim.tokens_exact += tokens
        server.answered(claim, self._estimated(claim, queries))
        claim_id = claim.claim_id
        rows: Sequence[int] = range(len(queries))
        kept = [q for q in queries if q.phase == IN_FLIGHT and q.claim_id == claim_id]
        if len(kept) < len(queries):
            mine = set(map(id, kept))
            rows = [row for row in rows if id(queries[row]) in mine]
        if not kept:
            return []
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

    @staticmethod
    def _estimated(claim: Claim, queries: Sequence[Query]) -> float:
        """Take the estimates of what is answered off what is left of the claim."""
        if len(queries) == len(claim.queries):
            tokens = claim.tokens_left
        else:
            tokens = min(sum([query.estimate for query in queries]), claim.tokens_left)
        claim.tokens_left -= tokens
        return tokens

    # Failures ------------------------------------------------------------------------------------

    def _input_failures(
        self, server: Server, claim: Claim, failures: Sequence[InputFailure], now_ns: int
    ) -> list[Query]:
        whole = claim.queries
        server.answered(claim, self._estimated(claim, [whole[each.index] for each in failures]))
        ended: list[Query] = []
        dead: list[Query] = []
        unstarted: list[Query] = []
        for each in failures:
            query, failure = whole[each.index], each.failure
            if query.phase != IN_FLIGHT or query.claim_id != claim.claim_id:
                continue
            match outcomes.course(failure):
                case Course.END:
                    ended += end([query], outcomes.final(failure))
                case Course.DEATH:
                    dead.append(query)
                case Course.NOT_STARTED:
                    unstarted.append(query)
                case Course.HELD:
                    unstarted.append(query)
                    server.hold(now_ns + _hold_ns(failure))
                case Course.ATTEMPT:
                    ended += self._attempt_failed(claim, query, failure, now_ns)
                    server.breaker.failed(now_ns)
        if dead:
            server.engine_died(now_ns)
            ended += self._died(server, claim, dead, now_ns)
        elif unstarted:
            server.breaker.failed(now_ns)
        ended += self._end_late(self._waiting.not_started(claim, unstarted, now_ns))
        return ended

    def _attempt_failed(
        self, claim: Claim, query: Query, failure: Failure, now_ns: int
    ) -> list[Query]:
        stopped, why = self._waiting.again(query, claim, failure, now_ns)
        return end(stopped, why) if why is not None else self._end_late(stopped)

    def _died(
        self, server: Server, claim: Claim, dead: Sequence[Query], now_ns: int
    ) -> list[Query]:
        late, convicted = self._waiting.died(claim, dead, server, now_ns)
        return self._end_late(late) + end(convicted, outcomes.DIED_ALONE)

    def _refused(self, server: Server, claim: Claim, failure: Failure, now_ns: int) -> list[Query]:
        """None of its inputs has run or will."""
        self.counters.claims_refused += 1
        queries = claim.unanswered()
        if failure.code is Code.RESOURCE_EXHAUSTED:
            server.hold(now_ns + _hold_ns(failure))
        else:
            server.breaker.failed(now_ns)
            if failure.code not in (Code.UNAVAILABLE, Code.NOT_FOUND):
                # It does not like the request itself: that must not go on for ever.
                ended = []
                for query in queries:
                    ended += self._attempt_failed(claim, query, failure, now_ns)
                return ended
        return self._end_late(self._waiting.not_started(claim, queries, now_ns))

    def _bad_answer(self, server: Server, claim: Claim, fault: str, now_ns: int) -> list[Query]:
        """Discard the request: what is unanswered is retried, what still comes is ignored."""
        self.counters.bad_answers += 1
        server.breaker.failed(now_ns)
        claim.discarded = True
        ended: list[Query] = []
        for query in claim.unanswered():
            stopped, why = self._waiting.bad_answer(query, claim, fault, now_ns)
            ended += end(stopped, why) if why is not None else self._end_late(stopped)
        return ended

    def claim_lost(self, event: ClaimLost, now_ns: int) -> list[Query]:
        """A claim gets no further answer; returns what ended by it."""
        server = self._servers.get(event.server)
        claim = server.claims.get(event.claim_id) if server is not None else None
        if server is None or claim is None:
            return []
        return self._lose(server, claim, event.loss, now_ns)

    def _lose(self, server: Server, claim: Claim, loss: Loss, now_ns: int) -> list[Query]:
        self.counters.claims_lost += 1
        ended: list[Query] = []
        if claim.discarded:
            pass  # its queries have moved on
        elif loss is Loss.NOT_STARTED:
            late = self._waiting.not_started(claim, claim.unanswered(), now_ns)
            ended = self._end_late(late)
        else:
            server.stream_failed(now_ns)
            late, convicted = self._waiting.lost(claim, server, now_ns)
            ended = self._end_late(late) + end(convicted, outcomes.DIED_ALONE)
        server.ended(claim)
        self._waiting.settle(claim)
        return ended

    # Dispatch ------------------------------------------------------------------------------------

    def dispatch(self, now_ns: int) -> list[Dispatch | Cancel]:
        """What is to be sent now, and which streams are to be cut."""
        effects: list[Dispatch | Cancel] = self._cut_silent(now_ns)
        waiting = self._waiting
        if not len(waiting):
            return effects
        usable = [server for server in self._servers.values() if server.usable(now_ns)]
        if usable and len(waiting.suspects):
            effects += self._send_suspects(usable, now_ns)
        if usable and waiting.backlog.retries_due(now_ns):
            effects += self._send_lone(usable, now_ns)
        while usable and waiting.backlog.claimable(now_ns):
            usable = [server for server in usable if server.usable(now_ns)]
            offer = rule.next_offer(usable, self.waiting_tokens, now_ns, self._options.lead_ns)
            if offer is None:
                break
            queries = self._take(offer, now_ns)
            if queries:
                effects.append(self._send(offer.server, queries, now_ns))
            else:
                usable.remove(offer.server)
        return effects

    def wake_at(self, now_ns: int) -> int | None:
        """When `expire` and `dispatch` are to be called though nothing else happens."""
        options, servers = self._options, self._servers.values()
        wake_ns = self._waiting.wake_at_ns(now_ns)
        if self._deadline_bound_ns < NEVER_NS:
            bound_ns = self._deadline_bound_ns + options.answer_grace_ns
            wake_ns = min(wake_ns, max(bound_ns, self._walk_after_ns))
        for server in servers:
            wake_ns = min(wake_ns, server.silent_at_ns(options.stream_silence_ns_max))
        if len(self._waiting):
            usable = [server for server in servers if server.usable(now_ns)]
            wake_ns = min(wake_ns, rule.wake_at_ns(usable, now_ns, options.lead_ns))
            for server in servers:
                for at_ns in (server.held_until_ns, server.breaker.wake_at_ns):
                    if now_ns < at_ns < wake_ns:
                        wake_ns = at_ns
        return None if wake_ns >= NEVER_NS else wake_ns

    def _cut_silent(self, now_ns: int) -> list[Dispatch | Cancel]:
        effects: list[Dispatch | Cancel] = []
        for server in self._servers.values():
            server.boundary_passed(now_ns)
            if server.silent_at_ns(self._options.stream_silence_ns_max) <= now_ns:
                server.cancelled(now_ns)
                self.counters.streams_cancelled += 1
                effects.append(
                    Cancel(model=self._options.model, server=server.address, message=_SILENT)
                )
        return effects

    def _only(self, server: Server) -> bool:
        """Whether there is no other to retry on."""
        return not any(each.ready for each in self._servers.values() if each is not server)

    def _take(self, offer: rule.Offer, now_ns: int) -> list[Query]:
        """Claim queries for this offer; empty: what is first does not fit there now."""
        server, backlog = offer.server, self._waiting.backlog
        limits = server.limits
        if limits is None:
            return []
        packer: Packer[Query] = Packer(
            PackLimits(
                tokens=offer.tokens,
                inputs=limits.inputs_max,
                size_bytes=limits.request_bytes_max,
            ),
            deviations=self.margin.in_deviations,
            look_ahead=self._options.look_ahead,
        )
        retries = backlog.due(now_ns, server.address, any_server=self._only(server), lone=False)
        first = retries[0].query if retries else backlog.head
        if first is None:
            return []
        self.calibration.estimate([first])
        if first.estimate > offer.tokens and server.claims:
            return []
        if retries:
            again = [retry.query for retry in retries]
            self.calibration.estimate(again)
            packer.feed(again)
            backlog.drop_retries(packer.taken)
            packer.forget_skipped()
        if not packer.full:
            chunk = int(offer.tokens / max(self._tokens_per_query, 1.0)) + 16
            backlog.take(packer, self.calibration.estimate, now_ns, chunk)
        return packer.taken

    @property
    def _tokens_per_query(self) -> float:
        return self.waiting_tokens / max(self._waiting.backlog.line_length, 1)

    def _send(
        self, server: Server, queries: list[Query], now_ns: int, *, group: Group | None = None
    ) -> Dispatch:
        exclusive = group is not None
        claim = Claim(next(self._claim_ids), server.address, queries, exclusive=exclusive)
        server.sent(claim, now_ns)
        self._deadline_bound_ns = min(
            self._deadline_bound_ns, self._waiting.backlog.deadline_bound_ns
        )
        if group is not None:
            self._waiting.sent(claim, group)
            self.counters.claims_exclusive += 1
        self.counters.claims += 1
        self.counters.claimed_queries += len(queries)
        self.counters.claimed_tokens_estimated += claim.estimate
        return Dispatch(
            claim_id=claim.claim_id,
            model=self._options.model,
            server=server.address,
            queries=queries,
            estimate=claim.estimate,
            exclusive=exclusive,
        )

    def _send_suspects(self, usable: Sequence[Server], now_ns: int) -> list[Dispatch]:
        """One exclusive request at a time for each server."""
        effects = []
        for server in sorted(usable, key=lambda each: (not each.idle, each.address)):
            if server.suspect_claim or server.limits is None:
                continue
            group = self._waiting.suspects.next_for(
                server.address,
                now_ns,
                tokens_max=server.room_tokens() if server.claims else NEVER_NS,
                inputs_max=server.limits.inputs_max,
                any_server=self._only(server),
            )
            if group is not None:
                deadlines = [q.deadline_ns for q in group.queries if q.deadline_ns]
                self._deadline_bound_ns = min([self._deadline_bound_ns, *deadlines])
                effects.append(self._send(server, group.queries, now_ns, group=group))
        return effects

    def _send_lone(self, usable: Sequence[Server], now_ns: int) -> list[Dispatch]:
        """Retries that go in requests of their own."""
        effects = []
        for server in usable:
            any_server = self._only(server)
            for retry in self._waiting.backlog.due(
                now_ns, server.address, any_server=any_server, lone=True
            ):
                if not server.claims or retry.query.estimate <= server.room_tokens():
                    self._waiting.backlog.drop_retries([retry.query])
                    effects.append(self._send(server, [retry.query], now_ns))
        return effects


def _hold_ns(failure: Failure) -> int:
    return _HOLD_NS if failure.retry_after_ms is None else failure.retry_after_ms * _MS


def _fault(claim: Claim, answer: Answer) -> str | None:
    """Note what a message answers; a sentence if that can't be."""
    indexes: Sequence[int]
    if len(answer.groups) == 1 and not answer.errors:
        indexes = answer.groups[0].indexes
    else:
        indexes = list(chain.from_iterable(group.indexes for group in answer.groups))
        indexes.extend(each.index for each in answer.errors)
    if indexes and not claim.mark(indexes):
        return "an input was answered twice, or was never sent"
    if answer.last and not claim.complete:
        missing = len(claim.queries) - claim.answered_inputs
        return f"{missing} inputs of {len(claim.queries)} have no answer"
    return None
