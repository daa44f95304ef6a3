"""Token vectors of a pass to one vector a text, for all texts at once.

Owns the six pooling modes of sentence-transformers on texts laid end to end. Invariants: each
text's vector comes from its own tokens only, sums are in float32, and the result is what
sentence-transformers' `Pooling` gives for the text alone (source: its `Pooling.forward`). It knows
nothing of models or attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from model_server.engines.model_folder import PoolingSpec


def pool(
    hidden: torch.Tensor, lengths: torch.Tensor, spec: PoolingSpec, prompt_tokens: Sequence[int]
) -> torch.Tensor:
    """Pool `hidden` [tokens, size] to float32 [texts, size x modes].

    `lengths` [texts] int64, on the same device, in the order of the pass. `prompt_tokens`, one a
    text: how many leading tokens are its prompt's. A model that does not pool them must be left at
    least one token beyond.
    """
    starts = torch.cumsum(lengths, dim=0) - lengths
    hidden = hidden.float()
    kept, kept_lengths, first = hidden, lengths, torch.zeros_like(lengths)
    if not spec.include_prompt and any(prompt_tokens):
        first = torch.tensor(prompt_tokens, device=hidden.device)
        position = _positions(lengths, starts)
        kept = hidden[position >= torch.repeat_interleave(first, lengths)]
        kept_lengths = lengths - first
    parts: list[torch.Tensor] = []
    for mode in spec.modes:
        if mode == "cls":
            parts.append(hidden[starts + first])
        elif mode == "lasttoken":
            parts.append(hidden[starts + lengths - 1])
        elif mode == "max":
            parts.append(torch.segment_reduce(kept, "max", lengths=kept_lengths))
        elif mode == "weightedmean":
            # A token's weight is its place in the text, counted from 1, prompt included.
            place = _positions(kept_lengths, torch.cumsum(kept_lengths, dim=0) - kept_lengths)
            weights = (place + 1 + torch.repeat_interleave(first, kept_lengths)).float()[:, None]
            total = torch.segment_reduce(kept * weights, "sum", lengths=kept_lengths)
            parts.append(total / torch.segment_reduce(weights, "sum", lengths=kept_lengths))
        else:
            count = kept_lengths.float()[:, None]
            divisor = count if mode == "mean" else count.sqrt()
            parts.append(torch.segment_reduce(kept, "sum", lengths=kept_lengths) / divisor)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _positions(lengths: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """[tokens] each token's place in its own text, from 0."""
    tokens = torch.arange(int(lengths.sum()), device=lengths.device)
    return tokens - torch.repeat_interleave(starts, lengths)
