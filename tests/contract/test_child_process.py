"""An engine's process: what it answers, how it ends, and that nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from model_server.engines.base import (
    EngineDiedError,
    EngineError,
    EngineOutOfMemoryError,
    EnginePass,
    SeparateEngine,
    Tokens,
)
from model_server.engines.child.process import LINE_CHARACTERS_MAX
from model_server.engines.model_folder import ModelRefusedError
from tests.harness.child_engines import FakeChildEngine, fake_engine, group_members, running
from tests.harness.child_runner import Act

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines of their own: Linux")
WAIT_S = 30.0
MEMBERS = 3
"""Of its group: itself, its guard, and what the runner started."""


def one(*ids: int, prompt_tokens: int = 0) -> Tokens:
    return Tokens(ids=list(ids), prompt_tokens=prompt_tokens)


def wait_until(condition: Callable[[], bool]) -> None:
    """What the kernel does tells nobody."""
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, "it did not come to be"
        time.sleep(0.01)


@pytest.fixture
def engine() -> Iterator[FakeChildEngine]:
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeChildEngine]:
    """For tests that leave it as it is."""
    with running() as made:
        yield made


# Passes


def test_ids_and_prompt_tokens_arrive_and_rows_come_back_in_order(shared: FakeChildEngine) -> None:
    inputs = [one(10, 11), one(20, prompt_tokens=1), Tokens(ids=array("I", [30, 31, 32]))]
    vectors = shared.embed(inputs)
    assert vectors[:, :3].tolist() == [[21, 2, 0], [20, 1, 1], [93, 3, 0]]
    assert vectors.dtype == np.float32
    assert vectors.flags.c_contiguous
    assert vectors.flags.writeable
    assert list(shared.passes) == [EnginePass(sequences=3, tokens=6)]


def test_it_is_an_engine_of_its_own(shared: FakeChildEngine) -> None:
    assert isinstance(shared, SeparateEngine)
    assert shared.embed([one(10)])[0, 3] == np.float32(shared.pid)
    assert os.getsid(shared.pid) == shared.pid != os.getsid(0)


def test_a_pass_of_many_inputs(shared: FakeChildEngine) -> None:
    inputs = [one(100 + i) for i in range(1_000)]
    assert shared.embed(inputs)[:, 0].tolist() == [100 + i for i in range(1_000)]


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (Act.RAISE, EngineError, "asked to raise"),
        (Act.OUT_OF_MEMORY, EngineOutOfMemoryError, "asked to run out"),
        (Act.MISCOUNT, EngineError, "ran 2 sequences of 1 tokens, not the 2 of 2"),
    ],
)
def test_a_pass_that_fails_leaves_it_alive(
    shared: FakeChildEngine, act: Act, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shared.embed([one(10), one(act)])
    assert shared.embed([one(10)])[0, 0] == 10


def test_a_list_that_was_split_is_counted_as_such(shared: FakeChildEngine) -> None:
    shared.embed([one(Act.SPLIT, 1, 2), one(10), one(11)])
    assert list(shared.passes) == [
        EnginePass(sequences=1, tokens=3),
        EnginePass(sequences=2, tokens=2),
    ]


def test_more_than_it_has_room_for_is_not_sent(shared: FakeChildEngine) -> None:
    with pytest.raises(EngineOutOfMemoryError, match="1001 tokens; the engine has room for 1000"):
        shared.embed([Tokens(ids=[10] * 1_001)])


def test_an_empty_pass_has_no_rows(shared: FakeChildEngine) -> None:
    assert shared.embed([]).shape == (0, shared.info.dimensions)
    assert not shared.passes


# Starts


@pytest.mark.parametrize(
    ("fail", "error", "message"),
    [
        ("refuse", ModelRefusedError, "not a model"),
        ("raise", EngineError, "no such luck"),
        ("exit", EngineDiedError, "ended with status 9; it said: ValueError: too little of it"),
    ],
)
def test_a_start_that_fails_says_why(fail: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fake_engine(fail=fail)


def test_what_it_prints_is_handed_on_in_lines_of_bounded_length() -> None:
    said: list[str] = []
    with pytest.raises(EngineDiedError):
        fake_engine(fail="exit", says=said.append)
    assert said == ["ValueError: too little of it", "and that was it"]
    said.clear()
    with pytest.raises(EngineDiedError):
        fake_engine(fail="shout", says=said.append)
    assert [len(line) for line in said] == [LINE_CHARACTERS_MAX, LINE_CHARACTERS_MAX, 8]


def test_a_start_that_hangs_is_given_up() -> None:
    with pytest.raises(EngineDiedError, match="did not answer within 1 s"):
        fake_engine(fail="hang", timeout_s=1.0)


# Deaths


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (Act.EXIT, "ended with status 7; it said: about to exit"),
        (Act.DIE, "asked to die"),
        (Act.BREAK, "asked to break"),
    ],
)
def test_its_death_in_a_pass_is_told_with_its_reason(
    engine: FakeChildEngine, act: Act, message: str
) -> None:
    group = engine.pid
    with pytest.raises(EngineDiedError, match=message):
        engine.embed([one(act)])
    with pytest.raises(EngineDiedError):
        engine.embed([one(10)])
    wait_until(lambda: not group_members(group))


def test_a_kill_from_outside_in_a_pass_ends_the_pass(engine: FakeChildEngine) -> None:
    deaths: list[str] = []
    engine.watch(deaths.append)
    threading.Timer(0.2, os.kill, (engine.pid, signal.SIGKILL)).start()
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        engine.embed([one(Act.HANG)])
    wait_until(lambda: bool(deaths))
    assert deaths == ["its process was ended by SIGKILL"]
    wait_until(lambda: not group_members(engine.pid))


def test_a_death_without_a_pass_is_told(engine: FakeChildEngine) -> None:
    told = threading.Event()
    engine.watch(lambda _: told.set())
    os.kill(engine.pid, signal.SIGKILL)
    assert told.wait(WAIT_S)
    again: list[str] = []
    engine.watch(again.append)
    assert again == ["its process was ended by SIGKILL"]


def test_kill_ends_a_pass_that_hangs_with_all_that_it_started(engine: FakeChildEngine) -> None:
    assert len(group_members(engine.pid)) == MEMBERS
    threading.Timer(0.2, engine.kill).start()
    with pytest.raises(EngineDiedError):
        engine.embed([one(Act.HANG)])
    wait_until(lambda: not group_members(engine.pid))


def test_close_leaves_nothing_and_tells_nobody() -> None:
    engine = fake_engine()
    deaths: list[str] = []
    engine.watch(deaths.append)
    engine.close()
    engine.close()
    wait_until(lambda: not group_members(engine.pid))
    assert not deaths
    with pytest.raises(EngineDiedError):
        engine.embed([one(10)])


def test_a_pass_outlives_the_signals_that_are_meant_for_the_server(engine: FakeChildEngine) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(engine.pid, number)
    assert engine.embed([one(10)])[0, 0] == 10


PARENT = """
import sys
from tests.harness.child_engines import fake_engine
from tests.contract.test_child_process import one
engine = fake_engine()
print(engine.pid, flush=True)
engine.embed([one(int(sys.argv[1]))])
"""


def test_what_it_started_ends_with_it_when_it_is_killed_beside_its_parent() -> None:
    """By the kernel, for their memory, say: then nobody is left who would know."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(int(Act.HANG))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        parent.send_signal(signal.SIGSTOP)
        os.kill(group, signal.SIGKILL)
        wait_until(lambda: not group_members(group))
        parent.kill()


@pytest.mark.parametrize("act", [Act.HANG, Act.BIND, 50])
def test_it_dies_with_its_parent(act: int) -> None:
    """In a pass, in a pass that lets no thread run, and between passes (the parent then exits)."""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(int(act))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        if act != 50:
            assert len(group_members(group)) == MEMBERS
            parent.kill()
    wait_until(lambda: not group_members(group))
