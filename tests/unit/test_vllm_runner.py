"""vLLM's runner on a stand-in for vLLM: where it runs, and what becomes of a pass that fails."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_server.engines.base import (
    EngineDiedError,
    EngineError,
    EngineOutOfMemoryError,
    Tokens,
)
from model_server.engines.child import vllm_runner
from model_server.engines.child.vllm_runner import VLLMRunner
from model_server.engines.model_folder import ModelRefusedError
from tests.harness.child_engines import RUNNER_OPTIONS

pytestmark = pytest.mark.torch
INPUTS = [Tokens(ids=[1, 2]), Tokens(ids=[3])]


class FakeLLMEngine:
    """Fails in its step, and remembers what it was asked for and what was taken back."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.requests: list[str] = []
        self.aborted: list[str] = []

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        self.requests.append(request_id)
        return f"{request_id}-internal"

    def step(self) -> list[Any]:
        raise self.error

    def abort_request(self, request_ids: list[str], *, internal: bool) -> None:
        assert internal
        self.aborted += request_ids


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            EngineOutOfMemoryError,
        ),
        # As a worker's failure arrives where there are several.
        (
            RuntimeError("Worker failed with error 'CUDA out of memory. Tried to'"),
            EngineOutOfMemoryError,
        ),
        (RuntimeError("CUDA error: device-side assert triggered"), EngineDiedError),
        (RuntimeError("shapes do not fit"), RuntimeError),
        (EngineError("vLLM: no"), EngineError),
    ],
)
def test_what_a_failed_step_means(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(PoolingParams=SimpleNamespace))
    engine = FakeLLMEngine(error)
    with pytest.raises(kind) as raised:
        VLLMRunner(engine, 2, {}).embed(INPUTS)
    assert type(raised.value) is kind
    assert str(raised.value) == str(error)
    assert engine.aborted == [f"{name}-internal" for name in engine.requests]
    assert len(engine.requests) == len(INPUTS)


class StartedLLMEngine:
    """Comes up as vLLM does, and answers each input with a row of its token alone."""

    def __init__(self) -> None:
        cache = SimpleNamespace(num_blocks=0, kv_cache_groups=[])
        core = SimpleNamespace(scheduler=SimpleNamespace(kv_cache_config=cache))
        self.engine_core = SimpleNamespace(engine_core=core)
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))
        self.requests: list[str] = []

    def collective_rpc(self, method: Any, args: Any) -> None:
        """There is no worker."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        self.requests.append(request_id)
        return request_id

    def step(self) -> list[Any]:
        row = torch.tensor([0.6, 0.8, 1, 1, 1])
        data = SimpleNamespace(data=row)
        return [
            SimpleNamespace(error=None, request_id=name, outputs=data) for name in self.requests
        ]


def start(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, device: str, gpu: bool
) -> tuple[VLLMRunner, dict[str, Any]]:
    """The runner, and what vLLM was told."""
    told: dict[str, Any] = {}
    arg_utils = SimpleNamespace(EngineArgs=told.update)
    llm_engine = SimpleNamespace(
        LLMEngine=SimpleNamespace(from_engine_args=lambda _: StartedLLMEngine())
    )
    for name, module in (
        ("vllm", SimpleNamespace(PoolingParams=SimpleNamespace)),
        ("vllm.engine", SimpleNamespace()),
        ("vllm.engine.arg_utils", arg_utils),
        ("vllm.v1", SimpleNamespace()),
        ("vllm.v1.engine", SimpleNamespace()),
        ("vllm.v1.engine.llm_engine", llm_engine),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "")
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "")
    options = asdict(RUNNER_OPTIONS) | {"device": device, "transformer": str(folder)}
    return vllm_runner.start(options, lambda _: None), told


@pytest.mark.parametrize(
    ("device", "gpu", "named"),
    [
        ("auto", True, "cuda:0: NVIDIA H200"),
        ("cuda", True, "cuda:0: NVIDIA H200"),
        ("auto", False, "cpu"),
        ("cpu", False, "cpu"),
    ],
)
def test_where_it_runs_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, gpu: bool, named: str
) -> None:
    runner, told = start(monkeypatch, tmp_path, device=device, gpu=gpu)
    assert runner.ready["device"] == named
    assert told["gpu_memory_utilization"] == (0.8 if gpu else 0.25)


@pytest.mark.parametrize(("device", "gpu"), [("cpu", True), ("cuda", False)])
def test_a_device_that_it_can_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, gpu: bool
) -> None:
    with pytest.raises(ModelRefusedError, match="device"):
        start(monkeypatch, tmp_path, device=device, gpu=gpu)
