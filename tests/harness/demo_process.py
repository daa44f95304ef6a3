"""`aggregator demo` as a process of its own, as a person in a terminal has it."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

DEADLINE_S = 120.0
_MARK = "DEMO_TEST_MARK"


class DemoProcess:
    """Runs the demo with its own folder for temporary files; a context manager.

    All its processes inherit a marker in their environment, so that none can hide.
    """

    def __init__(self, *arguments: str) -> None:
        self._mark = secrets.token_hex(8)
        self._home = tempfile.TemporaryDirectory(prefix="demo-test-")
        self.folder = Path(self._home.name)
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aggregator", "demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(self.folder), "COLUMNS": "200", _MARK: self._mark},
            # Away from the test's own terminal, and the target of a Ctrl-C by its group.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.until_gone()
        self._home.cleanup()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until the output matches."""
        self._until(lambda: re.search(pattern, self.output) is not None, pattern)
        found = re.search(pattern, self.output)
        assert found is not None
        return found

    def ctrl_c(self) -> None:
        """What a terminal does: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def ended(self) -> int:
        """Wait for the end; gives the exit status."""
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status

    def processes(self) -> list[int]:
        """Ids of all processes that came of it and still run."""
        if not Path("/proc/self/environ").exists():
            shown = subprocess.check_output(["ps", "axeww", "-o", "pid=,command="])
            lines = shown.decode(errors="replace").splitlines()
            return [int(line.split()[0]) for line in lines if self._mark in line]
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                # Ended meanwhile, or somebody else's.
                continue
        return found

    def until_gone(self) -> None:
        """Wait until none of its processes runs."""
        self._until(lambda: not self.processes(), "processes that end")

    def _until(self, happened: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not happened():
            # Nothing more will come once the process and the reader of its output have ended.
            over = self.process.poll() is not None and not self._reader.is_alive()
            late = time.monotonic() > deadline_s or (over and not self.processes())
            assert not late or happened(), f"no {what}; got:\n{self.output}"
            time.sleep(0.05)
