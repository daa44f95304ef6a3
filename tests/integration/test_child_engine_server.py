"""A model server whose engine is a process: its deaths, hangs and restarts, over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from model_server.core.lifecycle import Phase
from model_server.server.process import Ended, ModelServer
from model_server.settings import load_settings
from tests.harness.child_engines import FakeChildEngine, fake_engine, group_members
from tests.harness.child_runner import Act
from tests.harness.model_server import (
    CHANNEL_OPTIONS,
    WAIT_S,
    Stream,
    error_status,
    eventually,
    reasons,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines of their own: Linux")
Status = health_pb2.HealthCheckResponse


class Server:
    """A server in this process; `options` are those of its next engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.engines: list[FakeChildEngine] = []
        self.options: dict[str, Any] = {}
        self.log = io.StringIO()
        self._ended: Ended | None = None
        logger = structlog.wrap_logger(
            structlog.WriteLogger(file=self.log),
            processors=[structlog.processors.JSONRenderer()],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        )
        given: dict[str, Any] = {
            "engine": "simulated",
            "grpc_listen": "127.0.0.1:0",
            "metrics_listen": "",
            "batch_tokens_target": 64,
            **settings,
        }
        chosen = load_settings(options=given, environment={})
        self.model_server = ModelServer(chosen, self._load, log=logger)

    def _load(self) -> FakeChildEngine:
        self.engines.append(fake_engine(**self.options))
        return self.engines[-1]

    @property
    def phase(self) -> Phase:
        return self.model_server.driver.phase

    async def until(self, phase: Phase) -> None:
        await eventually(lambda: self.phase is phase)

    async def ended(self) -> Ended:
        """Wait for its end; more than once is the same."""
        if self._ended is None:
            async with asyncio.timeout(WAIT_S):
                self._ended = await self.model_server.ended()
        return self._ended

    def lines(self, event: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.log.getvalue().splitlines()]
        return [line for line in found if line["event"] == event]

    def sample(self, name: str, **labels: str) -> float | None:
        """A metric of ours now."""
        return self.model_server._metrics.registry.get_sample_value(f"model_server_{name}", labels)

    def channel(self) -> grpc.aio.Channel:
        address = f"127.0.0.1:{self.model_server.port}"
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


@contextlib.asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Server]:
    server = Server(settings)
    await server.model_server.start()
    try:
        await server.until(Phase.SERVING)
        yield server
    finally:
        if not server.model_server.driver.halted.done():
            server.model_server.drain()
        await server.ended()
        for engine in server.engines:
            engine.close()
        # What a child started is killed with it, and is gone when the kernel has come to it.
        await eventually(
            lambda: not [pid for engine in server.engines for pid in group_members(engine.pid)]
        )


@contextlib.asynccontextmanager
async def stream_of(server: Server) -> AsyncIterator[Stream]:
    async with server.channel() as channel, Stream(channel) as stream:
        yield stream


async def health(server: Server) -> int:
    async with server.channel() as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        return int(answer.status)


async def vectors(stream: Stream, *texts: str) -> int:
    """How many of them got a vector."""
    request_id = await stream.send(*texts)
    answers = (await stream.answers(request_id))[request_id]
    return sum(len(group.indexes) for answer in answers for group in answer.groups)


async def test_a_pass_is_logged_as_the_engine_counted_it() -> None:
    async with serving() as server, stream_of(server) as stream:
        assert await vectors(stream, "50 51 52", "53") == 2
        (line,) = server.lines("pass")
        assert (line["inputs"], line["tokens"]) == (2, 4)
        counted = line["engine_passes"], line["engine_sequences"], line["engine_tokens"]
        assert counted == (1, 2, 4)
        metrics = server.model_server.driver._metrics.registry
        assert metrics.get_sample_value("model_server_engine_passes_total") == 1


async def test_a_killed_engine_is_told_of_and_another_follows() -> None:
    async with serving() as server:
        async with stream_of(server) as stream:
            dying = await stream.send(f"{int(Act.HANG)} 50")
            await stream.until_running(dying)
            waiting = await stream.send("60 61", "62")
            await eventually(lambda: server.model_server.driver.scheduler.queued_tokens)
            os.kill(server.engines[0].pid, signal.SIGKILL)
            answers = await stream.answers(dying, waiting)
            (error,) = answers[dying][-1].errors
            assert reasons(error.status) == ("ENGINE_DIED", None, True)
            assert reasons(answers[waiting][-1].status) == ("NOT_STARTED", None, True)
            assert server.sample("passes_total", kind="normal", outcome="died") == 1
            assert server.sample("queued_tokens") == 0
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.end()
            assert reasons(error_status(ended.value))[0] == "NOT_STARTED"
        await server.until(Phase.SERVING)
        assert len(server.engines) == 2
        assert await health(server) == Status.SERVING
        async with stream_of(server) as stream:
            assert await vectors(stream, "70") == 1


@pytest.mark.parametrize(("act", "why"), [(Act.EXIT, "status 7"), (Act.DIE, "asked to die")])
async def test_an_engine_that_ends_in_a_pass_says_why(act: Act, why: str) -> None:
    async with serving() as server:
        async with stream_of(server) as stream:
            dying = await stream.send(f"{int(act)} 50")
            (error,) = (await stream.answers(dying))[dying][-1].errors
            assert reasons(error.status) == ("ENGINE_DIED", None, True)
            assert why in error.status.message
        await server.until(Phase.SERVING)
        assert len(server.engines) == 2


async def test_a_death_without_a_pass_is_noticed() -> None:
    async with serving() as server:
        async with stream_of(server) as stream:
            os.kill(server.engines[0].pid, signal.SIGKILL)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.end()
            assert reasons(error_status(ended.value))[0] == "NOT_STARTED"
        await server.until(Phase.SERVING)
        (line,) = server.lines("engine lost")
        assert "SIGKILL" in line["reason"]
        assert line["restart_in_s"] == 0
        async with stream_of(server) as stream:
            assert await vectors(stream, "70") == 1


async def test_a_pass_that_hangs_is_ended_and_the_server_goes_on() -> None:
    async with serving(pass_timeout_ms=300) as server:
        hanging = server.engines[0].pid
        async with stream_of(server) as stream:
            request_id = await stream.send(f"{int(Act.HANG)} 50")
            answer = (await stream.answers(request_id))[request_id][-1]
            assert reasons(answer.errors[0].status) == ("ENGINE_DIED", None, True)
            assert "300 ms" in answer.errors[0].status.message
            assert server.sample("passes_total", kind="normal", outcome="died") == 1
        await server.until(Phase.SERVING)
        assert not group_members(hanging)
        async with stream_of(server) as stream:
            assert await vectors(stream, "70") == 1


async def test_a_bad_input_fails_alone_without_a_restart() -> None:
    async with serving() as server, stream_of(server) as stream:
        request_id = await stream.send("50", f"{int(Act.RAISE)} 51", "52")
        answers = (await stream.answers(request_id))[request_id]
        (error,) = [error for answer in answers for error in answer.errors]
        assert error.index == 1
        assert reasons(error.status)[0] == "ENGINE_FAILED_ALONE"
        assert len(server.engines) == 1


async def test_out_of_memory_lowers_the_maximum() -> None:
    async with serving() as server, stream_of(server) as stream:
        assert (
            await vectors(stream, f"50 {int(Act.OUT_OF_MEMORY)}", f"{int(Act.OUT_OF_MEMORY)} 50")
            == 1
        )
        assert server.lines("maximum lowered")


async def test_an_engine_that_does_not_come_back_ends_the_server() -> None:
    async with serving() as server:
        server.options = {"fail": "exit"}
        os.kill(server.engines[0].pid, signal.SIGKILL)
        async with asyncio.timeout(WAIT_S):
            message = await server.model_server.driver.halted
        assert message is not None
        assert "too little of it" in message


async def test_a_drain_that_runs_out_of_time_does_not_wait_for_a_pass_that_hangs() -> None:
    async with serving(drain_deadline_ms=100) as server:
        async with stream_of(server) as stream:
            hanging = await stream.send(f"{int(Act.HANG)}")
            await stream.until_running(hanging)
            server.model_server.drain()
            (error,) = (await stream.answers(hanging))[hanging][-1].errors
            assert reasons(error.status)[0] == "NOT_STARTED"
        ended = await server.ended()
        assert ended.message is None
        assert not ended.hangs
        assert not group_members(server.engines[0].pid)


async def test_a_cancelled_request_does_not_run() -> None:
    async with serving(pass_timeout_ms=300) as server:
        async with stream_of(server) as blocking:
            hanging = await blocking.send(f"{int(Act.HANG)}")
            await blocking.until_running(hanging)
            async with stream_of(server) as leaving:
                await leaving.send("60", "61")
                await eventually(lambda: server.model_server.driver.scheduler.queued_tokens)
            await eventually(lambda: not server.model_server.driver.scheduler.queued_tokens)
            await blocking.answers(hanging)
        await server.until(Phase.SERVING)
        assert not server.lines("pass")
