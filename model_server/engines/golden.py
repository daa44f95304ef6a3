"""Golden vectors: does this engine, here and now, compute what the model's own code computes?

Owns 8 fixed texts, the reference vectors of them (made by the engine's `reference`, kept by
revision under a cache folder) and the bounds of agreement. Invariant: a server that has passed the
check serves the model's real vectors; one that can't be compared is not passed. It knows nothing
of how vectors are made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from model_server.engines.base import Engine, Text, TextRefused, Tokens, Vectors
from model_server.engines.files import read_cached_object, write_atomically

_LONG: Final = "Every station clock agreed, yet no two travellers could say what time it was. "
_LONG_COPIES: Final = 1_700
"""About 128 KiB, the longest text that a query may have: fills any maximum up to some 27,000."""

GOLDEN_TEXTS: Final[tuple[str, ...]] = (
    "a",
    "how long do hard boiled eggs keep in the fridge",
    "Die Straßenbahn fährt heute wegen Bauarbeiten nur bis zum Münsterplatz.",
    "Сколько времени идёт свет от Солнца до Земли?",
    "北京到上海的高铁需要多长时间? 富士山の高さは何メートルですか。",
    "ما هي عاصمة المغرب؟ मुंबई में आज मौसम कैसा है?",
    "def area(r): return 3.14159 * r ** 2  # €5 👍🏽 naïve—“quotes” \t\n [x] <y> {z}",
    _LONG * _LONG_COPIES,
)
"""The first is also the canary that tells a broken engine from a bad input."""

COSINE_MIN: Final = {"float32": 0.9999, "bfloat16": 0.999, "float16": 0.999}
"""By precision (CONTRACTS, golden vectors); any other must be given its bound."""


class GoldenMismatchError(Exception):
    """The engine does not compute the model's vectors; it must not serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenReport:
    """What the check found."""

    cosines: tuple[float, ...]
    """One a golden text, against the reference."""
    cosine_min: float
    """The bound that held."""
    from_cache: bool
    """The reference vectors were kept from an earlier start."""
    not_kept: str
    """Why they could not be kept for a later one; empty: nothing failed."""


def golden_tokens(engine: Engine) -> list[Tokens]:
    """The golden texts as this model takes them, cut at its maximum.

    Raises:
        GoldenMismatchError: the tokenizer refuses one of them.
    """
    answers = engine.tokenize([Text(text=text, truncate=True) for text in GOLDEN_TEXTS])
    tokens = [answer for answer in answers if isinstance(answer, Tokens)]
    if len(tokens) != len(answers):
        refused = [answer.message for answer in answers if isinstance(answer, TextRefused)]
        raise GoldenMismatchError(f"a golden text is refused: {refused[0]}")
    return tokens


def cosine_bound(engine: Engine, cosine_min: float | None) -> float:
    """The cosine from which vectors agree: `cosine_min`, or that of the engine's precision.

    Raises:
        ValueError: neither is known.
    """
    bound = cosine_min if cosine_min is not None else COSINE_MIN.get(engine.info.precision)
    if bound is None:
        raise ValueError(f"precision {engine.info.precision!r} needs golden_cosine_min")
    return bound


def check_golden(
    engine: Engine,
    cache_dir: Path | None = None,
    cosine_min: float | None = None,
    *,
    inputs_max: int = len(GOLDEN_TEXTS),
) -> GoldenReport | None:
    """Compare the engine's vectors of the golden texts with the reference's.

    The texts go through the engine both together and one by one, so that agreement covers packing;
    together as far as any server's limits allow: in passes of no more tokens than one input may
    have, and of `inputs_max` inputs. None: the engine has no reference (a simulated one).
    `cosine_min` is required for precisions that have no bound of their own.

    Raises:
        GoldenMismatchError: they disagree, or can't be compared.
        ValueError: no bound is known for the engine's precision.
    """
    bound = cosine_bound(engine, cosine_min)
    tokens = golden_tokens(engine)
    path = None if cache_dir is None else cache_dir / f"golden-{engine.info.revision}.json"
    reference = None if path is None else _read_reference(path, tokens, engine.info.dimensions)
    from_cache, not_kept = reference is not None, ""
    if reference is None:
        reference = engine.reference(tokens)
        if reference is None:
            return None
        _check_shape(reference, tokens, engine.info.dimensions, "the reference")
        if path is not None:
            not_kept = _write_reference(path, tokens, reference)
    passes = _passes(tokens, engine.info.input_tokens_max, inputs_max)
    together = np.concatenate([engine.embed(one) for one in passes])
    alone = np.concatenate([engine.embed([one]) for one in tokens])
    for vectors in (together, alone):
        _check_shape(vectors, tokens, engine.info.dimensions, "the engine")
    cosines = np.minimum(cosine(together, reference), cosine(alone, reference))
    if not np.all(cosines >= bound):
        worst = int(np.argmin(cosines))
        raise GoldenMismatchError(
            f"golden text {worst + 1} of {len(tokens)} ({len(tokens[worst].ids)} tokens) has "
            f"cosine {cosines[worst]:.6f} to the model's own vector, below {bound}"
        )
    return GoldenReport(
        cosines=tuple(float(value) for value in cosines),
        cosine_min=bound,
        from_cache=from_cache,
        not_kept=not_kept,
    )


def cosine(left: Vectors, right: Vectors) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Cosine of each row to the same row; of two zero vectors 1, of one zero vector 0.

    0 where a vector is not finite, so that no comparison with a bound lets it pass.
    """
    a, b = left.astype(np.float64), right.astype(np.float64)
    both_zero = ~a.any(axis=1) & ~b.any(axis=1)
    with np.errstate(invalid="ignore"):
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        products = np.sum(a * b, axis=1)
    fit = (norms > 0) & np.isfinite(norms)
    cosines = np.divide(products, norms, out=np.zeros_like(products), where=fit)
    return np.where(both_zero, 1.0, cosines)


def _passes(
    tokens: Sequence[Tokens], tokens_max: int, inputs_max: int
) -> Iterator[Sequence[Tokens]]:
    """All of them in order, in passes within the limits; one alone may always run."""
    inputs: list[Tokens] = []
    count = 0
    for one in tokens:
        if inputs and (count + len(one.ids) > tokens_max or len(inputs) == inputs_max):
            yield inputs
            inputs, count = [], 0
        inputs.append(one)
        count += len(one.ids)
    yield inputs


def _check_shape(vectors: Vectors, tokens: Sequence[Tokens], dimensions: int, who: str) -> None:
    if vectors.shape != (len(tokens), dimensions):
        raise GoldenMismatchError(
            f"{who} gives vectors of shape {vectors.shape}, not {(len(tokens), dimensions)}"
        )
    if not np.isfinite(vectors).all():
        raise GoldenMismatchError(f"{who} gives a vector that is not finite")


def _read_reference(path: Path, tokens: Sequence[Tokens], dimensions: int) -> Vectors | None:
    """The kept vectors, if they are whole and of these very tokens."""
    kept = read_cached_object(path)
    if kept.get("ids") != [list(one.ids) for one in tokens]:
        return None
    try:
        vectors = np.asarray(kept.get("vectors"), dtype=np.float32)
    except (TypeError, ValueError):
        return None
    if vectors.shape != (len(tokens), dimensions) or not np.isfinite(vectors).all():
        return None
    return vectors


def _write_reference(path: Path, tokens: Sequence[Tokens], vectors: Vectors) -> str:
    """Keep them; why that failed."""
    kept = {
        "ids": [[int(token) for token in one.ids] for one in tokens],
        "vectors": [[float(number) for number in row] for row in vectors],
    }
    try:
        write_atomically(path, json.dumps(kept).encode())
    except OSError as error:
        return str(error)
    return ""
