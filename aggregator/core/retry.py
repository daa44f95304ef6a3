"""What becomes of queries whose claim, or whose part in it, came to nothing.

Owns the waiting side of a model: the backlog, the suspects, and which claims carry suspects.
Invariants: every query given to it either waits in exactly one of the two, or is returned as ended;
an abandoned one is forgotten; none is retried after its deadline.

It must not know of servers' state beyond an address and how often one has come up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aggregator.core import outcomes
from aggregator.core.backlog import Backlog, Retry
from aggregator.core.failures import Failure
from aggregator.core.query import ABANDONED, WAITING, Query
from aggregator.core.suspects import DEATHS_SUSPECT, LOSSES_MAX, Group, Suspects, judge

if TYPE_CHECKING:
    from aggregator.core.claims import Claim
    from aggregator.core.servers import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """Maxima and backoff (nanoseconds) of retries."""

    attempts_max: int
    bad_answers_max: int
    backoff_ns_min: int
    backoff_ns_max: int


def end(queries: Sequence[Query], failure: Failure) -> list[Query]:
    """End queries; the abandoned among them are nobody's business any more."""
    ended = []
    for query in queries:
        query.claim_id = 0
        if query.phase != ABANDONED:
            query.failure = failure
            ended.append(query)
    return ended


class Waiting:
    """Backlog and suspects of one model; see the module's docstring."""

    __slots__ = ("_groups", "_options", "backlog", "deaths", "retried", "suspects")

    def __init__(self, options: RetryOptions) -> None:
        """Start empty."""
        self._options = options
        self._groups: dict[int, Group] = {}
        self.backlog = Backlog()
        self.suspects = Suspects()
        self.retried = 0
        """Queries put back so far."""
        self.deaths = 0
        """Of queries, so far."""

    def __len__(self) -> int:
        """Queries that wait."""
        return len(self.backlog) + len(self.suspects)

    def remove(self, doomed: Callable[[Query], bool]) -> list[Query]:
        """Take out every waiting query of which `doomed` says so."""
        return self.backlog.remove(doomed) + self.suspects.remove(doomed)

    def expire(self, now_ns: int) -> list[Query]:
        """Take out what is past its deadline."""
        late = self.backlog.expire(now_ns)
        if self.suspects:
            late += self.suspects.remove(lambda query: 0 < query.deadline_ns <= now_ns)
        return late

    def wake_at_ns(self, now_ns: int) -> int:
        """When something in here is due."""
        return min(self.backlog.wake_at_ns(now_ns), self.suspects.wake_at_ns(now_ns))

    # Suspects in flight --------------------------------------------------------------------------

    def sent(self, claim: Claim, group: Group) -> None:
        """A group went out as this claim."""
        self._groups[claim.claim_id] = group

    def settle(self, claim: Claim) -> None:
        """This claim gets no further answer."""
        self._groups.pop(claim.claim_id, None)

    # Coming back ---------------------------------------------------------------------------------

    def not_started(self, claim: Claim, queries: Sequence[Query], now_ns: int) -> list[Query]:
        """Put back what has not run, at once and uncounted; returns what is past its deadline."""
        alive, late = self._alive(queries, now_ns)
        group = self._groups.get(claim.claim_id)
        if group is not None:
            self.suspects.add(Group(alive, group.avoid, died_alone=group.died_alone))
        else:
            self.backlog.put_back(alive)
        return late

    def lost(self, claim: Claim, server: Server, now_ns: int) -> tuple[list[Query], list[Query]]:
        """The stream died: the announced die with it, the others were not started.

        Returns (past their deadline, convicted).
        """
        queries = claim.unanswered()
        if claim.running:
            return self.died(claim, queries, server, now_ns)
        dead, others = [], []
        for query in queries:
            query.losses += 1
            if query.losses >= LOSSES_MAX:
                query.losses = 0
                dead.append(query)
            else:
                others.append(query)
        late = self.not_started(claim, others, now_ns)
        late_too, convicted = self.died(claim, dead, server, now_ns)
        return late + late_too, convicted

    def died(
        self, claim: Claim, queries: Sequence[Query], server: Server, now_ns: int
    ) -> tuple[list[Query], list[Query]]:
        """The engine died with these in its pass; returns (past their deadline, convicted)."""
        alive, late = self._alive(queries, now_ns)
        if not alive:
            return late, []
        self.deaths += len(alive)
        verdict = judge(
            alive,
            self._groups.get(claim.claim_id),
            alone=claim.exclusive and len(claim.queries) == 1,
            server=claim.server,
            births=server.births,
        )
        for query in verdict.retry:
            self._delay(query, claim.server, now_ns)
        for group in verdict.groups:
            group.not_before_ns = now_ns + self._backoff_ns(group.queries[0])
            self.suspects.add(group)
        return late, verdict.convicted

    def again(
        self, query: Query, claim: Claim, failure: Failure, now_ns: int
    ) -> tuple[list[Query], Failure | None]:
        """A started attempt failed: retry it, or say with what it ends (None: late)."""
        query.attempts += 1
        if query.phase == ABANDONED:
            return [], None
        if query.attempts >= self._options.attempts_max:
            return [query], outcomes.server_error(failure)
        return self._again(query, claim.server, now_ns), None

    def bad_answer(
        self, query: Query, claim: Claim, fault: str, now_ns: int
    ) -> tuple[list[Query], Failure | None]:
        """An answer of its request failed the check: retry it, or say with what it ends."""
        query.attempts += 1
        query.bad_answers += 1
        if query.phase == ABANDONED:
            return [], None
        if query.bad_answers >= self._options.bad_answers_max:
            return [query], outcomes.bad_answer(fault)
        return self._again(query, claim.server, now_ns), None

    def _again(self, query: Query, server: str, now_ns: int) -> list[Query]:
        alive, late = self._alive([query], now_ns)
        for each in alive:
            if each.deaths >= DEATHS_SUSPECT:
                not_before_ns = now_ns + self._backoff_ns(each)
                self.suspects.add(Group([each], server, not_before_ns))
            else:
                self._delay(each, server, now_ns)
        return late

    def _delay(self, query: Query, server: str, now_ns: int) -> None:
        query.not_before_ns = now_ns + self._backoff_ns(query)
        # The last attempt goes alone, so that its mates are not charged with it.
        options = self._options
        lone = (
            query.bad_answers >= options.bad_answers_max - 1
            or query.attempts >= options.attempts_max - 1
        )
        self.backlog.delay(Retry(query, server, lone))

    def _backoff_ns(self, query: Query) -> int:
        doubled = self._options.backoff_ns_min << min(max(query.attempts - 1, 0), 16)
        return min(doubled, self._options.backoff_ns_max)

    def _alive(self, queries: Sequence[Query], now_ns: int) -> tuple[list[Query], list[Query]]:
        """Split what may be retried from what is late; the abandoned are forgotten."""
        alive, late = [], []
        for query in queries:
            query.claim_id = 0
            if query.phase == ABANDONED:
                continue
            query.phase = WAITING
            if 0 < query.deadline_ns <= now_ns:
                late.append(query)
            else:
                alive.append(query)
        self.retried += len(alive)
        return alive, late
