"""Our pooling and modules in the place of an engine's own, inside the process that runs the passes.

Invariants: vectors are float32 and follow the model's files, whatever the engine would do; each row
carries the number of its forward pass, and that pass's sequences and tokens as counted from what
the pass really held.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from model_server.engines.child.rows import COUNTS, Ended
from model_server.engines.model_folder import read_model_folder
from model_server.engines.pooling import pool
from model_server.engines.stock_model import load_tail

_NUMBERS = 1 << 20


class PoolingHead:
    """What follows the last layer of one model. Not a module: engines load the weights of those."""

    def __init__(self, model_path: str, pooling: str | None, device: torch.device) -> None:
        folder = read_model_folder(model_path, pooling)
        self._spec = folder.pooling
        self._tail = load_tail(folder, device)
        self._numbers = itertools.count(1)

    @torch.no_grad()
    def rows(
        self, hidden: torch.Tensor, lengths: torch.Tensor, prompt_tokens: Sequence[int]
    ) -> torch.Tensor:
        """`hidden` [tokens, size] of one pass to float32 [sequences, dimensions + counts].

        `lengths` [sequences]; `prompt_tokens`: how many leading ones are each prompt's.
        """
        lengths = lengths.to(device=hidden.device, dtype=torch.int64)
        pooled = pool(hidden, lengths, self._spec, prompt_tokens)
        return with_counts(
            self._tail(pooled), next(self._numbers) % _NUMBERS, len(lengths), len(hidden)
        )


def with_counts(vectors: torch.Tensor, number: int, sequences: int, tokens: int) -> torch.Tensor:
    """Three more columns, which float32 holds exactly up to 2**24."""
    counts = torch.tensor([number, sequences, tokens], dtype=torch.float32)
    columns = counts.to(vectors.device).expand(len(vectors), COUNTS)
    return torch.cat([vectors.float(), columns], dim=1)


def ended(sequences: int, device: torch.device, why: Ended) -> torch.Tensor:
    """Rows of a pass without vectors: counts alone."""
    return with_counts(torch.empty((sequences, 0), device=device), why, 0, 0)
