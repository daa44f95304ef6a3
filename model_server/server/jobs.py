"""What runs in the worker threads: tokenizing a request, and a forward pass, with their checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_server.engines.base import (
    Engine,
    EngineError,
    EnginePass,
    SeparateEngine,
    Text,
    TextRefused,
    Tokens,
    Vectors,
)
from model_server.server.requests import Columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What came of a pass."""

    vectors: Vectors
    started_ns: int
    ended_ns: int
    finite: bool
    """At least one of the vectors is."""
    passes: Sequence[EnginePass] | None = None
    """As an engine with a process of its own counted them; None: it ran here, as one."""

    def counted(self) -> dict[str, int]:
        """Fields of the pass's log line: what the engine itself counted."""
        if self.passes is None:
            return {}
        return {
            "engine_passes": len(self.passes),
            "engine_sequences": sum(one.sequences for one in self.passes),
            "engine_tokens": sum(one.tokens for one in self.passes),
        }


def embed(engine: Engine, inputs: Sequence[Tokens]) -> Ran:
    """One pass.

    Raises:
        EngineError: the vectors are not of the shape that they must have.
        Exception: what the engine raised.
    """
    started_ns = time.monotonic_ns()
    vectors = engine.embed(inputs)
    ended_ns = time.monotonic_ns()
    expected = (len(inputs), engine.info.dimensions)
    if vectors.shape != expected or vectors.dtype != np.float32:
        raise EngineError(
            f"the engine returned {vectors.dtype} of shape {vectors.shape}, not float32 {expected}"
        )
    passes = engine.passes if isinstance(engine, SeparateEngine) else None
    return Ran(
        vectors=vectors,
        started_ns=started_ns,
        ended_ns=ended_ns,
        finite=any(np.isfinite(row).all() for row in vectors),
        passes=passes,
    )


def tokenize(engine: Engine, columns: Columns) -> None:
    """Fill in tokens and exact counts.

    A tokenizer that raises (or panics) does it again text by text, so that one text fails alone.
    """
    texts = columns.texts_to_tokenize()
    answers: list[Tokens | TextRefused]
    try:
        answers = engine.tokenize(texts) if texts else []
    except BaseException:  # noqa: BLE001 - a panic in Rust is no Exception
        answers = [_tokenize_alone(engine, text) for text in texts]
    columns.take_tokens(answers)


def _tokenize_alone(engine: Engine, text: Text) -> Tokens | TextRefused:
    try:
        return engine.tokenize([text])[0]
    except BaseException as error:  # noqa: BLE001 - as above
        return TextRefused(message=f"The text can't be tokenized: {type(error).__name__}.")
