"""Runs seeds and says what came of them: `python -m tests.sim --seeds 1000`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import click

from tests.sim.doses import FAULTS
from tests.sim.simulation import Outcome, never_fired, run_seed

WORKERS_MAX = 2
FIRST_OTHERWISE = 20261130
"""The first seed where there is no commit to take it from."""
SEEDS_FOR_ALL = 250
"""In so many seeds every fault must fire."""
CHUNK = 8


def first_seed() -> int:
    """From the commit: each is tested with seeds of its own, and everybody can run them again."""
    commit = os.environ.get("COMMIT_SHA", "")
    if not commit:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
        commit = found.stdout.strip() if found.returncode == 0 else ""
    return int(commit[:8], 16) if commit else FIRST_OTHERWISE


def run_seeds(first: int, count: int, *, workers: int = WORKERS_MAX) -> Iterator[Outcome]:
    """Run seeds in a few processes; in their order."""
    seeds = [str(first + index) for index in range(count)]
    if workers <= 1:
        yield from map(run_seed, seeds)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(run_seed, seeds, chunksize=CHUNK)


def print_table(fired: Counter[str]) -> None:
    """How often each fault fired, and each branch behind them was taken."""
    print("\nfaults")
    for name in FAULTS:
        print(f"  {fired.get(name, 0):9}  {name}")
    print("branches")
    for name in sorted(set(fired) - set(FAULTS)):
        print(f"  {fired[name]:9}  {name}")


def report(outcomes: Sequence[Outcome], seconds: float, first: int | str) -> bool:
    """Print everything, the last line as JSON; returns whether all was well."""
    fired: Counter[str] = Counter()
    for outcome in outcomes:
        fired.update(outcome.fired)
    print_table(fired)
    failures = [outcome for outcome in outcomes if outcome.violation is not None]
    missing = never_fired(fired) if len(outcomes) >= SEEDS_FOR_ALL else []
    for outcome in failures:
        print(f"\nseed {outcome.seed}: {outcome.violation}\n  again: make sim SEED={outcome.seed}")
    if missing:
        print(f"\nnever fired: {', '.join(missing)}")
    events = sum(outcome.events for outcome in outcomes)
    print(
        json.dumps(
            {
                "seeds": len(outcomes),
                "first": first,
                "failures": [outcome.seed for outcome in failures],
                "never_fired": missing,
                "records": sum(outcome.records for outcome in outcomes),
                "duplicates": sum(outcome.duplicates for outcome in outcomes),
                "events": events,
                "events_per_second": round(events / seconds),
                "virtual_seconds": round(sum(o.virtual_ns for o in outcomes) / 1e9),
                "heal_seconds_max": round(max(o.heal_ns for o in outcomes) / 1e9, 1),
                "seconds": round(seconds, 1),
            }
        )
    )
    return not failures and not missing


@click.command(context_settings={"show_default": True})
@click.option("--seeds", default=300, type=click.IntRange(1), help="How many to run.")
@click.option("--first", type=int, help="The first; otherwise it is made of the commit.")
@click.option("--seed", help="Run this one alone, with its trace on standard error.")
@click.option("--workers", default=WORKERS_MAX, help="Processes.")
def main(seeds: int, first: int | None, seed: str | None, workers: int) -> None:
    """Simulate aggregators, Kafka and model servers, with faults, one world a seed."""
    started_s = time.monotonic()
    if seed is not None:
        outcome = run_seed(seed, trace=sys.stderr)
        sys.exit(not report([outcome], time.monotonic() - started_s, seed))
    start = first_seed() if first is None else first
    outcomes = []
    for outcome in run_seeds(start, seeds, workers=workers):
        outcomes.append(outcome)
        if outcome.violation is not None:
            print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
        if sys.stderr.isatty():
            print(f"\r{len(outcomes)} of {seeds}", end="", file=sys.stderr, flush=True)
    sys.exit(not report(outcomes, time.monotonic() - started_s, start))


if __name__ == "__main__":
    main()
