"""One stream to one address of a model server, opened again whenever it ends.

Invariants:
- Events are emitted in the order in which their messages came, all of a message in one list.
- Every claim given to `send` ends with its last answer or one `ClaimLost`. When a stream ends, the
  server is first reported as draining (so that nothing is sent to it while the losses are
  handled), then every unanswered claim as lost, then the server as down.
- A claim counts as not started only if its write never began.

It decides nothing: what to send, what a loss means, and when a silent stream is cut are the core's.
The one policy here is the connection's: each attempt has a channel of its own, so that no backoff
or broken connection of an earlier one lives on, and attempts wait between BACKOFF_S_MIN and _MAX.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from aggregator.core.effects import Dispatch
from aggregator.core.events import (
    ClaimAnswered,
    ClaimLost,
    Event,
    Loss,
    ServerChanged,
    ServerLimits,
    ServerPhase,
)
from aggregator.wire.rpc import build_request, check_response, server_limits
from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import embedding_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    EmbedStreamCall = grpc.aio.StreamStreamCall[pb.EmbedStreamRequest, pb.EmbedStreamResponse]

MESSAGE_BYTES_MAX = 64 * 1024 * 1024
CONNECT_TIMEOUT_S = 5.0
ENDED_IN_ORDER = "the server ended the stream"
"""With the status OK: it says so when it is stopped, not when it or the way to it broke."""
SERVING = health_pb2.HealthCheckResponse.SERVING
BACKOFF_S_MIN = 0.1
BACKOFF_S_MAX = 10.0
BACKOFF_FACTOR = 1.5
"""2 s are reached after 6 s, the maximum after 40: an address that stays dead is tried rarely (each
failed call costs grpc.aio about 0.5 kB for good, measured with grpcio 1.85)."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # The server must allow pings this often (its default is every 5 minutes), without calls too.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A new channel is a new connection, without the backoff of the one before.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # Only the settings read the environment.
    ("grpc.enable_http_proxy", 0),
)

Emit = Callable[[list[Event]], None]


class StreamFaultError(Exception):
    """The server broke the protocol; its stream is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What all streams of one model share."""

    model: str
    priority: pb.Priority = pb.PRIORITY_INTERACTIVE


@dataclass(slots=True)
class _Claim:
    """A claim that has no last answer yet."""

    dispatch: Dispatch
    writing: bool = False
    """Its write has begun: what becomes of it if the stream dies is unknown."""


@dataclass(slots=True)
class _Server:
    """What the server of the current stream said of itself."""

    revision: str
    dimensions: int
    limits: ServerLimits | None = None
    serving: bool = True


class ServerStream:
    """Keeps a stream to `address` open. `run` is its task; everything is called on its loop."""

    def __init__(
        self,
        address: str,
        *,
        authority: str,
        options: StreamOptions,
        emit: Emit,
        clock_ns: Callable[[], int],
        log: FilteringBoundLogger,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare it; nothing is opened before `run`.

        Args:
            address: IP:PORT, the server's name towards the core.
            authority: The configured HOST:PORT that it was resolved from.
            options: Shared by the streams of the model.
            emit: Takes events, in order; called on the loop.
            clock_ns: Monotonic.
            log: Gets one line for each change, never one for each message.
            on_ended: Called when a stream or an attempt to open one ended.
        """
        self.address = address
        self.opened = 0
        """Streams that became ready."""
        self.failed = 0
        """Attempts that failed, and streams that broke; not those that the server ended in order.
        """
        self._authority = authority
        self._options = options
        self._emit = emit
        self._clock_ns = clock_ns
        self._log = log.bind(model=options.model, server=address)
        self._on_ended = on_ended
        self._claims: dict[int, _Claim] = {}
        self._to_write: deque[_Claim] = deque()
        self._something_to_write = asyncio.Event()
        self._drained = asyncio.Event()
        self._retired = False
        self._call: EmbedStreamCall | None = None
        self._cut_message: str | None = None
        self._server: _Server | None = None
        self._problem = "not tried yet"

    @property
    def phase(self) -> ServerPhase:
        """As last reported to the core."""
        server = self._server
        if server is None or server.limits is None:
            return ServerPhase.DOWN
        if server.limits.draining or self._retired or not server.serving:
            return ServerPhase.DRAINING
        return ServerPhase.READY

    @property
    def problem(self) -> str:
        """Why there is no stream; empty while there is one."""
        return self._problem

    # Commands ------------------------------------------------------------------------------------

    def send(self, dispatch: Dispatch) -> None:
        """Send a claim; without a stream it is reported lost, not started, from the loop."""
        if self.phase is ServerPhase.DOWN:
            lost: list[Event] = [
                self._lost(dispatch.claim_id, Loss.NOT_STARTED, "the stream has ended")
            ]
            asyncio.get_running_loop().call_soon(self._emit, lost)
            return
        claim = _Claim(dispatch)
        self._claims[dispatch.claim_id] = claim
        self._to_write.append(claim)
        self._something_to_write.set()

    def cut(self, message: str) -> None:
        """End the stream at once; what is unanswered on it becomes lost."""
        if self._call is not None:
            self._cut_message = message
            self._call.cancel()

    def retire(self) -> None:
        """Nothing more is to be sent here; `drained` comes when nothing is unanswered."""
        self._retired = True
        self._announce_again()
        self._set_drained()

    def reinstate(self) -> None:
        """Undo `retire`."""
        self._retired = False
        self._drained.clear()
        self._announce_again()

    async def drained(self) -> None:
        """Wait until it is retired and nothing is unanswered."""
        await self._drained.wait()

    # The task ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connect, serve, wait, again and again, until cancelled."""
        backoff_s = BACKOFF_S_MIN
        while True:
            opened = self.opened
            message = await self._attempt()
            if _being_cancelled():
                # gRPC turned the cancellation into an error of the call that it met.
                self._report_end(message)
                raise asyncio.CancelledError
            if self.opened > opened:
                backoff_s = BACKOFF_S_MIN
            self.failed += message != ENDED_IN_ORDER
            self._no_stream(message, claims_lost=len(self._claims))
            self._report_end(message)
            self._on_ended()
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(BACKOFF_FACTOR * backoff_s, BACKOFF_S_MAX)

    async def _attempt(self) -> str:
        """One channel with one stream; return why it ended. Cancellation passes through."""
        channel = grpc.aio.insecure_channel(
            _target(self.address),
            options=(*CHANNEL_OPTIONS, ("grpc.default_authority", self._authority)),
        )
        self._cut_message = None
        try:
            return await self._serve(channel)
        except grpc.aio.AioRpcError as error:
            return self._cut_message or f"{error.code().name}: {error.details()}"
        except (StreamFaultError, TimeoutError) as error:
            return str(error) or "no answer in time"
        except asyncio.CancelledError:
            # Reading a call that we cancelled raises this too: only a cut is ours to catch.
            if self._cut_message is None or _being_cancelled():
                self._report_end("the stream is being closed")
                raise
            return self._cut_message
        finally:
            self._call = None
            await channel.close()

    async def _serve(self, channel: grpc.aio.Channel) -> str:
        stub = pb_grpc.EmbeddingServiceStub(channel)
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        helpers: list[asyncio.Task[None]] = []
        try:
            await self._until_serving(watch)
            info = await stub.GetModelInfo(
                pb.GetModelInfoRequest(model=self._options.model), timeout=CONNECT_TIMEOUT_S
            )
            self._server = _Server(info.model_revision, info.dimensions)
            call = self._call = stub.EmbedStream()
            helpers.append(asyncio.create_task(self._write(call)))
            helpers.append(asyncio.create_task(self._watch(watch)))
            for helper in helpers:
                helper.add_done_callback(lambda done: _stop_reading_after_a_bug(done, call))
            return await self._read(call)
        finally:
            watch.cancel()
            if self._call is not None:
                self._call.cancel()
            for helper in helpers:
                helper.cancel()
            for outcome in await asyncio.gather(*helpers, return_exceptions=True):
                if isinstance(outcome, Exception):
                    raise outcome

    async def _until_serving(self, watch: Any) -> None:
        """Wait for as long as the server is loading; the stub of health has no types."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            answer = await watch.read()
        while answer is not grpc.aio.EOF:
            if answer.status == SERVING:
                return
            self._no_stream("the server is up but not serving", claims_lost=0)
            answer = await watch.read()
        raise StreamFaultError("the server ended the health watch")

    async def _read(self, call: EmbedStreamCall) -> str:
        """Emit what comes until the stream ends; return why it did."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            response = await call.read()
        if isinstance(response, pb.EmbedStreamResponse) and not response.HasField("state"):
            raise StreamFaultError("the first message is not a ServerState")
        while isinstance(response, pb.EmbedStreamResponse):
            self._emit(self._events_of(response))
            response = await call.read()
        return ENDED_IN_ORDER

    def _events_of(self, response: pb.EmbedStreamResponse) -> list[Event]:
        """What a message says, the answer first: it frees the room that the state tells of."""
        events: list[Event] = []
        if response.request_id:
            events.append(self._answered(response))
        if response.HasField("state"):
            server = self._server
            if server is None:
                raise StreamFaultError("a message after the end of its stream")
            first = server.limits is None
            server.limits = server_limits(response.state)
            events.append(self._changed(server, server.limits, response.state.running))
            if first:
                self.opened += 1
                self._problem = ""
                self._log.info("stream opened", model_revision=server.revision)
        return events

    def _answered(self, response: pb.EmbedStreamResponse) -> Event:
        claim = self._claims.get(response.request_id)
        if claim is None or self._server is None:
            raise StreamFaultError(f"an answer to request {response.request_id}, which is not open")
        answer = check_response(response, claim.dispatch.queries, self._server.dimensions)
        if answer.last:
            del self._claims[response.request_id]
            self._set_drained()
        return ClaimAnswered(model=self._options.model, server=self.address, answer=answer)

    async def _write(self, call: EmbedStreamCall) -> None:
        """Write claims in order; a failure shows at the reading side, which ends the stream."""
        priority = self._options.priority
        while True:
            while not self._to_write:
                self._something_to_write.clear()
                await self._something_to_write.wait()
            claim = self._to_write.popleft()
            claim.writing = True
            try:
                request = build_request(claim.dispatch, self._clock_ns(), priority=priority)
            except ValueError as error:  # Protobuf refuses the text: its attempts are counted
                self._log.error("claim not written", error=str(error))
                self._claims.pop(claim.dispatch.claim_id, None)
                self._emit([self._lost(claim.dispatch.claim_id, Loss.UNKNOWN, str(error))])
                continue
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

    async def _watch(self, watch: Any) -> None:
        """Report changes of the server's health while its stream stays open."""
        try:
            while (answer := await watch.read()) is not grpc.aio.EOF:
                server = self._server
                serving = answer.status == SERVING
                if server is not None and server.serving != serving:
                    server.serving = serving
                    self._log.info("health changed", serving=serving)
                    self._announce_again()
        except grpc.aio.AioRpcError:
            return  # the stream tells soon enough

    # What the core is told -----------------------------------------------------------------------

    def _changed(
        self, server: _Server, limits: ServerLimits, running: Iterable[int] = ()
    ) -> ServerChanged:
        return ServerChanged(
            model=self._options.model,
            server=self.address,
            phase=self.phase,
            limits=limits,
            running=tuple(running),
            model_revision=server.revision,
            dimensions=server.dimensions,
        )

    def _announce_again(self) -> None:
        """Tell the phase anew; what the server said of being busy is no longer current."""
        server = self._server
        if server is not None and server.limits is not None:
            self._emit([self._changed(server, replace(server.limits, busy_ms=0.0))])

    def _lost(self, claim_id: int, loss: Loss, message: str) -> ClaimLost:
        return ClaimLost(
            model=self._options.model,
            server=self.address,
            claim_id=claim_id,
            loss=loss,
            message=message,
        )

    def _no_stream(self, message: str, *, claims_lost: int) -> None:
        """Remember and log why there is no stream, once for as long as it stays the same."""
        if message != self._problem:
            self._log.warning("no stream", reason=message, claims_lost=claims_lost)
        self._problem = message

    def _report_end(self, message: str) -> None:
        """Report the end of a stream; of an attempt that did not come to one there is no word."""
        server, self._server = self._server, None
        claims = list(self._claims.values())
        self._claims.clear()
        self._to_write.clear()
        self._set_drained()
        if server is None or server.limits is None:
            return
        draining = replace(server.limits, draining=True)
        events: list[Event] = [
            ServerChanged(
                model=self._options.model,
                server=self.address,
                phase=ServerPhase.DRAINING,
                limits=draining,
                model_revision=server.revision,
                dimensions=server.dimensions,
            )
        ]
        for claim in claims:
            loss = Loss.UNKNOWN if claim.writing else Loss.NOT_STARTED
            events.append(self._lost(claim.dispatch.claim_id, loss, message))
        events.append(
            ServerChanged(model=self._options.model, server=self.address, phase=ServerPhase.DOWN)
        )
        self._emit(events)

    def _set_drained(self) -> None:
        if self._retired and not self._claims:
            self._drained.set()


def _target(address: str) -> str:
    """gRPC's name for an IP address: no resolver and no scheme is guessed."""
    return f"{'ipv6' if address.startswith('[') else 'ipv4'}:{address}"


def _stop_reading_after_a_bug(done: asyncio.Task[None], call: EmbedStreamCall) -> None:
    """What a helper raised must not wait for the stream's own end to be seen."""
    if not done.cancelled() and done.exception() is not None:
        call.cancel()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
