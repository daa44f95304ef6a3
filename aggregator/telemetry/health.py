"""`/metrics`, `/livez` and `/readyz` over HTTP, from threads of their own.

Alive: the event loop answers within ALIVE_SECONDS. Ready: the given function, which is run on the
loop, finds nothing missing; what is missing is the body of the 503. A scrape first lets the loop
refresh its gauges. Invariant: at most CONNECTIONS_MAX connections are open, each with a thread, and
none for longer than CLIENT_TIMEOUT_SECONDS, whatever clients do; where there is no room for a new
one, the oldest gives way, so that clients which stand about don't keep probes out. Knows nothing of
what is measured or missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_LATEST

ALIVE_SECONDS = 5.0
CLIENT_TIMEOUT_SECONDS = 10.0
CONNECTIONS_MAX = 32
"""Probes and scrapes need two or three."""
GIVE_WAY_SECONDS = 0.1
"""How long a new connection waits for the thread of the one that gives way."""
POLL_SECONDS = 0.1
"""How long `close` may have to wait."""

T = TypeVar("T")


class HealthError(Exception):
    """The address can't be listened on; the message is one line."""


class HealthServer:
    """Serves until `close`; started in the constructor, so that a port in use shows at once."""

    def __init__(
        self,
        listen: str,
        *,
        loop: asyncio.AbstractEventLoop,
        missing: Callable[[], Sequence[str]],
        refresh: Callable[[], None],
        render: Callable[[], bytes],
    ) -> None:
        """Bind and serve.

        Args:
            listen: HOST:PORT; port 0 takes a free one (see `port`).
            loop: Where `missing` and `refresh` are run.
            missing: One phrase for each thing that this process is not ready without.
            refresh: Brings the gauges up to date.
            render: The exposition text; runs in the request's thread.

        Raises:
            HealthError: The address can't be bound.
        """
        self._loop = loop
        self._missing = missing
        self._refresh = refresh
        self._render = render
        host, _, port = listen.rpartition(":")
        try:
            self._server = _Server((host.strip("[]"), int(port)), _handler_of(self))
        except OSError as error:
            raise HealthError(f"metrics_listen {listen}: {error.strerror or error}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_SECONDS,), name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def on_loop(self, function: Callable[[], T]) -> T:
        """Run it on the loop and wait for what it returns.

        Raises:
            TimeoutError: The loop did not get to it within ALIVE_SECONDS, or is closed.
        """

        async def call() -> T:
            return function()

        coroutine = call()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:
            coroutine.close()
            raise TimeoutError("the event loop has ended") from error
        try:
            return future.result(ALIVE_SECONDS)
        except FutureTimeoutError as error:
            future.cancel()
            raise TimeoutError("the event loop does not answer") from error

    def answer(self, path: str) -> tuple[HTTPStatus, str, bytes]:
        """Status, content type and body of a GET."""
        if path == "/metrics":
            with contextlib.suppress(TimeoutError):  # a stuck loop's last numbers are wanted most
                self.on_loop(self._refresh)
            return HTTPStatus.OK, CONTENT_TYPE_LATEST, self._render()
        if path not in ("/livez", "/readyz"):
            return HTTPStatus.NOT_FOUND, "text/plain", b"/metrics, /livez, /readyz\n"
        try:
            missing = self.on_loop(self._missing)
        except TimeoutError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode()
        if path == "/livez" or not missing:
            return HTTPStatus.OK, "text/plain", b"ok\n"
        body = "".join(f"{line}\n" for line in missing).encode()
        return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", body


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # Of connections not yet accepted: at the default of 5 a probe may wait for seconds.
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}
        """By connection, the time at which it is cut; the oldest first."""
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread, if need be that of the oldest."""
        if not self._room.acquire(blocking=False):
            with self._lock:
                oldest = next(iter(self._open), None)
            _cut(oldest)
            if not self._room.acquire(timeout=GIVE_WAY_SECONDS):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request] = time.monotonic() + CLIENT_TIMEOUT_SECONDS
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._gone(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """In the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._gone(request)

    def service_actions(self) -> None:
        """Every POLL_SECONDS: cut what takes too long, a byte now and then though it may send."""
        now_s = time.monotonic()
        with self._lock:
            late = [connection for connection, cut_s in self._open.items() if cut_s <= now_s]
        for connection in late:
            _cut(connection)

    def _gone(self, request: Any) -> None:
        with self._lock:
            del self._open[request]
        self._room.release()

    def server_bind(self) -> None:
        """As http.server's, without its reverse look-up of our own name, which may hang."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """As socketserver's, but a client that is gone is not worth a traceback."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def _cut(connection: socket.socket | None) -> None:
    """End a connection under its thread, which then sees its end."""
    if connection is not None:
        with contextlib.suppress(OSError):  # it has just ended by itself
            connection.shutdown(socket.SHUT_RDWR)


def _handler_of(health: HealthServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_SECONDS
        server_version = "aggregator"
        sys_version = ""

        def do_GET(self) -> None:
            status, content_type, body = health.answer(self.path.partition("?")[0])
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's
            """Probes and scrapes are not worth a line each."""

    return Handler
