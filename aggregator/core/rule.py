"""Which server gets the next claim, and how large: points 1 to 4 of the dispatch rule.

Pure functions of what is believed of the servers. No timer forms a batch:

1. an idle server gets what there is at once, unless others have probably found it too;
2. when all are busy the backlog waits for the one that is free first and leaves `lead_ns` before
   its boundary, so that it is tokenized in time; what arrives after that follows in one more claim,
   at the last moment at which it is still in time for the same pass, or sooner where it has come to
   a part of a full claim that is worth a message;
3. where there are several servers, at most half a window goes to one coming pass;
4. a full claim goes ahead of time where there is room for it.

Room is what is left of the window. For a claim that leaves for a boundary, what runs in the pass
that ends there is not counted: it will have been answered before the claim's own pass starts.
(Without this, streams that share one server are each held to their share of every single pass, and
at 80% load the slowest percentile waits a pass longer.)

It must not know of queries: only how many tokens wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from aggregator.core.backlog import NEVER_NS
from aggregator.core.servers import Server

_REACH_SPARE_NS: Final = 100_000
_LARGE: Final = 1 / 4
_LARGE_AMONG_MANY: Final = 1 / 16
"""Where several share several servers, each may have but a part of a pass, and waits for less."""
_SOON: Final = 0.6
"""A boundary within this part of a pass is better than an idle server that is probably taken."""


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
        _idle(servers, now_ns, lead_ns)
        or _ahead(servers, waiting_tokens, now_ns, lead_ns)
        or _before_boundary(servers, waiting_tokens, now_ns, lead_ns)
    )


def _idle(servers: Collection[Server], now_ns: int, lead_ns: int) -> Offer | None:
    """An idle server, if there is one; which of several differs from one aggregator to another."""
    idle = [server for server in servers if server.idle and server.limits is not None]
    if not idle:
        return None
    if len(idle) == 1:
        server = idle[0]
        return _instead(server, servers, now_ns, lead_ns) or Offer(
            server, min(_target(server), server.room_tokens())
        )
    # All aggregators know the same of the servers. The time at which each has something to send is
    # what differs, so it scatters them (Knuth's multiplicative hash).
    idle.sort(key=lambda each: each.address)
    server = idle[((now_ns * 2_654_435_761) >> 20) % len(idle)]
    return Offer(server, min(_target(server), server.room_tokens()))


def _instead(idle: Server, servers: Collection[Server], now_ns: int, lead_ns: int) -> Offer | None:
    """A boundary that is better than the one idle server, if others may have found that too.

    News of a claim takes a round trip. Whoever comes second to an idle server within it waits for
    the whole pass of the first; claims for a boundary share its pass. Right after a server fell
    idle it is hardly taken yet.
    """
    if not _shared(idle) or now_ns - idle.idle_since_ns < _reach_ns(idle, lead_ns) // 3:
        return None
    for start_ns, server in _by_start(servers):
        if start_ns > now_ns + int(_SOON * server.pass_ns):
            return None
        tokens = _boundary_tokens(server, several=True)
        if tokens >= 1.0 and now_ns <= start_ns - _reach_ns(server, lead_ns):
            return Offer(server, tokens)
    return None


def _ahead(
    servers: Collection[Server], waiting_tokens: float, now_ns: int, lead_ns: int
) -> Offer | None:
    """A full claim, where the window has the room; to the server that is done first."""
    fitting = []
    for server in servers:
        full = full_tokens(server)
        if waiting_tokens >= full:
            # What others send to several servers at once must not overfill one of them.
            alone = len(servers) == 1 or not _shared(server)
            room = _room(server, now_ns + lead_ns if alone else now_ns)
            if room >= full:
                fitting.append((server.next_start_ns(), server.unanswered_tokens, room, server))
    if not fitting:
        return None
    _, _, room, server = min(fitting, key=lambda each: (*each[:2], each[3].address))
    return Offer(server, min(_target(server), room))


def _before_boundary(
    servers: Collection[Server], waiting_tokens: float, now_ns: int, lead_ns: int
) -> Offer | None:
    """What there is, for the boundary that comes first, when it is time to leave for it."""
    for start_ns, server in _by_start(servers):
        full = full_tokens(server)
        if now_ns < start_ns - lead_ns:
            return None  # nor is it time for any later one
        tokens = _boundary_tokens(server, several=len(servers) > 1)
        many = _shared(server) and len(servers) > 1
        if tokens < 1.0 or (not many and _crumb(server, tokens, waiting_tokens, full)):
            continue
        leave_ns = _leave_ns(server, start_ns, lead_ns)
        if waiting_tokens >= (_LARGE_AMONG_MANY if many else _LARGE) * full:
            leave_ns = start_ns - lead_ns
        if now_ns < leave_ns < NEVER_NS:
            # Not sooner to another: servers that end their passes together would all be kept busy
            # with a part each, and never fall out of step.
            return None
        if leave_ns <= now_ns and _in_time(server, start_ns, now_ns, lead_ns):
            return Offer(server, tokens)
    return None


def _crumb(server: Server, tokens: float, waiting_tokens: float, full: float) -> bool:
    """Whether so little goes there that it had better wait for the next full claim."""
    if server.pending_tokens <= 0.0 or waiting_tokens < full:
        return False
    return tokens < (_LARGE * full if _shared(server) else full)


def wake_at_ns(servers: Collection[Server], now_ns: int, lead_ns: int) -> int:
    """When the backlog may leave for the next boundary; `NEVER_NS`: not known yet."""
    times = [_leave_ns(server, start, lead_ns) for start, server in _by_start(servers)]
    times += [server.boundary_ns - lead_ns for server in servers if server.boundary_ns < NEVER_NS]
    return min((time for time in times if time > now_ns), default=NEVER_NS)


def _leave_ns(server: Server, start_ns: int, lead_ns: int) -> int:
    """When the next claim for this start may leave; `NEVER_NS`: those for it have left."""
    if server.boundary_claims == 0:
        return start_ns - lead_ns
    if server.boundary_claims == 1:
        reach_ns = _reach_ns(server, lead_ns)
        return start_ns - min(reach_ns + reach_ns // 8 + _REACH_SPARE_NS, lead_ns)
    return NEVER_NS


def _reach_ns(server: Server, lead_ns: int) -> int:
    return min(server.reach_ns, lead_ns // 2) if server.reach_ns else lead_ns // 2


def _in_time(server: Server, start_ns: int, now_ns: int, lead_ns: int) -> bool:
    """Whether a claim sent now is there before that start, or will find the server idle then."""
    if server.boundary_claims == 0 and not _shared(server):
        return True
    return now_ns <= start_ns - _reach_ns(server, lead_ns)


def _shared(server: Server) -> bool:
    """Whether other streams send there too: a lone one has the whole window."""
    limits = server.limits
    return limits is None or limits.window_tokens < 2 * limits.batch_tokens_target


def _by_start(servers: Collection[Server]) -> Sequence[tuple[int, Server]]:
    """Busy servers and when their first pass with room starts, where known; soonest first."""
    known = [(server.next_start_ns(), server) for server in servers]
    known = [each for each in known if each[0] < NEVER_NS]
    known.sort(key=lambda each: (each[0], each[1].address))
    return known


def _target(server: Server) -> float:
    return server.limits.batch_tokens_target if server.limits else 0.0


def _room(server: Server, by_ns: int) -> float:
    """What is left of the window for a claim that arrives by then."""
    ending = server.running_tokens() if server.boundary_ns <= by_ns else 0.0
    return server.room_tokens() + ending


def _boundary_tokens(server: Server, *, several: bool) -> float:
    limits = server.limits
    if limits is None:
        return 0.0
    tokens = min(
        limits.batch_tokens_target,
        server.room_tokens() + server.running_tokens(),
        server.pass_room(),
    )
    if several:
        tokens = min(tokens, limits.window_tokens / 2 - server.pending_tokens)
    return tokens
