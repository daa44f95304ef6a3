"""What people see while the demo works: lines with the time, and progress bars.

Fits the terminal there is: text wraps beside the times, and of a bar that gets too long the text is
cut, never the numbers. Without a terminal every line stays whole, and long work says now and then
how far it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

TOLD_EVERY_S = 10.0
"""How often long work says how far it is where there is no terminal."""
_LABEL_WIDTH = 52
_BAR_WIDTH_MIN, _BAR_WIDTH_MAX = 10, 24
_NUMBERS_WIDTH = len("4000/4000")
_CLOCK_WIDTH = len("00:00")
_GAPS = 3

Advance = Callable[[int], None]


class Steps:
    """Lines with the time since the start, and progress bars."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._start_s = clock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start_s

    def say(self, text: str) -> None:
        """One line, or a paragraph where the terminal is narrow."""
        if not self.console.is_terminal:
            self.console.print(f"{self._time()}  {text}", soft_wrap=True, markup=False)
            return
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(style="dim", no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(self._time(), Text(text))
        self.console.print(line)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Something moves below the lines, on a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status(f"[dim]{escape(text)}[/dim]"):
            yield

    @contextmanager
    def bar(self, text: str, total: int) -> Iterator[Advance]:
        """A progress bar; yields what advances it. On no terminal: a line now and then."""
        if not self.console.is_terminal:
            self.say(text)
            yield self._teller(total)
            return
        with self._progress(text, total) as progress:
            task = progress.add_task("", total=total)
            yield lambda count: progress.advance(task, count)

    def _time(self) -> str:
        return f"{self.elapsed_s:6.1f} s"

    def _teller(self, total: int) -> Advance:
        done, told_s = 0, self._clock()

        def advance(count: int) -> None:
            nonlocal done, told_s
            done += count
            if done < total and self._clock() - told_s >= TOLD_EVERY_S:
                told_s = self._clock()
                self.say(f"  {done:,} of {total:,}")

        return advance

    def _progress(self, text: str, total: int) -> Progress:
        """Columns in the same places for every bar, whatever its text."""
        numbers_width = max(2 * len(str(total)) + 1, _NUMBERS_WIDTH)
        room = self.console.width - numbers_width - _CLOCK_WIDTH - _GAPS
        bar_width = max(min(room - _LABEL_WIDTH, _BAR_WIDTH_MAX), _BAR_WIDTH_MIN)
        label_width = max(min(room - bar_width, _LABEL_WIDTH), 1)
        return Progress(
            TextColumn(
                f"[dim]{self._time()}[/dim]  {escape(text)}",
                table_column=Column(no_wrap=True, overflow="ellipsis", width=label_width),
            ),
            BarColumn(bar_width),
            MofNCompleteColumn(
                table_column=Column(no_wrap=True, justify="right", width=numbers_width)
            ),
            TimeRemainingColumn(
                compact=True,
                elapsed_when_finished=True,
                table_column=Column(no_wrap=True, width=_CLOCK_WIDTH),
            ),
            console=self.console,
        )
