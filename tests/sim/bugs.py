"""Plants each bug and looks how many seeds it takes to be noticed: `python -m tests.sim.bugs`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from tests.sim.mutants import MUTANTS, RARE, Mutant, planted
from tests.sim.simulation import Outcome, run_seed

SEEDS_MAX = 600


@dataclass(frozen=True, slots=True)
class Caught:
    """What became of one planted bug."""

    mutant: Mutant
    seeds: int
    """How many were run."""
    outcome: Outcome | None
    """Of the seed that noticed it."""

    @property
    def rightly(self) -> bool:
        """Noticed, as the violation of a guarantee that it breaks."""
        return self.outcome is not None and self.outcome.guarantee in self.mutant.guarantees


def hunt(mutant: Mutant, *, first: int, seeds_max: int) -> Caught:
    """Run seeds with the bug until one notices it."""
    for count in range(1, seeds_max + 1):
        seed = str(first + count - 1)
        with planted(mutant):
            outcome = run_seed(seed)
        if outcome.violation is not None:
            return Caught(mutant, count, outcome)
    return Caught(mutant, seeds_max, None)


@click.command(context_settings={"show_default": True})
@click.option("--first", default=0, help="The first seed.")
@click.option("--seeds", default=SEEDS_MAX, help="How many a bug may take at most.")
@click.option("--only", default="", help="Those alone whose names hold this.")
@click.option("--rare", is_flag=True, help="Those that take thousands of seeds instead.")
def main(first: int, seeds: int, only: str, rare: bool) -> None:
    """Plant each bug in turn; fail if one goes unnoticed."""
    started_s = time.monotonic()
    caught: list[Caught] = []
    for mutant in [each for each in (RARE if rare else MUTANTS) if only in each.name]:
        found = hunt(mutant, first=first, seeds_max=seeds)
        caught.append(found)
        what = found.outcome.violation if found.outcome is not None else "UNNOTICED"
        mark = " " if found.rightly else "!"
        print(f"{mark} {mutant.name:58} {found.seeds:4} seeds   {what}", flush=True)
    unnoticed = [each.mutant.name for each in caught if not each.rightly]
    by_guarantee = _by_guarantee(caught)
    print(
        json.dumps(
            {
                "bugs": len(caught),
                "noticed": len(caught) - len(unnoticed),
                "unnoticed": unnoticed,
                "guarantees": by_guarantee,
                "seeds": sum(each.seeds for each in caught),
                "seconds": round(time.monotonic() - started_s, 1),
            }
        )
    )
    sys.exit(bool(unnoticed))


def _by_guarantee(caught: Sequence[Caught]) -> dict[int, int]:
    """How many bugs were noticed as the violation of each."""
    counts: dict[int, int] = {}
    for each in caught:
        if each.outcome is not None and each.outcome.guarantee is not None:
            counts[each.outcome.guarantee] = counts.get(each.outcome.guarantee, 0) + 1
    return dict(sorted(counts.items()))


if __name__ == "__main__":
    main()
