"""What people see while the demo works: lines with the time, and progress bars."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Steps:
    """Lines with the time since the start, and progress bars."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{self.elapsed_s:6.1f} s[/dim]  {escape(text)}", soft_wrap=True)

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Callable[[int], None]]:
        """A progress bar; yields what advances it. On no terminal: one line."""
        if not self.console.is_terminal:
            self.say(text)
            yield lambda _: None
            return
        columns = (
            TextColumn(f"[dim]{self.elapsed_s:6.1f} s[/dim]  {escape(text)}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=total)
            yield lambda count: progress.advance(task, count)
