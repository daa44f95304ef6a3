"""The one protocol that every engine implements; `tests/contract/test_engines.py` is its contract.

An engine turns texts into token ids and lists of token ids into vectors. It knows nothing of
streams, requests, deadlines or batching: the scheduler decides what runs in one pass. Its methods
block; the server calls `tokenize` and `embed` from worker threads, never two `embed` at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
"""Shape [inputs, dimensions], float32, C order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a served model is, fixed once its engine has started."""

    revision: str
    """Hash of weights, tokenizer, pooling, modules, prompts, maximum, dtype and quantisation."""
    dimensions: int
    matryoshka_dimensions: tuple[int, ...] = ()
    normalized: bool
    """The model normalises its vectors: a cut vector is normalised again."""
    input_tokens_max: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    engine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    device: str
    """As torch calls it, and then what it is: `cpu, 2 threads`, `cuda:0: NVIDIA H200`."""
    precision: str
    """Such as float32 or bfloat16."""


# Text and Tokens are made for each input, and a frozen dataclass costs four times as much to make.


@dataclass(slots=True, kw_only=True)
class Text:
    """One text to tokenize. `prompt` is the prompt itself, already chosen; it precedes the text."""

    text: str
    prompt: str = ""
    truncate: bool = False


@dataclass(slots=True, kw_only=True)
class Tokens:
    """What enters a pass for one text: prompt, special tokens, after truncation.

    `prompt_tokens` leading tokens belong to the prompt (and are left out of pooling by models with
    `include_prompt: false`).
    """

    ids: Sequence[int]
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRefused:
    """A text that can't enter a pass: too long without `truncate`, or of no tokens."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePass:
    """One forward pass, as counted where it ran."""

    sequences: int
    tokens: int


class EngineError(Exception):
    """A pass failed; the engine itself may be sound."""


class EngineOutOfMemoryError(EngineError):
    """A pass did not fit the memory; a smaller one may."""


class EngineDiedError(Exception):
    """The engine is gone; every pass fails until it is restarted."""


class Engine(Protocol):
    """An inference engine with one model loaded."""

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        ...

    def tokenize(self, texts: Sequence[Text]) -> list[Tokens | TextRefused]:
        """Count and encode, one answer a text, in order. Never raises for what a text holds."""
        ...

    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        """One padding-free forward pass.

        Returns the model's full vectors (pooled, through all its modules), one row an input, in
        order; not yet cut to other dimensions.

        Raises:
            EngineOutOfMemoryError: the pass was too large for the memory.
            EngineDiedError: the engine can't be used any more.
            Exception: anything else means that this pass failed.
        """
        ...

    def reference(self, inputs: Sequence[Tokens]) -> Vectors | None:
        """Vectors of an independent float32 implementation, one input at a time; None: it has none.

        For a real model: plain transformers with its stock attention and our pooling. The golden
        vectors are made from it.
        """
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...


@runtime_checkable
class SeparateEngine(Engine, Protocol):
    """An engine in a process of its own: it may die at any time, and can be ended in a pass."""

    @property
    def passes(self) -> Sequence[EnginePass]:
        """The forward passes that the last `embed` took, as the engine itself counted them."""
        ...

    def watch(self, died: Callable[[str], None]) -> None:
        """Have it called, once and from any thread, when the process is gone without `close`.

        At once if it is gone already. What it is given says why, in one line.
        """
        ...

    def kill(self) -> None:
        """End the process now, from any thread; an `embed` that runs raises EngineDiedError."""
        ...
