"""The queries of one model that wait for a claim: in order of arrival, with deadlines and retries.

Owns the line (a deque) and the retries beside it. Invariants: a query is in here at most once and
leaves by exactly one of `take`, `expire`, `remove`; the line is in order of arrival, apart from
what comes back while earlier ones are still out; taking a claim costs work in proportion to the
claim, whatever the length of the line.

There is no heap of deadlines (it would cost every query): a lower bound of the earliest one is kept
and the line is walked when that has passed, at intervals that grow with its length. What is found
expired on the way into a claim is set aside for the next `expire`.

It must not know of servers' state: a retry only carries the address that it would rather avoid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from aggregator.core.packing import Packer
from aggregator.core.query import Query

NEVER_NS: Final = 1 << 62
"""Later than any monotonic time."""
_WALK_NS_PER_QUERY: Final = 4_000
"""Walks for deadlines are at least this long apart for each waiting query: about 2% of one core."""
_WALK_NS_MIN: Final = 2_000_000


@dataclass(slots=True, eq=False)
class Retry:
    """A query that is to be sent again, not before `query.not_before_ns`."""

    query: Query
    avoid: str | None
    """The server where it went wrong; another is used first, when there is one."""
    lone: bool
    """To be sent in a request of its own, so that its mates are not charged with it again."""


class Backlog:
    """See the module's docstring. Not an iterable: nobody else walks it."""

    __slots__ = ("_deadline_bound_ns", "_expired", "_line", "_retries", "_units", "_walk_after_ns")

    def __init__(self) -> None:
        """Start empty."""
        self._line: deque[Query] = deque()
        self._retries: list[Retry] = []
        self._expired: list[Query] = []
        self._units = 0
        self._deadline_bound_ns = NEVER_NS
        self._walk_after_ns = 0

    def __len__(self) -> int:
        """Queries waiting, those to be retried later included."""
        return len(self._line) + len(self._retries) + len(self._expired)

    @property
    def line_length(self) -> int:
        """Queries that can be claimed at once."""
        return len(self._line)

    @property
    def line_units(self) -> int:
        """Sum of (raw estimate + 2) over the line: what its tokens are nearly in proportion to."""
        return self._units

    @property
    def deadline_bound_ns(self) -> int:
        """No deadline in here is earlier; `NEVER_NS`: there is none."""
        return self._deadline_bound_ns

    def add(self, queries: Sequence[Query]) -> None:
        """Append queries that have just arrived."""
        self._line.extend(queries)
        self._count_in(queries)

    def put_back(self, queries: Iterable[Query]) -> None:
        """Return queries of a claim that came to nothing to their places by arrival."""
        back = sorted(queries, key=_arrival)
        if not back:
            return
        line, latest = self._line, back[-1].arrived_ns
        self._count_in(back)
        earlier: list[Query] = []
        while line and line[0].arrived_ns <= latest and len(earlier) < 4096:
            earlier.append(line.popleft())
        if earlier:
            back = sorted(earlier + back, key=_arrival)
        line.extendleft(reversed(back))

    def delay(self, retry: Retry) -> None:
        """Keep a query until its `not_before_ns`, then offer it before the line."""
        self._retries.append(retry)
        deadline_ns = retry.query.deadline_ns
        if deadline_ns and deadline_ns < self._deadline_bound_ns:
            self._deadline_bound_ns = deadline_ns

    def _count_in(self, queries: Iterable[Query]) -> None:
        self._units += sum([query.estimate_raw for query in queries])
        bound = self._deadline_bound_ns
        count = 0
        for query in queries:
            count += 1
            deadline_ns = query.deadline_ns
            if deadline_ns and deadline_ns < bound:
                bound = deadline_ns
        self._units += 2 * count
        self._deadline_bound_ns = bound

    # Claiming ------------------------------------------------------------------------------------

    @property
    def head(self) -> Query | None:
        """The first in line."""
        return self._line[0] if self._line else None

    def claimable(self, now_ns: int) -> bool:
        """Whether anything may be claimed now."""
        return bool(self._line) or self.retries_due(now_ns)

    def retries_due(self, now_ns: int) -> bool:
        """Whether the time of any retry has come."""
        return any(retry.query.not_before_ns <= now_ns for retry in self._retries)

    def due(self, now_ns: int, server: str, *, any_server: bool, lone: bool) -> list[Retry]:
        """Retries that may go to `server` now, oldest first.

        `any_server`: those that would rather avoid it too. `lone`: those that go in a request of
        their own, else the others.
        """
        if not self._retries:
            return []
        due = [
            retry
            for retry in self._retries
            if retry.query.not_before_ns <= now_ns
            and retry.lone == lone
            and not 0 < retry.query.deadline_ns <= now_ns
            and (any_server or retry.avoid != server)
        ]
        due.sort(key=lambda retry: _arrival(retry.query))
        return due

    def drop_retries(self, queries: Sequence[Query]) -> None:
        """Forget the retries of these, which are in a claim now, or gone."""
        gone = set(map(id, queries))
        self._retries = [retry for retry in self._retries if id(retry.query) not in gone]

    def take(
        self,
        packer: Packer[Query],
        estimate: Callable[[Sequence[Query]], None],
        now_ns: int,
        chunk: int,
    ) -> None:
        """Move queries from the head of the line into the packer until it has enough.

        `estimate` is called on those that are looked at, `chunk` at a time, so that they carry the
        newest calibration. Those looked at and not taken stay where they were, marked as passed
        over if one behind them was taken. What the packer holds already did not come from the line,
        and neither did what it has skipped.
        """
        line = self._line
        packer.forget_skipped()
        before = len(packer.taken)
        untouched: list[Query] = []
        while line:
            head = [line.popleft() for _ in range(min(chunk, len(line)))]
            if now_ns >= self._deadline_bound_ns:
                head = self._set_expired_aside(head, now_ns)
            estimate(head)
            consumed = packer.feed(head)
            if consumed < len(head):
                untouched = head[consumed:]
                break
            chunk = max(8, chunk >> 2)
        line.extendleft(reversed(untouched))
        for query in packer.skipped[: packer.overtaken]:
            query.passed_over = True
        line.extendleft(reversed(packer.skipped))
        taken = packer.taken[before:]
        self._units -= sum([query.estimate_raw for query in taken]) + 2 * len(taken)

    def _set_expired_aside(self, head: list[Query], now_ns: int) -> list[Query]:
        alive = []
        for query in head:
            if query.deadline_ns and query.deadline_ns <= now_ns:
                self._expired.append(query)
                self._units -= query.estimate_raw + 2
            else:
                alive.append(query)
        return alive

    # Deadlines and removal -----------------------------------------------------------------------

    def expire(self, now_ns: int) -> list[Query]:
        """Take out what is past its deadline."""
        expired, self._expired = self._expired, []
        if now_ns >= self._deadline_bound_ns and now_ns >= self._walk_after_ns:
            late = self.remove(lambda query: 0 < query.deadline_ns <= now_ns)
            expired.extend(late)
            waiting = [query.deadline_ns for query in self._line if query.deadline_ns]
            waiting += [r.query.deadline_ns for r in self._retries if r.query.deadline_ns]
            self._deadline_bound_ns = min(waiting, default=NEVER_NS)
            pause_ns = max(_WALK_NS_MIN, len(self._line) * _WALK_NS_PER_QUERY)
            self._walk_after_ns = now_ns + pause_ns
        return expired

    def remove(self, doomed: Callable[[Query], bool]) -> list[Query]:
        """Take out every waiting query of which `doomed` says so."""
        removed = [query for query in self._expired if doomed(query)]
        if removed:
            self._expired = [query for query in self._expired if not doomed(query)]
        from_line: list[Query] = []
        kept: deque[Query] = deque()
        for query in self._line:
            (from_line if doomed(query) else kept).append(query)
        if from_line:
            self._line = kept
            self._units -= sum([query.estimate_raw + 2 for query in from_line])
        retried = [retry.query for retry in self._retries if doomed(retry.query)]
        if retried:
            self.drop_retries(retried)
        return removed + from_line + retried

    def wake_at_ns(self, now_ns: int) -> int:
        """When the next deadline passes or the next retry is due; `NEVER_NS`: nothing waits."""
        if self._expired:
            return now_ns
        wake_ns = NEVER_NS
        if self._line or self._retries:
            wake_ns = max(self._deadline_bound_ns, self._walk_after_ns)
        for retry in self._retries:
            if now_ns < retry.query.not_before_ns < wake_ns:
                wake_ns = retry.query.not_before_ns
        return wake_ns


def _arrival(query: Query) -> tuple[int, int]:
    return query.arrived_ns, query.offset
