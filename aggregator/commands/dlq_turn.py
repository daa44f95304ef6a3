"""One replay of a topic at a time, among all machines: who replays is the only member of a group.

Owns the consumer that is the member, and its one thread, which keeps it one by polling. It reads
nothing and commits nothing. Invariant: whoever has joined sees everybody that joined before and
goes on; so of two runs the later ends, and both where they joined as one. A run that was killed is
out of the group when its session is over: the next one's join waits for that and no longer. One
that was frozen for so long notices before it sends anything more.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from aggregator.commands.kafka_client import (
    METADATA_TIMEOUT_S,
    QUIET,
    DeadLetterTopics,
    KafkaClientError,
    looked_up,
    partitions_of,
    passing,
)

SESSION_S = 10
HEARTBEAT_S = 2
JOIN_S_MAX = 60.0
"""A new group takes three seconds by the brokers' defaults; a dead member its session."""
LEAVE_S_MAX = 5.0
"""Without a broker the client takes its time to leave; the session ends by itself."""
_POLL_S = 0.1


class ReplayTurn:
    """A context manager: within it no other replay of the topic has begun, until `lost`."""

    def __init__(self, topics: DeadLetterTopics, stopping: Callable[[], bool]) -> None:
        """Nothing is joined yet; `stopping` is asked while it is."""
        self._topics = topics
        self._stopping = stopping
        self._group = f"aggregator-dlq-replay.{topics.letters}"
        self._lost = False
        self._polled_s = time.monotonic()
        self._joined = threading.Event()
        self._ending = threading.Event()
        self._error: KafkaClientError | None = None
        self._thread = threading.Thread(target=self._stay, name="replay-turn", daemon=True)

    def __enter__(self) -> Self:
        """Join, and look who else is there.

        Raises:
            KafkaClientError: somebody is, or the group can't be joined.
        """
        self._thread.start()
        try:
            self._await_join()
            if self._joined.is_set():
                self._look_round()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the group: the next may begin at once."""
        self._leave()

    @property
    def lost(self) -> bool:
        """The group has given this run up, or may have: another may have begun."""
        return self._lost or time.monotonic() - self._polled_s > SESSION_S - HEARTBEAT_S

    def _await_join(self) -> None:
        deadline_s = time.monotonic() + JOIN_S_MAX
        while not self._joined.wait(_POLL_S) and not self._stopping():
            if time.monotonic() > deadline_s:
                raise self._failed(f"no answer within {JOIN_S_MAX:g} s")
            if self._error is not None:
                raise self._error

    def _failed(self, why: str) -> KafkaClientError:
        return KafkaClientError(f"the group {self._group!r} can't be joined: {why}")

    def _look_round(self) -> None:
        members = self._members()
        if len(members) > 1:
            raise KafkaClientError(
                f"another replay of topic {self._topics.letters!r} runs "
                f"({', '.join(name for name in members if name != _name())}): one at a time"
            )

    def _members(self) -> Sequence[str]:
        config: dict[str, Any] = {**self._topics.client, "logger": QUIET}
        admin = AdminClient(config)

        def ask() -> Sequence[str]:
            asked = admin.describe_consumer_groups(
                [self._group], request_timeout=METADATA_TIMEOUT_S
            )
            return [member.client_id for member in asked[self._group].result().members]

        return looked_up(ask, self._topics.bootstrap_servers)

    def _leave(self) -> None:
        self._ending.set()
        self._thread.join(LEAVE_S_MAX)

    # The thread ----------------------------------------------------------------------------------

    def _stay(self) -> None:
        consumer = Consumer(
            {
                **self._topics.client,
                "client.id": _name(),
                "group.id": self._group,
                "session.timeout.ms": SESSION_S * 1_000,
                "heartbeat.interval.ms": HEARTBEAT_S * 1_000,
                "enable.auto.commit": False,
                "logger": QUIET,
            }
        )
        try:
            partitions_of(consumer, self._topics.letters, self._topics.bootstrap_servers)
            consumer.subscribe(
                [self._topics.letters], on_assign=self._on_assign, on_lost=self._on_lost
            )
            while not self._ending.is_set():
                message = consumer.poll(_POLL_S)
                self._lost = self.lost
                self._polled_s = time.monotonic()
                error = None if message is None else message.error()
                if error is not None and not error.retriable() and not passing(error):
                    self._error = self._failed(error.str())
        except KafkaClientError as error:
            self._error = error
        except KafkaException as error:
            self._error = self._failed(str(error))
        finally:
            consumer.close()

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.assign(partitions)
        consumer.pause(partitions)  # membership is all that is wanted
        self._joined.set()

    def _on_lost(self, _consumer: Consumer, _partitions: list[TopicPartition]) -> None:
        self._lost = True


def _name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"
