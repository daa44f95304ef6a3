"""Claims to requests, answers to columns, statuses to failures.

Owns how `embedding.v1.EmbedStream` is spoken from the client's side. Invariants: a request's
`timeout_ms` is never 0 for a query with a deadline; an `Answer` without `fault` is consistent in
itself and with its claim: each group has as many indexes, tokens and vectors, of the encoding and
dimensions that these queries asked for, finite, no index out of range or twice in the message. That
each query is answered exactly once over a claim's messages is the core's to check.

Knows nothing of streams, of retries, and of what becomes of an answer at fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from aggregator.core.effects import Dispatch
from aggregator.core.events import ServerLimits
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import Answer, InputFailure, Query, VectorGroup
from aggregator.wire.result import DTYPES, FLOAT16, FLOAT32, INT8, UBINARY, bounded_text
from protos.embedding.v1 import embedding_service_pb2 as pb

DOMAIN = "embedding.v1"
_BUSY_MS_MAX = 60_000.0
"""No longer is anybody believed to be busy: it is the longest that a pass may take (CONTRACTS), and
whoever claims more, and then has nothing to say, would be left alone for as long as it claimed."""
_RETRY_AFTER_MS_MAX = 2**53
_FIELD_CHARACTERS_MAX = 64
_BITS = 8

_CODES: dict[int, Code] = {number: Code(name) for name, number in code_pb2.Code.items()}

_KNOWN: dict[str, tuple[Code, bool, bool]] = {
    # What a server may say: reason -> code, retryable, dead letter.
    Reason.INVALID_FIELD: (Code.INVALID_ARGUMENT, False, False),
    Reason.MODEL_UNKNOWN: (Code.NOT_FOUND, False, False),
    Reason.EXPIRED: (Code.DEADLINE_EXCEEDED, True, False),
    Reason.ENGINE_FAILED_ALONE: (Code.INTERNAL, False, True),
    Reason.NOT_FINITE: (Code.INTERNAL, False, True),
    Reason.ENGINE_DIED: (Code.UNAVAILABLE, True, False),
    Reason.NOT_STARTED: (Code.UNAVAILABLE, True, False),
    Reason.TOO_MUCH_HELD: (Code.RESOURCE_EXHAUSTED, True, False),
    Reason.REQUEST_TOO_LARGE: (Code.RESOURCE_EXHAUSTED, True, False),
}


def build_request(
    claim: Dispatch, now_ns: int, *, priority: pb.Priority = pb.PRIORITY_UNSPECIFIED
) -> pb.EmbedStreamRequest:
    """Make the request of a claim; `now_ns` is monotonic.

    Inputs are in the order of `claim.queries`, so the indexes of answers are positions in it.
    """
    request = pb.EmbedStreamRequest()
    request.request_id = claim.claim_id
    request.model = claim.model
    if claim.exclusive:
        request.exclusive = True
    if priority:
        request.priority = priority
    add = request.inputs.add
    for query in claim.queries:
        entry = add()
        entry.text = query.text
        if query.deadline_ns:
            # 0 would mean no deadline; a server drops what has 1 ms left before its next pass.
            entry.timeout_ms = max((query.deadline_ns - now_ns) // 1_000_000, 1)
        if query.encoding != FLOAT32:
            entry.encoding = query.encoding  # type: ignore[assignment]
        if query.dimensions:
            entry.dimensions = query.dimensions
        if query.input_type:
            entry.input_type = query.input_type  # type: ignore[assignment]
        if query.truncate:
            entry.truncate = True
    return request


def server_limits(state: pb.ServerState) -> ServerLimits:
    """Convert what a server says, whatever it says.

    A `busy_ms` that is no number or below 0 becomes 0, one above `_BUSY_MS_MAX` that, a target of 0
    (a state left empty) 1: sizes are reckoned in targets.
    """
    busy_ms = state.busy_ms
    return ServerLimits(
        batch_tokens_target=max(state.batch_tokens_target, 1),
        batch_tokens_max=state.batch_tokens_max,
        window_tokens=state.window_tokens,
        inputs_max=state.inputs_max,
        request_bytes_max=state.request_bytes_max,
        busy_ms=min(busy_ms, _BUSY_MS_MAX) if busy_ms > 0 else 0.0,
        queued_tokens=state.queued_tokens,
        draining=state.draining,
    )


class _FaultError(Exception):
    """A message failed the check; never leaves this module."""


def check_response(
    response: pb.EmbedStreamResponse, queries: Sequence[Query], dimensions: int
) -> Answer:
    """Check one message about a claim and give it in columns; never raises.

    `queries`: the claim's, in the order of its request. `dimensions`: the model's own.
    """
    answer = Answer(
        claim_id=response.request_id,
        last=response.last,
        queue_us=max(response.queue_us, 0),
        inference_us=max(response.inference_us, 0),
    )
    try:
        if response.HasField("status"):
            answer.refused = _refusal(response)
            return answer
        seen: list[int] = []
        for group in response.groups:
            columns = _columns(group, queries, dimensions)
            seen += columns.indexes
            answer.groups.append(columns)
        for entry in response.errors:
            failed = _input_failure(entry, len(queries))
            seen.append(failed.index)
            answer.errors.append(failed)
        _check_distinct(seen)
    except _FaultError as fault:
        answer.groups = []
        answer.errors = []
        answer.fault = str(fault)
    return answer


def _check_distinct(seen: Sequence[int]) -> None:
    if len(set(seen)) != len(seen):
        raise _FaultError("an input is answered twice in one message")


def _refusal(response: pb.EmbedStreamResponse) -> Failure:
    if response.groups or response.errors or not response.last:
        raise _FaultError("a refusal of the whole request also answers inputs, or is not its last")
    if response.status.code == 0:
        raise _FaultError("a refusal of the whole request says OK")
    return failure_of_status(response.status)


def _input_failure(entry: pb.InputError, inputs: int) -> InputFailure:
    if not entry.HasField("index") or entry.index >= inputs:
        raise _FaultError("an error's index is missing or out of range")
    if entry.status.code == 0:
        raise _FaultError("an input's error says OK")
    return InputFailure(index=entry.index, failure=failure_of_status(entry.status))


def _stride(encoding: int, dimensions: int) -> int:
    if encoding not in DTYPES or dimensions < 1:
        raise _FaultError(f"a group has encoding {encoding} and {dimensions} dimensions")
    if encoding != UBINARY:
        return dimensions * DTYPES[encoding].itemsize
    if dimensions % _BITS:
        raise _FaultError(f"a ubinary group has {dimensions} dimensions, not a multiple of 8")
    return dimensions // _BITS


def _columns(
    group: pb.EmbeddingGroup, queries: Sequence[Query], own_dimensions: int
) -> VectorGroup:
    encoding, dimensions = int(group.encoding), group.dimensions
    stride = _stride(encoding, dimensions)
    indexes = list(group.indexes)
    tokens = list(group.tokens)
    scales = list(group.scales)
    embeddings = group.embeddings
    rows = len(indexes)
    if not rows or len(tokens) != rows:
        raise _FaultError(f"a group has {rows} indexes and {len(tokens)} token counts")
    if len(embeddings) != rows * stride:
        raise _FaultError(
            f"a group of {rows} vectors of {stride} bytes has {len(embeddings)} bytes"
        )
    if len(scales) != (rows if encoding == INT8 else 0):
        raise _FaultError(f"a group of {rows} vectors has {len(scales)} scales")
    if max(indexes) >= len(queries):
        raise _FaultError(f"an index is {max(indexes)} in a claim of {len(queries)}")
    for index in indexes:
        query = queries[index]
        if query.encoding != encoding or (query.dimensions or own_dimensions) != dimensions:
            raise _FaultError(
                "a vector has another encoding or dimensions than its query asked for"
            )
    _check_finite(encoding, embeddings, scales)
    return VectorGroup(
        encoding=encoding,
        dimensions=dimensions,
        indexes=indexes,
        tokens=tokens,
        embeddings=embeddings,
        stride=stride,
        scales=scales,
    )


def _check_finite(encoding: int, embeddings: bytes, scales: Sequence[float]) -> None:
    """Check a group's vectors as one matrix: 0.1 us a vector against 2 for each by itself."""
    if encoding in {FLOAT32, FLOAT16}:
        if not np.isfinite(np.frombuffer(embeddings, DTYPES[encoding])).all():
            raise _FaultError("a vector is not finite")
    elif not all(math.isfinite(scale) and scale >= 0 for scale in scales):
        raise _FaultError("a scale is not finite or below 0")


def failure_of_status(status: status_pb2.Status) -> Failure:
    """Give a server's status as a failure.

    A reason that a server may give, with its code, is kept. Anything else is `SERVER_ERROR`, with
    the code as it came (`UNKNOWN` for a number that google.rpc doesn't have), to be retried.
    """
    code = _CODES.get(status.code, Code.UNKNOWN)
    reason, field, retry_after_ms = _details(status)
    expected = _KNOWN.get(reason)
    message = bounded_text(status.message)
    if expected is None or expected[0] is not code:
        return Failure(
            code=code,
            reason=Reason.SERVER_ERROR,
            message=f"the server said {code}: {message}" if message else f"the server said {code}",
            retryable=True,
            retry_after_ms=retry_after_ms,
            dead_letter=True,
        )
    _, retryable, dead_letter = expected
    return Failure(
        code=code,
        reason=Reason(reason),
        message=message,
        field=field,
        retryable=retryable,
        retry_after_ms=retry_after_ms if retryable else None,
        dead_letter=dead_letter,
    )


def _details(status: status_pb2.Status) -> tuple[str, str | None, int | None]:
    """Give reason (or ""), field and retry delay, ms, of a status's details.

    A detail that can't be read counts as absent.
    """
    reason, field, retry_after_ms = "", None, None
    for detail in status.details:
        try:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                reason = info.reason if info.domain == DOMAIN else reason
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                bad_request = error_details_pb2.BadRequest.FromString(detail.value)
                for violation in bad_request.field_violations[:1]:
                    field = bounded_text(violation.field, _FIELD_CHARACTERS_MAX)
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                delay_ms = delay.seconds * 1000 + -(-delay.nanos // 1_000_000)
                retry_after_ms = min(max(delay_ms, 0), _RETRY_AFTER_MS_MAX)
        except DecodeError:
            continue
    return reason, field or None, retry_after_ms
