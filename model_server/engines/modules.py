"""The modules that follow the pooling: Dense, LayerNorm, Normalize.

Owns their weights and their arithmetic, float32 throughout. Invariant: for each vector alone they
compute what the modules of sentence-transformers of the same names do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from model_server.engines.model_folder import (
    DenseSpec,
    LayerNormSpec,
    ModelRefusedError,
    TailSpec,
)


class Dense(nn.Module):
    """A linear layer, an activation function, and optionally the input added to the output."""

    def __init__(self, spec: DenseSpec) -> None:
        super().__init__()
        self.linear = nn.Linear(spec.in_features, spec.out_features, bias=spec.bias)
        self.activation: nn.Module = getattr(nn, spec.activation)()
        self.use_residual = spec.use_residual
        if spec.use_residual and spec.in_features != spec.out_features:
            self.residual = nn.Linear(spec.in_features, spec.out_features, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.activation(self.linear(vectors))
        if not self.use_residual:
            return output
        return output + (self.residual(vectors) if hasattr(self, "residual") else vectors)


class LayerNorm(nn.Module):
    """A layer norm with weights."""

    def __init__(self, spec: LayerNormSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(spec.dimension)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(vectors)
        return output


class Normalize(nn.Module):
    """Division by the euclidean norm; a zero vector stays zero."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return functional.normalize(vectors, p=2.0, dim=-1)


class Tail(nn.Module):
    """All modules after the pooling in order, then the cut that the model itself asks for."""

    def __init__(self, specs: Sequence[TailSpec], truncate_dim: int | None = None) -> None:
        super().__init__()
        self.steps = nn.ModuleList(_load(spec) for spec in specs)
        self.truncate_dim = truncate_dim
        self.normalized = bool(specs) and isinstance(self.steps[-1], Normalize)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors float32 [texts, pooled size] to float32 [texts, dimensions]."""
        for step in self.steps:
            vectors = step(vectors)
        if self.truncate_dim is not None and self.truncate_dim < vectors.shape[1]:
            vectors = vectors[:, : self.truncate_dim]
            if self.normalized:
                vectors = functional.normalize(vectors, p=2.0, dim=-1)
        return vectors


def _load(spec: TailSpec) -> nn.Module:
    if isinstance(spec, DenseSpec):
        return _with_weights(Dense(spec), spec.path)
    if isinstance(spec, LayerNormSpec):
        return _with_weights(LayerNorm(spec), spec.path)
    return Normalize()


def _with_weights(module: nn.Module, folder: Path) -> nn.Module:
    try:
        weights = load_file(folder / "model.safetensors")
    except SafetensorError as error:
        raise ModelRefusedError(f"weights in {folder} can't be read: {error}") from error
    try:
        module.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    except RuntimeError as error:
        raise ModelRefusedError(f"weights of {folder.name} do not fit it: {error}") from error
    return module
