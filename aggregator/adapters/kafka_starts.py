"""Where partitions are read from once they are assigned: where the group stopped.

Owns which partitions are held: assigned, and paused since nobody has told yet where the group
stopped in them. The client is never left to ask by itself: once a coordinator that has moved
refuses, it neither asks again nor completes another rebalance (librdkafka #5586, seen with 2.16).
Belongs to the consumer's thread, as all calls on the `Consumer` do. Must not know for what other
reasons partitions are paused.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from aggregator.core.query import TopicPartition

HELD_SILENTLY_S = 5.0
"""An open transaction that ends, or brokers that come back, are nothing to complain of."""
_COMMITTED_SOON_S = 0.5
_COMMITTED_LOOK_S = 0.1
_COMMITTED_EVERY_S = 0.5
"""Where the group stopped is asked for right after the assignment, then every so often. While an
open transaction of somebody else holds these offsets, nobody is told: waiting for that kept a
member from sending the offsets of its own transaction, until that was aborted and the member
fenced.
"""

HOPELESS = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.UNSUPPORTED_VERSION,
    }
)
"""Errors that waiting does not mend, though the client calls none fatal."""


Told = dict[TopicPartition, KafkaPartition]
"""Partitions with the offsets that they are read from."""


class Complain(Protocol):
    """Who is told of trouble; `fatal`: it will not pass."""

    def __call__(self, message: str, *, fatal: bool) -> None: ...


class Starts:
    """Asks where the group stopped, until it is told."""

    def __init__(self, consumer: Consumer, complain: Complain) -> None:
        """Hold nothing yet."""
        self.held: set[TopicPartition] = set()
        """The caller takes out what is not ours any more; its size is for any thread to read."""
        self._consumer = consumer
        self._complain = complain
        self._ask_again_s = 0.0
        self._complain_s = 0.0
        self._complained = False

    def assigned(self, tps: Iterable[TopicPartition]) -> Told:
        """Ask for these; those of which nothing is told soon are held."""
        self.held.update(tps)
        self._complain_s = time.monotonic() + HELD_SILENTLY_S
        self._complained = False
        told, _ = self._ask(tps, _COMMITTED_SOON_S)
        return told

    @property
    def due(self) -> bool:
        """Whether it is time to ask for those held."""
        return bool(self.held) and time.monotonic() >= self._ask_again_s

    def sought(self) -> Told:
        """Ask for those held; what is told is held no more, and read from there once resumed."""
        told, error = self._ask(self.held, _COMMITTED_LOOK_S)
        if error is not None:
            self._complain_of(error)
        for tp, start in list(told.items()):
            try:
                self._consumer.seek(start)
            except KafkaException:  # not started yet: an earlier assignment of it is still ending
                del told[tp]
                self.held.add(tp)
        return told

    def _complain_of(self, error: KafkaError) -> None:
        """Once an assignment, unless there is no hope."""
        fatal = error.code() in HOPELESS
        if fatal or (not self._complained and time.monotonic() >= self._complain_s):
            self._complained = True
            message = f"not told where the group stopped, {len(self.held)} partitions wait: "
            self._complain(message + error.str(), fatal=fatal)

    def _ask(
        self, tps: Iterable[TopicPartition], timeout_s: float
    ) -> tuple[Told, KafkaError | None]:
        """Return what is told, and why nothing is of the others."""
        self._ask_again_s = time.monotonic() + _COMMITTED_EVERY_S
        asked = [KafkaPartition(*tp) for tp in tps]
        try:
            committed = self._consumer.committed(asked, timeout=timeout_s)
        except KafkaException as exception:
            return {}, exception.args[0]
        told: Told = {}
        error = None
        for partition in committed:
            if partition.error is not None:
                error = partition.error
                continue
            if partition.offset < 0:
                partition.offset = OFFSET_BEGINNING
            told[partition.topic, partition.partition] = partition
        self.held -= told.keys()
        return told, error
