"""A stream's session and the worker threads, without a network: order, back-pressure, endings."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import partial
from operator import getitem
from typing import Any, cast

import grpc
import numpy as np
import pytest

from model_server.core.failures import not_started
from model_server.server import sessions
from model_server.server.answers import Group
from model_server.server.calls import Held, Timing
from model_server.server.requests import Columns
from model_server.server.sessions import (
    STATUS_BYTES,
    UNTOKENIZED_REQUESTS_MAX,
    UNWRITTEN_BYTES_MAX,
    Session,
)
from model_server.server.workers import Worker
from model_server.vectors import Encoded, Encoding
from protos.embedding.v1 import embedding_service_pb2 as pb

WAIT_S = 30.0


class AbortedError(Exception):
    """What `context.abort` raises."""


class FakeContext:
    """A client that sends what is put in, and reads only while `reads` is set."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.written: list[pb.EmbedStreamResponse] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.aborted: grpc.StatusCode | None = None

    async def read(self) -> Any:
        return await self.incoming.get()

    async def write(self, message: pb.EmbedStreamResponse) -> None:
        await self.reads.wait()
        self.written.append(pb.EmbedStreamResponse.FromString(message.SerializeToString()))

    async def abort(self, code: grpc.StatusCode, details: str, **_: Any) -> None:
        self.aborted = code
        raise AbortedError(details)


class FakeServer:
    """Keeps what the session hands on."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.written: list[int] = []
        self.closed: list[int] = []
        self.busy_ms = 1.0
        self.tokenizes = False
        self.tokenizer_full = False

    def take_stream_request(self, session: Session, request: pb.EmbedStreamRequest) -> None:
        self.requests.append(request.request_id)
        if self.tokenizes:
            session.tokenizing()

    def fill_state(self, stream: int, state: pb.ServerState) -> None:
        state.busy_ms = self.busy_ms

    def announcement_written(self, pass_id: int) -> None:
        self.written.append(pass_id)

    def close_stream(self, session: Session) -> None:
        self.closed.append(session.stream)


class World:
    """A session that runs."""

    def __init__(self) -> None:
        self.context = FakeContext()
        self.server = FakeServer()
        self.session = Session(1, self.server)
        self.task = asyncio.create_task(self.session.run(cast("Any", self.context)))

    async def settle(self) -> None:
        """Let every task go as far as it can without anything from outside."""
        for _ in range(50):
            await asyncio.sleep(0)

    def send(self, *request_ids: int) -> None:
        for request_id in request_ids:
            self.context.incoming.put_nowait(pb.EmbedStreamRequest(request_id=request_id))

    def answer(self, request_id: int, *, last: bool = True, size_bytes: int = 4) -> None:
        rows = np.zeros((1, size_bytes), np.uint8)
        group = Group(
            encoding=Encoding.FLOAT32,
            dimensions=size_bytes // 4,
            indexes=[0],
            encoded=Encoded(rows=rows),
        )
        columns = Columns(
            texts=[], text_bytes=[], encodings=[], dimensions=[], deadlines_ns=None, counts=[3]
        )
        held = Held(
            key=request_id,
            stream=1,
            request_id=request_id,
            arrived_ns=0,
            caller=self.session,
            columns=columns,
        )
        timing = Timing(queue_us=5, inference_us=7)
        self.session.answer(held, [group], [], last=last, timing=timing)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


async def test_states_that_nobody_reads_do_not_pile_up(world: World) -> None:
    world.context.reads.clear()
    world.session.say()
    await world.settle()
    for request_id in range(1, 100):
        world.session.say([request_id])
    world.context.reads.set()
    await world.settle()
    assert len(world.context.written) == 2
    assert list(world.context.written[1].state.running) == list(range(1, 100))


async def test_a_state_is_reckoned_when_it_is_sent(world: World) -> None:
    world.context.reads.clear()
    world.session.say()
    await world.settle()
    world.session.say()
    world.server.busy_ms = 0
    world.context.reads.set()
    await world.settle()
    assert [message.state.busy_ms for message in world.context.written] == [1, 0]


async def test_an_announcement_rides_on_an_answer_that_is_not_yet_written(world: World) -> None:
    world.send(1)
    await world.settle()
    world.answer(1)
    world.session.say([2])
    await world.settle()
    (message,) = world.context.written
    assert (message.request_id, list(message.state.running)) == (1, [2])
    assert (message.queue_us, message.inference_us, message.last) == (5, 7, True)


async def test_an_awaited_announcement_is_reported_once_it_is_written(world: World) -> None:
    world.context.reads.clear()
    world.session.say([1], awaited=9)
    world.session.say([2])
    await world.settle()
    assert world.server.written == []
    world.context.reads.set()
    await world.settle()
    assert world.server.written == [9]
    assert [list(m.state.running) for m in world.context.written] == [[1], [2]]


async def test_a_stream_that_is_cut_ends_though_a_write_hangs(world: World) -> None:
    world.context.reads.clear()
    world.session.say([1], awaited=9)
    await world.settle()
    world.session.say([2])
    world.session.cut(not_started("it does not read"))
    world.session.say([3], awaited=10)
    with pytest.raises(AbortedError, match="it does not read"):
        await world.task
    assert world.context.aborted is grpc.StatusCode.UNAVAILABLE
    world.context.reads.set()
    await world.settle()
    assert (world.context.written, world.server.written) == ([], [])


async def test_a_client_that_does_not_even_read_why_it_was_cut_is_reset(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(sessions, "CUT_STATUS_S", 0.0)
    monkeypatch.setattr(world.context, "abort", hangs)
    await world.settle()
    world.session.cut(not_started("it does not read"))
    with pytest.raises(asyncio.CancelledError):
        await world.task


async def test_a_faulty_stream_whose_client_does_not_read_is_ended_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    world.context.reads.clear()
    world.session.say()
    await world.settle()
    monkeypatch.setattr(sessions, "CUT_STATUS_S", 0.0)
    monkeypatch.setattr(world.context, "abort", hangs)
    world.send(0)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(asyncio.CancelledError):
            await world.task
    assert world.server.closed == [1]


async def test_a_fault_is_told_to_a_client_that_reads(world: World) -> None:
    world.send(1, 1)
    with pytest.raises(AbortedError, match="still unanswered"):
        await world.task
    assert world.context.aborted is grpc.StatusCode.INVALID_ARGUMENT
    assert world.server.closed == [1]


async def test_a_client_that_hangs_up_before_it_has_read_why_is_no_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hung_up(*_: object, **__: object) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")

    monkeypatch.setattr(world.context, "abort", hung_up)
    await world.settle()
    world.session.cut(not_started("it does not read"))
    with pytest.raises(asyncio.CancelledError):
        await world.task


async def test_reading_stops_while_too_much_waits_for_the_tokenizer(world: World) -> None:
    world.server.tokenizes = True
    world.send(*range(1, 30))
    await world.settle()
    assert len(world.server.requests) == UNTOKENIZED_REQUESTS_MAX
    world.session.tokenized()
    await world.settle()
    assert len(world.server.requests) == UNTOKENIZED_REQUESTS_MAX + 1


async def test_reading_stops_while_the_tokenizer_is_full_but_for_one_request(world: World) -> None:
    world.server.tokenizes = world.server.tokenizer_full = True
    world.send(1, 2, 3)
    await world.settle()
    assert world.server.requests == [1]
    world.session.tokenized()
    await world.settle()
    assert world.server.requests == [1, 2]
    world.server.tokenizer_full = False
    world.session.wake_reader()
    await world.settle()
    assert world.server.requests == [1, 2, 3]


async def test_reading_stops_while_too_much_is_unwritten(world: World) -> None:
    world.send(1)
    await world.settle()
    world.context.reads.clear()
    world.answer(1, size_bytes=UNWRITTEN_BYTES_MAX + 4)
    world.send(*range(2, 10))
    await world.settle()
    assert len(world.server.requests) <= 2
    world.context.reads.set()
    await world.settle()
    assert world.server.requests == list(range(1, 10))


async def test_reading_stops_while_too_many_refusals_are_unwritten(world: World) -> None:
    def refuse(session: Session, request: pb.EmbedStreamRequest) -> None:
        world.server.requests.append(request.request_id)
        session.refuse_id(request.request_id, not_started("Restarting."))

    world.server.take_stream_request = refuse  # type: ignore[method-assign]
    world.context.reads.clear()
    most = UNWRITTEN_BYTES_MAX // STATUS_BYTES
    world.send(*range(1, 2 * most))
    await world.settle()
    assert most < len(world.server.requests) <= most + 2
    world.context.reads.set()
    await world.settle()
    assert len(world.server.requests) == 2 * most - 1


async def test_a_half_closed_stream_ends_when_all_is_answered(world: World) -> None:
    world.send(1)
    world.context.incoming.put_nowait(grpc.aio.EOF)
    await world.settle()
    assert not world.task.done()
    world.answer(1, last=False)
    await world.settle()
    assert not world.task.done()
    world.answer(1)
    await world.settle()
    assert world.task.done()
    assert world.task.exception() is None


async def test_a_closed_stream_ends_with_what_it_was_closed_with(world: World) -> None:
    world.send(1)
    await world.settle()
    world.session.close(not_started("Restarting."))
    await world.settle()
    assert not world.task.done()
    world.session.refuse_id(1, not_started("Restarting."))
    await world.settle()
    assert world.context.written[-1].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert world.context.aborted is grpc.StatusCode.UNAVAILABLE


async def test_a_request_id_may_be_used_again_once_answered(world: World) -> None:
    world.send(1)
    await world.settle()
    world.answer(1)
    world.send(1)
    await world.settle()
    assert world.server.requests == [1, 1]
    assert world.context.aborted is None


async def test_a_failure_to_read_ends_the_session(world: World) -> None:
    async def broken() -> Any:
        raise OSError("connection lost")

    world.context.read = broken  # type: ignore[method-assign]
    world.send(1)
    await world.settle()
    world.answer(1)
    with pytest.raises(OSError, match="connection lost"):
        async with asyncio.timeout(WAIT_S):
            await world.task


# Workers


def divide(by: int) -> int:
    return 10 // by


async def test_a_worker_does_its_jobs_in_order_and_reports_what_they_raise() -> None:
    worker = Worker("test", asyncio.get_running_loop())
    results: deque[Any] = deque()
    for number in range(100):
        worker.submit(partial(divide, number - 50), lambda r, e: results.append(e or r))
    assert await worker.call(lambda: "last") == "last"
    assert len(results) == 100
    assert isinstance(results[50], ZeroDivisionError)
    assert list(results)[:50] == [10 // (n - 50) for n in range(50)]
    with pytest.raises(KeyError):
        await worker.call(partial(getitem, {"there": 1}, "missing"))
    assert worker.close(WAIT_S)


async def test_what_is_no_exception_does_not_end_a_worker() -> None:
    class PanicError(BaseException):
        pass

    def panic() -> None:
        raise PanicError

    worker = Worker("test", asyncio.get_running_loop())
    errors: list[BaseException | None] = []
    worker.submit(panic, lambda _, error: errors.append(error))
    assert await worker.call(lambda: 1) == 1
    assert isinstance(errors[0], PanicError)
    assert worker.close(WAIT_S)
