"""Prints what the dispatch rule does in virtual time: `python -m tests.sim.report`."""

from __future__ import annotations

from tests.sim.world import MS, Setup, World, shared_queue

LOADS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.9)
HEADER = "aggregators x servers, load | shared queue p50/p99 ms | this rule | queries a claim"


def row(setup: Setup) -> str:
    """One line of the table."""
    ideal, real = shared_queue(setup), World(setup).run()
    return (
        f"{setup.aggregators} x {setup.servers}, {setup.load:4.0%}"
        f" | {ideal.quantile(0.5):5.1f}/{ideal.quantile(0.99):5.1f}"
        f" | {real.quantile(0.5):5.1f}/{real.quantile(0.99):5.1f}"
        f" | {setup.queries / real.claims:5.1f}"
    )


def main() -> None:
    """Print three tables."""
    fleets = ((1, 1), (1, 4), (4, 1), (4, 4))
    print(HEADER)
    for aggregators, servers in fleets:
        for load in LOADS:
            setup = Setup(aggregators=aggregators, servers=servers, load=load)
            print(row(setup), flush=True)
    print("\npass times vary by 20%")
    for aggregators, servers in fleets:
        for load in (0.2, 0.6, 0.9):
            setup = Setup(aggregators=aggregators, servers=servers, load=load, jitter=0.2)
            print(row(setup), flush=True)
    print("\none aggregator of four has 90% of the traffic, after one second")
    for servers in (1, 4):
        for load in (0.2, 0.6, 0.9):
            setup = Setup(
                aggregators=4,
                servers=servers,
                load=load,
                queries=20_000,
                shares=(0.9, 0.034, 0.033, 0.033),
                warm_up_ns=1000 * MS,
            )
            print(row(setup), flush=True)


if __name__ == "__main__":
    main()
