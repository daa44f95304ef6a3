"""The health endpoints of both programs, beset by clients that stand about: bounded, and served."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from aggregator.telemetry import health
from aggregator.telemetry.health import CONNECTIONS_MAX, HealthServer
from model_server.telemetry import http
from model_server.telemetry.http import TelemetryServer

WAIT_S = 30.0
GET = b"GET /livez HTTP/1.0\r\n\r\n"


@pytest.fixture(params=["aggregator", "model server"])
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    if request.param == "model server":
        telemetry = TelemetryServer(CollectorRegistry(), lambda: None)
        yield await telemetry.listen("127.0.0.1:0")
        await telemetry.close()
        return
    server = HealthServer(
        "127.0.0.1:0",
        loop=asyncio.get_running_loop(),
        missing=list,
        refresh=lambda: None,
        render=lambda: b"",
    )
    yield server.port
    await asyncio.to_thread(server.close)


async def ask(port: int, request: bytes = GET) -> bytes:
    """What one connection gets until it is closed."""
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        answer = await reader.read()
        writer.close()
    return answer


def threads() -> int:
    """Those of connections."""
    return sum("process_request" in thread.name for thread in threading.enumerate())


async def test_clients_that_send_nothing_do_not_keep_a_probe_out(port: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        idle = []
        for number in range(3 * CONNECTIONS_MAX):
            connected = socket.create_connection(("127.0.0.1", port), WAIT_S)
            stack.enter_context(connected)
            idle.append(connected)
            if number % 10 == 0:
                assert b" 200 " in await ask(port)
        assert b" 200 " in await ask(port)
        assert threads() <= CONNECTIONS_MAX
        # The oldest have given way.
        for connection in idle[:CONNECTIONS_MAX]:
            received = await asyncio.to_thread(received_from, connection)
            assert received == b""
    # And when they go, there is room for as many at once as before.
    answers = await asyncio.gather(*[ask(port) for _ in range(CONNECTIONS_MAX // 2)])
    assert all(b" 200 " in answer for answer in answers)


def received_from(connection: socket.socket) -> bytes:
    """Until the end; a reset is one."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(100)
    return b""


async def test_a_client_that_sends_a_byte_now_and_then_is_cut(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "CLIENT_TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(http, "CLIENT_TIMEOUT_SECONDS", 0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"G")
                await writer.drain()
                await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b""
    dripping.cancel()
    await asyncio.gather(dripping, return_exceptions=True)
    writer.close()
