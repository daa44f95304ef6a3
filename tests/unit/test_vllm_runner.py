"""vLLM's runner on a stand-in for its engine: what becomes of a pass that fails."""

from __future__ import annotations

import sys
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
from model_server.engines.child.vllm_runner import VLLMRunner

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
