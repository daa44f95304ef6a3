"""Resident memory of processes over time, from the operating system."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SAMPLE_S = 1.0


def rss_bytes(pid: int) -> int:
    """Of one process: from /proc, elsewhere from `ps`; 0: it is gone."""
    status = Path(f"/proc/{pid}/status")
    try:
        if status.parent.parent.joinpath("self").exists():
            lines = status.read_text().splitlines()
            shown = next((line.split()[1] for line in lines if line.startswith("VmRSS:")), "0")
        else:
            command = ["ps", "-o", "rss=", "-p", str(pid)]
            shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(shown.strip() or 0) * 1024


@dataclass(slots=True)
class Series:
    """One name's samples, over all its lives."""

    first_bytes: int = 0
    last_bytes: int = 0
    peak_bytes: int = 0
    samples: list[tuple[float, int]] = field(default_factory=list)


class RssWatch:
    """Samples processes, by name, in a thread; `stop` ends it."""

    def __init__(
        self,
        pids: Callable[[], Mapping[str, int]],
        clock_s: Callable[[], float],
        *,
        every_s: float = SAMPLE_S,
    ) -> None:
        """`pids` says which processes there are at the moment, 0 for one that is not."""
        self.series: dict[str, Series] = {}
        self._pids = pids
        self._clock_s = clock_s
        self._every_s = every_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            for name, pid in self._pids().items():
                used = rss_bytes(pid) if pid else 0
                if used:
                    self._note(name, used)

    def _note(self, name: str, used: int) -> None:
        series = self.series.setdefault(name, Series(first_bytes=used))
        series.last_bytes = used
        series.peak_bytes = max(series.peak_bytes, used)
        series.samples.append((round(self._clock_s(), 1), used))

    def stop(self) -> None:
        """Take no more samples."""
        self._ending.set()
        self._thread.join()
