"""The acts of the chaos tests: each does one thing to a group under load, then closes its books.

An act begins with nothing outstanding and ends so, so its duplicates are its own: none where nobody
was killed, frozen or evicted. What it waits for it waits for by event; the only times are those of
the faults themselves. `long` acts have more of everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from tests.chaos.arena import Arena
from tests.chaos.fleets import MAX_POLL_MS, Fleet
from tests.chaos.members import Member
from tests.chaos.report import say
from tests.harness.accounts import Period

BURST = 1_500
"""Records at once: the windows of all partitions are full for a while."""


def act(name: str, body: Callable[[Fleet, int], None], fleet: Fleet, rounds: int) -> Period:
    """Run one under load; returns its period."""
    say(fleet.name, f"{name} ...")
    fleet.traffic.go()
    body(fleet, rounds)
    fleet.wait_until_stable()
    period = fleet.catch_up()
    say(
        fleet.name,
        f"{name}: {period.sent} sent, {period.duplicates} doubled, {period.deaths} deaths",
    )
    return period


def victim(fleet: Fleet) -> Member:
    """A member that has partitions."""
    return fleet.random.choice([member for member in fleet.members if member.owned()])


def burst(fleet: Fleet, count: int) -> None:
    """Send many at once, and wait until the group is in the middle of them."""
    before = fleet.accounts.period.answers
    enough = before + fleet.random.randint(count // 20, count // 2)
    fleet.traffic.send(count)
    fleet.wait("answers", lambda: fleet.accounts.period.answers >= enough)


def kill_aggregator(fleet: Fleet, rounds: int) -> None:
    """`kill -9` in the middle of a burst; the others take over, then it comes back."""
    for _ in range(rounds):
        fleet.wait_until_stable()
        member = victim(fleet)
        burst(fleet, BURST)
        fleet.kill(member)
        fleet.wait_for_takeover(member)
        member.start()
        fleet.wait_until_stable()


def kill_server(fleet: Fleet, rounds: int) -> None:
    """`kill -9` of a model server with a burst on its way, and an engine that a query kills."""
    for number in range(rounds):
        if number % 2 == 0:
            fleet.traffic.send(1, "dies")
        burst(fleet, BURST // 2)
        fleet.arena.kill_server(fleet.random, fleet.random.uniform(0.0, 1.0))


def restart_model_servers(fleet: Fleet, rounds: int) -> None:
    """SIGTERM to one model server after the other: nothing is blamed, nothing ends badly."""
    for _ in range(rounds):
        burst(fleet, BURST // 2)
        fleet.arena.restart_servers()


def freeze_past_session(fleet: Fleet, rounds: int) -> None:
    """SIGSTOP until the group has given its partitions to others; then it goes on as a zombie."""
    for _ in range(rounds):
        fleet.wait_until_stable()
        member = victim(fleet)
        burst(fleet, BURST)
        fleet.freeze(member)
        try:
            fleet.wait_for_takeover(member)
        finally:
            fleet.thaw(member)
        fleet.wait_until_stable()


def freeze_past_poll_interval(fleet: Fleet, rounds: int) -> None:
    """The same for longer than `max.poll.interval.ms`."""
    for _ in range(rounds):
        fleet.wait_until_stable()
        member = victim(fleet)
        burst(fleet, BURST)
        fleet.freeze(member)
        until = time.monotonic() + MAX_POLL_MS / 1_000 + 1
        try:
            fleet.wait_for_takeover(member)
            fleet.wait("end of the poll interval", lambda: time.monotonic() > until)  # noqa: B023
        finally:
            fleet.thaw(member)
        fleet.wait_until_stable()


def rolling_restart(fleet: Fleet, rounds: int) -> None:
    """SIGTERM to one member after the other, each back before the next."""
    for _ in range(rounds):
        for member in list(fleet.members):
            fleet.wait_until_stable()
            burst(fleet, BURST // 3)
            fleet.terminate(member)
            member.start()
        fleet.wait_until_stable()


def rebalance_storm(fleet: Fleet, rounds: int) -> None:
    """Members join and leave, some before they have joined, while others do the same."""
    guests: list[Member] = []
    for _ in range(rounds + 1):
        guest = fleet.add()
        guest.start()
        guests.append(guest)
        fleet.traffic.send(BURST // 3)
        joined = fleet.random.random() < 0.7
        if joined:
            fleet.wait("guest with partitions", lambda: bool(guest.owned()))  # noqa: B023
        if fleet.random.random() < 0.5 or not joined:
            leaving = guests.pop(fleet.random.randrange(len(guests)))
            fleet.terminate(leaving)
            fleet.remove(leaving)
    for guest in guests:
        fleet.terminate(guest)
        fleet.remove(guest)
    fleet.wait_until_stable()


ACTS: dict[str, Callable[[Fleet, int], None]] = {
    "kill aggregator": kill_aggregator,
    "kill model server": kill_server,
    "restart model servers": restart_model_servers,
    "freeze past session": freeze_past_session,
    "freeze past poll interval": freeze_past_poll_interval,
    "rolling restart": rolling_restart,
    "rebalance storm": rebalance_storm,
}


def kill_broker(arena: Arena, rounds: int, random: Random) -> None:
    """`kill -9` of the broker under load; it restarts with the same ports and data."""
    say("broker", "kill ...")
    for _ in range(rounds):
        for fleet in arena.fleets:
            fleet.traffic.go()
            burst(fleet, BURST // 3)
        arena.kill_broker(random.uniform(0.0, 2.0))
        say("broker", "is back")
        arena.everywhere(Fleet.wait_until_stable)
    arena.everywhere(Fleet.catch_up)
    for fleet in arena.fleets:
        period = fleet.accounts.periods[-1]
        say(fleet.name, f"broker killed: {period.sent} sent, {period.duplicates} doubled")
