"""A model server in this process whose every message the test decides.

It stands in for the real one where a test needs a fault or an order that the real one can't be
asked for; `tests/contract/test_model_servers.py` runs what both can do against both.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import embedding_service_pb2_grpc as pb_grpc
from protos.embedding.v1 import query_pb2

DIMENSIONS = 4
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def state(
    *, busy_ms: float = 0.0, draining: bool = False, running: tuple[int, ...] = ()
) -> pb.ServerState:
    """A ServerState with plain limits."""
    return pb.ServerState(
        batch_tokens_target=600,
        batch_tokens_max=2400,
        window_tokens=1200,
        inputs_max=1024,
        request_bytes_max=1 << 24,
        busy_ms=busy_ms,
        draining=draining,
        running=running,
    )


def answer(request: pb.EmbedStreamRequest) -> pb.EmbedStreamResponse:
    """All inputs of a request in one group; each vector is the text's length, four times."""
    rows = len(request.inputs)
    return pb.EmbedStreamResponse(
        request_id=request.request_id,
        last=True,
        queue_us=100,
        inference_us=5000,
        groups=[
            pb.EmbeddingGroup(
                encoding=query_pb2.ENCODING_FLOAT32,
                dimensions=DIMENSIONS,
                indexes=range(rows),
                tokens=[3] * rows,
                embeddings=b"".join(
                    struct.pack("<4f", *[float(len(entry.text))] * DIMENSIONS)
                    for entry in request.inputs
                ),
            )
        ],
        state=state(),
    )


class FakeModelServer(pb_grpc.EmbeddingServiceServicer):
    """Serves one model; requests wait in `requests`, and `send` puts messages on the stream."""

    def __init__(self, *, model: str = "minilm", revision: str = "r1") -> None:
        self.model = model
        self.revision = revision
        self.answering = True
        """Answer every request at once; else the test does."""
        self.requests: asyncio.Queue[pb.EmbedStreamRequest] = asyncio.Queue()
        self.streams_opened = 0
        self.streams_open = 0
        self.stream_closed = asyncio.Event()
        self.first_state: pb.ServerState | None = state()
        self._out: asyncio.Queue[pb.EmbedStreamResponse | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        """Listen on the loopback interface and say SERVING."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_EmbeddingServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self.set_health(SERVING)
        await self._server.start()

    async def stop(self) -> None:
        """Cut every stream."""
        if self._server is not None:
            await self._server.stop(0)

    async def set_health(self, status: object) -> None:
        """Change what the health service says."""
        await self._health.set("", status)

    def send(self, response: pb.EmbedStreamResponse | None) -> None:
        """Put a message on the open stream; None ends it with OK."""
        self._out.put_nowait(response)

    async def Embed(  # noqa: N802 - gRPC's name
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.EmbedResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "the fake streams only")

    async def GetModelInfo(  # noqa: N802 - gRPC's name
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.GetModelInfoResponse:
        if request.model != self.model:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this server serves {self.model}")
        return pb.GetModelInfoResponse(
            model=self.model, model_revision=self.revision, dimensions=DIMENSIONS
        )

    async def EmbedStream(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[pb.EmbedStreamRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[pb.EmbedStreamResponse]:
        self.streams_opened += 1
        self.streams_open += 1
        self._out = asyncio.Queue()
        out = self._out
        reader = asyncio.create_task(self._read(request_iterator, out))
        try:
            yield pb.EmbedStreamResponse(state=self.first_state)
            while (response := await out.get()) is not None:
                yield response
        finally:
            self.streams_open -= 1
            self.stream_closed.set()
            reader.cancel()

    async def _read(
        self,
        request_iterator: AsyncIterator[pb.EmbedStreamRequest],
        out: asyncio.Queue[pb.EmbedStreamResponse | None],
    ) -> None:
        async for request in request_iterator:
            if self.answering:
                out.put_nowait(answer(request))
            else:
                self.requests.put_nowait(request)
