"""Virtual time: one heap of what is to happen, fibers for code that blocks, one seed, one trace.

Owns the order of everything. Invariants: the same seed gives the same run, event for event, in any
process (`trace_hash` says so); nothing reads a real clock and nothing sleeps; one thing runs at a
time. What belongs to an `Owner` (a simulated process) waits while that is frozen and is never run
once it is dead, as after `kill -9`.

A fiber is a greenlet: the consumer's and the producer's threads of the real adapters run in them
unchanged, and where they would block the world goes on. It must not know what is simulated.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import TextIO

import greenlet

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000
START_NS = 1_000 * SECOND

Call = Callable[[], None]


class Owner:
    """A simulated process: its clocks, and whether it lives."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.alive = True
        self.frozen_until_ns = 0
        """Nothing of it runs before this, as under SIGSTOP or in a paused virtual machine."""
        self.wall_offset_ms = 0
        self._held_at_ns = 0
        self._held_until_ns = 0
        self.fibers: list[Fiber] = []
        self.process: object = None
        """What it belongs to, for those who only know whose turn it is."""

    def monotonic_ns(self) -> int:
        """Its monotonic clock, which may have stood still for a while before it leaps."""
        now_ns = self.kernel.now_ns
        return self._held_at_ns if now_ns < self._held_until_ns else now_ns

    def wall_ms(self) -> int:
        """Its wall clock, Unix milliseconds, which may jump."""
        return self.kernel.wall_ms() + self.wall_offset_ms

    def hold_clock(self, until_ns: int) -> None:
        """Let its monotonic clock stand still until then, and leap."""
        self._held_at_ns = self.monotonic_ns()
        self._held_until_ns = until_ns

    def reaches_ns(self, monotonic_ns: int) -> int:
        """The world's time at which its monotonic clock will show this at the earliest."""
        if self.kernel.now_ns < self._held_until_ns and monotonic_ns > self._held_at_ns:
            return max(monotonic_ns, self._held_until_ns)
        return monotonic_ns

    def freeze(self, until_ns: int) -> None:
        self.frozen_until_ns = max(self.frozen_until_ns, until_ns)

    def kill(self) -> None:
        """End it where it is: not one line of it runs any more."""
        self.alive = False
        fibers, self.fibers = self.fibers, []
        for fiber in fibers:
            fiber.kill()


class Fiber:
    """Code that blocks. `wait` gives the world its turn."""

    def __init__(self, kernel: Kernel, owner: Owner, run: Call, name: str) -> None:
        self.done = False
        self._kernel = kernel
        self._owner = owner
        self._run = run
        self._name = name
        self._turn = 0
        self._waiting = False
        self._joiners: list[Fiber] = []
        self._greenlet = greenlet.greenlet(self._main, parent=kernel.main)
        owner.fibers.append(self)
        kernel.at(kernel.now_ns, owner, name, self._start)

    def _start(self) -> None:
        self._kernel.current = self
        self._greenlet.switch()

    def _main(self) -> None:
        self._run()
        self.done = True
        self._kernel.current = None
        if self in self._owner.fibers:
            self._owner.fibers.remove(self)
        for joiner in self._joiners:
            joiner.wake()

    def wait(self, timeout_ns: int | None) -> bool:
        """Wait until `wake`, at most so long; returns whether it was woken. From inside only."""
        kernel = self._kernel
        self._turn += 1
        turn = self._turn
        if timeout_ns is not None:
            at_ns = kernel.now_ns + max(timeout_ns, 0)
            kernel.at(at_ns, self._owner, self._name, lambda: self._resume(turn, woken=False))
        self._waiting = True
        kernel.current = None
        return bool(kernel.main.switch())

    def wake(self) -> None:
        """Let it go on, if it waits."""
        if not self._waiting:
            return
        self._waiting = False
        self._turn += 1
        turn = self._turn
        kernel = self._kernel
        kernel.at(kernel.now_ns, self._owner, self._name, lambda: self._resume(turn, woken=True))

    def join(self, by: Fiber, timeout_ns: int | None) -> None:
        """`by` waits until this has ended."""
        if not self.done:
            self._joiners.append(by)
            by.wait(timeout_ns)

    def _resume(self, turn: int, *, woken: bool) -> None:
        if turn != self._turn or self.done:
            return
        self._waiting = False
        self._kernel.current = self
        self._greenlet.switch(woken)

    def kill(self) -> None:
        """Unwind it; whatever it still does on the way must be without effect."""
        self.done = True
        if self._greenlet and greenlet.getcurrent() is not self._greenlet:
            self._greenlet.throw(greenlet.GreenletExit)


class Kernel:
    """See the module's docstring."""

    def __init__(self, seed: str | int, *, trace: TextIO | None = None) -> None:
        self.rng = random.Random(seed)
        self.now_ns = START_NS
        self.events = 0
        self.fired: Counter[str] = Counter()
        """Faults and branches, by name."""
        self.current: Fiber | None = None
        self.owner: Owner | None = None
        """Whose turn it is."""
        self.main = greenlet.getcurrent()
        self._heap: list[tuple[int, int, Owner | None, str, Call]] = []
        self._order = 0
        self._hash = 0
        self._trace = trace

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.now_ns // MS

    def at(self, at_ns: int, owner: Owner | None, label: str, call: Call) -> None:
        """Call then; `owner`: only if it lives, and not while it is frozen."""
        self._order += 1
        heapq.heappush(self._heap, (at_ns, self._order, owner, label, call))

    def after(self, delay_ns: int, owner: Owner | None, label: str, call: Call) -> None:
        self.at(self.now_ns + delay_ns, owner, label, call)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def delay_ns(self, least_ns: int, most_ns: int) -> int:
        """Mostly short, now and then long: a square of an even one."""
        return least_ns + int((most_ns - least_ns) * self.rng.random() ** 2)

    def fire(self, name: str, count: int = 1) -> None:
        """Count a fault or a branch."""
        self.fired[name] += count

    def say(self, what: str) -> None:
        """Put something into the trace."""
        self._hash = zlib.crc32(what.encode(), self._hash)
        if self._trace is not None:
            self._trace.write(f"{(self.now_ns - START_NS) / SECOND:12.6f}   {what}\n")

    @property
    def tracing(self) -> bool:
        return self._trace is not None

    @property
    def trace_hash(self) -> str:
        return f"{self._hash:08x}"

    def fiber(self) -> Fiber:
        """The one that runs; raises RuntimeError outside of any."""
        if self.current is None:
            raise RuntimeError("this would block the simulated world: it must run in a fiber")
        return self.current

    def run(self, until_ns: int) -> None:
        """Let everything happen that is due until then."""
        heap = self._heap
        while heap and heap[0][0] <= until_ns:
            at_ns, _, owner, label, call = heapq.heappop(heap)
            self.now_ns = max(self.now_ns, at_ns)
            if owner is not None:
                if not owner.alive:
                    continue
                if owner.frozen_until_ns > self.now_ns:
                    self.at(owner.frozen_until_ns, owner, label, call)
                    continue
            self.events += 1
            self._hash = zlib.crc32(f"{self.now_ns}{label}".encode(), self._hash)
            if self._trace is not None:
                who = owner.name if owner is not None else ""
                at_s = (self.now_ns - START_NS) / SECOND
                self._trace.write(f"{at_s:12.6f} {who:4} {label}\n")
            self.owner = owner
            call()
            self.current = None
        self.now_ns = max(self.now_ns, until_ns)

    def close(self, owners: list[Owner]) -> None:
        """Unwind all fibers."""
        for owner in owners:
            owner.kill()
        self._heap.clear()
