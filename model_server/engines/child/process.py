"""An engine's process, seen from its parent: started, spoken to, watched, and ended as a group.

Owns one child in a session of its own (so that a signal to our group does not reach it) with a
socket to it. Invariants: its death is noticed at once, by the end of the process and not by a
timeout; whatever ends it, its whole process group is killed, and when its parent is what
ended, its guard does that. It knows nothing of models.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from model_server.engines.child.frames import FrameError, Kind, receive, send

LINE_CHARACTERS_MAX: Final = 4_096
"""Of a line that the child prints; the rest of it is the next line."""
_LAST_LINES: Final = 30
_ENDING_S: Final = 0.5
"""A process that closed its connection is about to end, and its status says why."""
_REAPED_S: Final = 10.0
"""A killed process is gone at once, unless a driver holds it in the kernel."""

Says = Callable[[str], None]
"""Given each line that the child prints, from a thread."""


class ChildGoneError(Exception):
    """The process is gone, or does not speak to us any more; the message is one line."""


class ChildProcess:
    """See the module. `request` is for one thread, all else for any."""

    def __init__(self, runner: str, *, environment: Mapping[str, str], says: Says) -> None:
        """Start `python -m model_server.engines.child` with a module that has `start`."""
        self._says = says
        self._lock = threading.Lock()
        self._closed = False
        self._gone: str | None = None
        self._died: Callable[[str], None] | None = None
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        """What it printed last."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # Its end is our end: nobody else has the writing one.
        pipe, self._pipe = os.pipe()
        with theirs, open(pipe, "rb", closefd=True):
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "model_server.engines.child"),
                    *(runner, str(theirs.fileno()), str(pipe), str(os.getpid())),
                ],
                env=dict(environment),
                pass_fds=[theirs.fileno(), pipe],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        self._printed = threading.Thread(target=self._follow_output, daemon=True)
        self._waits = threading.Thread(target=self._wait, daemon=True)
        self._printed.start()
        self._waits.start()

    @property
    def pid(self) -> int:
        """Of the process, which is the number of its session and group too."""
        return self._process.pid

    def request(self, kind: Kind, payload: bytes, timeout_s: float) -> tuple[Kind, bytes]:
        """Send a frame and wait for the one that answers it.

        Raises:
            ChildGoneError: the process ended, or did not answer in time and was killed.
        """
        try:
            self._socket.settimeout(timeout_s)
            send(self._socket, kind, payload)
            answer = receive(self._socket)
        except TimeoutError:
            self.kill()
            raise ChildGoneError(f"it did not answer within {timeout_s:.0f} s") from None
        except (OSError, FrameError) as error:
            raise ChildGoneError(self._end(str(error))) from error
        if answer is None:
            raise ChildGoneError(self._end("it closed its connection"))
        return answer

    def watch(self, died: Callable[[str], None]) -> None:
        """Have it called once when the process ends without `close`; at once if it has."""
        with self._lock:
            gone = None if self._closed else self._gone
            if gone is None:
                self._died = died
        if gone is not None:
            died(gone)

    def kill(self) -> None:
        """End the process and all of its group now."""
        with self._lock:
            # Once it is reaped its number may be another process's.
            if self._process.returncode is None:
                self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill it and wait until it is gone. Idempotent."""
        with self._lock:
            first, self._closed = not self._closed, True
        self.kill()
        self._waits.join(_REAPED_S)
        self._printed.join(_REAPED_S)
        self._socket.close()
        if first:
            os.close(self._pipe)

    def _end(self, otherwise: str) -> str:
        """Make sure of its end; returns how it ended by itself, if it did."""
        self._waits.join(_ENDING_S)
        if self._waits.is_alive():
            self.kill()
            return otherwise
        return self._gone or otherwise

    def _wait(self) -> None:
        # Not reaped yet: its number stays its own while its group is killed.
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._kill_group()
            status = self._process.wait()
        with contextlib.suppress(OSError):
            # Wakes whoever waits for an answer, even if a grandchild holds the other end.
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._gone = _ended(status)
            died = None if self._closed else self._died
        if died is not None:
            died(self._gone)

    def _follow_output(self) -> None:
        output = self._process.stdout
        if output is None:
            return
        with output:
            while line := output.readline(LINE_CHARACTERS_MAX):
                if text := line.rstrip():
                    self.last_lines.append(text)
                    self._says(text)


def _ended(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        return f"its process was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"its process was ended by signal {-status}"
