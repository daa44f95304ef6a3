"""The consumer's commits, one asynchronous in flight at a time.

Owns what is between a `Commit` and its one answer. Invariants: offsets of another epoch than a
partition's current one are dropped, since the broker would accept them; all go through
`store_offsets`, which refuses partitions that were just taken from us; the newest offset of each
partition wins; every commit id is answered exactly once. Belongs to the consumer's thread, as all
calls on the `Consumer` do. Must not know why anything is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from aggregator.core.effects import Commit, CommitOffset
from aggregator.core.events import CommitDone, CommitFailed
from aggregator.core.query import TopicPartition

NOT_OURS = "its partitions are not assigned to us any more"
_REBALANCING = frozenset(
    {
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.STALE_MEMBER_EPOCH,
    }
)
"""The group is between two generations, or we do not yet know the newer one."""

Epochs = Mapping[TopicPartition, int]


class Commits:
    """Commits on their way. `epochs`, where given, is the assignment of that moment."""

    def __init__(
        self,
        consumer: Consumer,
        answer: Callable[[CommitDone | CommitFailed], None],
        *,
        timeout_s: float,
    ) -> None:
        """`timeout_s` bounds the wait for a synchronous commit outside a rebalance callback.

        Inside one it lasts until the coordinator answers or the session is over: a commit that was
        given up would be sent later, under the generation of then, for partitions of others.
        """
        self._consumer = consumer
        self._tell = answer
        self._timeout_s = timeout_s
        self._in_flight: list[int] = []
        self._waiting: list[Commit] = []
        self._reports_ignored = 0
        self._answer_by_s: float | None = None

    def add(self, commit: Commit, epochs: Epochs, *, in_callback: bool) -> None:
        """Commit as soon as may be; `in_callback`: a rebalance callback waits for it."""
        self._waiting.append(commit)
        if commit.synchronous and in_callback:
            self._commit_now(epochs)
            return
        if commit.synchronous:
            # The report comes by the next polls; a synchronous call could not be given up: it
            # blocked for 46 s in an outage, longer than anybody waits for a process to end.
            self._answer_by_s = time.monotonic() + self._timeout_s
        self._send(epochs)

    def pump(self, epochs: Epochs) -> None:
        """Send what is waiting, if nothing is in flight; give up a last commit that is late."""
        self._send(epochs)
        if self._answer_by_s is None:
            return
        if not self._in_flight and not self._waiting:
            self._answer_by_s = None
        elif time.monotonic() > self._answer_by_s:
            self._answer_by_s = None
            self._reports_ignored += bool(self._in_flight)
            self._fail_all(_Failure("no answer in time", retryable=True))

    def ended(self, error: KafkaError | None, partitions: Iterable[KafkaPartition]) -> None:
        """Take the client's report of an asynchronous commit; they come in order."""
        if self._reports_ignored:
            self._reports_ignored -= 1
            return
        self._answer(self._take_in_flight(), _failure(error, partitions))

    def close(self) -> None:
        """Answer what is left: nothing will be reported any more."""
        self._fail_all(_Failure("the consumer was closed"))

    def _send(self, epochs: Epochs) -> None:
        """Send what is waiting as one asynchronous commit, unless one is in flight."""
        if self._in_flight or not self._waiting:
            return
        self._in_flight = self._store_waiting(epochs)
        if not self._in_flight:
            return
        try:
            self._consumer.commit(asynchronous=True)
        except KafkaException as error:
            self._answer(self._take_in_flight(), _failure(error.args[0]))

    def _commit_now(self, epochs: Epochs) -> None:
        """Commit all that is waiting synchronously, overtaking the commit in flight.

        Its report is served by `poll`, never inside a callback. What it would have committed is
        stored, so that this commit holds it too: both have one outcome, and its report is ignored.
        """
        stored = self._store_waiting(epochs)
        if not stored:
            return
        overtaken = self._take_in_flight()
        self._reports_ignored += bool(overtaken)
        try:
            failure = _failure(None, self._consumer.commit(asynchronous=False))
        except KafkaException as error:
            failure = _failure(error.args[0])
        self._answer(overtaken + stored, failure)

    def _store_waiting(self, epochs: Epochs) -> list[int]:
        """Store the offsets of all waiting commits, the newest of each partition.

        Returns the ids of those of which anything is still ours; the others are answered here.
        """
        waiting, self._waiting = self._waiting, []
        newest: dict[TopicPartition, CommitOffset] = {}
        ours: list[int] = []
        for commit in waiting:
            current = {o.tp: o for o in commit.offsets if epochs.get(o.tp) == o.epoch}
            newest |= current
            if current:
                ours.append(commit.commit_id)
            else:
                self._answer([commit.commit_id], _Failure(NOT_OURS))
        stored = [self._store(entry) for entry in newest.values()]
        if any(stored):
            return ours
        self._answer(ours, _Failure(NOT_OURS))
        return []

    def _store(self, entry: CommitOffset) -> bool:
        """Store one offset; returns False if its partition was taken from us a moment ago."""
        offset = KafkaPartition(*entry.tp, entry.offset_next)
        try:
            self._consumer.store_offsets(offsets=[offset])
        except KafkaException as error:
            # The callback that says so is still to come.
            if error.args[0].code() != KafkaError._STATE:
                raise
            return False
        return True

    def _take_in_flight(self) -> list[int]:
        ids, self._in_flight = self._in_flight, []
        return ids

    def _fail_all(self, failure: _Failure) -> None:
        waiting, self._waiting = self._waiting, []
        self._answer(self._take_in_flight() + [c.commit_id for c in waiting], failure)

    def _answer(self, commit_ids: Iterable[int], failure: _Failure | None) -> None:
        for commit_id in commit_ids:
            self._tell(
                CommitDone(commit_id=commit_id)
                if failure is None
                else CommitFailed(
                    commit_id=commit_id, message=failure.message, retryable=failure.retryable
                )
            )


class _Failure(NamedTuple):
    """Why a commit failed."""

    message: str
    retryable: bool = False


def _failure(
    error: KafkaError | None, partitions: Iterable[KafkaPartition] | None = None
) -> _Failure | None:
    """Return why a commit failed, None if it did not.

    "No offset" says that all stored offsets are committed already.
    """
    if error is not None:
        if error.code() == KafkaError._NO_OFFSET:
            return None
        return _Failure(error.str(), error.code() in _REBALANCING)
    for partition in partitions or ():
        fault = partition.error
        if fault is not None:
            message = f"{partition.topic}-{partition.partition}: {fault.str()}"
            return _Failure(message, fault.code() in _REBALANCING)
    return None
