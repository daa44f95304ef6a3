"""Which faults a seed has and how much of each: the one declared table.

Every name in `FAULTS` must fire somewhere in a run of many seeds, or the run fails: a fault that
never fires tests nothing. Each seed draws a part of them (swarm testing: with everything on at once
the faults hide each other's consequences). Healing is `Doses.healthy`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

STEPS: Mapping[str, float] = {
    # What the world does to itself now and then; relative weights.
    "process killed": 1.0,
    "process stopped by SIGTERM": 1.0,
    "process replaced in a rolling restart": 1.0,
    "process added": 0.4,
    "process frozen": 0.7,
    "process frozen past its session": 0.5,
    "event loop blocked": 0.7,
    "event loop blocked past max.poll.interval": 0.25,
    "monotonic clock stood still, then leapt": 0.6,
    "wall clock jumped": 0.8,
    "partitions shuffled": 2.0,
    "member lost": 0.7,
    "cluster down": 0.4,
    "results topic down": 0.6,
    "results topic down past sink_outage_ms_max": 0.12,
    "dead letter topic down": 0.5,
    "results topic not authorised": 0.4,
    "records deleted by retention": 0.3,
    "server killed": 0.8,
    "server drained": 0.7,
    "server's engine died": 0.6,
    "server's limits changed": 1.2,
    "server's address gone": 0.4,
    "server frozen": 0.6,
    "server's revision changed": 0.3,
    "stream broken": 1.5,
    "stream stalled": 0.8,
}
"""The steps that the monkey takes, by name."""

CHANCES: Mapping[str, float] = {
    # Of one operation; the most that a seed draws.
    "commit refused": 0.25,
    "commit late": 0.2,
    "commit taken, answer lost": 0.2,
    "commit failed for one partition": 0.15,
    "committed offsets unknown": 0.3,
    "rebalance between poll and consume": 1.0,
    "poll read in parts": 0.5,
    "SIGTERM as partitions come": 0.3,
    "assignment gone before its callback": 0.6,
    "batch refused by its topic": 0.15,
    "batch refused for one record": 0.15,
    "batch timed out": 0.1,
    "batch timed out, though it landed": 0.15,
    "batch timed out, and landed later": 0.1,
    "report late": 0.3,
    "producer's queue full": 0.5,
    "end of a transaction late": 0.2,
    "end of a transaction never answered": 0.03,
    "offsets of a transaction not answered": 0.1,
    "transaction marker": 0.3,
    "offsets compacted away": 0.2,
    "pass slow": 0.2,
    "pass stuck": 0.02,
    "pass out of memory": 0.05,
    "pass raised for no reason": 0.15,
    "connection refused": 0.3,
    "server vanishes without a word": 0.3,
    "message late": 0.1,
    "answer twice": 0.06,
    "answer never": 0.03,
    "answer short": 0.08,
    "answer of wrong length": 0.08,
    "answer not finite": 0.08,
    "answer of other dimensions": 0.06,
    "answer of other encoding": 0.04,
    "answer with an index out of range": 0.06,
    "answer with an index twice": 0.06,
    "answer without counts": 0.05,
    "answer to another request": 0.02,
    "answer with an odd status": 0.15,
    "answer that is a refusal and not": 0.03,
    "claim refused with an odd status": 0.06,
    "claim refused as too much held": 0.1,
    "claim refused as not started": 0.1,
    "state that lies": 0.3,
    "first message is no state": 0.05,
}

KINDS: Mapping[str, float] = {
    # Of queries; relative weights, beside plain ones.
    "text empty": 1.0,
    "value null": 1.0,
    "value garbage": 1.0,
    "content type unknown": 0.5,
    "text oversize": 1.0,
    "text over the model's maximum": 1.0,
    "text truncated": 1.0,
    "headers too large": 0.7,
    "result too large": 1.5,
    "result too large in every form but the last": 1.0,
    "letter too large": 1.0,
    "letter too large for the client": 0.7,
    "model unknown": 0.7,
    "estimator raises": 0.7,
    "ttl negative": 0.5,
    "dimensions refused by the server": 0.7,
    "ttl short": 2.0,
    "ttl none": 2.0,
    "timestamp old": 1.0,
    "timestamp in the future": 1.0,
    "vector not finite": 0.8,
    "engine raises": 0.8,
    "engine dies": 0.5,
    "large": 2.0,
}
"""`engine dies`: poison."""

FAULTS: tuple[str, ...] = (*STEPS, *CHANCES, *(f"query: {kind}" for kind in KINDS))


class Doses:
    """What one seed has of each."""

    def __init__(self, rng: random.Random) -> None:
        everything = rng.random() < 0.1
        share = 1.0 if everything else rng.choice([0.15, 0.35, 0.6])

        def drawn(table: Mapping[str, float]) -> dict[str, float]:
            return {name: most for name, most in table.items() if rng.random() < share}

        self.steps = drawn(STEPS)
        self.chances = {name: most * rng.random() for name, most in drawn(CHANCES).items()}
        self.kinds = drawn(KINDS)
        self.odd_queries = rng.choice([0.0, 0.02, 0.1, 0.3])
        """Part of the queries that are of an odd kind."""
        self.step_every_ns = int(1e9 * rng.choice([0.08, 0.3, 0.8, 2.0]))
        self.healthy = False

    def chance(self, name: str) -> float:
        """The probability of a fault at one operation."""
        return 0.0 if self.healthy else self.chances.get(name, 0.0)

    def without(self, *names: str) -> None:
        """Take these away: they make no sense in this seed."""
        for name in names:
            self.steps.pop(name, None)
            self.chances.pop(name, None)
            self.kinds.pop(name, None)


@contextmanager
def no_doses(doses: Doses) -> Iterator[None]:
    """Nothing goes wrong meanwhile."""
    before, doses.healthy = doses.healthy, True
    yield
    doses.healthy = before
