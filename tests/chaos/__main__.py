"""`make chaos`: whole runs of all acts on real Kafka, each ending in one line of JSON.

Every run has a broker, model servers and groups of its own. Each group goes through all acts in an
order drawn from the seed, all groups at the same time; then the broker is killed under all of them,
and in the end everything happens at once for a while.
Exit status 1 when a ledger has a violation.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from random import Random

from tests.chaos.acts import ACTS, act, kill_broker
from tests.chaos.arena import Arena
from tests.chaos.fleets import DELIVERIES, Fleet, FleetOptions, fleets
from tests.chaos.mayhem import Mayhem
from tests.chaos.report import finish, say
from tests.chaos.traffic import ENDING, end_on_sigterm


def run(options: list[FleetOptions], seed: int, rounds: int, mayhem_s: float) -> bool:
    """One run; returns whether nothing was wrong."""
    random = Random(seed)
    started = time.monotonic()
    say("run", f"seed {seed}")
    violations: list[str] = []
    faults: dict[str, int] = {}
    with Arena(options) as arena:

        def all_acts(fleet: Fleet) -> None:
            order = list(ACTS)
            fleet.random.shuffle(order)
            for name in order:
                act(name, ACTS[name], fleet, rounds)

        try:
            arena.everywhere(all_acts)
            kill_broker(arena, rounds, random)
            if mayhem_s > 0:
                say("run", "everything at once ...")
                mayhem = Mayhem(arena, random, mayhem_s)
                mayhem.run()
                faults = mayhem.faults
        except AssertionError as error:
            arena.autopsy()
            violations.append(str(error))
        violations += arena.judge()
        counts = arena.counts()
    seconds = round(time.monotonic() - started, 1)
    return finish("run", violations, {"seed": seed, "seconds": seconds, "mayhem": faults, **counts})


def main() -> int:
    """Run as often as asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="0: drawn, and printed")
    parser.add_argument("--rounds", type=int, default=1, help="of each act")
    parser.add_argument("--mayhem", type=float, default=15.0, help="seconds of everything at once")
    parser.add_argument("--rate", type=float, default=100.0, help="queries a second and group")
    parser.add_argument("--delivery", choices=DELIVERIES, default=DELIVERIES[0])
    options = parser.parse_args()
    end_on_sigterm()
    first = options.seed or secrets.randbelow(2**31)
    good = 0
    for seed in range(first, first + options.runs):
        if ENDING.is_set():
            break
        groups = fleets([options.delivery], seed=seed, rate=options.rate)
        good += run(groups, seed, options.rounds, options.mayhem)
    say("end", f"{good} of {options.runs} runs without a violation")
    return 0 if good == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
