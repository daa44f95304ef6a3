"""The model server over real gRPC, with the simulated engine, in this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from model_server.core import streams
from model_server.engines.base import Text, TextRefused, Tokens
from model_server.server import driver
from model_server.vectors import Encoding, encode
from protos.embedding.v1 import embedding_service_pb2 as pb
from tests.harness.model_server import (
    CHANNEL_OPTIONS,
    MODEL,
    WAIT_S,
    Running,
    Stream,
    error_status,
    eventually,
    reasons,
    stub_of,
)

Status = health_pb2.HealthCheckResponse


def expected(server: Running, text: str, encoding: Encoding, dimensions: int = 384) -> bytes:
    """The bytes that the engine's own vector of this text has."""
    (tokens,) = server.engine.tokenize([Text(text=text)])
    assert isinstance(tokens, Tokens)
    vectors = server.engine.reference([tokens])
    data: bytes = encode(vectors, dimensions=dimensions, encoding=encoding).rows[0].tobytes()
    return data


def rows_of(group: pb.EmbeddingGroup) -> dict[int, bytes]:
    stride = len(group.embeddings) // len(group.indexes)
    return {
        index: group.embeddings[row * stride : (row + 1) * stride]
        for row, index in enumerate(group.indexes)
    }


# Answers


async def test_a_uniform_request_comes_back_in_one_group(server: Running, stream: Stream) -> None:
    texts = ["one", "two two", "three"]
    request_id = await stream.send(*texts)
    (answer,) = (await stream.answers(request_id))[request_id]
    (group,) = answer.groups
    assert (int(group.encoding), group.dimensions) == (1, 384)
    assert list(group.tokens) == [3, 4, 4]
    assert answer.last
    assert answer.queue_us >= 0
    assert answer.inference_us >= 0
    for index, data in rows_of(group).items():
        assert data == expected(server, texts[index], Encoding.FLOAT32)


async def test_encodings_and_dimensions_mix_in_a_request(server: Running, stream: Stream) -> None:
    wanted = [(e, d) for e in Encoding for d in (384, 64)]
    request_id = await stream.send(
        *[
            pb.Input(text=f"text {i}", encoding=int(e), dimensions=d)  # type: ignore[arg-type]
            for i, (e, d) in enumerate(wanted)
        ]
    )
    got: dict[int, bytes] = {}
    for answer in (await stream.answers(request_id))[request_id]:
        for group in answer.groups:
            assert len(group.scales) == (len(group.indexes) if group.encoding == 3 else 0)
            for index, data in rows_of(group).items():
                assert (int(group.encoding), group.dimensions) == wanted[index]
                got[index] = data
    assert got == {
        i: expected(server, f"text {i}", encoding, dimensions)
        for i, (encoding, dimensions) in enumerate(wanted)
    }


async def test_a_large_request_is_spread_over_passes(server: Running, stream: Stream) -> None:
    request_id = await stream.send(*[f"text number {i}" for i in range(50)])
    answers = (await stream.answers(request_id))[request_id]
    assert len(answers) > 1
    assert [answer.last for answer in answers] == [False] * (len(answers) - 1) + [True]
    indexes = [i for answer in answers for group in answer.groups for i in group.indexes]
    assert sorted(indexes) == list(range(50))
    for answer in answers:
        assert sum(t for group in answer.groups for t in group.tokens) <= 64


async def test_two_streams_share_passes_and_windows(
    server: Running, channel: grpc.aio.Channel, stream: Stream
) -> None:
    assert stream.states[0].window_tokens == 128
    server.engine.gate.clear()
    held = await stream.send("held")
    await stream.until_running(held)
    async with Stream(channel) as other:
        assert other.states[0].window_tokens == 64
        mine = await stream.send("a", "b")
        theirs = await other.send("c", "d")
        await eventually(lambda: server.server.driver.scheduler.queued_tokens == 12)
        await eventually(lambda: server.engine.held)
        passes = len(server.engine.passes)
        server.engine.gate.set()
        await other.answers(theirs)
        await stream.answers(held, mine)
        assert server.engine.passes[passes:] == [4]


async def test_a_start_is_announced_and_an_idle_engine_too(server: Running, stream: Stream) -> None:
    server.engine.gate.clear()
    request_id = await stream.send("text")
    await stream.until_running(request_id)
    assert stream.states[-1].busy_ms > 0
    server.engine.gate.set()
    (answer,) = (await stream.answers(request_id))[request_id]
    assert answer.state.busy_ms == 0
    assert list(answer.state.running) == []


async def test_a_half_closed_stream_still_gets_its_answers(server: Running, stream: Stream) -> None:
    server.engine.gate.clear()
    request_id = await stream.send("text")
    await stream.until_running(request_id)
    await stream.call.done_writing()
    server.engine.gate.set()
    await stream.answers(request_id)
    await stream.end()
    assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_cancelled_stream_leaves_the_queue(
    server: Running, channel: grpc.aio.Channel, stream: Stream
) -> None:
    server.engine.gate.clear()
    held = await stream.send("held")
    await stream.until_running(held)
    async with Stream(channel) as other:
        await other.send("never", "run")
        await eventually(lambda: server.server.driver.scheduler.queued_tokens)
    await eventually(lambda: server.server.driver.streams == 1)
    assert server.server.driver.scheduler.queued_tokens == 0
    await eventually(lambda: server.engine.held)
    passes = len(server.engine.passes)
    server.engine.gate.set()
    await stream.answers(held)
    follow = await stream.send("follow")
    await stream.answers(follow)
    assert server.engine.passes[passes:] == [1]


async def test_bulk_waits_for_interactive_inputs(server: Running, stream: Stream) -> None:
    server.engine.gate.clear()
    held = await stream.send("held")
    await stream.until_running(held)
    bulk = await stream.send("x" * 120, "y" * 120, priority=pb.PRIORITY_BULK)
    quick = await stream.send("z" * 120, "w" * 120)
    await eventually(lambda: server.server.driver.scheduler.queued_tokens == 4 * 32)
    server.engine.gate.set()
    order: list[int] = []
    while len(order) < 3:
        message = await stream.read()
        assert message is not None
        if message.request_id:
            order.append(message.request_id)
    assert order == [held, quick, bulk]


async def test_an_exclusive_request_runs_alone(server: Running, stream: Stream) -> None:
    server.engine.gate.clear()
    held = await stream.send("held")
    await stream.until_running(held)
    alone = await stream.send("s", "t", exclusive=True)
    mates = await stream.send("u", "v", "w")
    await eventually(lambda: server.server.driver.scheduler.queued_tokens == 5 * 3)
    await eventually(lambda: server.engine.held)
    passes = len(server.engine.passes)
    server.engine.gate.set()
    await stream.answers(held, alone, mates)
    assert server.engine.passes[passes:] == [2, 3]
    announced = [list(state.running) for state in stream.states if state.running]
    assert [alone] in announced


# Refusals of inputs


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (pb.Input(text=""), "text"),
        (pb.Input(), "text"),
        (pb.Input(text="a" * 131_073), "text"),
        (pb.Input(text="ж" * 65_537, truncate=True), "text"),
        (pb.Input(text="a" * 200), "text"),
        (pb.Input(text="a", dimensions=7), "dimensions"),
        (pb.Input(text="a", dimensions=0), "dimensions"),
        (pb.Input(text="a", encoding=9), "encoding"),  # type: ignore[arg-type]
        (pb.Input(text="a", encoding=4, dimensions=100), "encoding"),  # type: ignore[arg-type]
        (pb.Input(text="a", input_type=9), "input_type"),  # type: ignore[arg-type]
        (pb.Input(text="a", timeout_ms=-1), "timeout_ms"),
    ],
)
async def test_an_invalid_input_is_refused_alone(
    stream: Stream, given: pb.Input, field: str
) -> None:
    request_id = await stream.send("good", given, "good too")
    answers = (await stream.answers(request_id))[request_id]
    (error,) = [error for answer in answers for error in answer.errors]
    assert error.index == 1
    assert error.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert reasons(error.status) == ("INVALID_FIELD", field, False)
    indexes = [i for answer in answers for group in answer.groups for i in group.indexes]
    assert sorted(indexes) == [0, 2]


async def test_a_long_text_is_cut_when_asked(stream: Stream) -> None:
    request_id = await stream.send(pb.Input(text="a" * 200, truncate=True))
    (answer,) = (await stream.answers(request_id))[request_id]
    assert list(answer.groups[0].tokens) == [40]


async def test_an_input_whose_time_ran_out_says_so(server: Running, stream: Stream) -> None:
    server.engine.gate.clear()
    held = await stream.send("held")
    await stream.until_running(held)
    late = await stream.send(pb.Input(text="late", timeout_ms=1), "in time")
    (first,) = [await stream.read()]
    while first is not None and first.request_id != late:
        first = await stream.read()
    assert first is not None
    assert first.errors[0].status.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
    assert reasons(first.errors[0].status)[0] == "EXPIRED"
    server.engine.gate.set()
    await stream.answers(held, late)


# Refusals of requests


@pytest.mark.parametrize(
    ("inputs", "fields", "code", "reason"),
    [
        ([], {}, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (["a"] * 1_025, {}, grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE"),
        (["a"], {"model": "other"}, grpc.StatusCode.NOT_FOUND, "MODEL_UNKNOWN"),
        (["a"], {"model": ""}, grpc.StatusCode.NOT_FOUND, "MODEL_UNKNOWN"),
        (["a" * 131_000] * 129, {}, grpc.StatusCode.RESOURCE_EXHAUSTED, "REQUEST_TOO_LARGE"),
    ],
)
async def test_a_request_is_refused_whole_and_the_stream_goes_on(
    stream: Stream,
    inputs: list[str],
    fields: dict[str, Any],
    code: grpc.StatusCode,
    reason: str,
) -> None:
    request_id = await stream.send(*inputs, **fields)
    (answer,) = (await stream.answers(request_id))[request_id]
    assert answer.last
    assert not answer.groups
    assert not answer.errors
    assert answer.status.code == code.value[0]
    found, _, retry = reasons(answer.status)
    assert found == reason
    assert retry == (code is grpc.StatusCode.RESOURCE_EXHAUSTED)
    follow = await stream.send("follow")
    await stream.answers(follow)


async def test_a_stream_that_holds_too_much_is_refused(server: Running, stream: Stream) -> None:
    server.engine.gate.clear()
    much = await stream.send(*["abcd" * 30] * 20)
    await stream.until_running(much)
    more = await stream.send("more")
    (refused,) = (await stream.answers(more))[more]
    assert refused.status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert reasons(refused.status) == ("TOO_MUCH_HELD", None, True)
    server.engine.gate.set()
    await stream.answers(much)


@pytest.mark.parametrize("request_id", [0, 1])
async def test_a_request_id_of_0_or_still_unanswered_ends_the_stream(
    server: Running, stream: Stream, request_id: int
) -> None:
    server.engine.gate.clear()
    held = await stream.send("held")
    await stream.until_running(held)
    await stream.send("again", request_id=request_id)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stream.end()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reasons(error_status(raised.value))[:2] == ("INVALID_FIELD", "request_id")


# Unary calls


async def test_embed_answers_in_order(server: Running, channel: grpc.aio.Channel) -> None:
    request = pb.EmbedRequest(model=MODEL)
    texts = [f"text number {i}" for i in range(40)]
    for text in texts:
        request.inputs.add(text=text)
    request.inputs.add(text="")
    response = await stub_of(channel).Embed(request)
    assert response.model == MODEL
    assert response.model_revision
    for text, output in zip(texts, response.outputs, strict=False):
        assert output.embedding == expected(server, text, Encoding.FLOAT32)
        assert output.dimensions == 384
    assert reasons(response.outputs[40].status) == ("INVALID_FIELD", "text", False)


async def test_embed_gives_numbers_when_asked(server: Running, channel: grpc.aio.Channel) -> None:
    request = pb.EmbedRequest(inputs=[pb.Input(text="a")], float_values=True)
    (output,) = (await stub_of(channel).Embed(request)).outputs
    assert not output.embedding
    numbers = np.array(output.float_values, dtype="<f4").tobytes()
    assert numbers == expected(server, "a", Encoding.FLOAT32)
    request.inputs.add(text="b", encoding=3)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub_of(channel).Embed(request)
    assert reasons(error_status(raised.value))[:2] == ("INVALID_FIELD", "float_values")


async def test_embed_gives_a_scale_with_int8(channel: grpc.aio.Channel) -> None:
    request = pb.EmbedRequest(inputs=[pb.Input(text="a", encoding=3)])  # type: ignore[arg-type]
    (output,) = (await stub_of(channel).Embed(request)).outputs
    assert output.scale > 0
    assert len(output.embedding) == 384


async def test_embed_refuses_what_a_stream_refuses(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub_of(channel).Embed(pb.EmbedRequest())
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reasons(error_status(raised.value))[:2] == ("INVALID_FIELD", "inputs")


async def test_unary_callers_have_a_bounded_share_of_their_own(
    server: Running, channel: grpc.aio.Channel, stream: Stream
) -> None:
    server.engine.gate.clear()
    much = pb.EmbedRequest(inputs=[pb.Input(text="abcd" * 30)] * 20)
    holding = stub_of(channel).Embed(much)
    await eventually(lambda: server.server.driver.scheduler.held_tokens == 20 * 32)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub_of(channel).Embed(pb.EmbedRequest(inputs=[pb.Input(text="a")]))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reasons(error_status(raised.value)) == ("TOO_MUCH_HELD", None, True)
    request_id = await stream.send("a stream has its own")
    server.engine.gate.set()
    await stream.answers(request_id)
    assert len((await holding).outputs) == 20


async def test_unary_calls_that_wait_for_the_tokenizer_are_bounded(
    server: Running, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "UNTOKENIZED_UNARY_MAX", 0)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub_of(channel).Embed(pb.EmbedRequest(inputs=[pb.Input(text="a")]))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reasons(error_status(raised.value)) == ("TOO_MUCH_HELD", None, True)
    refused = server.server._metrics.registry.get_sample_value(
        "model_server_requests_refused_total", {"reason": "TOO_MUCH_HELD"}
    )
    assert refused == 1


async def test_a_stream_hears_of_us_while_the_tokenizer_works(
    server: Running, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SILENCE_NS_MAX", 1)
    gate = threading.Event()
    tokenize = server.engine.tokenize
    monkeypatch.setattr(
        server.engine, "tokenize", lambda texts: (gate.wait(WAIT_S), tokenize(texts))[1]
    )
    request_id = await stream.send("a text")
    for _ in range(2):
        message = await stream.read()
        assert message is not None
        assert message.request_id == 0
    gate.set()
    await stream.answers(request_id)


async def test_requests_of_dead_streams_are_not_tokenized(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    tokenized: list[str] = []
    tokenize = server.engine.tokenize

    def gated(texts: Sequence[Text]) -> list[Tokens | TextRefused]:
        tokenized.extend(text.text[:5] for text in texts)
        gate.wait(WAIT_S)
        return tokenize(texts)

    monkeypatch.setattr(server.engine, "tokenize", gated)
    async with server.channel() as channel:
        for _ in range(5):
            async with Stream(channel) as dead:
                for _ in range(8):
                    await dead.send("dead " * 10_000)
                await eventually(lambda: server.server.driver.untokenized >= 7)
            await eventually(lambda: not server.server.driver.streams)
        async with Stream(channel) as alive:
            request_id = await alive.send("alive")
            await eventually(lambda: server.server.driver.untokenized == 1)
            gate.set()
            await alive.answers(request_id)
    assert tokenized == ["dead ", "alive"]


async def test_a_cancelled_unary_call_leaves_the_queue(
    server: Running, channel: grpc.aio.Channel, stream: Stream
) -> None:
    server.engine.gate.clear()
    held = await stream.send("held")
    await stream.until_running(held)
    call = stub_of(channel).Embed(pb.EmbedRequest(inputs=[pb.Input(text="a")]))
    await eventually(lambda: server.server.driver.scheduler.queued_tokens)
    call.cancel()
    await eventually(lambda: not server.server.driver.scheduler.queued_tokens)
    server.engine.gate.set()
    await stream.answers(held)


async def test_each_failure_of_an_input_is_counted_once(server: Running, stream: Stream) -> None:
    await stream.answers(await stream.send("good", "", "bad [[nan]]"))
    for reason in ("INVALID_FIELD", "NOT_FINITE"):
        counted = server.server._metrics.registry.get_sample_value(
            "model_server_input_failures_total", {"reason": reason}
        )
        assert counted == 1


async def until_embedded(server: Running, inputs: int) -> None:
    """Wait until so many went through passes since the start, and none is held any more.

    That none is held does not say it: those that are on their way, or wait for the tokenizer, are
    not held yet. And while a stream holds much, the server refuses what comes next on it.
    """
    scheduler = server.server.driver.scheduler
    await eventually(lambda: sum(server.engine.passes) == inputs and scheduler.held_tokens == 0)


async def deaf_stream(server: Running, stack: contextlib.AsyncExitStack) -> Stream:
    """A stream with more unread than its connection holds, so that no later write returns."""
    # The connection's window for what is unread stays at its 64 KiB.
    options = (*CHANNEL_OPTIONS, ("grpc.http2.bdp_probe", 0))
    channel = grpc.aio.insecure_channel(server.address, options)
    stream = await stack.enter_async_context(Stream(await stack.enter_async_context(channel)))
    for _ in range(8):
        before = sum(server.engine.passes)
        await stream.send(*["word"] * 200)
        await until_embedded(server, before + 200)
    return stream


async def test_a_fault_of_a_client_that_does_not_read_ends_its_stream(server: Running) -> None:
    async with contextlib.AsyncExitStack() as stack:
        deaf = await deaf_stream(server, stack)
        server.engine.gate.clear()
        await deaf.send("held")
        await eventually(lambda: server.server.driver.scheduler.held_tokens)
        await deaf.send("a fault", request_id=0)
        await eventually(lambda: not server.server.driver.streams)
        assert server.server.driver.scheduler.held_tokens == 0
        server.engine.gate.set()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await deaf.end()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_hangs_up_before_it_has_read_why_it_was_cut_is_no_error(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        deaf = await deaf_stream(server, stack)
        await deaf.send("a fault", request_id=0)
        await eventually(lambda: not server.server.driver.streams)
        deaf.call.cancel()
    async with server.channel() as channel, Stream(channel) as other:
        await other.answers(await other.send("hello"))
    assert not [record for record in caplog.records if record.exc_info]


async def test_clients_that_do_not_read_are_cut_and_the_others_answered(server: Running) -> None:
    """Each held the engine for one announcement; what it sent besides holds it no more."""
    async with contextlib.AsyncExitStack() as stack:
        deaf = [await deaf_stream(server, stack) for _ in range(2)]
        for stream in deaf:
            for _ in range(20):
                await stream.send("alone", exclusive=True)
        channel = await stack.enter_async_context(server.channel())
        other = await stack.enter_async_context(Stream(channel))
        await eventually(lambda: server.log.getvalue().count("stream cut") == 2)
        # Nothing is kept of them, though they still have not read why.
        assert server.server.driver.streams == 1
        answers = await other.answers(await other.send("hello"))
        assert answers[1][-1].last
        for stream in deaf:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.end()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reasons(error_status(ended.value))[0] == "NOT_STARTED"
            assert "did not read" in str(ended.value.details())
    assert server.log.getvalue().count("stream cut") == 2
