"""Texts of queries, how many tokens they have, and the vectors that a sound engine makes of them.

What a text is says itself in its first word, so that an engine knows poison when it sees it, as a
real one does. Vectors are a hash of revision and text: whoever gets another one was given somebody
else's.
"""

from __future__ import annotations

import struct
import zlib

DIMENSIONS = 128
STRIDE = 4 * DIMENSIONS
_HASHED = 8
_PACK = struct.Struct(f"<{_HASHED}f")

KILLS, RAISES, NOT_FINITE, BREAKS_ESTIMATOR = "kills", "raises", "nan", "estimator"


def text_of(words: int, number: int, mark: str = "word") -> str:
    """A text of so many words, unlike all others."""
    return f"{mark} {number}" + " w" * max(words - 2, 0)


def mark_of(text: str) -> str:
    return text[: text.find(" ")]


def tokens_of(text: str) -> int:
    """The exact count, untruncated: a token a word and two special ones."""
    return text.count(" ") + 3


def vector_of(text: str, revision: str) -> bytes:
    """The bytes of its float32 vector."""
    seed = zlib.crc32(text.encode(), zlib.crc32(revision.encode()))
    few = _PACK.pack(*[((seed >> 3 * shift) & 0xFF) / 256 for shift in range(_HASHED)])
    return few * (DIMENSIONS // _HASHED)
