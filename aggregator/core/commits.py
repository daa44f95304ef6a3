"""Commits: when one is due, what it holds, and what it has done when it ends.

Invariants: a commit is built from ledgers' watermarks and from nothing else; at most one
asynchronous commit is under way. A synchronous one (a revoke, the drain) doesn't wait for it, and
whatever the older one reports afterwards moves nothing back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from aggregator.core.effects import Commit, CommitOffset
from aggregator.core.partitions import Ledger
from aggregator.core.query import Query


class Commits:
    """The commits of one process."""

    def __init__(self, *, interval_ns: int, window_records_max: int) -> None:
        """A commit every `interval_ns`, sooner when half a window of one partition is settled."""
        self._interval_ns = interval_ns
        self._half_window = window_records_max // 2
        self._ids = itertools.count(1)
        self._under_way: dict[int, list[tuple[Ledger, int, int]]] = {}
        """By id: (ledger, offset, records below it)."""
        self._asynchronous_id = 0
        self._moved = False
        """A watermark may have moved since the last commit."""
        self._urgent = False
        self._last_ns = 0

    def moved(self, ledger: Ledger) -> None:
        """The watermark of this partition may have moved."""
        self._moved = True
        if ledger.settled - ledger.committed >= self._half_window:
            self._urgent = True

    def due(self, now_ns: int) -> bool:
        """Whether an asynchronous commit should be made now."""
        if not self._moved or self._asynchronous_id:
            return False
        return self._urgent or now_ns - self._last_ns >= self._interval_ns

    def closing(self, _ledgers: Sequence[Ledger]) -> None:
        """These are being given up: they get a commit of their own at the end."""

    def finished(self, ledger: Ledger) -> bool:
        """Whether nothing more is to be waited for before that commit."""
        return not ledger.unsettled

    def wake_at(self) -> int | None:
        """When the next one is due; None: not known yet."""
        if not self._moved or self._asynchronous_id:
            return None
        return self._last_ns + self._interval_ns

    def begin(self, ledgers: Iterable[Ledger], *, synchronous: bool, now_ns: int) -> Commit | None:
        """A commit of the watermarks that are not yet committed; None if there are none.

        Of partitions being given up only the synchronous one; after one that was due the next is an
        interval away.
        """
        if not synchronous:
            self._moved = self._urgent = False
            self._last_ns = now_ns
        entries = [
            (ledger, watermark, ledger.settled)
            for ledger in ledgers
            if (synchronous or not ledger.closed) and (watermark := ledger.to_commit) is not None
        ]
        if not entries:
            return None
        commit_id = next(self._ids)
        self._under_way[commit_id] = entries
        if not synchronous:
            self._asynchronous_id = commit_id
        offsets = [
            CommitOffset(tp=ledger.tp, epoch=ledger.epoch, offset_next=offset)
            for ledger, offset, _ in entries
        ]
        return Commit(commit_id=commit_id, offsets=offsets, synchronous=synchronous)

    def done(self, commit_id: int) -> Sequence[Query]:
        """It ended well; what it holds was settled before it began."""
        for ledger, offset, settled in self._under_way.pop(commit_id, ()):
            # A synchronous commit may have overtaken this one.
            if ledger.committed_offset is None or offset > ledger.committed_offset:
                ledger.committed_offset = offset
                ledger.committed = settled
        self._ended(commit_id)
        return ()

    def failed(self, commit_id: int, *, message: str, now_ns: int) -> None:
        """It did not: what it held is still to be committed, at once, whatever the reason."""
        del message, now_ns
        self._under_way.pop(commit_id, None)
        self._moved = True
        self._ended(commit_id)

    def _ended(self, commit_id: int) -> None:
        if commit_id == self._asynchronous_id:
            self._asynchronous_id = 0
