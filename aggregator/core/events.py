"""What has happened: the only way into the core.

Events are past-tense facts and carry lists, so that the cost of handling one is shared by its
records. Times are monotonic integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from aggregator.core.query import Answer, Query, TopicPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The offset of the next record that a partition gives: what lies below it has been read."""

    tp: TopicPartition
    epoch: int
    offset_next: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsPolled:
    """One poll's records, decoded, in offset order per partition, and the positions right after it.

    `positions` holds each partition whose position moved, those without records too. A poll that
    takes long to decode comes in parts; all but the last have the positions behind their own
    records, so that none covers a record that is still to come.
    """

    records: Sequence[Query]
    positions: Sequence[Position]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsAssigned:
    """Partitions came under the number of this assignment."""

    epoch: int
    partitions: Sequence[TopicPartition]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsRevoking:
    """The rebalance callback waits for `Release(revoke_id)`; it gives up at its own deadline."""

    revoke_id: int
    partitions: Sequence[TopicPartition]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionsLost:
    """Somebody else has them already: nothing of them may be committed."""

    partitions: Sequence[TopicPartition]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a server says of itself (`embedding.v1.ServerState`), for one stream."""

    batch_tokens_target: int
    batch_tokens_max: int
    window_tokens: int
    inputs_max: int
    request_bytes_max: int
    busy_ms: float
    """The rest of the running pass plus all that is queued, reckoned at sending; 0: idle."""
    queued_tokens: int
    draining: bool


class ServerPhase(StrEnum):
    """Whether a server can be sent claims."""

    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChanged:
    """A stream to a server opened, ended, or brought a ServerState.

    `limits` is None only when the stream is down. `running`: claims in the pass that starts (empty
    when no start is announced). `server` is its address, unique per stream; a stream that is opened
    anew after `DOWN` starts with everything unanswered on it having been reported by `ClaimLost`.
    """

    model: str
    server: str
    phase: ServerPhase
    limits: ServerLimits | None = None
    running: Sequence[int] = ()
    model_revision: str = ""
    dimensions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimAnswered:
    """A message about a claim came."""

    model: str
    server: str
    answer: Answer


class Loss(StrEnum):
    """What is known of a claim that will get no (further) answer."""

    NOT_STARTED = "not_started"
    """It was never written to a stream, or the server said so."""
    UNKNOWN = "unknown"
    """Its stream died; the core knows whether its start had been announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLost:
    """A claim will get no further answer."""

    model: str
    server: str
    claim_id: int
    loss: Loss
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesDurable:
    """Records acknowledged by all in-sync replicas: one entry for each."""

    results: Sequence[Query] = ()
    letters: Sequence[Query] = ()


class WriteFault(StrEnum):
    """Whose fault a failed write is."""

    RECORD = "record"
    """Too large or invalid, found in a produce batch that may have held others."""
    RECORD_ALONE = "record_alone"
    """The same, sent by itself."""
    TOPIC = "topic"
    """Not authorised, missing, timed out: nothing to do with this record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritesFailed:
    """Records that are not durable, and whose fault it is."""

    fault: WriteFault
    message: str
    results: Sequence[Query] = ()
    letters: Sequence[Query] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDone:
    """The commit of this id ended well."""

    commit_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """The commit of this id did not. `retryable`: only because the group was being rebalanced."""

    commit_id: int
    message: str
    retryable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """The time asked for by `WakeAt` has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """SIGTERM, SIGINT, or a fatal fault of the shell: drain, then halt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellFailed:
    """Something outside the core broke for good: the process must end with this line."""

    message: str


Event = (
    RecordsPolled
    | PartitionsAssigned
    | PartitionsRevoking
    | PartitionsLost
    | ServerChanged
    | ClaimAnswered
    | ClaimLost
    | WritesDurable
    | WritesFailed
    | CommitDone
    | CommitFailed
    | Tick
    | StopRequested
    | ShellFailed
)

__all__ = [
    "ClaimAnswered",
    "ClaimLost",
    "CommitDone",
    "CommitFailed",
    "Event",
    "Loss",
    "PartitionsAssigned",
    "PartitionsLost",
    "PartitionsRevoking",
    "Position",
    "RecordsPolled",
    "ServerChanged",
    "ServerLimits",
    "ServerPhase",
    "ShellFailed",
    "StopRequested",
    "Tick",
    "WriteFault",
    "WritesDurable",
    "WritesFailed",
]
