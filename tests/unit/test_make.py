"""What the targets of the Makefile hand on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("target", "variables", "handed_on"),
    [
        ("sim", [], "--seeds 300"),
        ("sim", ["SEEDS=1000"], "--seeds 1000"),
        ("sim", ["SEED=7"], "--seed 7"),
        ("chaos", [], "--runs 1 --seed 0 --rounds 1 --delivery at_least_once"),
        ("chaos", ["RUNS=10", "SEED=5", "DELIVERY=exactly_once"], "--runs 10 --seed 5"),
        ("soak", ["MINUTES=3"], "--minutes 3 --seed 0"),
        ("bench-claims", ["QUERIES=a folder/q.txt"], '--queries "a folder/q.txt"'),
        ("bench-hotpath", ["JSON=1"], "--json-arrays"),
    ],
)
def test_variables_are_handed_on(target: str, variables: list[str], handed_on: str) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    shown = subprocess.run(
        ["make", "-n", target, *variables],
        cwd=ROOT,
        env=clean,
        capture_output=True,
        text=True,
        check=True,
    )
    assert handed_on in shown.stdout
