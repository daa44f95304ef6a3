"""Which server gets the next claim, and how large: points 1 to 4 of the dispatch rule.

Pure functions of what is believed of the servers. No timer forms a batch: an idle server gets what
there is at once; when all are busy the backlog waits for the one that is free first and leaves
`lead_ns` before that; a full claim goes ahead of time where there is room for it.

It must not know of queries: only how many tokens wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from aggregator.core.backlog import NEVER_NS
from aggregator.core.servers import Server


@dataclass(frozen=True, slots=True)
class Offer:
    """A server that may be sent a claim now, of at most `tokens`."""

    server: Server
    tokens: float


def full_tokens(server: Server) -> float:
    """A claim of this size is full."""
    limits = server.limits
    return min(limits.batch_tokens_target, limits.window_tokens / 2) if limits else NEVER_NS


def next_offer(
    servers: Collection[Server], waiting_tokens: float, now_ns: int, lead_ns: int
) -> Offer | None:
    """The server for the next claim, if one should leave now.

    `servers`: those usable now. `waiting_tokens`: about what the backlog holds.
    """
    return (
        _idle(servers)
        or _ahead(servers, waiting_tokens)
        or _before_boundary(servers, now_ns, lead_ns)
    )


def _idle(servers: Collection[Server]) -> Offer | None:
    idle = [server for server in servers if server.idle and server.limits is not None]
    if not idle:
        return None
    server = min(idle, key=lambda each: (each.idle_since_ns, each.address))
    return Offer(server, _tokens_max(server))


def _ahead(servers: Collection[Server], waiting_tokens: float) -> Offer | None:
    """A full claim, where the window has the room; to the server that is done first."""
    fitting = [
        server
        for server in servers
        if waiting_tokens >= (full := full_tokens(server)) and server.room_tokens() >= full
    ]
    if not fitting:
        return None
    server = min(fitting, key=lambda each: (each.free_ns, each.unanswered_tokens, each.address))
    return Offer(server, _tokens_max(server))


def _before_boundary(servers: Collection[Server], now_ns: int, lead_ns: int) -> Offer | None:
    for server in by_boundary(servers):
        if now_ns < server.free_ns - lead_ns:
            return None
        tokens = min(_tokens_max(server), _half_left(server))
        if tokens >= 1.0:
            return Offer(server, tokens)
    return None


def by_boundary(servers: Collection[Server]) -> Sequence[Server]:
    """Busy servers of which it is known when they will be free, the first first."""
    known = [server for server in servers if server.free_ns < NEVER_NS]
    known.sort(key=lambda each: (each.free_ns, each.address))
    return known


def wake_at_ns(servers: Collection[Server], now_ns: int, lead_ns: int) -> int:
    """When the backlog may leave for the next boundary; `NEVER_NS`: not known yet."""
    for server in by_boundary(servers):
        if server.free_ns - lead_ns > now_ns:
            return server.free_ns - lead_ns
    return NEVER_NS


def _tokens_max(server: Server) -> float:
    limits = server.limits
    return min(limits.batch_tokens_target, server.room_tokens()) if limits else 0.0


def _half_left(server: Server) -> float:
    """For one coming pass at most half the window is used."""
    limits = server.limits
    return limits.window_tokens / 2 - server.pending_tokens if limits else 0.0
