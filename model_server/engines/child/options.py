"""How to load a model into an engine with a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from model_server.engines.child.process import Says


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOptions:
    """How to load a model into an engine with a process of its own."""

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
