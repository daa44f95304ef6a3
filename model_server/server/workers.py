"""Threads that do blocking work for the event loop: one for the engine, one for the tokenizer.

A job costs one queue entry and no future; results that pile up go back to the loop in one call.
Invariant: jobs of a worker run one after the other, and their results arrive in that order.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

Job = Callable[[], Any]
Done = Callable[[Any, BaseException | None], None]
"""Called on the loop with the job's result, or with what it raised."""


class Worker:
    """One daemon thread: a job that hangs for ever does not keep the process from ending."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._results: deque[tuple[Done, Any, BaseException | None]] = deque()
        self._posted = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Run a job after those before it."""
        self._jobs.put((job, done))

    async def call(self, job: Job) -> Any:
        """Run a job and wait for it."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def done(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.submit(job, done)
        return await future

    def close(self, timeout_s: float) -> bool:
        """Stop after the jobs that are queued; False: it still runs one after `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            result: Any = None
            error: BaseException | None = None
            try:
                result = job()
            except BaseException as raised:  # noqa: BLE001 - a result; a panic in Rust is no Exception
                error = raised
            self._results.append((done, result, error))
            if not self._posted:
                self._posted = True
                # A closed loop means that nobody waits any more.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Before the first look: a result appended after the last look posts anew.
        self._posted = False
        while self._results:
            done, result, error = self._results.popleft()
            done(result, error)
