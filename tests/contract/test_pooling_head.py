"""Our pooling inside an engine's process, which sees token vectors and nothing else of a pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

from model_server.engines.base import EngineError, EnginePass, Tokens
from model_server.engines.child.pooling_head import PoolingHead, ended
from model_server.engines.child.rows import Ended, unpack_rows
from tests.contract.tiny_models import save_modules

pytestmark = pytest.mark.torch
SIZE = 32
DIMENSIONS = 12
CPU = torch.device("cpu")


def saved(path: Path, mode: str, *, include_prompt: bool = True) -> Path:
    pooling = Pooling(SIZE, mode, include_prompt=include_prompt)
    save_modules(path, "bert", [pooling, Dense(SIZE, DIMENSIONS), Normalize()])
    return path


def theirs(path: Path, hidden: torch.Tensor, prompt_tokens: int) -> torch.Tensor:
    """What sentence-transformers' modules make of the token vectors of one text."""
    features: dict[str, torch.Tensor] = {
        "token_embeddings": hidden[None],
        "attention_mask": torch.ones(1, len(hidden), dtype=torch.int64),
        "prompt_length": torch.tensor([prompt_tokens]),
    }
    with torch.inference_mode():
        for module in list(SentenceTransformer(str(path), device="cpu"))[1:]:
            features = module(features)
    return features["sentence_embedding"][0]


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_vectors_are_those_of_the_models_files(
    tmp_path: Path, mode: str, include_prompt: bool
) -> None:
    path = saved(tmp_path / "model", mode, include_prompt=include_prompt)
    inputs = [
        Tokens(ids=range(length), prompt_tokens=prompt_tokens)
        for length, prompt_tokens in ((3, 0), (9, 4), (1, 0), (5, 2))
    ]
    lengths = [len(one.ids) for one in inputs]
    hidden = torch.randn(sum(lengths), SIZE, generator=torch.Generator().manual_seed(1))
    head = PoolingHead(str(path), None, CPU)
    rows = head.rows(hidden, torch.tensor(lengths), [one.prompt_tokens for one in inputs])
    vectors, passes = unpack_rows(rows.tolist(), DIMENSIONS)
    pieces = torch.split(hidden, lengths)
    expected = torch.stack(
        [theirs(path, h, one.prompt_tokens) for h, one in zip(pieces, inputs, strict=True)]
    )
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6)
    assert passes == [EnginePass(sequences=4, tokens=sum(lengths))]


def test_each_pass_has_a_number_of_its_own(tmp_path: Path) -> None:
    head = PoolingHead(str(saved(tmp_path / "model", "mean")), None, CPU)
    passes = [head.rows(torch.ones(2, SIZE), torch.tensor([2]), [0]).tolist() for _ in range(2)]
    _, counted = unpack_rows([row for rows in passes for row in rows], DIMENSIONS)
    assert counted == [EnginePass(sequences=1, tokens=2)] * 2


def test_rows_of_a_pass_that_raised_say_so() -> None:
    with pytest.raises(EngineError, match="the forward pass raised"):
        unpack_rows(ended(3, CPU, Ended.RAISED).tolist(), DIMENSIONS)
