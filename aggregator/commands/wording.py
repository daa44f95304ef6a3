"""Words for people that depend on a number."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """`1 error`, `2 errors`, `1,000 errors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
