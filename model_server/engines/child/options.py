"""How an engine with a process of its own is to load a model: as asked, and as its runner is told.

Both are the same for every such engine; what they mean in the terms of one is in its
`..._arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model_server.engines.child.process import Says


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOptions:
    """As the settings ask."""

    model_path: Path
    device: str = "auto"
    dtype: str = "float32"
    threads: int = 0
    """Of its CPU kernels; 0: as it chooses."""
    pooling: str | None = None
    input_tokens_max: int | None = None
    pass_tokens_max: int | None = None
    """The most tokens of a pass; None: room for any target that a machine may want."""
    inputs_max: int = 1_024
    quantization: str | None = None
    tensor_parallel: int = 1
    memory_fraction: float | None = None
    attention_backend: str | None = None
    start_timeout_s: float = 600.0
    verbose: bool = False
    cache_dir: Path | None = None
    says: Says = field(repr=False, default=lambda _: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """As the runner is told, in JSON values; what the model's files say is read already."""

    model: str
    """The model's root folder."""
    transformer: str
    """The folder of its weights."""
    architecture: str
    """The first of `architectures` in its `config.json`."""
    pooling: str | None
    device: str
    dtype: str
    quantization: str | None
    tensor_parallel: int
    memory_fraction: float | None
    attention_backend: str | None
    dimensions: int
    """Of the model's whole vectors."""
    input_tokens_max: int
    pass_tokens_max: int
    inputs_max: int
    log_level: str
    config_overrides: Mapping[str, Any]
    """Of `config.json`: what engines read there and transformers no longer writes."""
