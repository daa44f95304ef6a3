"""`make chaos`: whole runs of all acts on real Kafka, each ending in one line of JSON.

Every run has a broker, model servers and groups of its own. Each group goes through all acts in an
order drawn from the seed, all groups at the same time; then the broker is killed under all of them.
Exit status 1 when a ledger has a violation.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from random import Random

from tests.chaos.acts import ACTS, act, kill_broker
from tests.chaos.arena import Arena, Fleet, FleetOptions, say


def fleets(deliveries: list[str], seed: int, rate: float) -> list[FleetOptions]:
    """Both protocols at least once, and exactly once where asked for."""
    chosen = []
    if "at_least_once" in deliveries:
        chosen += [
            FleetOptions(name="classic", protocol="classic", members=2, rate=rate, seed=seed),
            FleetOptions(name="consumer", protocol="consumer", members=3, rate=rate, seed=seed + 1),
        ]
    return chosen


def run(options: list[FleetOptions], seed: int, rounds: int) -> bool:
    """One run; returns whether nothing was wrong."""
    random = Random(seed)
    started = time.monotonic()
    say("run", f"seed {seed}")
    violations: list[str] = []
    with Arena(options) as arena:

        def all_acts(fleet: Fleet) -> None:
            order = list(ACTS)
            fleet.random.shuffle(order)
            for name in order:
                act(name, ACTS[name], fleet, rounds)

        try:
            arena.everywhere(all_acts)
            kill_broker(arena, rounds, random)
        except AssertionError as error:
            violations.append(str(error))
        violations += arena.judge()
        counts = arena.counts()
    for violation in violations:
        print(f"VIOLATION {violation}", flush=True)
    seconds = round(time.monotonic() - started, 1)
    line = {"chaos": "run", "seed": seed, "ok": not violations, "seconds": seconds, **counts}
    print(json.dumps(line), flush=True)
    return not violations


def main() -> int:
    """Run as often as asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="0: drawn, and printed")
    parser.add_argument("--rounds", type=int, default=1, help="of each act")
    parser.add_argument("--rate", type=float, default=100.0, help="queries a second and group")
    parser.add_argument("--delivery", action="append", default=[], help="at_least_once ...")
    options = parser.parse_args()
    first = options.seed or secrets.randbelow(2**31)
    deliveries = options.delivery or ["at_least_once"]
    good = 0
    for seed in range(first, first + options.runs):
        good += run(fleets(deliveries, seed, options.rate), seed, options.rounds)
    say("end", f"{good} of {options.runs} runs without a violation")
    return 0 if good == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
