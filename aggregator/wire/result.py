"""Records of the results topic: vectors and errors to bytes.

Owns the result's two encodings and the order of its headers. Invariants: ours come first, once
each; every `Form.BARE` result is an error of a few kilobytes at most; encoding never raises for a
query that `aggregator.wire.query` made. Vectors are taken as the bytes that the server sent:
nothing is recomputed.

Knows nothing of Kafka's client and of when or why a result is written.
"""

from __future__ import annotations

from binascii import b2a_base64
from typing import Any

import numpy as np
import orjson

from aggregator.core.effects import Form
from aggregator.core.failures import Failure
from aggregator.core.query import Query, VectorGroup
from aggregator.wire.headers import (
    CONTENT_TYPE,
    ID,
    JSON,
    PROTOBUF,
    STATUS,
    HeaderRules,
    Headers,
)
from aggregator.wire.query import ENCODINGS
from aggregator.wire.result_bytes import ResultBytes, embedding_head
from protos.embedding.v1 import query_pb2

Record = tuple[bytes, bytes, Headers]
"""(key, value, headers) of a record to produce."""

MESSAGE_CHARACTERS_MAX = 500
"""Of an error's message: longer ones are cut, so that error results and letters are small."""

ENCODING_NAMES = {number: name for name, number in ENCODINGS.items()}
FLOAT32 = int(query_pb2.ENCODING_FLOAT32)
FLOAT16 = int(query_pb2.ENCODING_FLOAT16)
INT8 = int(query_pb2.ENCODING_INT8)
UBINARY = int(query_pb2.ENCODING_UBINARY)

DTYPES: dict[int, np.dtype[Any]] = {
    FLOAT32: np.dtype("<f4"),
    FLOAT16: np.dtype("<f2"),
    INT8: np.dtype("<i1"),
    UBINARY: np.dtype("<u1"),
}
"""How a vector's bytes are read, by encoding."""

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
_PROTOBUF_HEADER = (CONTENT_TYPE, PROTOBUF)
_JSON_HEADER = (CONTENT_TYPE, JSON)
_OK_HEADER = (STATUS, b"OK")


class ResultEncoder:
    """Encodes results; not thread-safe (it remembers what the rows of one claim share)."""

    __slots__ = (
        "_bytes",
        "_group",
        "_head",
        "_inference_ms",
        "_matrix",
        "_rules",
        "_shared",
        "_shared_of",
    )

    def __init__(self, rules: HeaderRules) -> None:
        self._rules = rules
        self._group: VectorGroup | None = None
        self._matrix: np.ndarray[Any, Any] | None = None
        self._bytes = ResultBytes()
        self._head = b""
        self._shared = b""
        self._shared_of: tuple[VectorGroup | None, str, int] = (None, "", 0)
        self._inference_ms = 0.0

    def encode_vector(
        self,
        query: Query,
        group: VectorGroup,
        row: int,
        *,
        model_revision: str,
        inference_us: int,
        answered_ns: int,
    ) -> Record:
        """Encode the result of `query`, whose vector is row `row` of `group`.

        `answered_ns`: monotonic time at which the answer came; the time in the queue is what lies
        between the arrival and it, less the pass.
        """
        of_group, of_revision, of_inference_us = self._shared_of
        if (
            of_group is not group
            or of_inference_us != inference_us
            or of_revision != model_revision
        ):
            self._share(query.model, group, model_revision, inference_us)
        queue_ms = (answered_ns - query.arrived_ns) / 1e6 - self._inference_ms
        if queue_ms < 0.0:  # noqa: PLR1730 (max() costs a call for each query)
            queue_ms = 0.0
        if not query.protobuf:
            document = self._document(query, group, row)
            document["model_revision"] = model_revision
            document["queue_ms"] = round(queue_ms, 3)  # nanoseconds say nothing
            document["inference_ms"] = self._inference_ms
            return self._record(query, orjson.dumps(document, option=_NUMPY), _OK_HEADER)
        identifier = query.id.encode()
        stride = group.stride
        value = self._bytes.row(
            self._shared,
            identifier,
            group.tokens[row],
            self._head,
            group.embeddings[row * stride : (row + 1) * stride],
            _scale(group, row) if group.scales else b"",
            query.tp,
            query.offset,
            queue_ms,
        )
        headers: Headers = [_PROTOBUF_HEADER, _OK_HEADER, (ID, identifier)]
        if query.headers:
            headers += self._rules.passed_on(query.headers)
        return query.key if query.key is not None else identifier, value, headers

    def encode_error(self, query: Query, form: Form = Form.FULL) -> Record:
        """Encode the result that holds `query.failure`; raises ValueError if there is none."""
        failure = query.failure
        if failure is None:
            raise ValueError("an error result needs a failure")
        value = _error_message(query, failure) if query.protobuf else _error_json(query, failure)
        return self._record(query, value, (STATUS, failure.code.encode()), bare=form is Form.BARE)

    def _record(
        self, query: Query, value: bytes, status: tuple[str, bytes], *, bare: bool = False
    ) -> Record:
        identifier = query.id.encode()
        content_type = _PROTOBUF_HEADER if query.protobuf else _JSON_HEADER
        headers: Headers = [content_type, status, (ID, identifier)]
        if bare:
            return identifier, value, headers
        if query.headers:
            headers += self._rules.passed_on(query.headers)
        return query.key if query.key is not None else identifier, value, headers

    def _share(
        self, model: str, group: VectorGroup, model_revision: str, inference_us: int
    ) -> None:
        """Encode what all rows of a claim share, once."""
        self._inference_ms = inference_us / 1000
        self._head = embedding_head(group.stride)
        self._shared = query_pb2.Result(
            model=model,
            model_revision=model_revision,
            dimensions=group.dimensions,
            encoding=group.encoding,  # type: ignore[arg-type]
            inference_ms=self._inference_ms,
        ).SerializeToString()
        self._shared_of = (group, model_revision, inference_us)

    def _document(self, query: Query, group: VectorGroup, row: int) -> dict[str, object]:
        document: dict[str, object] = {
            "id": query.id,
            "model": query.model,
            "tokens": group.tokens[row],
            "embedding": _base64(group, row) if query.base64 else self._rows(group)[row],
            "dimensions": group.dimensions,
            "encoding": ENCODING_NAMES[group.encoding],
            "source": _source(query),
        }
        if group.encoding == INT8:
            document["scale"] = np.float32(group.scales[row])
        return document

    def _rows(self, group: VectorGroup) -> np.ndarray[Any, Any]:
        """View the group's vectors as (rows, dimensions); ubinary: (rows, dimensions / 8)."""
        if self._group is not group or self._matrix is None:
            flat = np.frombuffer(group.embeddings, DTYPES[group.encoding])
            self._matrix = flat.reshape(len(group.indexes), -1)
            self._group = group
        return self._matrix


def bounded_text(text: str, characters_max: int = MESSAGE_CHARACTERS_MAX) -> str:
    """Cut and, should it hold lone surrogates, made encodable."""
    return text[:characters_max].encode("utf-8", "replace").decode()


def _scale(group: VectorGroup, row: int) -> bytes:
    return query_pb2.Result(scale=group.scales[row]).SerializeToString()


def _set_source(message: query_pb2.Result, query: Query) -> None:
    source = message.source
    source.topic, source.partition = query.tp
    source.offset = query.offset


def _source(query: Query) -> dict[str, object]:
    return {"topic": query.tp[0], "partition": query.tp[1], "offset": query.offset}


def _base64(group: VectorGroup, row: int) -> str:
    stride = group.stride
    vector = group.embeddings[row * stride : (row + 1) * stride]
    return b2a_base64(vector, newline=False).decode("ascii")


def _error_message(query: Query, failure: Failure) -> bytes:
    message = query_pb2.Result()
    message.id = query.id
    if query.model:
        message.model = query.model
    error = message.error
    error.code = failure.code
    error.reason = failure.reason
    if failure.field is not None:
        error.field = bounded_text(failure.field)
    error.message = bounded_text(failure.message)
    error.retryable = failure.retryable
    if failure.retry_after_ms is not None:
        error.retry_after_ms = failure.retry_after_ms
    _set_source(message, query)
    return message.SerializeToString()


def _error_json(query: Query, failure: Failure) -> bytes:
    error: dict[str, object] = {"code": failure.code, "reason": failure.reason}
    if failure.field is not None:
        error["field"] = bounded_text(failure.field)
    error["message"] = bounded_text(failure.message)
    error["retryable"] = failure.retryable
    if failure.retry_after_ms is not None:
        error["retry_after_ms"] = failure.retry_after_ms
    document: dict[str, object] = {"id": query.id}
    if query.model:
        document["model"] = query.model
    document["error"] = error
    document["source"] = _source(query)
    return orjson.dumps(document)
