"""The ledger of one assignment of one partition: what is unsettled, the watermark, the window.

Invariants:
- `unsettled` holds the admitted queries in offset order from the first one that is not settled.
- The watermark is the offset below which every record is settled: the first unsettled offset, or,
  when there is none, the position that the last records came with. It is None until one of the two
  is known. Offsets are never assumed to be consecutive.
- Records are counted, not offsets subtracted, so that gaps do not fill the window.

It must not know of models, servers, or who writes results.
"""

from __future__ import annotations

from collections import deque

from aggregator.core.query import ABANDONED, SETTLED, Query, TopicPartition


class Ledger:
    """One partition under one assignment (epoch)."""

    __slots__ = (
        "admitted",
        "closed",
        "committed",
        "committed_offset",
        "epoch",
        "offset_next",
        "paused",
        "settled",
        "started_offset_last",
        "tp",
        "unsettled",
    )

    def __init__(self, tp: TopicPartition, epoch: int) -> None:
        """Nothing is known of it yet, not even the position."""
        self.tp = tp
        self.epoch = epoch
        self.unsettled: deque[Query] = deque()
        self.offset_next: int | None = None
        """The position behind what is admitted; while closed: where the next owner must start."""
        self.started_offset_last = -1
        """The highest offset of which anything left the process: dispatched, or a result written.
        """
        self.admitted = 0
        self.settled = 0
        """Records below the watermark."""
        self.committed = 0
        """Records below the committed offset."""
        self.committed_offset: int | None = None
        self.paused = False
        self.closed = False
        """Revoked or draining: it admits nothing and its position stands still."""

    def advance(self) -> bool:
        """Drop the settled prefix; return whether the watermark may have moved."""
        unsettled = self.unsettled
        count = 0
        while unsettled and unsettled[0].phase == SETTLED:
            unsettled.popleft()
            count += 1
        self.settled += count
        return count > 0

    @property
    def watermark(self) -> int | None:
        """The offset to commit: every record below it is settled."""
        return self.unsettled[0].offset if self.unsettled else self.offset_next

    @property
    def to_commit(self) -> int | None:
        """The watermark, if it is known and not yet committed."""
        watermark = self.watermark
        return None if watermark == self.committed_offset else watermark

    @property
    def window_records(self) -> int:
        """Records between the committed offset and the last admitted one."""
        return self.admitted - self.committed

    def close(self) -> list[Query]:
        """Admit nothing more; abandon and return what lies above everything started.

        The watermark can then not rise above the first query that was dropped.
        """
        self.closed = True
        dropped: list[Query] = []
        while self.unsettled and self.unsettled[-1].offset > self.started_offset_last:
            query = self.unsettled.pop()
            query.phase = ABANDONED
            self.offset_next = query.offset
            dropped.append(query)
        return dropped

    def abandon(self) -> list[Query]:
        """The epoch is over: return what became the next owner's by this call, each query once."""
        self.closed = True
        abandoned = [q for q in self.unsettled if q.phase not in (SETTLED, ABANDONED)]
        for query in abandoned:
            query.phase = ABANDONED
        return abandoned
