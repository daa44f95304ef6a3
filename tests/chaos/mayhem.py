"""Everything at once: kills, freezes, restarts and guests, drawn from a seed, none waited for.

Unlike an act of `acts`, one fault meets another: a member is killed while the broker is down or the
group is between two generations. What must hold is the same; only the bound is looser, by the
number of deaths. Each group has a thread of its own, the broker one more. When the time is over
everything is thawed and running again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

from tests.chaos.arena import FREEZE_BROKER_S_MAX, Arena
from tests.chaos.fleets import SESSION_MS, STREAM_SILENCE_MS, Fleet
from tests.chaos.members import Member
from tests.chaos.report import say
from tests.harness.accounts import Period

PAUSE_S = (0.5, 4.0)
"""Between two faults of one group."""
BROKER_EVERY_S = (15.0, 40.0)
GUESTS_MAX = 2
SWING_S = 15.0
"""The load is three-fold for so long, then single for so long."""
SWING = 3.0


class Mayhem:
    """Of one arena and one stretch of time."""

    def __init__(self, arena: Arena, random: Random, seconds: float) -> None:
        """Nothing happens before `run`."""
        self._arena = arena
        self._random = random
        self._until = time.monotonic() + seconds
        self._over = threading.Event()
        self.faults: dict[str, int] = {}
        self._lock = threading.Lock()

    def run(self) -> list[Period]:
        """Do it, heal everything, catch up; returns the periods.

        Raises:
            TrafficError: something does not recover.
        """
        timer = threading.Timer(self._until - time.monotonic(), self._over.set)
        timer.start()
        try:
            with ThreadPoolExecutor(len(self._arena.fleets) + 1) as pool:
                running = [pool.submit(self._shake, fleet) for fleet in self._arena.fleets]
                running.append(pool.submit(self._shake_broker))
                for done in running:
                    done.result()
        finally:
            timer.cancel()
            self._over.set()
        self._arena.everywhere(self._heal)
        self._arena.everywhere(Fleet.catch_up)
        return [fleet.accounts.periods[-1] for fleet in self._arena.fleets]

    def _count(self, fault: str) -> None:
        with self._lock:
            self.faults[fault] = self.faults.get(fault, 0) + 1

    def _shake(self, fleet: Fleet) -> None:
        """One group's faults, and its load."""
        random = Random(self._random.random())
        faults: list[tuple[Callable[[Fleet, Random], None], int]] = [
            (self._kill, 3),
            (self._freeze, 3),
            (self._restart, 3),
            (self._guest, 3),
            (self._kill_server, 2),
            (self._freeze_server, 1),
            (self._restart_servers, 1),
            (self._poison, 1),
        ]
        started = time.monotonic()
        try:
            while not self._over.wait(random.uniform(*PAUSE_S)):
                swings = int((time.monotonic() - started) / SWING_S)
                fleet.traffic.go(SWING if swings % 2 else 1.0)
                fleet.traffic.check()
                fleet.tend()
                (fault,) = random.choices([f for f, _ in faults], [weight for _, weight in faults])
                self._count(fault.__name__.strip("_"))
                fault(fleet, random)
        finally:
            for member in fleet.members:
                fleet.thaw(member)

    # Faults --------------------------------------------------------------------------------------

    def _one(self, fleet: Fleet, random: Random) -> Member:
        return random.choice(fleet.members)

    def _kill(self, fleet: Fleet, random: Random) -> None:
        member = self._one(fleet, random)
        say(fleet.name, f"kill {member.name}")
        fleet.kill(member)
        self._over.wait(random.uniform(0.0, 3.0))
        member.start()

    def _freeze(self, fleet: Fleet, random: Random) -> None:
        """For less or more than the group waits."""
        member = self._one(fleet, random)
        seconds = random.uniform(0.2, 2 * SESSION_MS / 1_000)
        say(fleet.name, f"freeze {member.name} for {seconds:.1f} s")
        fleet.freeze(member)
        self._over.wait(seconds)
        fleet.thaw(member)

    def _restart(self, fleet: Fleet, random: Random) -> None:
        member = self._one(fleet, random)
        say(fleet.name, f"restart {member.name}")
        fleet.terminate(member)
        member.start()

    def _guest(self, fleet: Fleet, random: Random) -> None:
        """Somebody more joins, or leaves, if only a moment after it came."""
        guests = fleet.members[fleet.options.members :]
        if len(guests) < GUESTS_MAX and random.random() < 0.6:
            guest = fleet.add()
            say(fleet.name, f"start {guest.name}")
            guest.start()
            return
        for guest in guests[:1]:
            say(fleet.name, f"end {guest.name}")
            fleet.terminate(guest)
            fleet.remove(guest)

    def _kill_server(self, fleet: Fleet, random: Random) -> None:
        say("servers", "kill one")
        self._arena.kill_server(random, random.uniform(0.0, 2.0))

    def _freeze_server(self, fleet: Fleet, random: Random) -> None:
        seconds = random.uniform(0.5, 1.5 * STREAM_SILENCE_MS / 1_000)
        say("servers", f"freeze one for {seconds:.1f} s")
        self._arena.freeze_server(random, seconds)

    def _restart_servers(self, fleet: Fleet, random: Random) -> None:
        say("servers", "restart all")
        self._arena.restart_servers()

    def _poison(self, fleet: Fleet, random: Random) -> None:
        fleet.traffic.send(1, "dies")

    def _shake_broker(self) -> None:
        random = Random(self._random.random())
        while not self._over.wait(random.uniform(*BROKER_EVERY_S)):
            if random.random() < 0.5:
                say("broker", "kill")
                self._count("kill_broker")
                self._arena.kill_broker(random.uniform(0.0, 3.0))
            else:
                longest = 2 * SESSION_MS / 1_000
                if self._arena.transactions:
                    longest = min(longest, FREEZE_BROKER_S_MAX)
                seconds = random.uniform(0.5, longest)
                say("broker", f"freeze for {seconds:.1f} s")
                self._count("freeze_broker")
                self._arena.freeze_broker(seconds)
            say("broker", "is back")

    # Healing -------------------------------------------------------------------------------------

    def _heal(self, fleet: Fleet) -> None:
        for guest in fleet.members[fleet.options.members :]:
            fleet.terminate(guest)
            fleet.remove(guest)
        fleet.wait_until_stable()
