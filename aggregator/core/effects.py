"""What is to be done: the only way out of the core.

The driver carries effects out in their order and answers those with an id by an event that carries
it. Nothing in here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from aggregator.core.query import Query, TopicPartition, VectorGroup


@dataclass(slots=True, kw_only=True)
class Dispatch:
    """Send a claim as one request; `claim_id` is its request id (from 1, never used twice).

    Ends with the `last` `ClaimAnswered`, or a `ClaimLost`.
    """

    claim_id: int
    model: str
    server: str
    queries: list[Query]
    estimate: float
    """Sum of the calibrated estimates, tokens."""
    exclusive: bool = False


@dataclass(slots=True, kw_only=True)
class Cancel:
    """Claims have waited too long on this stream: cut it, and they become `ClaimLost`."""

    model: str
    server: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """A message about this claim failed a check: note it as badly answered.

    Nothing of that message is used; what it had left unanswered is retried, and what still comes
    about it is ignored.
    """

    claim_id: int
    message: str


class Form(IntEnum):
    """The forms of a record to write, each smaller than the one before."""

    FULL = 0
    BARE = 1
    """A result without passed-on headers and with its id as key; a dead letter without its value,
    size and SHA-256 in headers."""


@dataclass(slots=True, kw_only=True)
class VectorRows:
    """Results that hold vectors: `queries[i]` has row `rows[i]` of `group`."""

    queries: list[Query]
    group: VectorGroup
    rows: Sequence[int]
    model_revision: str
    inference_us: int
    answered_ns: int
    alone: bool = False
    """Send it by itself, in a produce batch with no other record."""


@dataclass(slots=True, kw_only=True)
class ErrorRow:
    """A result that holds `query.failure`."""

    query: Query
    form: Form = Form.FULL
    alone: bool = False


@dataclass(slots=True, kw_only=True)
class LetterRow:
    """A dead letter of the query, for `query.failure`."""

    query: Query
    form: Form = Form.FULL
    alone: bool = False


@dataclass(slots=True, kw_only=True)
class Write:
    """Produce these; each record is answered once by `WritesDurable` or `WritesFailed`."""

    vectors: list[VectorRows] = field(default_factory=list)
    errors: list[ErrorRow] = field(default_factory=list)
    letters: list[LetterRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOffset:
    """Commit `offset_next` for a partition, if `epoch` is still its assignment."""

    tp: TopicPartition
    epoch: int
    offset_next: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Commit watermarks; `synchronous` inside a rebalance callback or at the end only."""

    commit_id: int
    offsets: Sequence[CommitOffset]
    synchronous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTransaction:
    """Write these records and commit these offsets as one transaction: all of it or nothing.

    Ends with one `CommitDone`, or one `CommitFailed` after an abort; what was refused of it is told
    by `WritesFailed` before that. It is not begun when a record is known to be too large.
    """

    commit_id: int
    write: Write
    offsets: Sequence[CommitOffset]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortTransaction:
    """Abort the transaction of this id if its commit has not begun; it ends as it would anyway."""

    commit_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Stop fetching these partitions."""

    partitions: Sequence[TopicPartition]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Fetch them again."""

    partitions: Sequence[TopicPartition]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Let the rebalance callback of this revoke return."""

    revoke_id: int
    abandoned: int
    """Queries that the deadline cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send a `Tick` at this monotonic time; replaces the one before."""

    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPolling:
    """Poll no more records; keep serving the group and the command queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Leave the group and end the process.

    `message` is the one clear line; `exit_code` is 0 after a drain. `abandoned` counts the queries
    that the drain's deadline cut off. `at_once`: no rebalance callback may return any more, so the
    group is not left and nothing is waited for.
    """

    exit_code: int
    message: str
    abandoned: int = 0
    at_once: bool = False


Effect = (
    Dispatch
    | Cancel
    | Discard
    | Write
    | Commit
    | CommitTransaction
    | AbortTransaction
    | Pause
    | Resume
    | Release
    | WakeAt
    | StopPolling
    | Halt
)
