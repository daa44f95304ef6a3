"""What the checkers keep: epochs and processes as seen from outside, and results as they are read.

Values without policy; what is right and wrong is said in `checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

from aggregator.core import effects as fx
from aggregator.core.query import Query, TopicPartition
from protos.embedding.v1 import query_pb2
from tests.sim.producer import Sent


class Violation(BaseException):
    """A guarantee is broken. No `Exception`: the driver would take it for a bug of its own."""

    def __init__(self, guarantee: int, what: str) -> None:
        super().__init__(f"guarantee {guarantee}: {what}")
        self.guarantee = guarantee


@dataclass(eq=False, slots=True)
class Epoch:
    """One assignment of one partition to one process, as seen from outside."""

    process: str
    tp: TopicPartition
    number: int
    queries: list[Query] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    started_last: int = -1
    """The highest offset of which anything left the process."""
    closing: bool = False
    over: bool = False
    released: bool = False
    commit_id: int = 0
    """Of its last synchronous commit."""
    commit_done: bool = True
    given_up_on: bool = False
    """The source did not wait for its release."""
    clean: bool = False
    """It ended in time with everything settled and committed."""


@dataclass(slots=True)
class Watch:
    """What is kept of one process."""

    epochs: dict[TopicPartition, Epoch] = field(default_factory=dict)
    replaced: list[Epoch] = field(default_factory=list)
    """Their partition was assigned again in this step."""
    writes: dict[tuple[int, bool], int] = field(default_factory=dict)
    """(query, letter) -> 1: handed to the sink, 2: durable. Absent: neither, or it failed."""
    transactions: dict[int, fx.CommitTransaction] = field(default_factory=dict)
    """Those under way, by commit id."""
    kept: list[Query] = field(default_factory=list)
    """So that no identity is used twice."""
    revoking: dict[int, list[Epoch]] = field(default_factory=dict)
    revoke_by_ns: dict[int, int] = field(default_factory=dict)
    drain: list[Epoch] | None = None
    drain_by_ns: int = 0
    stalled_ns: int = 0
    """When the process was last held up from outside."""
    polled_ns: int = 0
    """When the records of the last poll came, which may be admitted in parts."""
    full_polls: int = 0
    """Polls with records while the buffer was full."""
    steps: int = 0
    spin_ms: int = 0
    spins: int = 0
    last_ok_ns: dict[str, int] = field(default_factory=dict)
    revisions: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Result:
    """A result, by what is in it."""

    tp: TopicPartition
    offset: int
    reason: str
    """"OK", or the error's."""
    vector: bytes
    """Empty where it is not given in bytes."""
    revision: str


def read_result(sent: Sent, *, protobuf: bool) -> Result:
    """Decode a record of the results topic."""
    ok = dict(sent.headers)["embedding-status"] == b"OK"
    value = sent.value or b""
    if protobuf:
        message = query_pb2.Result.FromString(value)
        source = message.source
        return Result(
            (source.topic, source.partition),
            source.offset,
            "OK" if ok else message.error.reason,
            message.embedding,
            message.model_revision,
        )
    document = orjson.loads(value)
    where = document["source"]
    return Result(
        (where["topic"], where["partition"]),
        where["offset"],
        "OK" if ok else document["error"]["reason"],
        b"",
        document.get("model_revision", ""),
    )
