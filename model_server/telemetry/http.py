"""`/metrics`, `/livez` and `/readyz` over HTTP, on the event loop.

On the loop on purpose: `/livez` answers exactly as long as the loop does. Serves GET only, one
request a connection. At most CONNECTIONS_MAX are open, each for CLIENT_TIMEOUT_SECONDS at most; for
one more the oldest gives way, so that clients which stand about don't keep probes out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

CLIENT_TIMEOUT_SECONDS = 10.0
HEADER_BYTES_MAX = 16_384
CONNECTIONS_MAX = 32
"""Probes and scrapes need two or three."""
_TEXT = "text/plain; charset=utf-8"
_NONSENSE = (asyncio.IncompleteReadError, asyncio.LimitOverrunError)


class ListenError(Exception):
    """The address can't be listened on; the message is one line."""


def why_not(error: OSError) -> str:
    """The system's words for it: asyncio's own repeat the address."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)


class TelemetryServer:
    """`missing()` says in one phrase why the process is not ready; None: it is."""

    def __init__(self, registry: CollectorRegistry, missing: Callable[[], str | None]) -> None:
        self._registry = registry
        self._missing = missing
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """Connections, the oldest first."""

    async def listen(self, address: str) -> int:
        """Listen on HOST:PORT (0: a free port); returns the port.

        Raises:
            ListenError: the port is in use, or the host is not ours.
        """
        host, _, port = address.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=HEADER_BYTES_MAX
            )
        except OSError as error:
            raise ListenError(f"metrics_listen {address}: {why_not(error)}") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            # A client that is gone, slow or talks nonsense gets nothing.
            with contextlib.suppress(OSError, ValueError, TimeoutError, *_NONSENSE):
                async with asyncio.timeout(CLIENT_TIMEOUT_SECONDS):
                    await self._converse(reader, writer)
        finally:
            self._open.pop(writer, None)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, content_type, body = self.answer(head.split(b"\r\n", 1)[0].decode("ascii"))
        writer.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
            + body
        )
        await writer.drain()

    def answer(self, request_line: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body for a request line such as `GET /readyz HTTP/1.1`."""
        method, _, rest = request_line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"GET only\n"
        if path == "/metrics":
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == "/livez":
            return HTTPStatus.OK, _TEXT, b"ok\n"
        if path == "/readyz":
            missing = self._missing()
            if missing is None:
                return HTTPStatus.OK, _TEXT, b"ok\n"
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{missing}\n".encode()
        return HTTPStatus.NOT_FOUND, _TEXT, b"/metrics, /livez, /readyz\n"
