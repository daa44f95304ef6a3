"""Our commands as processes of their own: started, waited for by their log lines, ended.

A process's standard error is read to its end by a thread, so that it never blocks on a full pipe,
and is shown when something is waited for in vain.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Container, Mapping
from typing import Any, Self

WAIT_S = 60.0

Line = dict[str, Any]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class CommandProcess:
    """`python -m MODULE ARGUMENTS`; leave it as a context manager to have it killed."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        forget: Container[str] = (),
    ) -> None:
        """Start it, with nothing of our own settings but `environment`.

        `forget`: events whose lines are not kept, as a long run has very many of them.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AGGREGATOR_", "MODEL_SERVER_"))
        }
        self.lines: list[Line] = []
        """Log lines; what is no JSON is {"text": ...}."""
        self._forget = forget
        self._changed = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**inherited, "PYTHONFAULTHANDLER": "1", **environment},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def _read(self) -> None:
        for text in self.process.stderr or ():
            try:
                line = json.loads(text)
            except ValueError:
                line = {"text": text.rstrip()}
            if line.get("event") in self._forget:
                continue
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(
        self, condition: Callable[[Line], bool], *, after: int = 0, timeout_s: float = WAIT_S
    ) -> Line:
        """The first line from number `after` on of which it holds; fails when none comes."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or any(map(condition, self.lines[after:])), timeout_s
            )
            for line in self.lines[after:]:
                if condition(line):
                    return line
        raise AssertionError(f"no such line among: {self.lines[-20:]}")

    def terminate(self) -> int:
        """SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Return the exit status; a process that does not end shows where its threads are."""
        try:
            status = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
            self._reader.join(WAIT_S)
            raise AssertionError(f"it does not end: {self.lines[-200:]}") from None
        self._reader.join(WAIT_S)
        return status

    @property
    def running(self) -> bool:
        """Whether it has not ended; a frozen one runs."""
        return self.process.poll() is None

    def freeze(self) -> None:
        """SIGSTOP: it stands still as on a machine that stalls."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def autopsy(self) -> list[Line]:
        """End it, thawed, by SIGABRT; return the end of its log, with where its threads were."""
        if self.running:
            self.thaw()
            self.process.send_signal(signal.SIGABRT)
            self.process.wait()
        self._reader.join(WAIT_S)
        return self.lines[-120:]

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self.process.kill()
        self.process.wait()


def simulated_server(port: int, *, model: str = "minilm", **settings: str) -> CommandProcess:
    """A model server with the simulated engine that answers at once; returns when it serves."""
    server = CommandProcess(
        "model_server",
        "serve",
        environment={
            "MODEL_SERVER_ENGINE": "simulated",
            "MODEL_SERVER_SERVED_MODEL_NAME": model,
            "MODEL_SERVER_GRPC_LISTEN": f"127.0.0.1:{port}",
            "MODEL_SERVER_METRICS_LISTEN": "",
            "MODEL_SERVER_LOG_FORMAT": "json",
            **settings,
        },
    )
    try:
        server.wait_for(lambda line: line.get("phase") == "serving")
    except AssertionError:
        server.kill()
        raise
    return server
