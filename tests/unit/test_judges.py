"""What judges runs by cosines: a vector of nothing, or not of numbers, is never found right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from aggregator.commands import demo_analysis
from model_server.engines import golden
from ops import verify
from ops.bench import engines
from ops.bench.common import BenchError

GOOD = np.array([[3, 4], [6, 8]], np.float32)
BAD = {
    "not a number": [math.nan, 1],
    "infinite": [math.inf, 0],
    "zero": [0, 0],
    "another": [-4, 3],
}


@pytest.fixture(params=BAD)
def bad(request: pytest.FixtureRequest) -> Any:
    return np.array(BAD[request.param], np.float32)


def test_the_golden_cosine_is_of_numbers(bad: Any) -> None:
    found = golden.cosine(np.stack([bad, GOOD[1]]), GOOD)
    assert found.tolist() == [0.0, 1.0]


def test_verify(bad: Any) -> None:
    one = verify.Received(vectors=[GOOD[0], bad, GOOD[0]], tokens=[3, 3, 4])
    least, tokens_wrong = verify.compare(one, GOOD[0], 3)
    assert least == 0.0
    assert tokens_wrong == 1
    passes = verify.Passes(count=1, tokens=9, counted=0, not_as_sent=0)
    told: dict[str, Any] = {"queries": 1, "missing": 0, "doubled": 0, "errors": 0, "seconds": 1}
    wrong = verify.Verdict(**told, tokens_wrong=0, cosine_min=least, passes=passes)
    assert not wrong.ok
    assert verify.compare(verify.Received(vectors=[2 * GOOD[0]], tokens=[3]), GOOD[0], 3) == (1, 0)


def test_bench_engines(bad: Any) -> None:
    torch = measured("torch", GOOD)
    engines.figures("sglang", measured("sglang", 2 * GOOD), torch, "float32")
    wrong = measured("sglang", np.stack([GOOD[0], bad]))
    with pytest.raises(BenchError, match="sglang: a vector has cosine 0"):
        engines.figures("sglang", wrong, torch, "float32")


@pytest.mark.parametrize("nothing", ["not a number", "infinite", "zero"])
def test_bench_engines_finds_its_reference_wrong(nothing: str) -> None:
    torch = measured("torch", np.array([GOOD[0], BAD[nothing]], np.float32))
    with pytest.raises(BenchError, match="torch: a vector has cosine 0"):
        engines.figures("torch", torch, torch, "float32")


def measured(engine: str, vectors: Any) -> engines.Measured:
    return engines.Measured(
        contender=engines.Contender(engine=engine),
        stub=None,
        alone_ms=[1.0],
        list_ms={size: [1.0] for size in engines.LISTS},
        vectors=vectors,
    )


def test_demo(bad: Any) -> None:
    assert demo_analysis.cosine(GOOD[0], bad) == 0.0
