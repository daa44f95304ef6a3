"""Model servers that lie: each serves one model and answers honestly until a text asks for its lie.

Faults that the real server can't be asked for. They run in a thread of this process, one port each,
so that what one does to its own breaker touches no other.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Self

import grpc
import numpy as np
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import query_pb2
from tests.harness.fake_model_server import FakeModelServer, state

MARKER = "please lie"
DIMENSIONS = 8
START_S = 30.0

Response = pb.EmbedStreamResponse
Lie = Callable[[pb.EmbedStreamRequest, Response, list[int]], "list[Response | None]"]
"""(request, honest answer, inputs that ask for it) -> what is sent; None: the stream ends."""

_FORMATS: dict[int, tuple[int, str]] = {
    1: (query_pb2.ENCODING_FLOAT32, "<f4"),
    2: (query_pb2.ENCODING_FLOAT16, "<f2"),
    3: (query_pb2.ENCODING_INT8, "<i1"),
}


def honest(request: pb.EmbedStreamRequest, dimensions: int = DIMENSIONS) -> Response:
    """A group for each input, in their order."""
    response = Response(request_id=request.request_id, last=True, inference_us=100, state=state())
    for index, entry in enumerate(request.inputs):
        encoding, dtype = _FORMATS[entry.encoding or 1]
        # Numbers whose JSON is as long as a real vector's.
        numbers = np.linspace(0.1, 0.9, dimensions) * (127 if encoding == 3 else 1)
        response.groups.append(
            pb.EmbeddingGroup(
                encoding=encoding,  # type: ignore[arg-type]
                dimensions=dimensions,
                indexes=[index],
                tokens=[3],
                embeddings=numbers.astype(dtype).tobytes(),
                scales=[0.5] if encoding == 3 else [],
            )
        )
    return response


def status(code: int, reason: str = "", *, domain: str = "embedding.v1") -> status_pb2.Status:
    """A Status with an ErrorInfo, if there is a reason."""
    made = status_pb2.Status(code=code, message="a lie")
    if reason:
        detail = AnyMessage()
        detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain))
        made.details.append(detail)
    return made


def changed(change: Callable[[pb.EmbeddingGroup], None]) -> Lie:
    """Change the groups of the inputs that ask for it."""

    def lie(
        _request: pb.EmbedStreamRequest, response: Response, indexes: list[int]
    ) -> list[Response | None]:
        for index in indexes:
            change(response.groups[index])
        return [response]

    return lie


def failed(error: status_pb2.Status | None, *, vector_too: bool = False) -> Lie:
    """Those inputs get an error, None: no answer at all; `vector_too`: besides their vector."""

    def lie(
        _request: pb.EmbedStreamRequest, response: Response, indexes: list[int]
    ) -> list[Response | None]:
        if not vector_too:
            kept = [group for group in response.groups if group.indexes[0] not in indexes]
            del response.groups[:]
            response.groups.extend(kept)
        if error is not None:
            response.errors.extend(pb.InputError(index=i, status=error) for i in indexes)
        return [response]

    return lie


def refused(error: status_pb2.Status, *, vectors_too: bool = False) -> Lie:
    """The whole request is refused."""

    def lie(
        _request: pb.EmbedStreamRequest, response: Response, _indexes: list[int]
    ) -> list[Response | None]:
        if not vectors_too:
            del response.groups[:]
        response.status.CopyFrom(error)
        return [response]

    return lie


def doubled(
    _request: pb.EmbedStreamRequest, response: Response, indexes: list[int]
) -> list[Response | None]:
    """In one message."""
    response.groups.append(response.groups[indexes[0]])
    return [response]


def doubled_later(
    _request: pb.EmbedStreamRequest, response: Response, indexes: list[int]
) -> list[Response | None]:
    """A whole and right answer, and then some of it again."""
    again = Response(request_id=response.request_id, last=True, state=state())
    again.groups.append(response.groups[indexes[0]])
    response.last = False
    return [response, again]


def answered_again(
    _request: pb.EmbedStreamRequest, response: Response, _indexes: list[int]
) -> list[Response | None]:
    """After the last message of its request, which is a fault of the stream."""
    return [response, response]


def states_empty(
    _request: pb.EmbedStreamRequest, response: Response, _indexes: list[int]
) -> list[Response | None]:
    """It says that it is busy, and nothing of its limits."""
    response.state.CopyFrom(pb.ServerState(busy_ms=5.0))
    return [Response(state=response.state), response, Response(state=pb.ServerState())]


def times_absurd(
    _request: pb.EmbedStreamRequest, response: Response, _indexes: list[int]
) -> list[Response | None]:
    """Its pass took ages, and its queue less than nothing."""
    response.inference_us = 2**63 - 1
    response.queue_us = -(2**63)
    response.state.busy_ms = math.inf
    return [response, Response(state=state())]


def silent(
    _request: pb.EmbedStreamRequest, _response: Response, _indexes: list[int]
) -> list[Response | None]:
    """Nothing, ever."""
    return []


def announced(request: pb.EmbedStreamRequest) -> Response:
    """Its pass starts."""
    return Response(state=state(busy_ms=50.0, running=(request.request_id,)))


def stream_dies(
    request: pb.EmbedStreamRequest, _response: Response, _indexes: list[int]
) -> list[Response | None]:
    """As if the process had died in the pass."""
    return [announced(request), None]


def engine_dies(
    request: pb.EmbedStreamRequest, response: Response, _indexes: list[int]
) -> list[Response | None]:
    """All inputs of its pass are told so; the stream goes on."""
    everyone = list(range(len(request.inputs)))
    died = status(14, "ENGINE_DIED")
    return [announced(request), *failed(died)(request, response, everyone)]


def bytes_of(change: Callable[[bytes], bytes]) -> Lie:
    """Change the vectors' bytes."""

    def apply(group: pb.EmbeddingGroup) -> None:
        group.embeddings = change(group.embeddings)

    return changed(apply)


def scales_of(scales: list[float]) -> Lie:
    """Give those scales."""

    def apply(group: pb.EmbeddingGroup) -> None:
        group.scales[:] = scales

    return changed(apply)


def with_field(name: str, value: int) -> Lie:
    """Set a field of the groups."""
    return changed(lambda group: setattr(group, name, value))


def with_column(name: str, values: list[int]) -> Lie:
    """Give a group's indexes or tokens other values."""

    def apply(group: pb.EmbeddingGroup) -> None:
        getattr(group, name)[:] = values

    return changed(apply)


NOT_A_NUMBER = np.full(1, math.nan, "<f4").tobytes()
INFINITE_HALF = np.full(1, math.inf, "<f2").tobytes()


class LyingServer(FakeModelServer):
    """One of them; `lie` None: it is honest."""

    def __init__(
        self,
        lie: Lie | None,
        *,
        model: str,
        dimensions: int = DIMENSIONS,
        lied_about: set[str] | None = None,
    ) -> None:
        """`lied_about`: shared with others; a text that is in it is answered honestly."""
        super().__init__(model=model)
        self.dimensions = dimensions
        self.lies_told = 0
        self._lie = lie
        self._lied_about = lied_about

    async def GetModelInfo(  # noqa: N802 - gRPC's name
        self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> pb.GetModelInfoResponse:
        response = await super().GetModelInfo(request, context)
        response.dimensions = self.dimensions
        return response

    def _asked(self, request: pb.EmbedStreamRequest) -> list[int]:
        """The inputs that ask for the lie."""
        asked = [i for i, entry in enumerate(request.inputs) if MARKER in entry.text]
        if self._lied_about is not None:
            asked = [i for i in asked if request.inputs[i].text not in self._lied_about]
            self._lied_about.update(request.inputs[i].text for i in asked)
        return asked

    async def _read(
        self,
        request_iterator: AsyncIterator[pb.EmbedStreamRequest],
        out: asyncio.Queue[pb.EmbedStreamResponse | None],
    ) -> None:
        async for request in request_iterator:
            response = honest(request, self.dimensions)
            asked = self._asked(request) if self._lie is not None else []
            if self._lie is None or not asked:
                out.put_nowait(response)
                continue
            self.lies_told += 1
            for message in self._lie(request, response, asked):
                out.put_nowait(message)


class LyingServers:
    """Runs them in a thread; a context manager."""

    def __init__(self, servers: Iterable[LyingServer]) -> None:
        """Each gets a free port at the start."""
        self.servers = list(servers)
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(START_S), "the lying servers did not start"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        for server in self.servers:
            await server.start()
        self._ready.set()
        await self._stop.wait()
        for server in self.servers:
            await server.stop()

    @property
    def addresses(self) -> dict[str, list[str]]:
        """By model."""
        found: dict[str, list[str]] = {}
        for server in self.servers:
            found.setdefault(server.model, []).append(f"127.0.0.1:{server.port}")
        return found
