"""A query on its way through the aggregator, and the columns in which answers come back.

`Query` is one admitted Kafka record. The wire layer fills the first half when it decodes the
record; the core alone writes the second half. It is a slotted mutable class because it is made once
per record on the hot path (a frozen dataclass costs four times more).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aggregator.core.failures import Failure

TopicPartition = tuple[str, int]
"""(topic, partition)."""

WAITING, IN_FLIGHT, WRITING, SETTLED, ABANDONED = range(5)
"""`Query.phase`. Plain integers: they are compared on the path of every query.

WAITING: in a backlog. IN_FLIGHT: in a claim. WRITING: its outcome is decided and being produced.
SETTLED: result, and dead letter if due, durable. ABANDONED: its epoch ended; the partition's next
owner has it, and whatever still comes for it is ignored.
"""

HeaderList = Sequence[tuple[str, bytes | None]]
"""A record's headers in their order, repeats and nulls kept."""


QUERY_OVERHEAD_BYTES = 1024
"""What a query holds beside its bytes: 770 of Python's objects as decoded, then a place in queues
and in a claim. Without it the bytes of short queries bound no memory: windows of many partitions
hold hundreds of thousands.
"""


class Query:
    """One record of the queries topic, from its admission until it is settled or abandoned."""

    __slots__ = (
        "answered_ns",
        "arrived_ns",
        "attempts",
        "bad_answers",
        "base64",
        "claim_id",
        "deadline_ns",
        "deaths",
        "deaths_alone",
        "dimensions",
        "encoding",
        "epoch",
        "estimate",
        "estimate_raw",
        "failure",
        "group",
        "headers",
        "id",
        "inference_us",
        "input_type",
        "key",
        "letter_step",
        "losses",
        "model",
        "model_revision",
        "not_before_ns",
        "offset",
        "passed_over",
        "phase",
        "protobuf",
        "row",
        "script",
        "size_bytes",
        "text",
        "text_bytes",
        "timestamp_ms",
        "tp",
        "truncate",
        "value",
        "variance",
        "write_step",
        "writes_pending",
    )

    # Filled by the wire layer. -------------------------------------------------------------------
    tp: TopicPartition
    offset: int
    epoch: int
    """The assignment of its partition under which it was polled."""
    key: bytes | None
    value: bytes | None
    headers: HeaderList
    timestamp_ms: int | None
    """The record's timestamp; None: it has none."""
    arrived_ns: int
    """Monotonic time of its arrival at the aggregator."""
    deadline_ns: int
    """Monotonic; 0: none."""
    size_bytes: int
    """Key, value, headers, decoded text and `QUERY_OVERHEAD_BYTES`: what it counts towards
    `buffer_bytes_max`."""
    id: str
    model: str
    text: str
    text_bytes: int
    """UTF-8 bytes of the text."""
    input_type: int
    """embedding.v1.InputType."""
    dimensions: int
    """0: the model's own."""
    encoding: int
    """embedding.v1.Encoding, never 0."""
    truncate: bool
    protobuf: bool
    """The result is Protobuf, else JSON."""
    base64: bool
    """JSON only: the vector as base64, else as an array."""
    estimate_raw: int
    """The estimator's count, prompt and special tokens not included; 0 until estimated."""
    script: int
    """The text's script class (`aggregator.core.calibration`), set with `estimate_raw`."""
    failure: Failure | None
    """Set by the wire layer: refused, to be answered with this error at once. Later: the error
    that is being written."""

    # Written by the core alone. ------------------------------------------------------------------
    estimate: float
    """Calibrated tokens."""
    variance: float
    """Of `estimate`."""
    phase: int
    """One of WAITING, IN_FLIGHT, WRITING, SETTLED, ABANDONED."""
    claim_id: int
    """The claim it is in flight with; 0: none."""
    passed_over: bool
    """A claim has already taken a later query in its place."""
    attempts: int
    """Times its pass was started, or may have been."""
    deaths: int
    """Times an engine or stream died with it in an announced pass."""
    deaths_alone: int
    """Those of them when it was alone in an exclusive pass."""
    losses: int
    """Times it was lost with a stream without its start having been announced."""
    bad_answers: int
    """Answers of its requests that failed the check."""
    not_before_ns: int
    """Retry backoff: not to be claimed earlier."""
    group: VectorGroup | None
    """The columns that hold its vector until the result is durable."""
    row: int
    """Its row in `group`."""
    inference_us: int
    answered_ns: int
    """Monotonic time of the answer that brought its vector."""
    model_revision: str
    write_step: int
    """Which form of the result is being written (`aggregator.core.delivery`)."""
    letter_step: int
    """The same of its dead letter."""
    writes_pending: int
    """Records not yet durable: its result, and its dead letter if due."""

    def __init__(self) -> None:
        """Set the core's half; the wire layer sets its own."""
        self.failure = None
        self.estimate = 0.0
        self.variance = 0.0
        self.phase = WAITING
        self.claim_id = 0
        self.passed_over = False
        self.attempts = 0
        self.deaths = 0
        self.deaths_alone = 0
        self.losses = 0
        self.bad_answers = 0
        self.not_before_ns = 0
        self.group = None
        self.row = 0
        self.inference_us = 0
        self.answered_ns = 0
        self.model_revision = ""
        self.write_step = 0
        self.letter_step = 0
        self.writes_pending = 0


@dataclass(slots=True, kw_only=True)
class VectorGroup:
    """Vectors of one encoding and dimensions, in columns.

    `embeddings` holds `len(indexes)` vectors one after another, `stride` bytes each; `indexes` are
    positions in the claim's queries; `tokens` exact counts; `scales` is empty but for int8.
    """

    encoding: int
    dimensions: int
    indexes: Sequence[int]
    tokens: Sequence[int]
    embeddings: bytes
    stride: int
    scales: Sequence[float] = ()


@dataclass(slots=True, kw_only=True)
class InputFailure:
    """One input of a claim that has no vector."""

    index: int
    failure: Failure


@dataclass(slots=True, kw_only=True)
class Answer:
    """One message of a server about one claim, checked by the wire layer.

    `fault` is a sentence when the message failed the check of single messages (length, dimensions,
    encoding, finiteness, indexes out of range or doubled in it); the columns are then empty.
    `refused`: the whole request was refused, none of its inputs has run or will.
    """

    claim_id: int
    groups: list[VectorGroup] = field(default_factory=list)
    errors: list[InputFailure] = field(default_factory=list)
    last: bool = False
    queue_us: int = 0
    inference_us: int = 0
    refused: Failure | None = None
    fault: str | None = None
