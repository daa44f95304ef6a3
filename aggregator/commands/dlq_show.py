"""How dead letters are shown: a table for people, JSON lines for programs.

Invariants: text that came with a record is shown with its control characters escaped, since it may
be anybody's; rows are given as they come, and the columns fit the first `ROWS_FITTED`, so that any
number of letters takes little memory.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain, islice

from aggregator.commands.dlq_topic import StoredLetter
from aggregator.commands.wording import shown

ROWS_FITTED = 200
COLUMNS = ("WHEN", "WHERE", "CODE", "REASON", "ATTEMPTS", "REPLAYS", "ID", "MESSAGE")


def json_lines(letters: Iterable[StoredLetter], replays_max: int) -> Iterator[str]:
    """One JSON object a letter; `replays_max` is replay_attempts_max."""
    for stored in letters:
        letter = stored.letter
        fields = {
            "id": letter.id,
            "time": _when(stored.time_ms),
            "letter": {"partition": stored.partition, "offset": stored.offset},
            "source": {
                "topic": letter.tp[0],
                "partition": letter.tp[1],
                "offset": letter.offset,
                "time": _when(letter.timestamp_ms),
            },
            "stage": letter.stage,
            "code": letter.code,
            "reason": letter.reason,
            "message": letter.message,
            "attempts": letter.attempts,
            "replays": letter.replays,
            "value_bytes": letter.value_bytes,
            "value_sha256": letter.value_sha256,
            "not_replayable": letter.hindrance(replays_max),
        }
        yield json.dumps(fields, ensure_ascii=True)


def table(letters: Iterable[StoredLetter], replays_max: int) -> Iterator[str]:
    """Columns for people. The message, last, is cut where there is a terminal and it ends."""
    rows = (_row(stored, replays_max) for stored in letters)
    first = list(islice(rows, ROWS_FITTED))
    if not first:
        return
    widths = [max(map(len, column)) for column in zip(COLUMNS, *first, strict=True)][:-1]
    line_max = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in chain([COLUMNS], first, rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        line = "  ".join([*cells, row[-1]])
        yield line if line_max is None or len(line) <= line_max else line[: line_max - 1] + "…"


def _row(stored: StoredLetter, replays_max: int) -> tuple[str, ...]:
    letter = stored.letter
    hindrance = letter.hindrance(replays_max)
    message = f"{letter.message} (not replayable: {hindrance})" if hindrance else letter.message
    return (
        _when(stored.time_ms) or "-",
        shown(f"{letter.tp[0]}-{letter.tp[1]}-{letter.offset}"),
        shown(letter.code),
        shown(letter.reason),
        str(letter.attempts),
        str(letter.replays),
        "-" if letter.id is None else shown(letter.id),
        shown(message),
    )


def named(stored: StoredLetter) -> str:
    """Which letter it is, in a sentence."""
    identity = stored.letter.id
    name = "a letter" if identity is None else shown(identity)
    return f"{name} (letter {stored.place}, {shown(stored.letter.reason)})"


def _when(time_ms: int | None) -> str | None:
    """ISO 8601 in UTC; None: there is no such time."""
    if time_ms is None:
        return None
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):  # a producer's timestamp may be any number
        return None
