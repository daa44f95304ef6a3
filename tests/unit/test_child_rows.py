"""How the rows of an engine's process are read: two dimensions, then number, sequences and tokens.

The numbers of the traps are those of `ops/adr/0010-engines-in-processes.md`.
"""

from __future__ import annotations

import numpy as np
import pytest

from model_server.engines.base import EngineError, EngineOutOfMemoryError, EnginePass
from model_server.engines.child.rows import Ended, unpack_rows


def test_rows_of_one_pass() -> None:
    vectors, passes = unpack_rows([[0.5, 1.0, 7, 2, 9], [0.25, -1.0, 7, 2, 9]], 2)
    assert vectors.tolist() == [[0.5, 1.0], [0.25, -1.0]]
    assert vectors.dtype == np.float32
    assert passes == [EnginePass(sequences=2, tokens=9)]


def test_a_list_that_was_split_has_two_passes() -> None:
    """Trap 1: 32 texts ran as 14 and 18."""
    _, passes = unpack_rows([[1, 0, 8, 1, 5], [1, 0, 7, 2, 9], [1, 0, 7, 2, 9]], 2)
    assert passes == [EnginePass(sequences=2, tokens=9), EnginePass(sequences=1, tokens=5)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 0, 7, 2, 9]], "pass 7 of 2 sequences gave 1 rows"),  # another list was in it
        ([[1, 0]], "not 2 numbers and our counts"),  # SGLang's own class answered
        ([[1, 0, 7, 1, 9], [1, 7, 1, 9]], "not 2 numbers and our counts"),
        ([[Ended.RAISED, 0, 0]], "the forward pass raised"),
    ],
)
def test_rows_that_are_not_ours(rows: list[list[float]], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        unpack_rows(rows, 2)


def test_rows_of_a_pass_without_memory() -> None:
    with pytest.raises(EngineOutOfMemoryError):
        unpack_rows([[Ended.OUT_OF_MEMORY, 0, 0]] * 2, 2)
