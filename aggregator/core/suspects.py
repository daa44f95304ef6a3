"""Queries that engines have died with twice: run apart from all others until one is convicted.

Owns the groups that wait for an exclusive pass. A group keeps what died together; it is halved at
each further death, so a poisonous query is alone after about log2(n) deaths and its mates are
answered on the way. Only one that dies twice alone, the server having come up in between, is ended.

It must not know of servers beyond an address and the number of times one has come up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from aggregator.core.backlog import NEVER_NS
from aggregator.core.query import Query

DEATHS_SUSPECT: Final = 2
"""Deaths after which a query runs in exclusive passes only."""
DEATHS_ALONE_MAX: Final = 2
LOSSES_MAX: Final = 5
"""The loss of this number without an announced start counts as a death."""


@dataclass(slots=True, eq=False)
class Group:
    """Suspects that go out as one exclusive request."""

    queries: list[Query]
    avoid: str | None = None
    not_before_ns: int = 0
    died_alone: tuple[str, int] | None = field(default=None)
    """(server, its births) at the death of its lone query."""


class Suspects:
    """The groups that wait; see the module's docstring."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        """Start without any."""
        self._groups: list[Group] = []

    def __len__(self) -> int:
        """Queries in the groups that wait."""
        return sum(len(group.queries) for group in self._groups)

    def add(self, group: Group) -> None:
        """Let a group wait for its turn."""
        if group.queries:
            self._groups.append(group)

    def next_for(
        self, server: str, now_ns: int, *, tokens_max: float, inputs_max: int, any_server: bool
    ) -> Group | None:
        """Take out the group that waits longest of those that may go to `server` now.

        `tokens_max`: the room there. A group of more than `inputs_max` is split. `any_server`: one
        that would rather avoid it may go too.
        """
        for group in self._groups:
            if group.not_before_ns > now_ns or (group.avoid == server and not any_server):
                continue
            if sum(query.estimate for query in group.queries) > tokens_max:
                continue
            self._groups.remove(group)
            rest = group.queries[inputs_max:]
            if rest:
                group.queries = group.queries[:inputs_max]
                self._groups.append(Group(rest, group.avoid, group.not_before_ns))
            return group
        return None

    def remove(self, doomed: Callable[[Query], bool]) -> list[Query]:
        """Take out every waiting suspect of which `doomed` says so."""
        removed: list[Query] = []
        for group in self._groups:
            gone = [query for query in group.queries if doomed(query)]
            if gone:
                removed.extend(gone)
                group.queries = [query for query in group.queries if not doomed(query)]
        self._groups = [group for group in self._groups if group.queries]
        return removed

    def wake_at_ns(self, now_ns: int) -> int:
        """When the next deadline or retry of a waiting suspect is due; `NEVER_NS`: none waits."""
        wake_ns = NEVER_NS
        for group in self._groups:
            if now_ns < group.not_before_ns < wake_ns:
                wake_ns = group.not_before_ns
            for query in group.queries:
                if now_ns < query.deadline_ns < wake_ns:
                    wake_ns = query.deadline_ns
        return wake_ns


@dataclass(slots=True)
class Verdict:
    """What follows from a death."""

    retry: list[Query]
    """First death: retried as any other."""
    groups: list[Group]
    convicted: list[Query]


def judge(
    queries: Sequence[Query], group: Group | None, *, alone: bool, server: str, births: int
) -> Verdict:
    """Count a death for each of these, which were unanswered in a pass that killed its engine.

    `group`: the one they were sent as; None: an ordinary claim. `alone`: one query, in an exclusive
    pass.
    """
    verdict = Verdict([], [], [])
    suspects = []
    for query in queries:
        query.deaths += 1
        query.attempts += 1
        if query.deaths >= DEATHS_SUSPECT:
            suspects.append(query)
        else:
            verdict.retry.append(query)
    if group is None:
        verdict.groups.append(Group(suspects, server))
    elif alone and suspects:
        _judge_lone(suspects[0], group, (server, births), verdict)
    else:
        half = (len(suspects) + 1) // 2
        verdict.groups.append(Group(suspects[:half], server))
        verdict.groups.append(Group(suspects[half:], server))
    verdict.groups = [each for each in verdict.groups if each.queries]
    return verdict


def _judge_lone(query: Query, group: Group, death: tuple[str, int], verdict: Verdict) -> None:
    if group.died_alone == death:
        # The same engine has not been seen to work since: this death proves nothing.
        verdict.groups.append(Group([query], death[0], died_alone=death))
        return
    query.deaths_alone += 1
    if query.deaths_alone >= DEATHS_ALONE_MAX:
        verdict.convicted.append(query)
    else:
        verdict.groups.append(Group([query], death[0], died_alone=death))
