"""`embedding.v1.EmbeddingService` on grpc.aio: messages in, messages out, nothing decided.

Knows which call a message belongs to; requests, answers and refusals are the driver's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_server.core.failures import Failure, model_unknown, not_started
from model_server.server.driver import Driver
from model_server.server.statuses import abort
from model_server.server.unary import UnaryCall
from model_server.vectors import Encoding
from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import embedding_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from model_server.server.sessions import StreamContext

    EmbedContext = grpc.aio.ServicerContext[pb.EmbedRequest, pb.EmbedResponse]
    InfoContext = grpc.aio.ServicerContext[pb.GetModelInfoRequest, pb.GetModelInfoResponse]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["EmbeddingService"].full_name


class EmbeddingService(pb_grpc.EmbeddingServiceServicer):
    """See the module."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def Embed(  # noqa: N802 - gRPC's name
        self, request: pb.EmbedRequest, context: EmbedContext
    ) -> pb.EmbedResponse:
        """Embed a list of inputs; the outputs are in their order."""
        call = UnaryCall(len(request.inputs), float_values=request.float_values)
        key = self._driver.take_unary(request, call)
        if isinstance(key, Failure):
            await abort(context, key)
        try:
            answer = await call.done
        finally:
            self._driver.cancel(key)  # does nothing for an answered request
        if isinstance(answer, Failure):
            await abort(context, answer)
        info = self._driver.info
        answer.model = self._driver.model
        answer.model_revision = info.revision if info is not None else ""
        return answer

    async def EmbedStream(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.EmbedStreamRequest], context: StreamContext
    ) -> None:
        """Requests in, answers out pass by pass; the session reads and writes by itself."""
        del request_iterator
        failure = self._driver.not_serving()
        if failure is not None:
            await abort(context, failure)
        session = self._driver.open_stream()
        try:
            await session.run(context)
        finally:
            self._driver.close_stream(session)

    async def GetModelInfo(  # noqa: N802 - gRPC's name
        self, request: pb.GetModelInfoRequest, context: InfoContext
    ) -> pb.GetModelInfoResponse:
        """What is served, and with which limits."""
        driver = self._driver
        started = driver.started
        if started is None:
            await abort(context, not_started(f"The server is {driver.phase}."))
        if request.HasField("model") and request.model != driver.model:
            await abort(context, model_unknown(request.model, driver.model))
        info, limits = started.engine.info, driver.scheduler.limits
        points = started.found.curve.points if started.found is not None else ()
        return pb.GetModelInfoResponse(
            model=driver.model,
            model_revision=info.revision,
            dimensions=info.dimensions,
            matryoshka_dimensions=info.matryoshka_dimensions,
            input_tokens_max=info.input_tokens_max,
            prompts=info.prompts,
            encodings=[int(encoding) for encoding in Encoding],  # type: ignore[misc]
            batch_tokens_target=limits.batch_tokens_target,
            batch_tokens_max=limits.batch_tokens_max,
            batch_tokens_target_source=str(driver.target_source),
            curve=[
                pb.CurvePoint(tokens=round(point.tokens), pass_ms=point.pass_ms) for point in points
            ],
            engine=info.engine,
            versions=info.versions,
            device=info.device,
            precision=info.precision,
        )
