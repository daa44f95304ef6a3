"""A whole model server in this process, on free ports, with an engine whose passes can be held.

No test depends on time: one that needs a pass to be running holds the engine, and everything else
is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import structlog
from google.rpc import error_details_pb2, status_pb2

from model_server.core.lifecycle import Phase
from model_server.engines.base import Tokens, Vectors
from model_server.engines.simulated import SimulatedEngine, SimulatedOptions
from model_server.server.process import ModelServer
from model_server.settings import Fault, ModelServerSettings, load_settings
from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import embedding_service_pb2_grpc as pb_grpc

WAIT_S = 30.0
MODEL = "simulated"
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
)

FAST = SimulatedOptions(
    fixed_ms=0,
    slope_us_per_token=0,
    matryoshka_dimensions=(64, 100),
    input_tokens_max=40,
    faults={
        "[[raise]]": Fault.RAISE,
        "[[nan]]": Fault.NAN,
        "[[die]]": Fault.DIE,
        "[[short]]": Fault.SHORT,
    },
)
"""Answers at once; target 64, one input at most 40; markers for what may go wrong."""

StreamCall = grpc.aio.StreamStreamCall[pb.EmbedStreamRequest, pb.EmbedStreamResponse]


async def eventually(condition: Callable[[], object]) -> None:
    """Wait until a condition of the server's own objects, which tell nobody, holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - they tell nobody
            await asyncio.sleep(0.005)


class GatedEngine(SimulatedEngine):
    """A simulated engine that answers at once, unless its gate is shut."""

    def __init__(self, options: SimulatedOptions) -> None:
        super().__init__(options)
        self.gate = threading.Event()
        self.gate.set()
        self.passes: list[int] = []
        """Inputs of each pass, those of the start included."""
        self.held = False
        """A pass stands at the gate; it is announced a moment before."""

    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        self.passes.append(len(inputs))
        self.held = not self.gate.is_set()
        if not self.gate.wait(WAIT_S):
            raise TimeoutError("a test left the gate shut")
        self.held = False
        return super().embed(inputs)


class Running:
    """A server that serves, and the engine that it uses now."""

    def __init__(
        self,
        settings: ModelServerSettings,
        options: SimulatedOptions,
        cache_dir: Path | None = None,
    ) -> None:
        self.log = io.StringIO()
        self.engines: list[GatedEngine] = []
        self._options = options
        self.next_options: SimulatedOptions | None = None
        """Of the engine after a restart."""
        logger = structlog.wrap_logger(
            structlog.WriteLogger(file=self.log),
            processors=[structlog.processors.JSONRenderer()],
            wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        )
        self.server = ModelServer(settings, self._load, log=logger, cache_dir=cache_dir)

    def _load(self) -> GatedEngine:
        options = self.next_options if self.engines and self.next_options else self._options
        self.engines.append(GatedEngine(options))
        return self.engines[-1]

    @property
    def engine(self) -> GatedEngine:
        return self.engines[-1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def until(self, phase: Phase) -> None:
        """Wait for a phase."""
        await eventually(lambda: self.server.driver.phase is phase)

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)


@contextlib.asynccontextmanager
async def serving(
    *,
    options: SimulatedOptions | None = None,
    wait: bool = True,
    cache_dir: Path | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A server with these settings, stopped at the end whatever happened."""
    simulated = options or SimulatedOptions(fixed_ms=0, slope_us_per_token=0)
    given: dict[str, Any] = {
        "engine": "simulated",
        "grpc_listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "batch_tokens_target": 64,
        **settings,
    }
    running = Running(load_settings(options=given, environment={}), simulated, cache_dir)
    await running.server.start()
    try:
        if wait:
            await running.until(Phase.SERVING)
        yield running
    finally:
        for engine in running.engines:
            engine.gate.set()
        if not running.server.driver.halted.done():
            running.server.drain()
        async with asyncio.timeout(WAIT_S):
            await running.server.ended()


class Stream:
    """A client's end of `EmbedStream`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: StreamCall = pb_grpc.EmbeddingServiceStub(channel).EmbedStream()
        self.states: list[pb.ServerState] = []
        self.next_id = 0

    async def __aenter__(self) -> Stream:
        first = await self.read()
        assert first is not None
        assert first.request_id == 0
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()

    async def read(self) -> pb.EmbedStreamResponse | None:
        """The next message; None at the end of the stream."""
        async with asyncio.timeout(WAIT_S):
            message = await self.call.read()
        if not isinstance(message, pb.EmbedStreamResponse):
            return None
        assert message.HasField("state"), "every message carries a state"
        self.states.append(message.state)
        return message

    async def end(self) -> None:
        """Read to the end of the stream."""
        while await self.read() is not None:
            pass

    async def send(self, *inputs: pb.Input | str, **fields: Any) -> int:
        """Send a request; returns its id."""
        self.next_id = int(fields.pop("request_id", self.next_id + 1))
        request = pb.EmbedStreamRequest(request_id=self.next_id, model=MODEL)
        for name, value in fields.items():
            setattr(request, name, value)
        for given in inputs:
            request.inputs.append(pb.Input(text=given) if isinstance(given, str) else given)
        await self.call.write(request)
        return request.request_id

    async def answers(self, *request_ids: int) -> dict[int, list[pb.EmbedStreamResponse]]:
        """All messages of these requests, until each has had its last."""
        found: dict[int, list[pb.EmbedStreamResponse]] = {key: [] for key in request_ids}
        left = set(request_ids)
        while left:
            message = await self.read()
            assert message is not None, "the stream ended"
            if message.request_id:
                found[message.request_id].append(message)
                if message.last:
                    left.discard(message.request_id)
        return found

    async def until_running(self, request_id: int) -> None:
        """Read until a pass with this request is announced."""
        while request_id not in self.states[-1].running:
            assert await self.read() is not None


def stub_of(channel: grpc.aio.Channel) -> pb_grpc.EmbeddingServiceAsyncStub:
    """The unary calls, typed as what an aio channel gives."""
    stub: Any = pb_grpc.EmbeddingServiceStub(channel)
    return stub  # type: ignore[no-any-return]


def reasons(status: status_pb2.Status) -> tuple[str, str | None, bool]:
    """Reason, field and whether there is a retry delay, of a Status's details."""
    reason, field, retry = "", None, False
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo.FromString(detail.value)
            assert info.domain == "embedding.v1"
            reason = info.reason
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest.FromString(detail.value)
            field = bad.field_violations[0].field
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
            retry = delay.seconds > 0 or delay.nanos > 0
    return reason, field, retry


def error_status(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The Status in a failed call's trailing metadata."""
    metadata = dict(error.trailing_metadata() or ())
    details = metadata["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    status = status_pb2.Status.FromString(details)
    assert status.code == error.code().value[0]
    return status
