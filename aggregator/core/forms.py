"""The forms in which an outcome can be written, each smaller than the one before.

A result goes together with others, then alone, then as the error RESULT_TOO_LARGE, then as that one
bare; a dead letter together, alone, bare. The step that is being written is kept in the query. The
bare form fits every topic that takes a few kilobytes, but a topic may refuse it all the same: then
nothing is left to write, and there is no going on.

It must not know of topics, of who writes, or of when.
"""

from __future__ import annotations

from typing import Final

from aggregator.core.effects import ErrorRow, Form, LetterRow, VectorRows
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import WRITING, Query, VectorGroup

RECORD_OVERHEAD_BYTES: Final = 1024
"""What a result in the producer's queue is reckoned to hold besides its vector: headers, key,
names, librdkafka's and our bookkeeping. Generous on purpose: it bounds memory."""

TOGETHER, ALONE, TOO_LARGE, BARE = range(4)
"""`Query.write_step`: together with others, alone, as the error RESULT_TOO_LARGE, that one bare."""

LETTER_BARE: Final = 2
"""`Query.letter_step`: `TOGETHER`, `ALONE`, then this."""


def begin_vectors(rows: VectorRows) -> int:
    """These results are to be written: each query keeps its vector. Returns the bytes held."""
    group = rows.group
    for query, row in zip(rows.queries, rows.rows, strict=True):
        query.phase = WRITING
        query.group = group
        query.row = row
        query.writes_pending = 1
        query.model_revision = rows.model_revision
        query.inference_us = rows.inference_us
        query.answered_ns = rows.answered_ns
    return len(rows.queries) * (group.stride + RECORD_OVERHEAD_BYTES)


def result_refused(query: Query, message: str, *, alone: bool) -> str | None:
    """Take the next form of its result; returns why there is none, if there is none.

    `alone`: it was refused by itself, so what was refused is not written again.
    """
    if alone and query.write_step == BARE:
        return f"the smallest form of a result was refused: {message}"
    query.write_step = _next_step(query, alone=alone)
    return None


def letter_refused(query: Query, message: str, *, alone: bool) -> str | None:
    """The same of its dead letter."""
    if alone and query.letter_step == LETTER_BARE:
        return f"the smallest form of a dead letter was refused: {message}"
    query.letter_step = LETTER_BARE if alone else max(query.letter_step, ALONE)
    return None


def _next_step(query: Query, *, alone: bool) -> int:
    """An error result has no smaller form but the bare one."""
    if not alone:
        return max(query.write_step, ALONE)
    if query.group is None and query.write_step < TOO_LARGE:
        return BARE
    return max(query.write_step + 1, TOO_LARGE)


def vector_row(query: Query, group: VectorGroup, *, alone: bool) -> VectorRows:
    """Its vector, by itself."""
    return VectorRows(
        queries=[query],
        group=group,
        rows=[query.row],
        model_revision=query.model_revision,
        inference_us=query.inference_us,
        answered_ns=query.answered_ns,
        alone=alone,
    )


def error_row(query: Query) -> ErrorRow:
    """Its failure, in the form of its step."""
    form = Form.BARE if query.write_step == BARE else Form.FULL
    return ErrorRow(query=query, form=form, alone=query.write_step > TOGETHER)


def letter_row(query: Query) -> LetterRow:
    """Its dead letter, in the form of its step."""
    form = Form.BARE if query.letter_step == LETTER_BARE else Form.FULL
    return LetterRow(query=query, form=form, alone=query.letter_step > TOGETHER)


def letter_bytes(query: Query) -> int:
    """What its dead letter holds in memory."""
    return RECORD_OVERHEAD_BYTES + query.size_bytes


def too_large(message: str) -> Failure:
    """What a consumer is told instead of a vector that its topic refuses."""
    return Failure(
        code=Code.OUT_OF_RANGE,
        reason=Reason.RESULT_TOO_LARGE,
        message=f"the result was refused by its topic: {message}",
    )
