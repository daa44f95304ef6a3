"""Who is tokenized next, who is not, and how much may wait."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, cast

import pytest

from model_server.core.failures import EXPIRED
from model_server.core.queue import BULK_FIRST_EVERY
from model_server.engines.base import Text, Tokens
from model_server.server import tokenizing
from model_server.server.calls import Held
from model_server.server.requests import Columns
from model_server.server.tokenizing import AHEAD_BYTES_MAX, Tokenizing
from model_server.vectors import Encoding

LONG = AHEAD_BYTES_MAX + 1


class ManualWorker:
    """Its thread works when told to."""

    def __init__(self) -> None:
        self.jobs: deque[Any] = deque()

    def submit(self, job: Any, done: Any) -> None:
        self.jobs.append((job, done))

    def work(self, error: BaseException | None = None) -> None:
        job, done = self.jobs.popleft()
        done(None if error else job(), error)


class World:
    """Requests by key, and what became of them."""

    def __init__(self) -> None:
        self.worker = ManualWorker()
        self.held: dict[int, Held] = {}
        self.left: list[int] = []
        self.done: list[int] = []
        self.errors: list[BaseException | None] = []
        self.tokenized: list[str] = []
        self.rooms = 0
        self.tokenizing = Tokenizing(cast("Any", self.worker), self.held, has_room=self._has_room)

    def _has_room(self) -> None:
        self.rooms += 1

    def tokenize(self, texts: list[Text]) -> list[Tokens]:
        self.tokenized += [text.text for text in texts]
        return [Tokens(ids=[1]) for _ in texts]

    def add(
        self,
        key: int,
        *,
        size_bytes: int = LONG,
        bulk: bool = False,
        exclusive: bool = False,
        deadlines_ns: list[int] | None = None,
    ) -> Columns:
        inputs = len(deadlines_ns or [0])
        columns = Columns(
            texts=[Text(text=f"{key}.{index}") for index in range(inputs)],
            text_bytes=[size_bytes] * inputs,
            encodings=[Encoding.FLOAT32] * inputs,
            dimensions=[4] * inputs,
            deadlines_ns=deadlines_ns,
        )
        self.held[key] = held = Held(
            key=key,
            stream=1,
            request_id=key,
            arrived_ns=0,
            caller=cast("Any", None),
            columns=columns,
            exclusive=exclusive,
            bulk=bulk,
        )
        self.tokenizing.add(
            held, cast("Any", self), left=lambda: self.left.append(key), done=self._done
        )
        return columns

    def _done(self, held: Held, error: BaseException | None) -> None:
        self.done.append(held.key)
        self.errors.append(error)

    def gone(self, *keys: int) -> None:
        for key in keys:
            del self.held[key]
        self.tokenizing.drop()

    def work(self) -> None:
        while self.worker.jobs:
            self.worker.work()


@pytest.fixture
def world() -> World:
    return World()


def test_interactive_requests_go_before_bulk_ones(world: World) -> None:
    for key in (1, 2, 3):
        world.add(key, bulk=True)
    world.add(4)
    world.add(5, bulk=True, exclusive=True)
    world.work()
    assert world.done == [1, 4, 5, 2, 3]
    assert world.left == world.done


def test_of_ten_in_a_row_one_is_bulk(world: World) -> None:
    world.add(1, bulk=True)
    world.add(2, bulk=True)
    for key in range(3, 33):
        world.add(key)
    world.work()
    assert world.done.index(2) == BULK_FIRST_EVERY


def test_the_thread_is_handed_little_ahead(world: World) -> None:
    world.add(1)
    world.add(2)
    assert len(world.worker.jobs) == 1
    world.work()
    for key in (3, 4, 5):
        world.add(key, size_bytes=AHEAD_BYTES_MAX // 2)
    assert len(world.worker.jobs) == 2
    assert world.tokenizing.waiting == 1


def test_what_nobody_waits_for_is_not_tokenized(world: World) -> None:
    for key in (1, 2, 3):
        world.add(key)
    world.gone(1, 2)
    assert world.left == [2]
    assert world.tokenizing.waiting == 1
    world.work()
    assert (world.tokenized, world.done, world.left) == (["3.0"], [3], [2, 1, 3])


def test_inputs_that_expired_in_the_line_are_answered_untokenized(world: World) -> None:
    later = time.monotonic_ns() + 10**12
    world.add(1)
    columns = world.add(2, deadlines_ns=[1, later, 0, 1])
    world.work()
    assert world.tokenized == ["1.0", "2.1", "2.2"]
    assert columns.failures == {0: EXPIRED, 3: EXPIRED}
    assert columns.counts == [0, 1, 1, 0]


def test_a_tokenizer_that_fails_is_told(world: World) -> None:
    world.add(1)
    world.worker.work(MemoryError())
    assert isinstance(world.errors[0], MemoryError)
    assert world.left == [1]


def test_too_much_text_is_told_and_so_is_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "UNTOKENIZED_BYTES_MAX", 3 * LONG)
    for key in (1, 2, 3, 4):
        assert world.tokenizing.full == (key == 4)
        world.add(key)
    world.worker.work()
    assert world.tokenizing.full
    assert world.rooms == 0
    world.gone(4)
    assert not world.tokenizing.full
    assert world.rooms == 1
    world.work()
    assert world.rooms == 1


def test_what_waits_is_told_in_tokens_by_its_length(world: World) -> None:
    """Else a server would seem idle that is behind with others' texts."""
    world.add(1)
    assert world.tokenizing.waiting_tokens == 0  # the thread has it
    world.add(2)
    world.add(3, size_bytes=0)
    assert world.tokenizing.waiting_tokens >= LONG // tokenizing.BYTES_PER_TOKEN
    world.work()
    assert world.tokenizing.waiting_tokens == 0
