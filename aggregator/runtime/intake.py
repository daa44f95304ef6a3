"""From polled records to queries with their estimates, whatever the decoder or estimator does.

Invariant: every record gives exactly one `Query`. A decoder, estimator or classifier that raises
gives a query with the failure `INTERNAL`, reason `SERVER_ERROR`, and a dead letter: one record can
stop neither its mates nor the process, and is never lost. A record whose headers the client can't
read is undecodable; its headers are asked for once, and are in neither its result nor its letter.

Runs on the event loop, which a poll of long texts would hold up for seconds; so it is read in parts
that each take `TURN_NS` and a long text more at most.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from aggregator.adapters.estimator import Estimator
from aggregator.adapters.kafka_source import RawBatch
from aggregator.adapters.record_headers import read_headers
from aggregator.core.calibration import script_class
from aggregator.core.events import Position, RecordsPolled
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import QUERY_OVERHEAD_BYTES, HeaderList, Query, TopicPartition
from aggregator.wire.query import DecodeOptions, decode_record

TURN_NS = 20_000_000
"""A poll of 1,000 short queries takes 7 ms under tiktoken, and so is one part."""
LOOK_BYTES = 16 * 1024
"""The clock is looked at when so much of `Query.size_bytes` was read since the last time: for each
of long texts, for one in a dozen short queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Reads records. `decode`, `classify` and `clock_ns` are fields for the tests' sake."""

    options: DecodeOptions
    estimators: Mapping[str, Estimator]
    """By served name."""
    on_bug: Callable[[Exception], None]
    """Told what a decoder or estimator raised."""
    decode: Callable[..., Query] = decode_record
    classify: Callable[[str], int] = script_class
    clock_ns: Callable[[], int] = time.monotonic_ns

    def read(
        self, batch: RawBatch, *, arrived_ns: int, wall_ms: int
    ) -> Iterator[tuple[RecordsPolled, bool]]:
        """Decode and estimate each record; never raises for what a record holds.

        Gives parts, each with whether it is the last; that one has the positions of the poll, an
        earlier one those behind its own records. `arrived_ns` is monotonic; `wall_ms` the Unix time
        of the same moment.
        """
        options, decode, classify = self.options, self.decode, self.classify
        estimates = {model: estimator.estimate for model, estimator in self.estimators.items()}
        epochs = {tp: (tp, epoch) for tp, epoch in batch.epochs.items()}
        queries: list[Query] = []
        append = queries.append
        turn_ends_ns = self.clock_ns() + TURN_NS
        unlooked_bytes = 0
        for message in batch.messages:
            # The mapping's own tuple: one for all records of a partition.
            tp, epoch = epochs[message.topic(), message.partition()]  # type: ignore[index]
            headers: HeaderList = ()
            try:
                try:
                    headers = read_headers(message) or ()
                except SystemError:
                    append(_failed(_HEADERS_UNREADABLE, message, (), tp, epoch, arrived_ns))
                    continue
                kind, timestamp_ms = message.timestamp()
                query = decode(
                    options,
                    tp=tp,
                    epoch=epoch,
                    offset=message.offset(),
                    key=message.key(),
                    value=message.value(),
                    headers=headers,
                    timestamp_ms=None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms,
                    arrived_ns=arrived_ns,
                    wall_ms=wall_ms,
                )
                if query.failure is None:
                    text = query.text
                    query.estimate_raw = estimates[query.model](text)
                    query.script = classify(text)
            except Exception as error:  # noqa: BLE001 - a bug with one record is that record's end
                self.on_bug(error)
                query = _failed(_bug(error), message, headers, tp, epoch, arrived_ns)
            append(query)
            unlooked_bytes += query.size_bytes
            if unlooked_bytes >= LOOK_BYTES:
                unlooked_bytes = 0
                if self.clock_ns() >= turn_ends_ns:
                    yield RecordsPolled(records=queries, positions=_behind(queries)), False
                    queries = []
                    append = queries.append
                    turn_ends_ns = self.clock_ns() + TURN_NS
        yield RecordsPolled(records=queries, positions=batch.positions), True


def _behind(queries: Sequence[Query]) -> list[Position]:
    """The position right behind the last of them in each partition."""
    last = {query.tp: query for query in queries}
    return [Position(tp=q.tp, epoch=q.epoch, offset_next=q.offset + 1) for q in last.values()]


_HEADERS_UNREADABLE = Failure(
    code=Code.INVALID_ARGUMENT,
    reason=Reason.UNDECODABLE,
    message="the name of a header is not valid UTF-8",
    dead_letter=True,
)
"""The client raises for such a name, and when asked again gives a list that ends the process."""


def _bug(error: Exception) -> Failure:
    return Failure(
        code=Code.INTERNAL,
        reason=Reason.SERVER_ERROR,
        message=f"the aggregator failed on this record: {type(error).__name__}",
        retryable=True,
        dead_letter=True,
    )


def _failed(  # noqa: PLR0917 - private, and as the caller has them
    failure: Failure,
    message: Message[Any, Any],
    headers: HeaderList,
    tp: TopicPartition,
    epoch: int,
    arrived_ns: int,
) -> Query:
    """A query that ends with `failure`, made without anything that could raise again."""
    query = Query()
    query.tp = tp
    query.epoch = epoch
    query.offset = message.offset() or 0
    query.key = message.key()
    query.value = message.value()
    query.headers = headers
    kind, timestamp_ms = message.timestamp()
    query.timestamp_ms = None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_ms
    query.arrived_ns = arrived_ns
    query.deadline_ns = 0
    query.size_bytes = QUERY_OVERHEAD_BYTES + len(message)
    query.id = f"{tp[0]}-{tp[1]}-{query.offset}"
    query.model = ""
    query.text = ""
    query.text_bytes = 0
    query.input_type = 0
    query.dimensions = 0
    query.encoding = 1
    query.truncate = False
    query.protobuf = any(
        name.lower() == "content-type" and b"protobuf" in (value or b"")
        for name, value in query.headers
    )
    query.base64 = False
    query.estimate_raw = 0
    query.script = 0
    query.failure = failure
    return query
