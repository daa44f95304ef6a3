"""From what the phases left behind to figures: pure arithmetic on results and log lines.

Knows nothing of processes or screens. Vectors are float32 rows, one a text.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aggregator.commands.demo_load import Phase
from aggregator.commands.demo_report import Delivery, Neighbour, Neighbourhood
from aggregator.commands.received import NotAResultError, read_result

Matrix = npt.NDArray[np.float32]

NEAREST_SHOWN = 3
_WORDS_SHOWN = range(4, 9)
_SEED = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One claim, from the aggregator's log line about it."""

    estimate: float
    tokens: int
    queries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The engine's forward passes over some time."""

    count: int
    tokens: int
    inputs: int
    fill_ratio: float
    """Tokens over the targets that the passes were cut for. Of ordinary passes only: a probe is
    larger than its target on purpose, a rerun smaller."""
    target_min: int
    target_max: int
    """A target follows the machine."""


def read_claims(log: bytes) -> list[Claim]:
    """The answered claims of a stretch of the aggregator's JSON log."""
    return [
        Claim(estimate=entry["estimate"], tokens=entry["tokens"], queries=entry["queries"])
        for entry in _entries(log, "claim")
        if entry.get("outcome") == "answered" and entry["tokens"]
    ]


def read_passes(log: bytes) -> Passes:
    """The passes of a stretch of the model server's JSON log; all 0 if there is none."""
    entries = list(_entries(log, "pass"))
    targets = [entry["batch_tokens_target"] for entry in entries]
    ordinary = [entry for entry in entries if entry["kind"] == "normal"]
    aimed_at = sum(entry["batch_tokens_target"] for entry in ordinary)
    return Passes(
        count=len(entries),
        tokens=sum(entry["tokens"] for entry in entries),
        inputs=sum(entry["inputs"] for entry in entries),
        fill_ratio=sum(entry["tokens"] for entry in ordinary) / max(aimed_at, 1),
        target_min=min(targets, default=0),
        target_max=max(targets, default=0),
    )


def _entries(log: bytes, event: str) -> Iterator[dict[str, Any]]:
    """The log's lines about this, cut ones left out."""
    for line in log.splitlines():
        if f'"{event}"'.encode() not in line:
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry.get("event") == event:
            yield entry


def estimate_error(claims: Sequence[Claim]) -> float:
    """Mean of |estimate - tokens| / tokens; 0 without claims."""
    errors = [abs(claim.estimate - claim.tokens) / claim.tokens for claim in claims]
    return sum(errors) / len(errors) if errors else 0.0


def as_claims(raw: Sequence[int], tokens: Sequence[int], queries: int) -> list[Claim]:
    """Claims of `queries` each, as they would be with raw counts for estimates."""
    return [
        Claim(
            estimate=sum(raw[start : start + queries]),
            tokens=sum(tokens[start : start + queries]),
            queries=queries,
        )
        for start in range(0, len(tokens) - queries + 1, queries)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All results of all phases. `vectors` and `tokens` are by the text's index."""

    delivery: Delivery
    vectors: dict[int, Matrix]
    tokens: dict[int, int]


def outcome(phases: Sequence[Phase], duplicates: int) -> Outcome:
    """Read every result and keep the ledger: each query has a vector, an error, or nothing."""
    vectors: dict[int, Matrix] = {}
    tokens: dict[int, int] = {}
    ok = missing = 0
    errors: list[str] = []
    for query in [query for phase in phases for query in phase.queries]:
        if query.record is None:
            missing += 1
            continue
        try:
            result = read_result(query.record)
        except NotAResultError as error:
            errors.append(str(error))
            continue
        if result.vector is None:
            errors.append(result.as_line())
            continue
        ok += 1
        vectors[query.text_index] = result.vector
        tokens[query.text_index] = result.tokens
    delivery = Delivery(
        sent=ok + len(errors) + missing,
        results_ok=ok,
        results_error=len(errors),
        missing=missing,
        duplicates=duplicates,
        first_error=errors[0] if errors else "",
    )
    return Outcome(delivery=delivery, vectors=vectors, tokens=tokens)


def cosine(one: Matrix, other: Matrix) -> float:
    """Of two vectors, in float64; 0 if either is zero or not finite."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms and math.isfinite(norms) else 0.0


def neighbourhoods(
    texts: Sequence[str], vectors: dict[int, Matrix], count: int
) -> list[Neighbourhood]:
    """`count` texts, drawn by a fixed seed, and what is nearest to each by cosine.

    Drawn among texts of a few words, where there are such; a text that occurs twice is not its own
    neighbour.
    """
    firsts = {texts[index]: index for index in sorted(vectors, reverse=True)}
    indexes = sorted(firsts.values())
    short = [
        index
        for index in indexes
        if texts[index].isascii() and len(texts[index].split()) in _WORDS_SHOWN
    ]
    drawn_from = short if len(short) >= count else indexes
    shown = random.Random(_SEED).sample(drawn_from, min(count, len(drawn_from)))
    matrix = np.stack([vectors[index] for index in indexes])
    norms = np.linalg.norm(matrix, axis=1, keepdims=True)
    matrix /= np.where(norms > 0, norms, 1)
    return [_neighbourhood(index, indexes, matrix, texts) for index in shown if len(indexes) > 1]


def _neighbourhood(
    index: int, indexes: list[int], matrix: Matrix, texts: Sequence[str]
) -> Neighbourhood:
    row = indexes.index(index)
    cosines = matrix @ matrix[row]
    order = [int(other) for other in np.argsort(-cosines) if other != row]
    return Neighbourhood(
        text=texts[index],
        nearest=[
            Neighbour(text=texts[indexes[other]], cosine=float(cosines[other]))
            for other in order[:NEAREST_SHOWN]
        ],
    )
