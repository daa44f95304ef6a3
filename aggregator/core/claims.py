"""A claim in flight, and the check that each of its inputs is answered exactly once.

It must not know what becomes of a query: it only tells which were answered and which are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from aggregator.core.backlog import NEVER_NS
from aggregator.core.query import IN_FLIGHT, Query


class Claim:
    """Queries sent to one server as one request, until its last answer or its loss.

    `queries` is shared with the `Dispatch` effect and never changed. Most claims are answered by
    one message that covers them all, and cost nothing per query; a mask is made for the others.
    """

    __slots__ = (
        "_mask",
        "answered_inputs",
        "claim_id",
        "discarded",
        "estimate",
        "exclusive",
        "missed_ns",
        "queries",
        "running",
        "sent_ns",
        "server",
        "tokens_exact",
        "tokens_left",
        "variance",
    )

    def __init__(
        self, claim_id: int, server: str, queries: list[Query], *, exclusive: bool = False
    ) -> None:
        """A claim of these; its estimates are summed here."""
        self.claim_id = claim_id
        self.server = server
        self.queries = queries
        self.exclusive = exclusive
        self.estimate = sum([query.estimate for query in queries])
        self.variance = sum([query.variance for query in queries])
        self.tokens_left = self.estimate
        """Estimated tokens of what is not answered."""
        self.tokens_exact: int | None = 0
        """Exact tokens of what is answered; None: not all of them are known."""
        self.answered_inputs = 0
        self.sent_ns = 0
        self.running = False
        """Inputs of it are in a pass, as far as is known: its start was announced, its end not."""
        self.missed_ns = NEVER_NS
        """Since when its server, which claims to have nothing to do, has said nothing of it."""
        self.discarded = False
        """An answer failed the check: whatever still comes is ignored."""
        self._mask: bytearray | None = None
        for query in queries:
            query.phase = IN_FLIGHT
            query.claim_id = claim_id

    @property
    def complete(self) -> bool:
        """Every input is answered."""
        return self.answered_inputs == len(self.queries)

    def mark(self, indexes: Sequence[int]) -> bool:
        """Note these as answered, if each is one that was not; False: nothing was noted."""
        count, size = len(indexes), len(self.queries)
        if len(set(indexes)) != count or max(indexes) >= size or min(indexes) < 0:
            return False
        if count == size and self._mask is None:
            self._mask = bytearray(b"\1") * count
            self.answered_inputs = count
            return True
        mask = self._mask
        if mask is None:
            mask = self._mask = bytearray(size)
        if any(mask[index] for index in indexes):
            return False
        for index in indexes:
            mask[index] = 1
        self.answered_inputs += count
        return True

    def unanswered(self) -> list[Query]:
        """Queries without an answer that are still in flight with this claim."""
        if self._mask is None:
            left = self.queries
        else:
            left = list(compress(self.queries, [not answered for answered in self._mask]))
        return [q for q in left if q.phase == IN_FLIGHT and q.claim_id == self.claim_id]
