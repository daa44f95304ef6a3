"""One `EmbedStream`: reads requests, writes answers and states, ends as it should.

Invariants: messages leave in the order in which they were ordered; at most one message without an
answer waits at the end of the queue, so that a client that does not read costs no memory for
announcements; what is read stops while too much is unwritten or untokenized. A half-closed stream
is written to until everything is answered.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import grpc

from model_server.core.failures import Failure, invalid
from model_server.server.answers import Group
from model_server.server.calls import Held, Timing
from model_server.server.statuses import abort, status_of
from protos.embedding.v1 import embedding_service_pb2 as pb

if TYPE_CHECKING:
    StreamContext = grpc.aio.ServicerContext[pb.EmbedStreamRequest, pb.EmbedStreamResponse]

UNWRITTEN_BYTES_MAX = 8 * 1024 * 1024
STATUS_BYTES = 1024
"""What a message, and each failure in it, is reckoned to hold besides vectors: a client that sends
only what is refused, and reads nothing, must not cost memory without end."""
UNTOKENIZED_REQUESTS_MAX = 8
CUT_STATUS_S = 30.0
"""How long a client whose stream is cut may take to read why; then the call is reset."""


class Server(Protocol):
    """What a session needs of the driver."""

    def take_stream_request(self, session: Session, request: pb.EmbedStreamRequest) -> None:
        """Check, tokenize, schedule."""
        ...

    def fill_state(self, stream: int, state: pb.ServerState) -> None:
        """The state as of now."""
        ...

    def announcement_written(self, pass_id: int) -> None:
        """The write of an awaited announcement returned."""
        ...

    def close_stream(self, session: Session) -> None:
        """The stream is over: what it holds is dropped."""
        ...

    @property
    def tokenizer_full(self) -> bool:
        """Whether who has a request at the tokenizer must not send another."""
        ...


class _Outgoing:
    """A message to be written, apart from its state, which is filled in when it is sent."""

    __slots__ = ("awaited", "message", "running", "size_bytes")

    def __init__(self, message: pb.EmbedStreamResponse, size_bytes: int = 0) -> None:
        self.message = message
        self.running: list[int] = []
        self.awaited: int | None = None
        self.size_bytes = size_bytes


class Session:
    """See the module. Everything runs on the loop; `run` is the call's own coroutine."""

    def __init__(self, stream: int, server: Server) -> None:
        self.stream = stream
        self._server = server
        self._outbox: deque[_Outgoing] = deque()
        self._outbox_bytes = 0
        self._unanswered: set[int] = set()
        self._untokenized = 0
        self._room = asyncio.Event()
        self._ordered = asyncio.Event()
        self._closing = False
        self._failure: Failure | None = None
        self._fault: Failure | None = None
        self._cancel_write: Callable[[], object] = lambda: None

    async def run(self, context: StreamContext) -> None:
        """Until the client has all answers and sends no more, or the server closes the stream."""
        reader = asyncio.create_task(self._read(context))
        reader.add_done_callback(lambda _: self._ordered.set())
        writer = asyncio.create_task(self._write(context, reader))
        self._cancel_write = writer.cancel
        try:
            await asyncio.wait({writer})
        finally:
            writer.cancel()
            reader.cancel()
            outcomes = await asyncio.gather(writer, reader, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        failure = self._fault or self._failure
        if failure is not None:
            await self._abort(context, failure)

    async def _abort(self, context: StreamContext, failure: Failure) -> None:
        try:
            # The status of a stream that was cut waits behind what its client has not read.
            async with asyncio.timeout(CUT_STATUS_S if self._fault is not None else None):
                await abort(context, failure)
        except (TimeoutError, grpc.aio.InternalError):
            # gRPC resets the call of a handler that ends so; nothing else ends it while it is full.
            # The other error says that the client has hung up meanwhile.
            raise asyncio.CancelledError from None

    async def _read(self, context: StreamContext) -> None:
        while isinstance(request := await context.read(), pb.EmbedStreamRequest):
            request_id = request.request_id
            if request_id == 0 or request_id in self._unanswered:
                what = "0" if request_id == 0 else f"{request_id}, which is still unanswered"
                self.cut(invalid("request_id", f"The request_id is {what}."))
                self._server.close_stream(self)
                return
            self._unanswered.add(request_id)
            self._server.take_stream_request(self, request)
            while not self._may_read():
                self._room.clear()
                await self._room.wait()

    def _may_read(self) -> bool:
        # One that has nothing at the tokenizer reads on: it would be owed something, and not know.
        full = self._untokenized > 0 and self._server.tokenizer_full
        return (
            self._outbox_bytes <= UNWRITTEN_BYTES_MAX
            and self._untokenized < UNTOKENIZED_REQUESTS_MAX
            and not full
        )

    async def _write(self, context: StreamContext, reader: asyncio.Task[None]) -> None:
        while True:
            while self._outbox and self._fault is None:
                outgoing = self._outbox.popleft()
                state = outgoing.message.state
                self._server.fill_state(self.stream, state)
                if outgoing.running:
                    state.running.extend(outgoing.running)
                await context.write(outgoing.message)
                self._outbox_bytes -= outgoing.size_bytes
                self._room.set()
                if outgoing.awaited is not None:
                    self._server.announcement_written(outgoing.awaited)
            if self._fault is not None:
                return
            if not self._unanswered and (self._closing or reader.done()):
                return
            self._ordered.clear()
            await self._ordered.wait()

    # What the driver orders

    def close(self, failure: Failure | None) -> None:
        """End the stream when all is answered and written, with OK or with a failure."""
        self._closing = True
        self._failure = failure
        self._ordered.set()

    def cut(self, failure: Failure) -> None:
        """End the stream now with a failure, unwritten and unanswered: its client is at fault."""
        self._fault = failure
        self._outbox.clear()
        self._cancel_write()

    def tokenizing(self) -> None:
        """A request of this stream waits for the tokenizer."""
        self._untokenized += 1

    def tokenized(self) -> None:
        """It no longer does."""
        self._untokenized -= 1
        self._room.set()

    def wake_reader(self) -> None:
        """The tokenizer has room."""
        self._room.set()

    def say(self, running: Sequence[int] = (), awaited: int | None = None) -> None:
        """Send a state: with the last message that is not yet written, or alone."""
        if self._fault is not None:
            return
        if not self._outbox or self._outbox[-1].awaited is not None:
            self._order(_Outgoing(pb.EmbedStreamResponse()))
        last = self._outbox[-1]
        last.running += [request_id for request_id in running if request_id not in last.running]
        last.awaited = awaited

    def answer(
        self,
        held: Held,
        groups: Sequence[Group],
        failures: Sequence[tuple[int, Failure]],
        *,
        last: bool,
        timing: Timing | None,
    ) -> None:
        """Order a message with answers."""
        message = pb.EmbedStreamResponse(request_id=held.request_id, last=last)
        if timing is not None:
            message.queue_us = timing.queue_us
            message.inference_us = timing.inference_us
        size_bytes = STATUS_BYTES * (1 + len(failures))
        counts = held.columns.counts
        for group in groups:
            column = message.groups.add()
            column.encoding = int(group.encoding)  # type: ignore[assignment]
            column.dimensions = group.dimensions
            column.indexes.extend(group.indexes)
            column.tokens.extend([counts[index] for index in group.indexes])
            column.embeddings = group.encoded.rows.tobytes()
            if group.encoded.scales is not None:
                column.scales.extend(group.encoded.scales.tolist())
            size_bytes += group.encoded.rows.nbytes
        for index, failure in failures:
            message.errors.add(index=index, status=status_of(failure))
        if last:
            self._unanswered.discard(held.request_id)
        self._order(_Outgoing(message, size_bytes))

    def refuse(self, held: Held, failure: Failure) -> None:
        """Order a message that refuses a whole request."""
        self.refuse_id(held.request_id, failure)

    def refuse_id(self, request_id: int, failure: Failure) -> None:
        """The same for a request that was not even read into columns."""
        self._unanswered.discard(request_id)
        message = pb.EmbedStreamResponse(
            request_id=request_id, last=True, status=status_of(failure)
        )
        self._order(_Outgoing(message, STATUS_BYTES))

    def _order(self, outgoing: _Outgoing) -> None:
        if self._fault is not None:
            return
        self._outbox.append(outgoing)
        self._outbox_bytes += outgoing.size_bytes
        self._ordered.set()
