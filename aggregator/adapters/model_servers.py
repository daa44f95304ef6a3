"""The model servers of one model: their names resolved again and again, a stream per address.

Invariants: a new address gets a stream; one that is gone is sent nothing more and is closed when
nothing is unanswered on it; a name that can't be resolved keeps the addresses that it had. Two
names with one address share its stream. It decides nothing about claims.

A name with IPv4 and IPv6 addresses is taken by IPv4 alone: the two are as a rule the same servers,
and two streams to one server would each be given a share of its window.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aggregator.adapters.server_stream import Emit, ServerStream, StreamOptions
from aggregator.core.effects import Cancel, Dispatch
from aggregator.core.events import ClaimLost, Event, Loss, ServerPhase

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

GONE_AFTER = 2
"""Look-ups in a row that must miss an address: a half-answering name server closes nothing."""


@dataclass(slots=True)
class _Entry:
    stream: ServerStream
    task: asyncio.Task[None]
    missed: int = 0
    closer: asyncio.Task[None] | None = None
    """Once it is gone: waits until nothing is unanswered there."""


@dataclass(slots=True)
class _Lookups:
    """The addresses that each name had when it was last resolved."""

    found: dict[str, list[str]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


class ModelServers:
    """Streams to all servers of one model. Everything is called on the loop that runs `run`."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        options: StreamOptions,
        emit: Emit,
        clock_ns: Callable[[], int],
        log: FilteringBoundLogger,
        resolve_interval_s: float = 5.0,
    ) -> None:
        """`servers` are HOST:PORT; nothing is opened before `run`."""
        self.model = options.model
        self._servers = list(servers)
        self._options = options
        self._emit = emit
        self._clock_ns = clock_ns
        self._log = log
        self._interval_s = resolve_interval_s
        self._entries: dict[str, _Entry] = {}
        self._lookups = _Lookups()
        self._look_again = asyncio.Event()
        self._opened = 0
        self._failed = 0

    # Commands ------------------------------------------------------------------------------------

    def send(self, dispatch: Dispatch) -> None:
        """Send a claim to `dispatch.server`; its end is reported by events."""
        entry = self._entries.get(dispatch.server)
        if entry is not None:
            entry.stream.send(dispatch)
            return
        lost: list[Event] = [
            ClaimLost(
                model=self.model,
                server=dispatch.server,
                claim_id=dispatch.claim_id,
                loss=Loss.NOT_STARTED,
                message="there is no such server any more",
            )
        ]
        asyncio.get_running_loop().call_soon(self._emit, lost)

    def cancel(self, cancel: Cancel) -> None:
        """Cut the stream to `cancel.server`."""
        entry = self._entries.get(cancel.server)
        if entry is not None:
            entry.stream.cut(cancel.message)

    # What is known -------------------------------------------------------------------------------

    def phases(self) -> Mapping[str, ServerPhase]:
        """By address."""
        return {address: entry.stream.phase for address, entry in self._entries.items()}

    @property
    def opened(self) -> int:
        """Streams that became ready since the start."""
        return self._opened + sum(entry.stream.opened for entry in self._entries.values())

    @property
    def failed(self) -> int:
        """Streams that broke, and attempts that failed, since the start."""
        return self._failed + sum(entry.stream.failed for entry in self._entries.values())

    def missing(self) -> str | None:
        """Why no server is ready, in one phrase; None if one is."""
        if any(entry.stream.phase is ServerPhase.READY for entry in self._entries.values()):
            return None
        problems = [*self._lookups.problems.values()]
        problems += [f"{a}: {e.stream.problem}" for a, e in self._entries.items()]
        return f"no server of {self.model} is ready ({'; '.join(problems) or 'starting'})"

    # The task ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Resolve and keep the streams until cancelled; raises what a stream's task raised."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._resolve_all()
                    self._match(group)
                    self._look_again.clear()
                    # A server that keeps failing must not turn this into a busy loop.
                    await asyncio.sleep(self._interval_s / 5)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(4 * self._interval_s / 5):
                            await self._look_again.wait()
        finally:
            self._entries.clear()

    async def _resolve_all(self) -> None:
        for server in self._servers:
            host, _, port = server.rpartition(":")
            try:
                found = await _addresses(host.strip("[]"), int(port))
            except OSError as error:
                problem = f"{server}: {error.strerror or error}"
                if self._lookups.problems.get(server) != problem:
                    self._log.warning("name not resolved", model=self.model, reason=problem)
                self._lookups.problems[server] = problem
                continue
            self._lookups.problems.pop(server, None)
            self._lookups.found[server] = found

    def _match(self, group: asyncio.TaskGroup) -> None:
        """Give every address found a stream, and retire those that are gone."""
        authorities = {
            address: server
            for server in reversed(self._servers)
            for address in self._lookups.found.get(server, ())
        }
        for address, authority in authorities.items():
            if address not in self._entries:
                self._open(group, address, authority)
        for address, entry in list(self._entries.items()):
            if address in authorities:
                if entry.closer is not None:
                    self._log.info("address is back", model=self.model, server=address)
                    entry.closer.cancel()
                    entry.closer = None
                    entry.stream.reinstate()
                entry.missed = 0
                continue
            entry.missed += 1
            if entry.missed == GONE_AFTER:
                self._log.info("address is gone", model=self.model, server=address)
                entry.stream.retire()
                entry.closer = group.create_task(self._close_when_drained(address, entry))

    def _open(self, group: asyncio.TaskGroup, address: str, authority: str) -> None:
        stream = ServerStream(
            address,
            authority=authority,
            options=self._options,
            emit=self._emit,
            clock_ns=self._clock_ns,
            log=self._log,
            on_ended=self._look_again.set,
        )
        self._entries[address] = _Entry(stream, group.create_task(stream.run()))

    async def _close_when_drained(self, address: str, entry: _Entry) -> None:
        await entry.stream.drained()
        del self._entries[address]
        self._opened += entry.stream.opened
        self._failed += entry.stream.failed
        entry.task.cancel()


async def _addresses(host: str, port: int) -> list[str]:
    """Resolve to IP:PORT, IPv4 alone if there is any; raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    four = [f"{info[4][0]}:{port}" for info in found if info[0] == socket.AF_INET]
    six = [f"[{info[4][0]}]:{port}" for info in found if info[0] == socket.AF_INET6]
    return list(dict.fromkeys(four or six))
