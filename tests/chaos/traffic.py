"""Steady load on one group and the books of what comes of it, in threads of its own.

Three threads: one sends at a rate, one reads results and letters, one asks again and again what the
group has committed; each snapshot of the last is judged once the second has read past it. Outages
of the broker are ridden out. What fails in a thread is raised by the next call.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable

from confluent_kafka import KafkaException

from tests.chaos.queries import Mix
from tests.harness.accounts import Period, Snapshot
from tests.harness.ledger import Ledger

TICK_S = 0.02
SNAPSHOT_S = 0.15
OWED_S_MAX = 1.0
"""What a stalled sender makes up for."""
ENDING = threading.Event()
"""This process was told to end: nothing is waited for any more."""


class TrafficError(AssertionError):
    """Something did not come in time."""


def end_on_sigterm() -> None:
    """Have SIGTERM end a run as a failure does, so that no process is left behind."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: ENDING.set())


class Traffic:
    """See the module; `stop` ends the threads."""

    def __init__(self, ledger: Ledger, mix: Mix, *, rate: float) -> None:
        """Nothing is sent before `rate` is set by `go`."""
        self.ledger = ledger
        self.accounts = ledger.accounts
        self._mix = mix
        self._full_rate = rate
        self._rate = 0.0
        self._orders: deque[tuple[str | None, int]] = deque()
        self._ticks = 0
        self._snapshots: deque[Snapshot] = deque()
        self._fresh: Snapshot | None = None
        self.outages = 0
        """Snapshots that no broker answered."""
        self._last_outage = ""
        self._failure: BaseException | None = None
        self._ending = threading.Event()
        loops = (self._send, self._read, self._ask)
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops
        ]
        for thread in self._threads:
            thread.start()

    def go(self, factor: float = 1.0) -> None:
        """Send at the full rate, or so many times it; 0: nothing."""
        self._rate = self._full_rate * factor

    def send(self, count: int, kind: str | None = None) -> None:
        """Send so many at once, beside the steady load."""
        self._orders.append((kind, count))

    def catch_up(self, tend: Callable[[], None], timeout_s: float) -> Period:
        """Stop sending, wait until all is answered, committed and judged; close the period.

        Raises:
            TrafficError: it took too long; says what is missing.
        """
        self._rate = 0.0
        deadline = time.monotonic() + timeout_s
        # The sender may be in the middle of a tick that began before.
        quiet_at = self._ticks + 2
        self._wait(lambda: not self._orders and self._ticks >= quiet_at, tend, deadline)
        self.ledger.flush()
        self._wait(self._all_in, tend, deadline)
        # One more snapshot, so that what was written until now is read before the books close.
        last = self._fresh
        self._wait(lambda: self._fresh is not last and not self._snapshots, tend, deadline)
        with self.ledger.lock:
            return self.accounts.close_period()

    def _all_in(self) -> bool:
        with self.ledger.lock:
            accounts = self.accounts
            return accounts.committed == accounts.ends() and not accounts.lost

    def _wait(self, condition: Callable[[], bool], tend: Callable[[], None], until: float) -> None:
        while not condition():
            self.check()
            tend()
            if time.monotonic() > until:
                with self.ledger.lock:
                    raise TrafficError(
                        f"not caught up: {len(self.accounts.lost)} without a result "
                        f"{self.ledger.lost[:5]}, committed {self.accounts.committed} "
                        f"of {self.accounts.ends()} in {self.accounts.snapshots} snapshots, "
                        f"{self.outages} failed {self._last_outage}"
                    )
            time.sleep(0.05)

    def check(self) -> None:
        """Raise what failed in a thread, or that all is to end."""
        if ENDING.is_set():
            raise TrafficError("told to end")
        if self._failure is not None:
            raise TrafficError(f"the ledger failed: {self._failure!r}") from self._failure

    def stop(self) -> None:
        """End the threads and let go of the broker."""
        self._ending.set()
        for thread in self._threads:
            thread.join()
        self.ledger.close()

    # The threads ---------------------------------------------------------------------------------

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # noqa: BLE001 - told by the next call
            self._failure = error

    def _send(self) -> None:
        owed, last = 0.0, time.monotonic()
        while not self._ending.is_set():
            now = time.monotonic()
            owed = min(owed + self._rate * (now - last), self._full_rate * OWED_S_MAX)
            last = now
            while self._orders:
                kind, count = self._orders[0]
                for _ in range(count):
                    self._draw(kind)
                self._orders.popleft()
            for _ in range(int(owed)):
                self._draw(None)
            owed -= int(owed)
            self._ticks += 1
            self.ledger.serve(TICK_S)

    def _draw(self, kind: str | None) -> None:
        draw = self._mix.draw(kind)
        self.ledger.produce(draw.sent, draw.partition, timestamp_ms=draw.timestamp_ms)

    def _read(self) -> None:
        while not self._ending.is_set():
            self.ledger.read(0.1)
            while self._snapshots and self.ledger.read_past(self._snapshots[0]):
                with self.ledger.lock:
                    self.accounts.judge_commit(self._snapshots[0])
                self._snapshots.popleft()

    def _ask(self) -> None:
        while not self._ending.wait(SNAPSHOT_S):
            try:
                snapshot = self.ledger.snapshot()
            except KafkaException as error:  # an outage: asked again
                self.outages += 1
                self._last_outage = str(error)
                continue
            self._snapshots.append(snapshot)
            self._fresh = snapshot
