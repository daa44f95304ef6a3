"""What comes back of a forward pass from inside an engine: a row a sequence, the vector and counts.

Engines return nothing else of a pass than a row of numbers for each input, so that is how its
number, its sequences and its tokens travel, as they were counted where it ran.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from model_server.engines.base import (
    EngineError,
    EngineOutOfMemoryError,
    EnginePass,
    Vectors,
)

COUNTS: Final = 3
"""Columns after a vector: number of the pass, its sequences, its tokens."""


class Ended(IntEnum):
    """In the place of a pass's number: why it made no vectors."""

    RAISED = -1
    OUT_OF_MEMORY = -2


def unpack_rows(
    rows: Sequence[Sequence[float]], dimensions: int
) -> tuple[Vectors, list[EnginePass]]:
    """Vectors, and the passes that made them, in the order in which they ran.

    Raises:
        EngineOutOfMemoryError: a pass did not fit the memory.
        EngineError: a pass raised, or its rows are not those of our pooler.
    """
    for why in {int(row[-COUNTS]) for row in rows if len(row) == COUNTS}:
        if why == Ended.OUT_OF_MEMORY:
            raise EngineOutOfMemoryError("the forward pass ran out of memory")
        if why == Ended.RAISED:
            raise EngineError("the forward pass raised; the lines before this one say what")
    if any(len(row) != dimensions + COUNTS for row in rows):
        raise EngineError(f"the engine gives rows that are not {dimensions} numbers and our counts")
    matrix: npt.NDArray[np.float32] = np.asarray(rows, dtype=np.float32)
    counted = Counter(tuple(int(value) for value in row) for row in matrix[:, -COUNTS:])
    for (number, sequences, _), found in counted.items():
        if found != sequences:
            raise EngineError(f"pass {number} of {sequences} sequences gave {found} rows")
    passes = [EnginePass(sequences=key[1], tokens=key[2]) for key in sorted(counted)]
    return np.ascontiguousarray(matrix[:, :-COUNTS]), passes
