"""Offsets on their way into a transaction: from the thread of transactions to the consumer's.

Owns the hand-over and its end. Invariants: offsets are sent on the consumer's thread only, with the
group's metadata of that moment; a request that was given up is never sent later, in somebody else's
transaction; nobody waits for ever for a client that does not return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from aggregator.core.effects import CommitOffset

SLICE_S = 0.5
"""Calls into the client block no longer than this before they are looked at again."""
LOOK_S = 0.02
"""How late an abort that is asked for, or a report, may be noticed."""
HANG_LOOKS = 500
"""The client's `send_offsets_to_transaction` has been seen not to return at all, whatever its
timeout, after a broker was killed under it; the consumer's thread is then lost, and with it the
process. Looks are counted, not time: a process that was frozen must not take that for a hang."""


class OffsetSender(Protocol):
    """The consumer: its thread checks the epochs and calls one of the request's two ends."""

    def send_offsets(self, request: OffsetsRequest) -> None:
        """Carry it out between two polls or inside a rebalance callback."""


class OffsetsRequest:
    """Offsets on their way into a transaction; `carry_out` or `refuse` is called at most once."""

    def __init__(self, producer: Producer, offsets: Sequence[CommitOffset]) -> None:
        """Nothing is sent yet."""
        self.offsets = offsets
        self.error: KafkaError | None = None
        self.refusal: str | None = None
        self.ended = threading.Event()
        self._producer = producer
        self._lock = threading.Lock()
        self._given_up = False
        self._sending = False

    def carry_out(self, group_metadata: object) -> None:
        """Send them; on the consumer's thread, with its metadata of this moment."""
        partitions = [KafkaPartition(*o.tp, o.offset_next) for o in self.offsets]
        with self._lock:
            if self._given_up:
                return
            self._sending = True
            try:
                self._producer.send_offsets_to_transaction(partitions, group_metadata, SLICE_S)
            except KafkaException as error:
                self.error = error.args[0]
            self._sending = False
        self.ended.set()

    def wait(self, look: Callable[[], None], *, look_s: float = LOOK_S) -> bool:
        """Wait for its end, with a `look` every `look_s`; returns False when the client hangs."""
        looks = 0
        while not self.ended.wait(look_s):
            looks = looks + 1 if self._sending else 0
            if looks == HANG_LOOKS:
                return False
            look()
        return True

    def refuse(self, reason: str) -> None:
        """Say that they may not be sent."""
        self.refusal = reason
        self.ended.set()

    def give_up(self, *, look_s: float = LOOK_S) -> bool:
        """Return once nothing is being sent, nor will be; False when the client hangs."""
        for _ in range(HANG_LOOKS):
            if self._lock.acquire(timeout=look_s):
                self._given_up = True
                self._lock.release()
                return True
        return False
