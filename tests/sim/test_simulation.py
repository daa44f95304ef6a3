"""The whole in virtual time: no seed breaks a guarantee, every fault fires, planted bugs are seen.

The first seed comes from the commit (`python -m tests.sim --help`), so each commit is tested with
seeds of its own. One that fails goes into `corpus.txt`, with what it taught.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.sim.__main__ import first_seed, run_seeds
from tests.sim.bugs import hunt
from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.simulation import never_fired, run_seed

SEEDS = 300
QUICK_SEEDS_MAX = 60
CORPUS = [
    line.split("\t", 1)
    for line in (Path(__file__).parent / "corpus.txt").read_text("utf-8").splitlines()
    if line and not line.startswith("#")
]
QUICK = (
    # One for each guarantee at least; all of them: `make sim-bugs`.
    "retries are lost",
    "held records are sent at each probe",
    "the highest offset is committed (arroyo)",
    "the watermark moves before durability",
    "a revoke does not commit",
    "the backlog is worked off on a revoke",
    "full windows do not pause",
    "one bad answer ends a query",
    "vectors are not checked for finiteness",
    "a drain ends as a failure",
    "a transaction holds no prefix",
    "the first fault of a topic ends the process",
    "dead letters that fail are dropped (arroyo)",
)


@pytest.mark.timeout(600)
def test_no_seed_breaks_a_guarantee_and_every_fault_fires() -> None:
    fired: Counter[str] = Counter()
    failures = []
    for outcome in run_seeds(first_seed(), SEEDS):
        fired.update(outcome.fired)
        if outcome.violation is not None:
            failures.append(f"make sim SEED={outcome.seed}: {outcome.violation}")
    assert not failures
    assert not never_fired(fired)


@pytest.mark.parametrize(("seed", "taught"), CORPUS)
def test_what_failed_once_holds(seed: str, taught: str) -> None:
    assert run_seed(seed).violation is None, taught


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    seed = str(first_seed())
    here = run_seed(seed).trace_hash
    assert run_seed(seed).trace_hash == here
    assert run_seed(seed + "1").trace_hash != here
    code = f"from tests.sim.simulation import run_seed; print(run_seed({seed!r}).trace_hash)"
    for hash_seed in ("1", "2"):
        elsewhere = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert elsewhere.stdout.strip() == here


def test_every_guarantee_has_a_planted_bug() -> None:
    assert {number for mutant in MUTANTS for number in mutant.guarantees} >= set(range(1, 11))
    assert set(QUICK) <= {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", [pytest.param(m, id=m.name) for m in MUTANTS if m.name in QUICK])
def test_a_planted_bug_is_noticed(mutant: Mutant) -> None:
    caught = hunt(mutant, first=1, seeds_max=QUICK_SEEDS_MAX)
    assert caught.outcome is not None, f"{mutant.name}: unnoticed in {caught.seeds} seeds"
    assert caught.rightly, caught.outcome.violation
