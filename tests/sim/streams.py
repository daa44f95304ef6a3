"""An aggregator's streams to its model servers, in virtual time.

`SimStream` is the real `ServerStream` but for its task: what is sent, checked, emitted and reported
when a stream ends is the adapter's own code; connecting, reading and writing are played here, since
they are gRPC's. `SimServers` is what `ModelServers` does with addresses that come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aggregator.adapters import server_stream
from aggregator.adapters.server_stream import ServerStream, StreamFaultError, StreamOptions
from aggregator.core.effects import Cancel, Dispatch
from aggregator.core.events import ClaimLost, Event, Loss, ServerPhase
from aggregator.wire.rpc import build_request
from protos.embedding.v1 import embedding_service_pb2 as pb
from tests.sim.doses import Doses
from tests.sim.kernel import MS, SECOND, Kernel, Owner
from tests.sim.network import Connection
from tests.sim.servers import ModelServer
from tests.sim.shims import SimLoop
from tests.sim.texts import DIMENSIONS

Emit = Callable[[list[Event]], None]


class SimStream(ServerStream):
    """A stream to one server."""

    def __init__(
        self,
        kernel: Kernel,
        doses: Doses,
        owner: Owner,
        loop: SimLoop,
        *,
        model: str,
        server: ModelServer,
        emit: Emit,
        log: Any,
    ) -> None:
        super().__init__(
            server.address,
            authority=server.address,
            options=StreamOptions(model=model),
            emit=emit,
            clock_ns=owner.monotonic_ns,
            log=log,
        )
        self.owner = owner
        self.connection: Connection | None = None
        self.closed = False
        self._kernel = kernel
        self._doses = doses
        self._loop = loop
        self._model_server = server
        self._backoff_s = server_stream.BACKOFF_S_MIN
        self._first = True
        self._write_due = False

    # Connecting ----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Try; where it fails, again after a backoff that grows."""
        if self.closed:
            return
        server = self._model_server
        if not server.up or self._kernel.chance(self._doses.chance("connection refused")):
            if server.up:
                self._kernel.fire("connection refused")
            self._try_again()
        elif server.serving:
            delay_ns = self._kernel.delay_ns(MS // 2, 20 * MS)
            self._kernel.after(delay_ns, self.owner, "connected", self._connected)
        else:  # it watches the server's health
            server.waiting.append(self._server_is_up)

    def _server_is_up(self) -> None:
        if self.owner.alive:
            delay_ns = self._kernel.delay_ns(MS, 20 * MS)
            self._kernel.after(delay_ns, self.owner, "serving", self.connect)

    def _try_again(self) -> None:
        wait_s = self._backoff_s * self._kernel.rng.uniform(0.5, 1.0)
        self._backoff_s = min(
            server_stream.BACKOFF_FACTOR * self._backoff_s, server_stream.BACKOFF_S_MAX
        )
        self._kernel.after(int(wait_s * SECOND), self.owner, "connect", self.connect)

    def _connected(self) -> None:
        if self.closed:
            return
        server = self._model_server
        if not server.serving:
            self.connect()
            return
        self._server = server_stream._Server(server.revision, DIMENSIONS)
        self._first = True
        connection = self.connection = server.accept(self)
        self._call = _Call(connection)  # type: ignore[assignment]

    # Reading -------------------------------------------------------------------------------------

    def received(self, connection: Connection, response: pb.EmbedStreamResponse) -> None:
        if not self.closed:
            self._loop.call_soon(self._read_one, connection, response)

    def _read_one(self, connection: Connection, response: pb.EmbedStreamResponse) -> None:
        if connection is not self.connection:
            return
        opened = self.opened
        try:
            self._check_first(response)
            events = self._events_of(response)
        except StreamFaultError as fault:
            self._kernel.fire("stream: cut for a fault of the protocol")
            connection.cut(str(fault))
            return
        if response.last:
            connection.claims.pop(response.request_id, None)
        if self.opened > opened:
            self._backoff_s = server_stream.BACKOFF_S_MIN
        self._emit(events)

    def _check_first(self, response: pb.EmbedStreamResponse) -> None:
        if self._first and not response.HasField("state"):
            raise StreamFaultError("the first message is not a ServerState")
        self._first = False

    def ended(self, connection: Connection, message: str) -> None:
        if not self.closed:
            self._loop.call_soon(self._end, connection, message)

    def _end(self, connection: Connection, message: str) -> None:
        if connection is not self.connection:
            return
        self.connection = None
        self._call = None
        self._kernel.fire("stream: ended")
        self._report_end(self._cut_message or message)
        self._cut_message = None
        self._try_again()

    # Writing -------------------------------------------------------------------------------------

    def send(self, dispatch: Dispatch) -> None:
        super().send(dispatch)
        self._write_soon()

    def _write_soon(self) -> None:
        if self._to_write and not self._write_due:
            self._write_due = True
            delay_ns = self._kernel.delay_ns(20_000, 400_000)
            self._kernel.after(delay_ns, self.owner, "write", self._write_one)

    def _write_one(self) -> None:
        self._write_due = False
        connection = self.connection
        if connection is None or not self._to_write:
            return
        if connection.stalled_until_ns > self._kernel.now_ns:
            # Flow control: the write of the next claim does not begin.
            self._write_due = True
            self._kernel.at(connection.stalled_until_ns, self.owner, "write", self._write_one)
            return
        claim = self._to_write.popleft()
        claim.writing = True
        request = build_request(claim.dispatch, self.owner.monotonic_ns())
        if connection.open:
            connection.to_server(request, claim.dispatch)
        else:
            connection.server.note_unsent(claim.dispatch)
        self._write_soon()

    def close(self) -> None:
        self.closed = True
        if self.connection is not None:
            self.connection.cut("the process ends")


class _Call:
    """What can be cancelled of a gRPC call."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def cancel(self) -> None:
        self._connection.kernel.fire("stream: cancelled for its silence")
        self._connection.cut("cancelled")


class SimServers:
    """The streams of one model: the driver's port."""

    def __init__(
        self,
        kernel: Kernel,
        doses: Doses,
        owner: Owner,
        loop: SimLoop,
        *,
        model: str,
        emit: Emit,
        log: Any,
    ) -> None:
        self._model = model
        self._emit = emit
        self._loop = loop

        def make(server: ModelServer) -> SimStream:
            return SimStream(
                kernel, doses, owner, loop, model=model, server=server, emit=emit, log=log
            )

        self._make = make
        self.streams: dict[str, SimStream] = {}

    def found(self, servers: Mapping[str, ModelServer]) -> None:
        """What a look-up of the names gives: new addresses get streams, old ones are retired."""
        for address, server in servers.items():
            stream = self.streams.get(address)
            if stream is None:
                stream = self.streams[address] = self._make(server)
                stream.connect()
            elif stream._retired:
                stream.reinstate()
        for address, stream in list(self.streams.items()):
            if address not in servers and not stream._retired:
                stream.retire()
            if stream._retired and not stream._claims:
                del self.streams[address]
                stream.close()
                stream._report_end("its address is gone")

    def send(self, dispatch: Dispatch) -> None:
        stream = self.streams.get(dispatch.server)
        if stream is not None:
            stream.send(dispatch)
            return
        lost: list[Event] = [
            ClaimLost(
                model=self._model,
                server=dispatch.server,
                claim_id=dispatch.claim_id,
                loss=Loss.NOT_STARTED,
                message="there is no such server any more",
            )
        ]
        self._loop.call_soon(self._emit, lost)

    def cancel(self, cancel: Cancel) -> None:
        stream = self.streams.get(cancel.server)
        if stream is not None:
            stream.cut(cancel.message)

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()

    def ready(self) -> int:
        return sum(stream.phase is ServerPhase.READY for stream in self.streams.values())
