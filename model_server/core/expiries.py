"""When waiting inputs run out of time: requests by their earliest deadline.

A request is kept until that time even if it is gone before; only then is it looked up and dropped,
or once most that are kept are gone.
It does not know what becomes of inputs that have expired.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from model_server.core.requests import Request

_KEPT_MIN = 64
"""Fewer of the gone cost nothing."""


class Expiries:
    """See the module; `requests` is the scheduler's table of those alive."""

    def __init__(self, requests: Mapping[int, Request]) -> None:
        self._requests = requests
        self._heap: list[tuple[int, int]] = []

    def add(self, request: Request) -> None:
        """A request was taken in, with deadlines or without."""
        if request.earliest_ns:
            if len(self._heap) > _KEPT_MIN + 2 * len(self._requests):
                self._heap = [kept for kept in self._heap if kept[1] in self._requests]
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, (request.earliest_ns, request.key))

    def take(self, now_ns: int) -> list[tuple[Request, list[int]]]:
        """Take the inputs that have expired out of those that wait."""
        expired: list[tuple[Request, list[int]]] = []
        while self._heap and self._heap[0][0] <= now_ns:
            request = self._requests.get(heapq.heappop(self._heap)[1])
            if request is not None:
                expired.append((request, request.expired(now_ns)))
                self.add(request)
        return expired

    def next_ns(self) -> int | None:
        """The earliest deadline of a request that is alive; None: there is none."""
        heap = self._heap
        while heap and heap[0][1] not in self._requests:
            heapq.heappop(heap)
        return heap[0][0] if heap else None
