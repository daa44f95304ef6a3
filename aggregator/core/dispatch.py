"""Everything between the admission of a query and its outcome, for one model.

Owns the beliefs about servers, the claims in flight and the calibration; the waiting side is
`aggregator.core.retry`'s. Invariants: a query that was admitted waits, or is in exactly one open
claim, or has been returned as answered, ended or removed, once; nothing is retried for ever (each
retry is counted against a maximum, or waits for a server within the query's deadline).

It must not know of partitions, offsets, results or Kafka. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from aggregator.core import outcomes, rule
from aggregator.core.backlog import NEVER_NS
from aggregator.core.calibration import Calibration, Margin
from aggregator.core.claims import Claim
from aggregator.core.effects import Cancel, Dispatch
from aggregator.core.events import (
    ClaimAnswered,
    ClaimLost,
    Loss,
    ServerChanged,
    ServerLimits,
    ServerPhase,
)
from aggregator.core.packing import Packer, PackLimits
from aggregator.core.query import IN_FLIGHT, Query
from aggregator.core.replies import Answered, Counters, Replies
from aggregator.core.retry import RetryOptions, Waiting, end
from aggregator.core.servers import Server
from aggregator.core.suspects import Group

__all__ = ["Answered", "Counters", "DispatchOptions", "Dispatcher"]

_MS: Final = 1_000_000
_WALK_NS_MIN: Final = 20 * _MS
"""Walks over all claims in flight for deadlines are at least this long apart."""
_SILENT: Final = "silent for too long with requests unanswered"
_FORGETFUL: Final = "idle for too long, by its own word, with requests unanswered"
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
    look_ahead: int = 16
    """Later queries that are tried in place of one that does not fit."""


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
        self._replies = Replies(self._waiting, self.calibration, self.margin, self.counters)
        self._ended: list[Query] = []
        """Found ended where it can't be returned; `expire` returns it."""

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
    def in_flight(self) -> int:
        """Queries in claims that have neither an answer nor an end."""
        return sum(
            len(claim.unanswered())
            for server in self._servers.values()
            for claim in server.claims.values()
        )

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
        ended, self._ended = self._ended, []
        late = self._waiting.expire(now_ns)
        grace_ns = self._options.answer_grace_ns
        if now_ns >= self._deadline_bound_ns + grace_ns and now_ns >= self._walk_after_ns:
            late += self._walk_in_flight(now_ns - grace_ns)
            self._walk_after_ns = now_ns + _WALK_NS_MIN
        return ended + self._end_late(late)

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
            for claim in list(server.claims.values()):  # never reported lost with the old stream
                lost = self._replies.lost(server, claim, Loss.UNKNOWN, now_ns)
                self._ended += lost.ended + self._end_late(lost.late)
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
        return self._revision == revision

    def _adopt_target(self, limits: ServerLimits) -> None:
        self.calibration.claim_tokens = float(limits.batch_tokens_target)

    def _server_down(self, server: Server) -> None:
        server.closed(ServerPhase.DOWN)
        if len(self._servers) > _SERVERS_KEPT and not server.claims:
            del self._servers[server.address]

    # What came of claims -------------------------------------------------------------------------

    def claim_answered(self, event: ClaimAnswered, now_ns: int) -> Answered:
        """Check one message about a claim and say what it settles."""
        server = self._servers.get(event.server)
        claim = server.claims.get(event.answer.claim_id) if server is not None else None
        if server is None or claim is None:
            self.counters.late_answers += 1
            return Answered()
        answered = self._replies.answered(server, claim, event.answer, now_ns)
        answered.ended += self._end_late(answered.late)
        return answered

    def claim_lost(self, event: ClaimLost, now_ns: int) -> list[Query]:
        """A claim gets no further answer; returns what ended by it."""
        server = self._servers.get(event.server)
        claim = server.claims.get(event.claim_id) if server is not None else None
        if server is None or claim is None:
            return []
        lost = self._replies.lost(server, claim, event.loss, now_ns)
        return lost.ended + self._end_late(lost.late)

    # Dispatch ------------------------------------------------------------------------------------

    def dispatch(self, now_ns: int) -> list[Dispatch | Cancel]:
        """What is to be sent now, and which streams are to be cut."""
        effects: list[Dispatch | Cancel] = self._cut_streams(now_ns)
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
        if self._ended:
            return now_ns
        wake_ns = self._waiting.wake_at_ns(now_ns)
        if self._deadline_bound_ns < NEVER_NS:
            bound_ns = self._deadline_bound_ns + options.answer_grace_ns
            wake_ns = min(wake_ns, max(bound_ns, self._walk_after_ns))
        for server in servers:
            wake_ns = min(
                wake_ns,
                server.silent_at_ns(options.stream_silence_ns_max),
                server.forgotten_at_ns(options.stream_silence_ns_max),
            )
        if len(self._waiting):
            usable = [server for server in servers if server.usable(now_ns)]
            wake_ns = min(wake_ns, rule.wake_at_ns(usable, now_ns, options.lead_ns))
            for server in servers:
                times = (
                    server.held_until_ns,
                    server.breaker.wake_at_ns,
                    server.presumed_idle_at_ns(),
                )
                for at_ns in times:
                    if now_ns < at_ns < wake_ns:
                        wake_ns = at_ns
        return None if wake_ns >= NEVER_NS else wake_ns

    def _cut_streams(self, now_ns: int) -> list[Dispatch | Cancel]:
        effects: list[Dispatch | Cancel] = []
        silence_ns_max = self._options.stream_silence_ns_max
        for server in self._servers.values():
            server.boundary_passed(now_ns)
            if server.presumed_idle_at_ns() <= now_ns:
                server.presume_idle(now_ns)
            if server.silent_at_ns(silence_ns_max) <= now_ns:
                effects.append(self._cut(server, _SILENT, now_ns))
            elif server.forgotten_at_ns(silence_ns_max) <= now_ns:
                server.forgot()
                effects.append(self._cut(server, _FORGETFUL, now_ns))
        return effects

    def _cut(self, server: Server, message: str, now_ns: int) -> Cancel:
        server.cancelled(now_ns)
        self.counters.streams_cancelled += 1
        return Cancel(model=self._options.model, server=server.address, message=message)

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
