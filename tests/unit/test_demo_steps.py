"""What the demo prints while it works: nothing cut that counts, on terminals and without one."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from aggregator.commands.demo_steps import TOLD_EVERY_S, Steps

LONG = "1,234 queries at 1,234 a second and a good deal more than any line has room for"


class Clock:
    """Stands where it was put."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def last_frame(output: io.StringIO) -> str:
    """The bar as it stands in the end."""
    plain = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", output.getvalue())
    return plain.replace("\r", "\n").rstrip().splitlines()[-1]


def steps_on(width: int, *, terminal: bool) -> tuple[Steps, io.StringIO, Clock]:
    output, clock = io.StringIO(), Clock()
    console = Console(
        file=output, width=width, force_terminal=terminal, color_system=None, highlight=False
    )
    return Steps(console, clock), output, clock


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("text", ["short", LONG])
def test_a_bar_keeps_its_numbers_and_its_line(width: int, text: str) -> None:
    steps, output, clock = steps_on(width, terminal=True)
    clock.now_s += 9.5
    with steps.bar(text, 4_000) as advance:
        advance(1_234)
        advance(2_766)
    last = last_frame(output)
    assert len(last) <= width
    assert last.startswith(f"   9.5 s  {text[:5]}")
    assert ("…" in last) == (text == LONG)
    assert "4000/4000 00:00" in last
    assert last.count("━") >= 10


def test_bars_stand_below_each_other() -> None:
    starts = set()
    for text, total in (("short", 300), (LONG, 4_000)):
        steps, output, _ = steps_on(80, terminal=True)
        with steps.bar(text, total) as advance:
            advance(total)
        starts.add(last_frame(output).index("━"))
    assert len(starts) == 1


def test_long_lines_wrap_beside_the_time_on_a_terminal_only() -> None:
    steps, output, _ = steps_on(60, terminal=True)
    steps.say(LONG + " [not markup]")
    first, second = output.getvalue().splitlines()
    assert first.startswith("   0.0 s  1,234 queries")
    assert second.startswith(" " * 10 + "more than")
    assert second.rstrip().endswith("[not markup]")
    steps, output, _ = steps_on(60, terminal=False)
    steps.say(LONG + " [not markup]")
    assert output.getvalue() == f"   0.0 s  {LONG} [not markup]\n"


def test_without_a_terminal_long_work_says_now_and_then_how_far_it_is() -> None:
    steps, output, clock = steps_on(80, terminal=False)
    with steps.bar("4,000 queries", 4_000) as advance:
        advance(500)
        clock.now_s += TOLD_EVERY_S
        advance(700)
        advance(0)
        clock.now_s += TOLD_EVERY_S
        advance(2_800)
    assert output.getvalue().splitlines() == [
        "   0.0 s  4,000 queries",
        "  10.0 s    1,200 of 4,000",
    ]
