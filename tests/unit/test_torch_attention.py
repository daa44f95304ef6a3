"""Packed attention equals plain attention of each text alone; what it would ignore it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_server.engines import torch_attention
from model_server.engines.torch_attention import (
    Packing,
    UnsupportedAttentionError,
    pack,
    packed_attention,
)

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
HEADS, KEY_HEADS, SIZE = 4, 2, 8


class Layer(torch.nn.Module):
    """What the attention sees of a model's layer."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def states(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value as models hand them over: [1, heads, tokens, size], not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(1, tokens, heads, SIZE, generator=generator).transpose(1, 2)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    return query, key, value


def plain(
    parts: tuple[torch.Tensor, ...],
    *,
    causal: bool,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Softmax attention of one text; [heads, tokens, size] to [tokens, heads, size]."""
    query, key, value = parts
    key, value = (state.repeat_interleave(HEADS // KEY_HEADS, dim=0) for state in (key, value))
    scores = query @ key.transpose(1, 2) * scaling
    length = query.shape[1]
    apart = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    hidden = torch.zeros(length, length, dtype=torch.bool)
    if causal:
        hidden |= apart < 0
    if window is not None:
        hidden |= apart.abs() >= window
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1)


def of_each_alone(parts: tuple[torch.Tensor, ...], lengths: list[int], **how: Any) -> torch.Tensor:
    split = [torch.split(part[0], lengths, dim=1) for part in parts]
    return torch.cat([plain(text, **how) for text in zip(*split, strict=True)])[None]


cases = given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 2, 5, 16, 100]),
    seed=st.integers(0, 999),
)


@settings(deadline=None)
@cases
def test_as_each_text_alone(
    lengths: list[int], causal: bool, window: int | None, seed: int
) -> None:
    parts = states(sum(lengths), seed)
    output, weights = packed_attention(
        Layer(is_causal=causal),
        *parts,
        None,
        packing=pack(lengths, CPU),
        scaling=0.3,
        sliding_window=window,
        position_ids=torch.zeros(1),
        softcap=None,
    )
    assert weights is None
    expected = of_each_alone(parts, lengths, causal=causal, window=window, scaling=0.3)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def documented_varlen(  # noqa: PLR0917 - as torch.nn.attention.varlen.varlen_attn
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What torch's documentation says its GPU kernel computes."""
    left, right = window_size
    assert (left == -1 and right in (-1, 0)) or right in (0, left)
    assert enable_gqa
    assert all(state.is_contiguous() for state in (query, key, value))
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    parts = tuple(state.transpose(0, 1)[None] for state in (query, key, value))
    window = None if left == -1 else left + 1
    return of_each_alone(parts, lengths, causal=right == 0, window=window, scaling=scale)[0]


@settings(deadline=None)
@cases
def test_the_kernel_is_asked_for_the_same(
    lengths: list[int], causal: bool, window: int | None, seed: int
) -> None:
    parts = states(sum(lengths), seed)
    packing = pack(lengths, CPU)
    flat = [part[0].transpose(0, 1) for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "_VARLEN", documented_varlen)
        output = torch_attention._by_kernel(flat, packing, 0.3, causal, window)
    expected = of_each_alone(parts, lengths, causal=causal, window=window, scaling=0.3)
    torch.testing.assert_close(output[None], expected, rtol=1e-4, atol=1e-5)


def test_runs_are_neighbours_of_equal_length() -> None:
    packing = pack([2, 2, 5, 7, 7, 7], CPU)
    found = [(run.start, run.count, run.length, run.end) for run in packing.runs]
    assert found == [(0, 2, 2, 4), (4, 1, 5, 9), (9, 3, 7, 30)]
    assert packing.offsets.tolist() == [0, 2, 4, 9, 16, 23, 30]
    assert (packing.tokens, packing.length_max) == (30, 7)


def test_a_decoder_told_to_see_both_ways_sees_its_windows_edge() -> None:
    parts = states(12, 1)
    output, _ = packed_attention(
        Layer(is_causal=True),
        *parts,
        None,
        packing=pack([12], CPU),
        scaling=0.3,
        sliding_window=3,
        is_causal=False,
    )
    expected = of_each_alone(parts, [12], causal=False, window=4, scaling=0.3)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"packing": None}, "does not hand"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "attention mask of its own"),
        ({"dropout": 0.1}, "training"),
        ({"softcap": 30.0}, "softcap"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"s_aux": torch.zeros(1)}, "s_aux"),
        ({"packing": pack([4], CPU)}, "4 tokens"),
    ],
)
def test_what_it_would_ignore_is_refused(change: dict[str, Any], named: str) -> None:
    query, key, value = states(3, 0)
    packing: Packing = pack([3], CPU)
    arguments = {"attention_mask": None, "packing": packing, "scaling": 0.3} | change
    with pytest.raises(UnsupportedAttentionError, match=named):
        packed_attention(Layer(is_causal=False), query, key, value, **arguments)
