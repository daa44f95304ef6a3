"""Fixtures of the model server's tests: a server in this process, a channel and a stream to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from tests.harness.model_server import FAST, Running, Stream, serving


@pytest.fixture
async def server() -> AsyncIterator[Running]:
    """Target 64 tokens, one input at most 40."""
    async with serving(options=FAST) as running:
        yield running


@pytest.fixture
async def channel(server: Running) -> AsyncIterator[grpc.aio.Channel]:
    async with server.channel() as opened:
        yield opened


@pytest.fixture
async def stream(channel: grpc.aio.Channel) -> AsyncIterator[Stream]:
    async with Stream(channel) as opened:
        yield opened
