"""Requests on their way through the tokenizer: who is next, who is left out, how many may wait.

Owns every request from its arrival until its tokens are counted. Interactive ones go before bulk
ones, by arrival among themselves, and of `BULK_FIRST_EVERY` in a row one is bulk. Invariants: the
worker's thread is never handed more than a little ahead, so that what comes next waits for one long
request at most; what nobody waits for any more is dropped, and what has expired by its turn is not
tokenized. On the loop, but for the job itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from model_server.core.queue import BULK_FIRST_EVERY
from model_server.server.jobs import tokenize

if TYPE_CHECKING:
    from model_server.engines.base import Engine
    from model_server.server.calls import Held
    from model_server.server.workers import Worker

UNTOKENIZED_BYTES_MAX = 64 * 1024 * 1024
"""Of text, over all callers; each may have one request more."""
BYTES_PER_TOKEN = 4
AHEAD_BYTES_MAX = 32 * 1024
"""Of text that the thread is given besides what it works on: some milliseconds of work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    held: Held
    engine: Engine
    left: Callable[[], None]
    done: Callable[[Held, BaseException | None], None]
    size_bytes: int


class Tokenizing:
    """See the module; `held` is the driver's table of those that somebody waits for."""

    def __init__(
        self, worker: Worker, held: Mapping[int, Held], *, has_room: Callable[[], None]
    ) -> None:
        """`has_room` is called when too much has waited and no longer does."""
        self._worker = worker
        self._held = held
        self._has_room = has_room
        self._interactive: deque[_Job] = deque()
        self._bulk: deque[_Job] = deque()
        self._since_bulk = 0
        self._bytes = 0
        """Of all that is here."""
        self._worker_jobs = 0
        self._worker_bytes = 0

    @property
    def full(self) -> bool:
        """Too much waits: nobody may add to it who has something here."""
        return self._bytes >= UNTOKENIZED_BYTES_MAX

    @property
    def waiting(self) -> int:
        """Requests that the thread has not been given."""
        return len(self._interactive) + len(self._bulk)

    @property
    def waiting_tokens(self) -> int:
        """About how many tokens the thread has not been given, by the length of their texts."""
        return (self._bytes - self._worker_bytes) // BYTES_PER_TOKEN + self.waiting

    def add(
        self,
        held: Held,
        engine: Engine,
        *,
        left: Callable[[], None],
        done: Callable[[Held, BaseException | None], None],
    ) -> None:
        """A request arrived. `left` is called once, whatever becomes of it; `done` if it is held
        still, with what the tokenizer failed with."""
        job = _Job(
            held=held,
            engine=engine,
            left=left,
            done=done,
            size_bytes=sum(held.columns.text_bytes),
        )
        self._bytes += job.size_bytes
        # Exclusive requests have one line, by arrival.
        (self._bulk if held.bulk and not held.exclusive else self._interactive).append(job)
        self._hand_on()

    def drop(self) -> None:
        """Some are no longer held."""
        for line in (self._interactive, self._bulk):
            gone = [job for job in line if job.held.key not in self._held]
            if not gone:
                continue
            kept = [job for job in line if job.held.key in self._held]
            line.clear()
            line.extend(kept)
            for job in gone:
                self._leave(job)

    def _leave(self, job: _Job) -> None:
        was_full = self.full
        self._bytes -= job.size_bytes
        job.left()
        if was_full and not self.full:
            self._has_room()

    def _hand_on(self) -> None:
        while (line := self._next_line()) is not None:
            job = line[0]
            if self._worker_jobs and self._worker_bytes + job.size_bytes > AHEAD_BYTES_MAX:
                return
            line.popleft()
            self._since_bulk = 0 if line is self._bulk else self._since_bulk + 1
            self._worker_jobs += 1
            self._worker_bytes += job.size_bytes
            job.held.columns.expire(time.monotonic_ns())
            self._worker.submit(partial(self._run, job), partial(self._ran, job))

    def _next_line(self) -> deque[_Job] | None:
        bulk_turn = self._bulk and self._since_bulk >= BULK_FIRST_EVERY - 1
        if self._interactive and not bulk_turn:
            return self._interactive
        return self._bulk or None

    def _run(self, job: _Job) -> None:
        """In the thread."""
        if job.held.key in self._held:
            tokenize(job.engine, job.held.columns)

    def _ran(self, job: _Job, result: Any, error: BaseException | None) -> None:
        del result
        self._worker_jobs -= 1
        self._worker_bytes -= job.size_bytes
        self._leave(job)
        self._hand_on()
        if job.held.key in self._held:
            job.done(job.held, error)
