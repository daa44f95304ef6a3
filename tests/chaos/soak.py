"""`make soak`: everything at once for minutes on real Kafka, with a load that swings three-fold.

Stretches of a minute: faults of all kinds, then a heal and the ledger. Resident memory of every
process is sampled each second (`--rss FILE` keeps the samples as CSV). The last line is JSON: the
ledger's counts, the faults, memory by process. Exit status 1 on a violation: of the ledger, or a
process above its bound of memory.
"""

from __future__ import annotations

import argparse
import csv
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from ops.bench.rss import RssWatch, Series
from tests.chaos.arena import Arena
from tests.chaos.fleets import DELIVERIES, fleets
from tests.chaos.mayhem import Mayhem
from tests.chaos.report import finish, say
from tests.chaos.traffic import end_on_sigterm

STRETCH_S = 60.0
MEBIBYTE = 1024 * 1024
RSS_MAX = {"broker": 1024, "model-server": 384, "aggregator": 384}
"""MiB. An aggregator: 130 at rest, 64 of prefetch, 6 partitions of 350 records, 2 MiB of results at
most in its producer; the rest is what allocators keep. It must not grow with the minutes.
"""


def kind_of(name: str) -> str:
    """Which bound is its."""
    return next((kind for kind in RSS_MAX if name.startswith(kind)), "aggregator")


def soak(arena: Arena, random: Random, minutes: float) -> tuple[list[str], Counter[str]]:
    """Shake for so long; returns what is wrong, and the faults."""
    faults: Counter[str] = Counter()
    until = time.monotonic() + minutes * 60
    while (left := until - time.monotonic()) > 0:
        mayhem = Mayhem(arena, random, min(left, STRETCH_S))
        try:
            for fleet, period in zip(arena.fleets, mayhem.run(), strict=True):
                say(
                    fleet.name,
                    f"caught up: {period.sent} sent, {period.duplicates} doubled, "
                    f"{period.deaths} deaths",
                )
        except AssertionError as error:
            arena.autopsy()
            return [str(error), *arena.judge()], faults + Counter(mayhem.faults)
        faults.update(mayhem.faults)
    return arena.judge(), faults


def memory(series: Mapping[str, Series]) -> tuple[list[str], dict[str, Any]]:
    """What is above its bound, and MiB by process."""
    table = {
        name: {
            "first_mib": each.first_bytes // MEBIBYTE,
            "last_mib": each.last_bytes // MEBIBYTE,
            "peak_mib": each.peak_bytes // MEBIBYTE,
        }
        for name, each in sorted(series.items())
    }
    above = [
        f"memory: {name} had {figures['peak_mib']} MiB, at most {RSS_MAX[kind_of(name)]}"
        for name, figures in table.items()
        if figures["peak_mib"] > RSS_MAX[kind_of(name)]
    ]
    return above, table


def main() -> int:
    """Soak, print, report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="0: drawn, and printed")
    parser.add_argument("--rate", type=float, default=60.0, help="queries a second and group")
    parser.add_argument("--delivery", choices=DELIVERIES, default=DELIVERIES[0])
    parser.add_argument("--rss", type=Path, help="write all samples there, as CSV")
    options = parser.parse_args()
    end_on_sigterm()
    seed = options.seed or secrets.randbelow(2**31)
    say("soak", f"seed {seed}, {options.minutes:g} minutes")
    started = time.monotonic()
    with Arena(fleets([options.delivery], seed=seed, rate=options.rate)) as arena:
        watch = RssWatch(arena.pids, lambda: time.monotonic() - started)
        try:
            violations, faults = soak(arena, Random(seed), options.minutes)
        finally:
            watch.stop()
        counts = arena.counts()
    above, table = memory(watch.series)
    if options.rss is not None:
        with options.rss.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("process", "seconds", "rss_bytes"))
            for name, series in sorted(watch.series.items()):
                rows.writerows((name, *sample) for sample in series.samples)
    figures = {"seed": seed, "seconds": round(time.monotonic() - started, 1), **counts}
    good = finish("soak", violations + above, {**figures, "faults": dict(faults), "rss": table})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
