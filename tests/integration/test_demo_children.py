"""The demo's children end with it: drained, killed when they don't, and never orphaned."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aggregator.commands import demo_children
from aggregator.commands.demo_children import Child, ChildError, free_ports

DEADLINE_S = 20.0
SAY_PID = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SAY_PID}"
# A child with a child of its own, which ignores SIGTERM.
PARENT = (
    "import subprocess, sys, time;"
    f"subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); time.sleep(600)"
)
# Starts a child as the demo does, then does nothing more.
OWNER = (
    "import sys, time; from pathlib import Path;"
    "from aggregator.commands.demo_children import Child;"
    f"child = Child('sleeper', [sys.executable, '-c', {SAY_PID!r}], Path(sys.argv[1]));"
    "time.sleep(600)"
)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


def pid_in(log: Path) -> int:
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    return int(log.read_text())


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    # A zombie of an init that does not reap has ended all the same.
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_child_ends_when_it_is_told(tmp_path: Path) -> None:
    with Child("sleeper", [sys.executable, "-c", SAY_PID], tmp_path / "log") as child:
        pid = pid_in(child.log)
        child.check()
        assert runs(pid)
    assert not runs(pid)
    child.stop()


def test_one_that_does_not_listen_is_killed_with_its_own_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_children, "GRACE_S", 0.2)
    with Child("stubborn", [sys.executable, "-c", STUBBORN], tmp_path / "stubborn") as child:
        stubborn = pid_in(child.log)
    assert not runs(stubborn)
    with Child("parent", [sys.executable, "-c", PARENT], tmp_path / "parent") as child:
        grandchild = pid_in(child.log)
    until(lambda: not runs(grandchild))


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_does_not_outlive_a_killed_owner(tmp_path: Path, kill: signal.Signals) -> None:
    log = tmp_path / "log"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(log)], stderr=subprocess.DEVNULL)
    pid = pid_in(log)
    assert runs(pid)
    owner.send_signal(kill)
    owner.wait(DEADLINE_S)
    until(lambda: not runs(pid))


def test_a_child_that_fails_is_told_with_its_log(tmp_path: Path) -> None:
    program = "import sys; print('it broke'); sys.exit(3)"
    with Child("engine", [sys.executable, "-c", program], tmp_path / "log") as child:

        def failed() -> bool:
            try:
                child.check()
            except ChildError:
                return True
            return False

        until(failed)
        with pytest.raises(ChildError) as caught:
            child.check()
    first, last = str(caught.value).splitlines()
    assert first == f"the engine ended by itself with status 3; its log is {tmp_path / 'log'}"
    assert last == "    it broke"


def test_a_child_has_the_settings_it_is_given_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGGREGATOR_GROUP_ID", "somebody's")
    monkeypatch.setenv("MODEL_SERVER_DTYPE", "somebody's")
    monkeypatch.setenv("OTHER", "kept")
    program = "import os, time; print(*sorted(os.environ), flush=True); time.sleep(600)"
    given = {"AGGREGATOR_LOG_LEVEL": "info"}
    command = [sys.executable, "-c", program]
    with Child("sleeper", command, tmp_path / "log", settings=given) as child:
        until(lambda: child.log.read_text().endswith("\n"))
        names = child.log.read_text().split()
    assert "OTHER" in names
    ours = [name for name in names if name.startswith(("AGGREGATOR_", "MODEL_SERVER_"))]
    assert ours == ["AGGREGATOR_LOG_LEVEL"]


def test_free_ports_are_different() -> None:
    assert len(set(free_ports(20))) == 20
