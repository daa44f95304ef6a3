"""Words for people: those that depend on a number, and those that came from anybody."""

from __future__ import annotations


def counted(count: int, noun: str, several: str | None = None) -> str:
    """`1 error`, `2 errors`, `1,000 errors`; `several` where the plural is another."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def shown(text: str) -> str:
    """On one line, with nothing that moves a terminal's cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
