"""The vectors of a pass, grouped by format, for one request.

Inputs of one encoding and one size share a group with contiguous bytes. An input whose vector is
not finite is in no group: it gets a failure of its own. Knows nothing of streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_server.core.failures import NOT_FINITE, Failure
from model_server.engines.base import Vectors
from model_server.server.requests import Columns
from model_server.vectors import Encoded, Encoding, encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Vectors of one format; `indexes` are positions in the request."""

    encoding: Encoding
    dimensions: int
    indexes: Sequence[int]
    encoded: Encoded


def group_answers(
    columns: Columns, indexes: Sequence[int], vectors: Vectors, *, normalized: bool
) -> tuple[list[Group], list[tuple[int, Failure]]]:
    """Group the answers to some inputs of a request; row i of `vectors` is of `indexes[i]`."""
    groups: list[Group] = []
    failures: list[tuple[int, Failure]] = []
    for (encoding, dimensions), positions in _formats(columns, indexes).items():
        rows = vectors if len(positions) == len(indexes) else vectors[positions]
        encoded = encode(rows, dimensions=dimensions, encoding=encoding, normalized=normalized)
        own = indexes if rows is vectors else [indexes[position] for position in positions]
        if encoded.bad_rows:
            failures += [(own[row], NOT_FINITE) for row in encoded.bad_rows]
            own, encoded = _without_bad(own, encoded)
        if own:
            groups.append(
                Group(encoding=encoding, dimensions=dimensions, indexes=own, encoded=encoded)
            )
    return groups, failures


def _formats(columns: Columns, indexes: Sequence[int]) -> dict[tuple[Encoding, int], Sequence[int]]:
    """Positions in `indexes` by what their inputs ask for."""
    encodings, dimensions = columns.encodings, columns.dimensions
    if columns.uniform:
        return {(encodings[0], dimensions[0]): range(len(indexes))}
    formats: dict[tuple[Encoding, int], list[int]] = {}
    for position, index in enumerate(indexes):
        formats.setdefault((encodings[index], dimensions[index]), []).append(position)
    return dict(formats)


def _without_bad(indexes: Sequence[int], encoded: Encoded) -> tuple[list[int], Encoded]:
    bad = set(encoded.bad_rows)
    good = np.array([row for row in range(len(indexes)) if row not in bad], dtype=np.intp)
    scales = encoded.scales[good] if encoded.scales is not None else None
    return [indexes[row] for row in good], Encoded(rows=encoded.rows[good], scales=scales)
