"""The model server's life over real gRPC: faults of its engine, health, telemetry, drain."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from model_server.core.lifecycle import Phase
from model_server.core.saturation import Measured
from model_server.engines.base import EngineError, Tokens, Vectors
from model_server.engines.simulated import SimulatedEngine, SimulatedOptions
from model_server.profiling.store import profile_key, save_profile
from model_server.server.process import ServeError
from protos.embedding.v1 import embedding_service_pb2 as pb
from tests.harness.model_server import (
    FAST,
    MODEL,
    WAIT_S,
    Running,
    Stream,
    error_status,
    eventually,
    reasons,
    serving,
    stub_of,
)

Status = health_pb2.HealthCheckResponse


# Faults of the engine


async def test_a_bad_input_fails_alone(stream: Stream) -> None:
    request_id = await stream.send("a", "b", "c [[raise]]", "d", "e")
    answers = (await stream.answers(request_id))[request_id]
    (error,) = [error for answer in answers for error in answer.errors]
    assert error.index == 2
    assert error.status.code == grpc.StatusCode.INTERNAL.value[0]
    assert reasons(error.status)[0] == "ENGINE_FAILED_ALONE"
    indexes = [i for answer in answers for group in answer.groups for i in group.indexes]
    assert sorted(indexes) == [0, 1, 3, 4]


async def test_a_vector_that_is_not_finite_fails_alone(stream: Stream) -> None:
    request_id = await stream.send("a", "b [[nan]]", "c")
    (answer,) = (await stream.answers(request_id))[request_id]
    assert [error.index for error in answer.errors] == [1]
    assert reasons(answer.errors[0].status)[0] == "NOT_FINITE"
    assert list(answer.groups[0].indexes) == [0, 2]


async def test_nobody_is_blamed_for_an_engine_that_gives_no_finite_vector(
    server: Running, channel: grpc.aio.Channel, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = server.engine
    monkeypatch.setattr(broken, "embed", lambda inputs: np.full((len(inputs), 384), np.nan, "<f4"))
    request_id = await stream.send("a", "b", "c")
    answers = (await stream.answers(request_id))[request_id]
    assert {reasons(e.status)[0] for answer in answers for e in answer.errors} == {"NOT_STARTED"}
    await eventually(lambda: server.engine is not broken)
    await server.until(Phase.SERVING)
    async with Stream(channel) as again:
        (answer,) = (await again.answers(await again.send("a"))).values()
        assert answer[0].groups


@pytest.mark.parametrize("value", [np.nan, 0.5])
async def test_a_canary_with_another_vector_than_at_the_start_convicts_nobody(
    server: Running, stream: Stream, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    broken = server.engine

    def embed(inputs: Sequence[Tokens]) -> Vectors:
        if len(inputs[0].ids) > 3:
            raise EngineError("it is broken")
        return np.full((len(inputs), 384), value, dtype=np.float32)

    monkeypatch.setattr(broken, "embed", embed)
    request_id = await stream.send("a text of many more words")
    answers = (await stream.answers(request_id))[request_id]
    assert [reasons(e.status)[0] for e in answers[0].errors] == ["NOT_STARTED"]
    await eventually(lambda: server.engine is not broken)
    await server.until(Phase.SERVING)


async def test_a_pass_with_a_row_too_few_is_one_that_failed(stream: Stream) -> None:
    request_id = await stream.send("a", "b [[short]]", "c")
    answers = (await stream.answers(request_id))[request_id]
    assert [e.index for answer in answers for e in answer.errors] == [1]


async def test_a_dead_engine_is_replaced_and_only_its_pass_is_suspected(
    server: Running, channel: grpc.aio.Channel, stream: Stream
) -> None:
    server.engine.gate.clear()
    dying = await stream.send("[[die]]")
    await stream.until_running(dying)
    waiting = await stream.send("waiting")
    await eventually(lambda: server.server.driver.scheduler.queued_tokens)
    server.engine.gate.set()
    answers = await stream.answers(dying, waiting)
    assert reasons(answers[dying][0].errors[0].status) == ("ENGINE_DIED", None, True)
    assert answers[dying][0].errors[0].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert reasons(answers[waiting][0].status) == ("NOT_STARTED", None, True)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stream.end()
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert reasons(error_status(raised.value))[0] == "NOT_STARTED"
    await server.until(Phase.SERVING)
    assert len(server.engines) == 2
    async with Stream(channel) as again:
        await again.answers(await again.send("again"))


async def test_an_engine_that_does_not_come_back_ends_the_server(
    server: Running, stream: Stream
) -> None:
    server.next_options = SimulatedOptions(fixed_ms=0, wrong_reference=True)
    await stream.send("[[die]]")
    async with asyncio.timeout(WAIT_S):
        message = await server.server.driver.halted
    assert message is not None
    assert "golden" in message


# Health, reflection, telemetry, model info


async def test_health_follows_the_engine() -> None:
    async with serving(options=FAST, wait=False) as server, server.channel() as channel:
        watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await channel.channel_ready()
        seen = []
        async with asyncio.timeout(WAIT_S):
            while Status.SERVING not in seen:
                seen.append((await watch.read()).status)
            async with Stream(channel) as stream:
                await stream.send("[[die]]")
                while seen[-1] == Status.SERVING:
                    seen.append((await watch.read()).status)
            while seen[-1] != Status.SERVING:
                seen.append((await watch.read()).status)
            server.server.drain()
            seen.append((await watch.read()).status)
        assert seen[-4:] == [
            Status.SERVING,
            Status.NOT_SERVING,
            Status.SERVING,
            Status.NOT_SERVING,
        ]


async def test_a_server_that_disagrees_with_its_reference_never_serves() -> None:
    wrong = SimulatedOptions(fixed_ms=0, wrong_reference=True)
    async with serving(options=wrong, wait=False) as server, server.channel() as channel:
        async with asyncio.timeout(WAIT_S):
            message = await server.server.driver.halted
        assert message is not None
        assert "cosine" in message
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == Status.NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub_of(channel).Embed(pb.EmbedRequest(inputs=[pb.Input(text="a")]))
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert reasons(error_status(raised.value)) == ("NOT_STARTED", None, True)


async def test_a_warm_up_that_does_not_fit_lowers_the_maximum() -> None:
    small = SimulatedOptions(
        fixed_ms=0, slope_us_per_token=0, input_tokens_max=10, out_of_memory_above_tokens=150
    )
    async with serving(options=small) as server, server.channel() as channel:
        info = await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert (info.batch_tokens_target, info.batch_tokens_max) == (64, 128)
        assert "maximum lowered" in server.log.getvalue()


async def test_a_stored_profile_decides_the_target_and_is_told(tmp_path: Path) -> None:
    fast = SimulatedOptions(fixed_ms=0, slope_us_per_token=0)
    tokens = (8, 16, 32, 64, 128, 256, 512)
    curve = Measured(tokens=tokens, rounds_ms=(tuple(5.0 + size / 10 for size in tokens),))
    save_profile(tmp_path, profile_key(SimulatedEngine(fast).info), curve)
    given: dict[str, Any] = {"options": fast, "cache_dir": tmp_path, "batch_tokens_target": None}
    async with serving(**given) as server, server.channel() as channel:
        info = await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert (info.batch_tokens_target, info.batch_tokens_target_source) == (256, "profile")
        assert [(point.tokens, point.pass_ms) for point in info.curve] == list(
            zip(tokens, curve.rounds_ms[0], strict=True)
        )
        async with Stream(channel) as stream:
            assert stream.states[0].batch_tokens_target == 256
            assert stream.states[0].window_tokens == 512
    async with serving(**given, pass_ms_max=12.0) as server, server.channel() as channel:
        info = await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert info.batch_tokens_target == 64
    async with serving(**{**given, "batch_tokens_target": 99}) as server:
        async with server.channel() as channel:
            info = await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert (info.batch_tokens_target, info.batch_tokens_target_source) == (99, "setting")
        assert not info.curve


async def test_a_target_that_moves_is_told_to_every_stream(tmp_path: Path) -> None:
    fast = SimulatedOptions(fixed_ms=0, slope_us_per_token=0)
    tokens = (8, 16, 32, 64, 128, 256, 512)
    # Passes of nanoseconds, on a machine of long ago: every real one takes over `pass_ms_max`.
    curve = Measured(tokens=tokens, rounds_ms=(tuple(5e-5 + size * 1e-6 for size in tokens),))
    save_profile(tmp_path, profile_key(SimulatedEngine(fast).info), curve)
    given: dict[str, Any] = {"options": fast, "cache_dir": tmp_path, "batch_tokens_target": None}
    async with (
        serving(**given, pass_ms_max=1e-3) as server,
        server.channel() as channel,
        Stream(channel) as busy,
        Stream(channel) as quiet,
    ):
        assert quiet.states[0].batch_tokens_target == 256
        while busy.states[-1].batch_tokens_target == 256:
            request_id = await busy.send("word " * 140)
            await busy.answers(request_id)
        while quiet.states[-1].batch_tokens_target == 256:
            assert await quiet.read() is not None
        assert quiet.states[-1].batch_tokens_target == 231
        info = await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert (info.batch_tokens_target, info.batch_tokens_target_source) == (231, "followed")
        _, text = await asyncio.to_thread(fetch, server.server.metrics_port, "/metrics")
        for line in (
            "model_server_batch_tokens_target 231.0",
            "model_server_target_moves_total 1.0",
            "model_server_batch_tokens_target_implied 8.0",
        ):
            assert line in text.splitlines()
        log = [json.loads(line) for line in server.log.getvalue().splitlines()]
        assert [line["event"] for line in log].count("target moved") == 1
        # The pass that moved it is held against the target that it was cut for.
        passes = [line for line in log if line["event"] == "pass"]
        assert {line["batch_tokens_target"] for line in passes} == {256}
        for line in passes:
            assert line["fill_ratio"] == round(line["tokens"] / 256, 3)


async def test_without_a_profile_one_is_measured_at_start() -> None:
    given: dict[str, Any] = {"batch_tokens_target": None, "profile_ms_max": 30_000}
    async with serving(**given) as server, server.channel() as channel:
        info = await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert info.batch_tokens_target_source == "quick profile"
        sizes = [point.tokens for point in info.curve]
        assert len(sizes) >= 5
        assert sizes == sorted(sizes)
        assert info.batch_tokens_target in sizes
        times = [point.pass_ms for point in info.curve]
        assert times == sorted(times)
        # An engine that dies is measured no second time.
        passes = len(server.engine.passes)
        server.next_options = SimulatedOptions(fixed_ms=0, slope_us_per_token=0)
        engine = server.engine
        engine.close()
        lost = await stub_of(channel).Embed(pb.EmbedRequest(inputs=[pb.Input(text="a")]))
        assert reasons(lost.outputs[0].status)[0] == "ENGINE_DIED"
        await eventually(lambda: server.engine is not engine)
        await server.until(Phase.SERVING)
        assert len(server.engine.passes) < passes / 2
        again = await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest())
        assert again.batch_tokens_target == info.batch_tokens_target


async def test_model_info(channel: grpc.aio.Channel) -> None:
    info = await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest(model=MODEL))
    assert info.model == MODEL
    assert info.model_revision
    assert (info.dimensions, list(info.matryoshka_dimensions)) == (384, [64, 100])
    assert info.input_tokens_max == 40
    assert (info.batch_tokens_target, info.batch_tokens_target_source) == (64, "setting")
    assert info.batch_tokens_max == 256
    assert list(info.encodings) == [1, 2, 3, 4]
    assert (info.engine, info.device, info.precision) == ("simulated", "cpu", "float32")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub_of(channel).GetModelInfo(pb.GetModelInfoRequest(model="other"))
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    names = {service.name for service in answer.list_services_response.service}
    assert {"embedding.v1.EmbeddingService", "grpc.health.v1.Health"} <= names
    call.cancel()


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_metrics_and_probes(server: Running, stream: Stream) -> None:
    await stream.answers(await stream.send("a", "b"))
    port = server.server.metrics_port
    status, text = await asyncio.to_thread(fetch, port, "/metrics")
    assert status == 200
    assert 'model_server_passes_total{kind="normal",outcome="done"} 1.0' in text
    assert "model_server_inputs_total 2.0" in text
    assert "model_server_serving 1.0" in text
    assert await asyncio.to_thread(fetch, port, "/livez") == (200, "ok\n")
    assert await asyncio.to_thread(fetch, port, "/readyz") == (200, "ok\n")
    assert (await asyncio.to_thread(fetch, port, "/other"))[0] == 404
    line = next(
        json.loads(line)
        for line in server.log.getvalue().splitlines()
        if json.loads(line)["event"] == "pass"
    )
    assert (line["inputs"], line["tokens"], line["kind"]) == (2, 6, "normal")


def at(setting: str, address: str) -> dict[str, Any]:
    return {setting: address}


async def test_a_port_in_use_is_one_clear_error(server: Running) -> None:
    metrics = f"127.0.0.1:{server.server.metrics_port}"
    for setting, taken in (("grpc_listen", server.address), ("metrics_listen", metrics)):
        with pytest.raises(ServeError, match=f"^{setting} {taken}: Address already in use$"):
            async with serving(**at(setting, taken)):
                pass


@pytest.mark.parametrize("setting", ["grpc_listen", "metrics_listen"])
async def test_a_host_that_is_not_there_is_one_clear_error(setting: str) -> None:
    with pytest.raises(ServeError, match=f"^{setting} nowhere.invalid:0: [^:]+$"):
        async with serving(**at(setting, "nowhere.invalid:0")):
            pass


# Drain


async def test_drain_answers_what_is_held_and_ends_streams_with_ok(
    server: Running, stream: Stream
) -> None:
    server.engine.gate.clear()
    held = await stream.send("held")
    await stream.until_running(held)
    server.server.drain()
    while not stream.states[-1].draining:
        assert await stream.read() is not None
    late = await stream.send("late")
    (refused,) = (await stream.answers(late))[late]
    assert refused.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert reasons(refused.status) == ("NOT_STARTED", None, True)
    server.engine.gate.set()
    await stream.answers(held)
    await stream.end()
    assert await stream.call.code() is grpc.StatusCode.OK
    async with asyncio.timeout(WAIT_S):
        assert await server.server.driver.halted is None


async def test_a_pass_over_its_time_ends_the_server_after_answering() -> None:
    async with serving(options=FAST, pass_timeout_ms=50) as server, server.channel() as channel:
        async with Stream(channel) as stream:
            server.engine.gate.clear()
            hung = await stream.send("hung")
            (answer,) = (await stream.answers(hung))[hung]
            assert reasons(answer.errors[0].status)[0] == "ENGINE_DIED"
            async with asyncio.timeout(WAIT_S):
                message = await server.server.driver.halted
        assert message is not None
        assert "50 ms" in message
