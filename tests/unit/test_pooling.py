"""Pooling of texts laid end to end equals sentence-transformers' pooling of each text alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.modules import Pooling

from model_server.engines.description import output_dimension
from model_server.engines.model_folder import (
    POOLING_MODES,
    DenseSpec,
    LayerNormSpec,
    ModelRefusedError,
    NormalizeSpec,
    PoolingSpec,
)
from model_server.engines.modules import Tail
from model_server.engines.pooling import pool

pytestmark = pytest.mark.torch
SIZE = 5


def theirs(tokens: torch.Tensor, modes: tuple[str, ...], prompt: int | None) -> torch.Tensor:
    """sentence-transformers' own pooling of one text."""
    pooling = Pooling(SIZE, modes, include_prompt=prompt is None)
    features = {
        "token_embeddings": tokens[None],
        "attention_mask": torch.ones(1, len(tokens), dtype=torch.int64),
    }
    if prompt is not None:
        features["prompt_length"] = torch.tensor([prompt])
    vector: torch.Tensor = pooling(features)["sentence_embedding"][0]
    return vector


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    return lengths, [draw(st.integers(0, length - 1)) for length in lengths]


@settings(deadline=None)
@given(
    texts(),
    st.lists(st.sampled_from(POOLING_MODES), min_size=1, max_size=6),
    st.booleans(),
    st.integers(0, 1_000),
)
def test_each_text_is_pooled_as_if_alone(
    drawn: tuple[list[int], list[int]], modes: list[str], include_prompt: bool, seed: int
) -> None:
    lengths, prompts = drawn
    hidden = torch.randn(sum(lengths), SIZE, generator=torch.Generator().manual_seed(seed))
    ours = pool(
        hidden,
        torch.tensor(lengths),
        PoolingSpec(modes=tuple(modes), include_prompt=include_prompt),
        prompts,
    )
    assert ours.dtype == torch.float32
    pieces = torch.split(hidden, lengths)
    for vector, piece, prompt in zip(ours, pieces, prompts, strict=True):
        expected = theirs(piece, tuple(modes), None if include_prompt else prompt)
        torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-6)


def test_half_precision_is_summed_in_float32() -> None:
    hidden = torch.ones(3_000, SIZE, dtype=torch.bfloat16)
    spec = PoolingSpec(modes=("mean_sqrt_len_tokens",))
    (vector,) = pool(hidden, torch.tensor([3_000]), spec, [0])
    torch.testing.assert_close(vector, torch.full((SIZE,), 3_000**0.5))


def test_output_dimension_follows_the_modules() -> None:
    path = Path("2_Dense")
    dense = DenseSpec(path=path, in_features=8, out_features=3)
    norm = LayerNormSpec(path=path, dimension=3)
    assert output_dimension(8, (dense, norm, NormalizeSpec()), None) == 3
    assert output_dimension(8, (), 5) == 5
    assert output_dimension(8, (), 50) == 8
    with pytest.raises(ModelRefusedError, match="2_Dense takes vectors of 3, gets 8"):
        output_dimension(8, (norm, dense), None)


def test_a_cut_vector_is_normalised_again() -> None:
    tail = Tail((NormalizeSpec(),), truncate_dim=2)
    assert tail.normalized
    vector = tail(torch.tensor([[3.0, 4.0, 12.0], [0.0, 0.0, 1.0]]))
    torch.testing.assert_close(vector, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))
    plain = Tail((), truncate_dim=2)
    assert not plain.normalized
    torch.testing.assert_close(plain(torch.tensor([[3.0, 4.0, 12.0]])), torch.tensor([[3.0, 4.0]]))
