"""The padded baseline: the model's own vectors, and padding that is really there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from model_server.engines.base import Text, Tokens
from model_server.engines.golden import cosine
from model_server.engines.padded_engine import ENGINE_NAME, load_padded
from model_server.engines.torch_engine import TorchOptions
from tests.contract.tiny_models import ARCHITECTURES, save_modules

pytestmark = pytest.mark.torch
TEXTS = ("a", "alpha bravo", "charlie " * 7, "[SEP] literally", "delta " * 200, "echo")


def loaded(path: Path, architecture: str, mode: str = "mean") -> Any:
    save_modules(path, architecture, [Pooling(32, mode), Normalize()])
    return load_padded(TorchOptions(model_path=path, device="cpu", threads=1))


def tokens_of(engine: Any) -> list[Tokens]:
    answers = engine.tokenize([Text(text=text, truncate=True) for text in TEXTS])
    return [answer for answer in answers if isinstance(answer, Tokens)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_vectors_are_the_models_own(tmp_path: Path, architecture: str) -> None:
    engine = loaded(tmp_path / "model", architecture)
    tokens = tokens_of(engine)
    assert len(tokens) == len(TEXTS)
    vectors = engine.embed(tokens)
    assert cosine(vectors, engine.reference(tokens)).min() >= 0.9999
    assert cosine(engine.embed(tokens[::-1])[::-1], vectors).min() >= 0.9999
    assert engine.info.engine == ENGINE_NAME == "padded-baseline"


@pytest.mark.parametrize("mode", ["cls", "lasttoken"])
@pytest.mark.parametrize("architecture", ["bert", "qwen3"])
def test_padding_is_never_pooled(tmp_path: Path, architecture: str, mode: str) -> None:
    engine = loaded(tmp_path / "model", architecture, mode)
    tokens = tokens_of(engine)
    assert cosine(engine.embed(tokens), engine.reference(tokens)).min() >= 0.9999


def test_a_pass_is_a_rectangle_as_wide_as_its_longest_text(tmp_path: Path) -> None:
    engine = loaded(tmp_path / "model", "bert")
    shapes: list[tuple[int, ...]] = []

    def seen(_module: Any, _arguments: Any, named: dict[str, Any]) -> None:
        shapes.append(tuple(named["input_ids"].shape))
        padded = named["input_ids"].numel() - int(named["attention_mask"].sum())
        assert padded == np.prod(shapes[-1]) - sum(len(one.ids) for one in tokens)

    engine._model._transformer.register_forward_pre_hook(seen, with_kwargs=True)
    tokens = tokens_of(engine)
    engine.embed(tokens)
    assert shapes == [(len(TEXTS), max(len(one.ids) for one in tokens))]
