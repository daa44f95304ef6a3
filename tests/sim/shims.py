"""What the real adapters find in place of threads, queues, clocks and Kafka's clients.

`installed(kernel)` puts these into the modules `kafka_source`, `kafka_starts`, `kafka_commits`,
`kafka_sink`, `kafka_offsets`, `kafka_transactions`, `server_stream` and `bridge` for the length of
a run, so that their code runs unchanged in virtual time. Each finds out by the kernel's `owner`
whose process calls. It must not decide anything.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from aggregator.adapters import (
    kafka_commits,
    kafka_offsets,
    kafka_sink,
    kafka_source,
    kafka_starts,
    kafka_transactions,
    server_stream,
)
from aggregator.runtime import bridge, intake
from tests.sim.kernel import SECOND, Fiber, Kernel, Owner

LOOK_BYTES = 2_000
"""The intake looks at its clock for each record or two: polls are small here."""


class SimTime:
    """The module `time`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def _owner(self) -> Owner:
        owner = self._kernel.owner
        if owner is None:
            raise RuntimeError("only a process has clocks")
        return owner

    def monotonic(self) -> float:
        return self._owner().monotonic_ns() / SECOND

    def monotonic_ns(self) -> int:
        return self._owner().monotonic_ns()

    def sleep(self, seconds: float) -> None:
        self._kernel.fiber().wait(int(seconds * SECOND))

    def time_ns(self) -> int:
        return self._owner().wall_ms() * 1_000_000


class SimThread:
    """`threading.Thread`: a fiber."""

    def __init__(self, kernel: Kernel, owner: Owner, target: Callable[[], None], name: str) -> None:
        self._kernel = kernel
        self._owner = owner
        self._target = target
        self._name = name
        self._fiber: Fiber | None = None

    def start(self) -> None:
        self._fiber = Fiber(self._kernel, self._owner, self._target, self._name)

    @property
    def ident(self) -> int | None:
        return None if self._fiber is None else 1

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.done

    def join(self, timeout: float | None = None) -> None:
        if self._fiber is not None:
            timeout_ns = None if timeout is None else int(timeout * SECOND)
            self._fiber.join(self._kernel.fiber(), timeout_ns)


class SimEvent:
    """`threading.Event`, of which one waits at a time."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._set = False
        self._waiter: Fiber | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None:
            self._waiter.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._waiter = self._kernel.fiber()
            self._waiter.wait(None if timeout is None else int(timeout * SECOND))
            self._waiter = None
        return self._set


class SimLock:
    """`threading.Lock`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._held = False
        self._waiters: deque[Fiber] = deque()

    def acquire(self, timeout: float = -1) -> bool:
        if self._held:
            fiber = self._kernel.fiber()
            self._waiters.append(fiber)
            fiber.wait(None if timeout < 0 else int(timeout * SECOND))
            if fiber in self._waiters:
                self._waiters.remove(fiber)
        if self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False
        if self._waiters:
            self._waiters.popleft().wake()

    def __enter__(self) -> None:
        while not self.acquire():
            pass

    def __exit__(self, *_: object) -> None:
        self.release()


class SimCondition:
    """`threading.Condition`, of which the sink uses one side only in a simulation."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def notify_all(self) -> None:
        return None


class SimThreading:
    """The module `threading`."""

    Condition = SimCondition

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def Event(self) -> SimEvent:  # noqa: N802 (its name)
        return SimEvent(self._kernel)

    def Lock(self) -> SimLock:  # noqa: N802 (its name)
        return SimLock(self._kernel)

    def Thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> SimThread:  # noqa: N802 (its name)
        owner = self._kernel.owner
        if owner is None:
            raise RuntimeError("only a process starts threads")
        return SimThread(self._kernel, owner, target, name)


class SimQueue:
    """`queue.SimpleQueue` of the commands to a consumer's thread."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._items: deque[Any] = deque()
        self._reader: Fiber | None = None
        self.on_put: Callable[[], None] | None = None
        """Told of each item: an idle poll must end within its time."""

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._reader is not None:
            self._reader.wake()
        elif self.on_put is not None:
            self.on_put()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._items and block:
            timeout_ns = None if timeout is None else int(timeout * SECOND)
            self._reader = self._kernel.fiber()
            self._reader.wait(timeout_ns)
            self._reader = None
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class SimQueueModule:
    """The module `queue`."""

    Empty = queue.Empty

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def SimpleQueue(self) -> SimQueue:  # noqa: N802 (its name)
        return SimQueue(self._kernel)


class SimFuture:
    """What a loop's `create_future` gives, as far as the driver uses it."""

    def __init__(self, on_result: Callable[[Any], None]) -> None:
        self._on_result = on_result
        self._result: Any = None

    def done(self) -> bool:
        return self._result is not None

    def set_result(self, result: Any) -> None:
        self._result = result
        self._on_result(result)


class SimTimer:
    """What a loop's `call_at` gives."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class SimLoop:
    """An event loop: calls from other threads in their order, timers, and a little latency.

    Nothing is called before `busy_until_ns`, as while a long callback runs.
    """

    def __init__(self, kernel: Kernel, owner: Owner, *, lag_ns: int) -> None:
        self._lag_ns = lag_ns
        self._kernel = kernel
        self._owner = owner
        self._last_ns = 0
        self.closed = False
        self.busy_until_ns = 0
        self.on_halt: Callable[[Any], None] = lambda _: None

    def _soonest_ns(self) -> int:
        kernel = self._kernel
        soon_ns = max(kernel.now_ns, self.busy_until_ns) + kernel.rng.randrange(2_000, self._lag_ns)
        self._last_ns = max(self._last_ns, soon_ns)
        return self._last_ns

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: Any) -> None:
        if self.closed or not self._owner.alive:
            raise RuntimeError("the loop is closed")
        self._kernel.at(self._soonest_ns(), self._owner, "loop", lambda: function(*arguments))

    call_soon = call_soon_threadsafe

    def call_at(self, when_s: float, callback: Callable[[], None]) -> SimTimer:
        timer = SimTimer()
        self._arm(timer, int(when_s * SECOND), callback)
        return timer

    def _arm(self, timer: SimTimer, when_ns: int, callback: Callable[[], None]) -> None:
        def ring() -> None:
            if timer.cancelled or self.closed:
                return
            # As asyncio has it: not before its own clock shows the time.
            if self._owner.monotonic_ns() + 1_000 < when_ns:
                self._arm(timer, when_ns, callback)
            else:
                callback()

        at_ns = self._owner.reaches_ns(when_ns)
        lateness_ns = self._kernel.rng.randrange(2_000, self._lag_ns)
        at_ns = max(at_ns, self._kernel.now_ns, self.busy_until_ns) + lateness_ns
        self._kernel.at(at_ns, self._owner, "timer", ring)

    def time(self) -> float:
        return self._owner.monotonic_ns() / SECOND

    def create_future(self) -> SimFuture:
        def halted(result: Any) -> None:
            self.on_halt(result)  # which is set after this

        return SimFuture(halted)


class SimAsyncio:
    """The module `asyncio`, for the synchronous half of a stream."""

    Event = asyncio.Event

    def __init__(self, loop_of: Callable[[], SimLoop]) -> None:
        self.get_running_loop = loop_of


@contextmanager
def installed(
    kernel: Kernel,
    *,
    consumer: Callable[[Any], Any],
    producer: Callable[[Any], Any],
    loop_of: Callable[[], SimLoop],
) -> Iterator[None]:
    """Run what follows with the adapters in virtual time."""
    sim_time, threading = SimTime(kernel), SimThreading(kernel)
    replacements: list[tuple[Any, str, Any]] = [
        (kafka_source, "time", sim_time),
        (kafka_source, "threading", threading),
        (kafka_source, "queue", SimQueueModule(kernel)),
        (kafka_source, "Consumer", consumer),
        (kafka_commits, "time", sim_time),
        (kafka_starts, "time", sim_time),
        (intake, "LOOK_BYTES", LOOK_BYTES),
        (kafka_sink, "time", sim_time),
        (kafka_sink, "threading", threading),
        (kafka_sink, "Producer", producer),
        (kafka_offsets, "threading", threading),
        (kafka_transactions, "time", sim_time),
        (kafka_transactions, "threading", threading),
        (kafka_transactions, "queue", SimQueueModule(kernel)),
        (kafka_transactions, "Producer", producer),
        (bridge, "time", sim_time),
        (server_stream, "asyncio", SimAsyncio(loop_of)),
    ]
    with ExitStack() as stack:
        for module, name, replacement in replacements:
            stack.enter_context(mock.patch.object(module, name, replacement))
        yield
