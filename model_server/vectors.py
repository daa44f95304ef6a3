"""Vectors to bytes: cut, renormalise, check finite, convert, check again (CONTRACTS, "Vectors").

Owns the number formats. Invariants: all arithmetic is float32; a row's bytes depend on that row
alone; bytes are little-endian; nothing that is not finite leaves in a group's bytes. It must not
know requests or messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from model_server.engines.base import Vectors

INT8_MAX = 127
_ONE = np.float32(1)
_LENGTH_TOLERANCE = np.float32(1e-6)
"""Squared lengths this close to 1 are what float32 can do: dividing again would only round again.
Decided row by row, so that a row's bytes do not depend on its mates."""
UBINARY_MULTIPLE = 8
"""`numpy.packbits` packs eight dimensions into a byte."""


class Encoding(IntEnum):
    """As numbered by `embedding.v1.Encoding`."""

    FLOAT32 = 1
    FLOAT16 = 2
    INT8 = 3
    UBINARY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Rows in one format: shape [rows, bytes of a row], uint8, C order.

    `scales`: int8 only, float32 [rows]. `bad_rows` are not finite; their bytes mean nothing.
    """

    rows: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32] | None = None
    bad_rows: tuple[int, ...] = ()


def encode(
    vectors: Vectors, *, dimensions: int, encoding: Encoding, normalized: bool = True
) -> Encoded:
    """Bring full vectors, float32 [rows, model dimensions], into one format.

    `dimensions` leading values are kept; `normalized` models get length 1 again, in float32.
    A zero vector stays zero (int8: scale 0).

    Raises:
        ValueError: ubinary with dimensions that are not a multiple of 8.
    """
    cut = vectors[:, :dimensions]
    squares = np.einsum("ij,ij->i", cut, cut)
    unit = np.abs(squares - _ONE) <= _LENGTH_TOLERANCE
    bad = np.zeros(len(cut), dtype=np.bool_)
    if not (normalized and unit.all()):
        cut = _mended(cut, squares, unit, bad, normalized=normalized)
    encoded = _CONVERT[encoding](cut, bad)
    if bad.any():
        return Encoded(
            rows=encoded.rows, scales=encoded.scales, bad_rows=tuple(np.flatnonzero(bad).tolist())
        )
    return encoded


def _mended(
    cut: Vectors,
    squares: npt.NDArray[np.float32],
    unit: npt.NDArray[np.bool_],
    bad: npt.NDArray[np.bool_],
    *,
    normalized: bool,
) -> Vectors:
    """Normalise the rows that need it, and mark the bad ones; `cut` itself is left as it was.

    A sum of squares is finite only if all its terms are. It may overflow where they are finite,
    which is as useless for a model that normalises.
    """
    bad |= ~np.isfinite(squares)
    if not normalized:
        if bad.any():
            bad &= ~np.isfinite(cut).all(axis=1)
        return cut
    mended = cut.copy()
    off = ~unit & ~bad & (squares > 0)
    mended[off] /= np.sqrt(squares[off])[:, None]
    return mended


def _as_bytes(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def _float32(vectors: Vectors, bad: npt.NDArray[np.bool_]) -> Encoded:
    del bad
    return Encoded(rows=_as_bytes(vectors.astype("<f4", copy=False)))


def _float16(vectors: Vectors, bad: npt.NDArray[np.bool_]) -> Encoded:
    with np.errstate(over="ignore", invalid="ignore"):
        half = vectors.astype("<f2")
    bad |= ~np.isfinite(half).all(axis=1)
    return Encoded(rows=_as_bytes(half))


def _int8(vectors: Vectors, bad: npt.NDArray[np.bool_]) -> Encoded:
    """q = round half to even of x / scale, scale = max|x| / 127 of the vector itself."""
    with np.errstate(all="ignore"):
        scales = (np.abs(vectors).max(axis=1) / np.float32(INT8_MAX)).astype(np.float32)
        bad |= ~np.isfinite(scales)
        divisors = np.where(scales > 0, scales, np.float32(np.inf))
        # A scale that is subnormal has lost digits, so that x / scale may lie outside.
        quantized = np.clip(np.rint(vectors / divisors[:, None]), -INT8_MAX, INT8_MAX)
        quantized[bad] = 0
    return Encoded(rows=_as_bytes(quantized.astype(np.int8)), scales=scales)


def _ubinary(vectors: Vectors, bad: npt.NDArray[np.bool_]) -> Encoded:
    del bad
    if vectors.shape[1] % UBINARY_MULTIPLE:
        raise ValueError(f"ubinary needs a multiple of 8 dimensions, not {vectors.shape[1]}")
    return Encoded(rows=np.packbits(vectors > 0, axis=1))


_CONVERT = {
    Encoding.FLOAT32: _float32,
    Encoding.FLOAT16: _float16,
    Encoding.INT8: _int8,
    Encoding.UBINARY: _ubinary,
}
