"""Records, queries and columns for the tests of the wire layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import HeaderList, Query, TopicPartition, VectorGroup
from aggregator.wire.query import DecodeOptions, decode_record
from protos.embedding.v1 import query_pb2

TP: TopicPartition = ("queries", 3)
OFFSET = 41
DEFAULT_ID = "queries-3-41"
ARRIVED_NS = 5_000_000_000
WALL_MS = 1_700_000_000_000
OPTIONS = DecodeOptions(models=frozenset({"minilm"}))
PROTOBUF_HEADERS: HeaderList = [("content-type", b"application/protobuf")]
BROKEN = Failure(
    code=Code.INTERNAL,
    reason=Reason.ENGINE_FAILED_ALONE,
    message="the input failed alone",
    dead_letter=True,
)


def decoded(
    value: bytes | None,
    headers: HeaderList | None = None,
    options: DecodeOptions = OPTIONS,
    *,
    key: bytes | None = None,
    timestamp_ms: int | None = WALL_MS,
    arrived_ns: int = ARRIVED_NS,
    tp: TopicPartition = TP,
) -> Query:
    """Decode a record that came at `WALL_MS`."""
    return decode_record(
        options,
        tp=tp,
        epoch=7,
        offset=OFFSET,
        key=key,
        value=value,
        headers=headers,
        timestamp_ms=timestamp_ms,
        arrived_ns=arrived_ns,
        wall_ms=WALL_MS,
    )


def from_json(
    headers: HeaderList | None = None, options: DecodeOptions = OPTIONS, /, **fields: object
) -> Query:
    """Decode a JSON query; `text` is there unless it is given, None included."""
    return decoded(orjson.dumps({"text": "hello", **fields}), headers, options)


def from_protobuf(message: query_pb2.Query, options: DecodeOptions = OPTIONS) -> Query:
    """Decode a Protobuf query."""
    return decoded(message.SerializeToString(), PROTOBUF_HEADERS, options)


def float32_group(rows: int = 2, dimensions: int = 4) -> VectorGroup:
    """Give vectors 0, 0.1, 0.2 ... in float32."""
    matrix = (np.arange(rows * dimensions) / 10).astype("<f4")
    return group_of(query_pb2.ENCODING_FLOAT32, dimensions, matrix.tobytes(), rows)


def group_of(
    encoding: int, dimensions: int, embeddings: bytes, rows: int, scales: Sequence[float] = ()
) -> VectorGroup:
    """Give columns in which row i answers input i with 10 + i tokens."""
    return VectorGroup(
        encoding=encoding,
        dimensions=dimensions,
        indexes=list(range(rows)),
        tokens=[10 + row for row in range(rows)],
        embeddings=embeddings,
        stride=len(embeddings) // rows,
        scales=scales,
    )
