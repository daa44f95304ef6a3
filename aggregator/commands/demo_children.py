"""The demo's child processes: started, watched, and ended whatever happens to the demo.

Each child runs under `guard`, which ends it when the demo is gone, killed included. Its output goes
to a log file, whose last lines are shown when it fails. Knows nothing of what the children do.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

GRACE_S = 10.0
"""What a child gets to drain before it is killed."""
_LOG_LINES_SHOWN = 12
_OURS = ("AGGREGATOR_", "MODEL_SERVER_")
_DEFAULTS = {"OMP_WAIT_POLICY": "passive"}
"""An engine's threads that wait by spinning take the cores from the demo's other processes: on two
cores with other work besides, 16 queries a second became 130."""


class ChildError(Exception):
    """A child ended, or did not get ready: the message is for people and ends with its log."""


class Child:
    """One guarded process. A context manager."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; both its output streams go to `log`.

        `settings` are variables of its environment; of anybody else's settings it sees none.
        """
        self.name = name
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "aggregator.commands.guard", str(GRACE_S), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A Ctrl-C in the terminal is for the demo, which then ends its children in order.
                start_new_session=True,
                env=environment(settings or {}),
            )

    def __enter__(self) -> Self:
        """Own it in a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.stop()

    def check(self) -> None:
        """Raise `ChildError` if it has ended."""
        status = self._process.poll()
        if status is not None:
            raise self.error(f"ended by itself with status {status}")

    def error(self, what: str) -> ChildError:
        """`what` happened to this child, with the end of its log."""
        lines = self.log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES_SHOWN:]
        tail = "\n".join(f"    {line}" for line in lines)
        return ChildError(f"the {self.name} {what}; its log is {self.log}\n{tail}".rstrip())

    def stop(self) -> None:
        """Have it drain, kill it if it takes too long; returns when it is gone. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on; different from each other."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listening.getsockname()[1] for listening in sockets]
    for listening in sockets:
        listening.close()
    return ports


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Our own environment with these settings in place of all others of the two programs."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return _DEFAULTS | others | dict(settings)
