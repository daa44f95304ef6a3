"""The old way, for comparison only: texts padded to the longest of their pass.

What most embedding services do: one rectangle of token ids, filled up with padding, through plain
transformers and its stock attention. The vectors are the model's own, like those of every engine
here; the time goes by texts x longest text instead of by tokens, so a target in tokens fits it
badly. Nobody should serve with it: it is there to be measured against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from model_server.engines.base import Tokens, Vectors
from model_server.engines.description import vector_dimensions
from model_server.engines.model_folder import ModelFolder
from model_server.engines.stock_model import load_tail, load_transformer, pool_and_finish
from model_server.engines.torch_engine import (
    TorchEngine,
    TorchOptions,
    extra_inputs,
    positions,
    size,
)

ENGINE_NAME: Final = "padded-baseline"


def load_padded(options: TorchOptions) -> TorchEngine:
    """Load a model from a local folder to be run with padding.

    Raises:
        ModelRefusedError: the model can't be served exactly, or an option contradicts it.
    """
    return TorchEngine.around(_loaded, options, name=ENGINE_NAME)


def _loaded(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> PaddedModel:
    return PaddedModel(folder, load_transformer(folder, device, dtype, attention=None), device)


class PaddedModel:
    """A transformer with its stock attention over padded texts, our pooling and modules."""

    def __init__(self, folder: ModelFolder, transformer: Any, device: torch.device) -> None:
        """`transformer` is on the device already."""
        self.folder = folder
        self.device = device
        self._transformer = transformer
        _, self.positions_max = positions(self._transformer)
        padding = getattr(self._transformer.config, "pad_token_id", None)
        self._padding = padding if isinstance(padding, int) and padding >= 0 else 0
        self._tail = load_tail(folder, device)
        self.dimensions = vector_dimensions(folder, size(self._transformer, "hidden_size"))

    @torch.inference_mode()
    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        """One pass over a rectangle: as many rows as texts, as many columns as the longest has."""
        if not inputs:
            return np.empty((0, self.dimensions), dtype=np.float32)
        longest = max(len(one.ids) for one in inputs)
        ids = torch.full((len(inputs), longest), self._padding, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(inputs):
            ids[row, : len(one.ids)] = torch.tensor(list(one.ids), dtype=torch.long)
            mask[row, : len(one.ids)] = 1
        mask = mask.to(self.device)
        output = self._transformer(
            input_ids=ids.to(self.device), attention_mask=mask, **extra_inputs(self._transformer)
        )
        # Pooling sees the texts' own tokens only, laid end to end.
        return pool_and_finish(
            output.last_hidden_state[mask.bool()], inputs, self.folder, self._tail
        )
