"""Attention over texts of different length laid end to end, without padding.

Owns one function that is registered with transformers as an attention implementation: it gets the
states of all tokens of a pass at once and lets each text see itself only. Invariant: it computes
exactly what the model's stock attention computes for each text alone, or raises; a feature that it
does not know never passes silently. It knows nothing of batching, tokens or pooling.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

import torch
from torch.nn import functional
from transformers import AttentionInterface

ATTENTION_NAME: Final = "packed_by_length"
"""The `attn_implementation` that a model is loaded with to have this attention."""

_HARMLESS: Final = frozenset(
    {
        "cache", "cache_position", "deterministic", "output_attentions", "output_hidden_states",
        "past_key_values", "position_ids", "return_dict", "token_type_ids", "use_cache",
    }
)  # fmt: skip
"""Keyword arguments that models pass along and that have no part in an attention without cache."""


class UnsupportedAttentionError(Exception):
    """The model's attention has a feature that is not computed here."""


@dataclass(frozen=True, slots=True)
class Run:
    """`count` neighbouring texts of `length` tokens each, from token `start` on."""

    start: int
    count: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the texts of a pass lie in its tokens: sorted by length, so that runs are long."""

    runs: tuple[Run, ...]
    tokens: int
    length_max: int
    offsets: torch.Tensor
    """[texts + 1] int32 on the pass's device: where each text starts, and the end."""


def pack(lengths: Sequence[int], device: torch.device) -> Packing:
    """The packing of texts of these lengths, in this order: ascending makes the fewest runs."""
    runs: list[Run] = []
    start = 0
    for length, group in groupby(lengths):
        run = Run(start, len(list(group)), length)
        runs.append(run)
        start = run.end
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int32), dim=0, out=offsets[1:])
    return Packing(
        runs=tuple(runs),
        tokens=start,
        length_max=max(lengths),
        offsets=offsets.to(device, non_blocking=True),
    )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of one layer.

    `query` [1, heads, tokens, head size], `key` and `value` the same with as many or fewer heads.
    Returns [1, tokens, heads, head size], and no weights. A window of W sees positions less than W
    apart.

    Raises:
        UnsupportedAttentionError: for anything that it would have to ignore.
    """
    if packing is None:
        raise UnsupportedAttentionError("the model does not hand its attention what it was given")
    _refuse_unknown(attention_mask, dropout, others)
    if query.shape[0] != 1 or query.shape[2] != packing.tokens or key.shape[2] != packing.tokens:
        raise UnsupportedAttentionError(
            f"states of shape {tuple(query.shape)} for {packing.tokens} tokens"
        )
    causal, window = _causal_and_window(module, is_causal, sliding_window)
    if window is not None and window >= packing.length_max:
        window = None
    states = tuple(state[0].transpose(0, 1) for state in (query, key, value))
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and _VARLEN is not None:
        return _by_kernel(states, packing, scaling, causal, window).unsqueeze(0), None
    outputs = [_run_attention(states, run, scaling, causal, window) for run in packing.runs]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


def register() -> None:
    """Make `ATTENTION_NAME` known to transformers. Idempotent.

    No mask function is registered with it, so models build no mask and leave it to us.
    """
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def _refuse_unknown(
    attention_mask: torch.Tensor | None, dropout: float, others: dict[str, Any]
) -> None:
    if attention_mask is not None:
        raise UnsupportedAttentionError("the model makes an attention mask of its own")
    if dropout:
        raise UnsupportedAttentionError("the model is in training mode")
    unknown = sorted(
        name for name, value in others.items() if value is not None and name not in _HARMLESS
    )
    if unknown:
        raise UnsupportedAttentionError(f"unknown feature of attention: {', '.join(unknown)}")


def _causal_and_window(
    module: torch.nn.Module, is_causal: bool | None, sliding_window: int | None
) -> tuple[bool, int | None]:
    made_causal = bool(getattr(module, "is_causal", True))
    causal = made_causal if is_causal is None else is_causal
    if made_causal and not causal and sliding_window is not None:
        # A decoder told to see both ways: transformers' mask for it takes in the window's edge.
        return False, sliding_window + 1
    return causal, sliding_window


def _run_attention(
    states: Sequence[torch.Tensor],
    run: Run,
    scaling: float | None,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """The texts of one run: states of the pass in, [tokens of the run, heads, size] out."""
    query, key, value = (
        state[run.start : run.end].view(run.count, run.length, *state.shape[1:]).transpose(1, 2)
        for state in states
    )
    mask = None
    if window is not None and window < run.length:
        side = 1 << (run.length - 1).bit_length()
        mask = _window_mask(side, window, causal, query.device)[: run.length, : run.length]
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).flatten(0, 1)


@functools.lru_cache(maxsize=16)
def _window_mask(side: int, window: int, causal: bool, device: torch.device) -> torch.Tensor:
    """[side, side] which positions see which; kept by powers of two, so that few are kept."""
    positions = torch.arange(side, device=device)
    apart = positions[:, None] - positions[None, :]
    return (apart < window) & (apart >= 0 if causal else apart > -window)


def _by_kernel(
    states: Sequence[torch.Tensor],
    packing: Packing,
    scaling: float | None,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    if _VARLEN is None:
        raise UnsupportedAttentionError("this torch has no variable-length attention")
    query, key, value = (state.contiguous() for state in states)
    left = -1 if window is None else window - 1
    output: torch.Tensor = _VARLEN(
        query,
        key,
        value,
        packing.offsets,
        packing.offsets,
        packing.length_max,
        packing.length_max,
        scale=scaling,
        window_size=(left, 0 if causal else left),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def _find_varlen() -> Any:
    """Torch's variable-length kernel, where this torch has one that takes all we need."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in every torch
    except ImportError:
        return None
    known = set(inspect.signature(varlen_attn).parameters)
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= known else None


_VARLEN: Final = _find_varlen()
