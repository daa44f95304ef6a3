"""The engine and its thread: started, watched, ended and started again as the driver says.

Invariants: one engine at a time, and all that blocks on it runs in its one thread; a death is told
once for each engine, on the loop, whether a pass ran or not; an engine with a process of its own is
killed before anything waits for it. No policy: when to restart is the scheduler's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from model_server.engines.base import Engine, SeparateEngine
from model_server.server.workers import Done, Job, Worker

if TYPE_CHECKING:
    from model_server.server.startup import Started


class EngineHost:
    """See the module. `started` and `died` are called on the loop."""

    def __init__(
        self,
        start: Callable[[], Started],
        loop: asyncio.AbstractEventLoop,
        *,
        started: Callable[[Started], None],
        failed: Callable[[BaseException], None],
        died: Callable[[str], None],
    ) -> None:
        """`start` blocks; it runs in the engine's thread, at first and at each restart."""
        self._start = start
        self._loop = loop
        self._tell_started = started
        self._tell_failed = failed
        self._tell_died = died
        self._worker = Worker("engine", loop)
        self._timer: asyncio.TimerHandle | None = None
        self._lost: Engine | None = None
        self.current: Started | None = None
        """What was started last; None before the first."""

    @property
    def separate(self) -> SeparateEngine | None:
        """The engine, if it has a process of its own."""
        engine = self.current.engine if self.current is not None else None
        return engine if isinstance(engine, SeparateEngine) else None

    def start(self) -> None:
        """Load the engine; `started` or `failed` follows."""
        self._worker.submit(self._start, self._started)

    def submit(self, job: Job, done: Done) -> None:
        """Run a job in the engine's thread."""
        self._worker.submit(job, done)

    def restart(self, delay_ns: int) -> None:
        """End the engine and start another one after a while; `started` or `failed` follows."""
        lost = self.current.engine if self.current is not None else None
        if lost is not None:
            self._end(lost)

        def again() -> Started:
            if lost is not None:
                lost.close()
            return self._start()

        self._timer = self._loop.call_later(
            delay_ns / 1e9, self._worker.submit, again, self._started
        )

    def close(self, timeout_s: float) -> bool:
        """Free the engine and end its thread; False: that hangs in a pass or in a start."""
        if self._timer is not None:
            self._timer.cancel()
        if self.current is not None:
            self._end(self.current.engine)
            self._worker.submit(self.current.engine.close, lambda *_: None)
        return self._worker.close(timeout_s)

    def _end(self, engine: Engine) -> None:
        """Its death is no news any more, and nothing waits for a pass of it."""
        self._lost = engine
        if isinstance(engine, SeparateEngine):
            engine.kill()

    def _started(self, result: Any, error: BaseException | None) -> None:
        if error is not None:
            self._tell_failed(error)
            return
        self.current = result
        self._tell_started(result)
        separate = self.separate
        if separate is not None:
            separate.watch(lambda message: self._died(separate, message))

    def _died(self, engine: Engine, message: str) -> None:
        """Told from any thread: behind the pass that it died in, which knows more of why."""
        self._worker.submit(lambda: None, lambda *_: self._gone(engine, message))

    def _gone(self, engine: Engine, message: str) -> None:
        if self.current is not None and engine is self.current.engine and engine is not self._lost:
            self._tell_died(message)
