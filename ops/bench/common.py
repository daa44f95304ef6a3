"""What the benchmarks share: child processes on free ports, CPU clocks, percentiles, output.

A benchmark prints a table for people and, as its last line on standard output, one JSON object
with units in the names. It fails (exit status 1, one line) when a record has no result.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.table import Table

from ops.kafka.node import free_port

MODEL = "bench"


class BenchError(Exception):
    """The run proves nothing: one line for people."""


def leave_nothing_behind() -> None:
    """Let SIGTERM unwind the stack, so that children are ended: by default it would not.

    Does nothing where somebody has a handler of their own, or outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


class Child:
    """A process in a session of its own, with its output in a file; ended with its owner."""

    def __init__(self, name: str, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        """`env` is added to the environment."""
        self.name = name
        self._arguments = list(arguments)
        self._env = {**os.environ, **env}
        self.log_path = Path(tempfile.mkdtemp(prefix="bench-")) / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it."""
        leave_nothing_behind()
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                self._arguments,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it in order, by force after 30 s."""
        process = self.process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def check(self) -> None:
        """Raise `BenchError` with the end of its log if it has ended."""
        if self.process is not None and self.process.poll() is not None:
            tail = self.log_path.read_text(errors="replace").splitlines()[-5:]
            raise BenchError(f"{self.name} ended early:\n" + "\n".join(tail))

    def wait_ready(self, url: str, timeout_s: float = 60.0) -> None:
        """Wait until `url` answers 200."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check()
            try:
                with urllib.request.urlopen(url, timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise BenchError(f"{self.name} was not ready within {timeout_s:.0f} s: {self.log_path}")

    def cpu_s(self) -> float:
        """User and system CPU that the process has used so far, all threads included."""
        if self.process is None:
            return 0.0
        return process_cpu_s(self.process.pid)


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process so far: from /proc (to 10 ms), elsewhere from `ps`."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.exists():
        fields = stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    shown = subprocess.run(
        ["ps", "-o", "cputime=", "-p", str(pid)], capture_output=True, text=True, check=True
    ).stdout.strip()
    seconds = 0.0
    for part in shown.replace("-", ":").split(":"):
        seconds = seconds * 60 + float(part)
    return seconds


def model_server(options: Mapping[str, str]) -> tuple[Child, str, str]:
    """A model server with the simulated engine: (child, its gRPC address, its metrics URL)."""
    grpc, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    env = {
        "MODEL_SERVER_ENGINE": "simulated",
        "MODEL_SERVER_SERVED_MODEL_NAME": MODEL,
        "MODEL_SERVER_GRPC_LISTEN": grpc,
        "MODEL_SERVER_METRICS_LISTEN": metrics,
        "MODEL_SERVER_LOG_LEVEL": "warning",
        **options,
    }
    arguments = [sys.executable, "-m", "model_server", "serve"]
    return Child("model-server", arguments, env), grpc, f"http://{metrics}"


def aggregator(bootstrap: str, server: str, options: Mapping[str, str]) -> tuple[Child, str]:
    """An aggregator as users run it: (child, its metrics URL)."""
    metrics = f"127.0.0.1:{free_port()}"
    env = {
        "AGGREGATOR_BOOTSTRAP_SERVERS": bootstrap,
        "AGGREGATOR_MODELS": json.dumps({MODEL: {"servers": [server]}}),
        "AGGREGATOR_METRICS_LISTEN": metrics,
        "AGGREGATOR_LOG_FORMAT": "json",
        **options,
    }
    arguments = [sys.executable, "-m", "aggregator", "run"]
    return Child("aggregator", arguments, env), f"http://{metrics}"


def metric(url: str, name: str, labels: str = "") -> float:
    """The sum of a metric's samples, over all its labels, or those that hold `labels`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as response:
        text = response.read().decode()
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith((f"{name} ", f"{name}{{")) and labels in line
    ]
    return sum(values)


def read_queries(path: Path | None, count: int) -> list[str]:
    """`count` texts, repeated as needed: from `id TAB text` or plain lines, else the demo's own.

    Raises:
        BenchError: the file can't be read, or holds none.
    """
    if path is None:
        from aggregator.commands.demo_queries import demo_queries  # noqa: PLC0415

        texts = [str(query) for query in demo_queries()]
    else:
        texts = read_texts(path)
    return [texts[i % len(texts)] for i in range(count)]


def read_texts(path: Path) -> list[str]:
    """Every text of a file once.

    Raises:
        BenchError: it can't be read, or holds none.
    """
    from aggregator.commands import demo_queries  # noqa: PLC0415

    try:
        return demo_queries.read_queries(path)
    except OSError as error:
        raise BenchError(f"queries {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BenchError(str(error)) from error


def percentile(values: Sequence[float], q: float) -> float:
    """The nearest-rank percentile, `q` in 0..100, of values that need not be sorted."""
    ordered = sorted(values)
    rank = max(0, min(len(ordered) - 1, -(-len(ordered) * q // 100) - 1))
    return ordered[int(rank)]


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:  # into a file: wide enough for every column
        console = Console(width=160)
    console.print(table)


def report(figures: Mapping[str, Any]) -> None:
    """Print the figures as the last line: one JSON object."""
    print(json.dumps(figures), flush=True)
