"""Results and dead letters to Kafka: records in, lists of delivery reports out.

Owns two producers and a thread for each that gathers its delivery reports: one for all, and one,
made when first needed, that puts each record into a produce batch of its own. Invariants: every
record handed in is answered exactly once, `close` included; `produce` neither blocks nor loses when
the client's queue is full (the rest waits here, bounded by the core's own windows). Reports say
whose fault a failure is, nothing more: what to do about it is the core's business.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer

from aggregator.adapters.kafka_config import (
    Config,
    KafkaConfigError,
    KafkaOptions,
    alone_config,
    producer_config,
)
from aggregator.adapters.kafka_watch import ConnectionWatch
from aggregator.core.events import WriteFault
from aggregator.wire.headers import Headers

Token = TypeVar("Token")
Token_contra = TypeVar("Token_contra", contravariant=True)

POLL_S = 0.05
"""How long a report of a record that never left may have to wait."""
GATHER_S = 0.005
"""Reports that come within this are handed over together: nobody waits for them but the next
commit, and each time takes the interpreter from the thread that works for latency."""

OF_THE_RECORD = frozenset(
    {
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        KafkaError._INVALID_DIFFERENT_RECORD,
    }
)
"""Refusals that name no single record but are some record's own; every other is the topic's.

Not INVALID_TIMESTAMP: the time is this host's clock against the topic's bounds, the same for all.
Where a broker finds fault with several records of a batch, the client gives these INVALID_RECORD,
whatever it was, and their mates _INVALID_DIFFERENT_RECORD: only alone each gets its own code.
"""


class SinkListener(Protocol[Token_contra]):
    """Who is told, on a thread of the sink; must return at once."""

    def on_reports(
        self,
        durable: Sequence[Token_contra],
        failed: Sequence[tuple[Token_contra, WriteFault, str]],
    ) -> None:
        """Records were acknowledged by all in-sync replicas, or are not written, and why."""

    def on_fault(self, message: str, *, fatal: bool) -> None:
        """The client complains; `fatal`: it will write nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """How to write.

    `message_bytes_max` and `batch_bytes_max`: the largest and the smallest `max.message.bytes` of
    the topics written to.
    """

    kafka: KafkaOptions
    message_bytes_max: int = 1_048_588
    batch_bytes_max: int = 1_048_588


class KafkaSink(Generic[Token]):
    """What the loop writes to."""

    def __init__(
        self,
        options: SinkOptions,
        listener: SinkListener[Token],
        *,
        logger: logging.Logger | None = None,
    ) -> None:
        """Check the configuration and start the thread. Raises `KafkaConfigError`."""
        config = producer_config(
            options.kafka,
            message_bytes_max=options.message_bytes_max,
            batch_bytes_max=options.batch_bytes_max,
        )
        if logger is not None:
            config["logger"] = logger
        self._kafka = options.kafka
        self._config = config
        self._listener = listener
        self._main = _Channel(options.kafka, config, listener, WriteFault.RECORD)
        self._alone: _Channel[Token] | None = None

    @property
    def unconfirmed(self) -> int:
        """Records handed in and not yet reported."""
        return sum(channel.unconfirmed for channel in self._channels())

    def produce(  # noqa: PLR0917 - positional for speed: it runs once per result
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        token: Token,
        alone: bool = False,
    ) -> None:
        """Write a record; `token` comes back in a report. From one thread only.

        `alone`: in a produce batch with no other record. Raises RuntimeError after `close`.
        """
        if not alone:
            self._main.produce(topic, key, value, headers, token)
            return
        if self._alone is None:
            config = alone_config(self._config)
            self._alone = _Channel(self._kafka, config, self._listener, WriteFault.RECORD_ALONE)
        self._alone.produce(topic, key, value, headers, token)

    def flush(self, timeout_s: float) -> int:
        """Wait until everything is reported; return how many records still are not. Blocks."""
        for channel in self._channels():
            channel.flush(timeout_s)
        return self.unconfirmed

    def close(self, timeout_s: float = 5.0) -> None:
        """Report what is not yet written as failed and end the threads. Idempotent. Blocks."""
        for channel in self._channels():
            channel.close(timeout_s)

    def _channels(self) -> list[_Channel[Token]]:
        return [self._main] if self._alone is None else [self._main, self._alone]


class _Channel(Generic[Token]):
    """A producer and the thread that gathers its reports."""

    def __init__(
        self,
        kafka: KafkaOptions,
        config: Config,
        listener: SinkListener[Token],
        fault_of_record: WriteFault,
    ) -> None:
        self._listener = listener
        self._fault_of_record = fault_of_record
        watch = ConnectionWatch("producer", kafka, self._on_cut_off)
        try:
            self._producer = Producer({**config, **watch.config, "error_cb": self._on_error})
        except (KafkaException, TypeError, ValueError) as error:
            raise KafkaConfigError(f"the Kafka producer's configuration: {error}") from error
        self._overflow: deque[tuple[str, bytes | None, bytes | None, Headers, Token]] = deque()
        self._refused: deque[tuple[Token, WriteFault, str]] = deque()
        self._produced = 0  # written by the caller's thread
        self._reported = 0  # written by ours
        self._durable: list[Token] = []
        self._failed: list[tuple[Token, WriteFault, str]] = []
        self._all_reported = threading.Condition()
        self._delivered = self._on_delivery  # bound once: it is asked for with each record
        self._closing = False
        self._close_by = 0.0
        self._thread = threading.Thread(target=self._run, name="kafka-producer", daemon=True)
        self._thread.start()

    @property
    def unconfirmed(self) -> int:
        return self._produced - self._reported

    def produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        token: Token,
    ) -> None:
        if self._closing:
            raise RuntimeError("the sink is closed")
        self._produced += 1
        if self._overflow or not self._try(topic, key, value, headers, token):
            self._overflow.append((topic, key, value, headers, token))

    def _try(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        token: Token,
    ) -> bool:
        """Give the client a record; returns False when its queue is full."""
        try:
            self._producer.produce(
                topic,
                value,
                key,
                on_delivery=partial(self._delivered, token),
                headers=headers,  # type: ignore[arg-type] # lists are invariant
            )
        except BufferError:
            return False
        except KafkaException as error:
            self._refused.append((token, self._refusal(error.args[0]), _text(topic, error.args[0])))
        return True

    def _refusal(self, error: KafkaError) -> WriteFault:
        """Say whose fault it is that the client did not take a record: it had no batch mates."""
        if error.code() in OF_THE_RECORD:
            return WriteFault.RECORD_ALONE
        return WriteFault.TOPIC

    def flush(self, timeout_s: float) -> None:
        with self._all_reported:
            self._all_reported.wait_for(lambda: self.unconfirmed == 0, timeout_s)

    def close(self, timeout_s: float) -> None:
        self._close_by = time.monotonic() + timeout_s
        self._closing = True
        self._thread.join()

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._producer.poll(POLL_S)
                self._refill()
                if self._hand_over():
                    time.sleep(GATHER_S)
            self._abandon()
        except Exception as error:  # noqa: BLE001 - the thread's end must be told, whatever it is
            self._listener.on_fault(f"the producer's thread failed: {error!r}", fatal=True)

    def _refill(self) -> None:
        """Give the client what did not fit before."""
        while self._overflow and self._try(*self._overflow[0]):
            self._overflow.popleft()

    def _hand_over(self) -> bool:
        """Report what has come; return whether anything has."""
        while self._refused:
            self._failed.append(self._refused.popleft())
        if not (self._durable or self._failed):
            return False
        durable, self._durable = self._durable, []
        failed, self._failed = self._failed, []
        self._reported += len(durable) + len(failed)
        self._listener.on_reports(durable, failed)
        if self._reported == self._produced:
            with self._all_reported:
                self._all_reported.notify_all()
        return True

    def _abandon(self) -> None:
        """Report everything that is still here as not written."""
        while self._overflow:
            *_, token = self._overflow.popleft()
            self._failed.append((token, WriteFault.TOPIC, "the sink was closed"))
        self._producer.purge()
        while len(self._producer) and time.monotonic() < self._close_by:
            self._producer.poll(POLL_S)
        self._hand_over()

    def _on_delivery(self, token: Token, error: KafkaError | None, message: Any) -> None:
        """Called by the client inside poll."""
        if error is None:
            self._durable.append(token)
            return
        of_record = error.code() in OF_THE_RECORD
        fault = self._fault_of_record if of_record else WriteFault.TOPIC
        self._failed.append((token, fault, _text(message.topic(), error)))

    def _on_error(self, error: KafkaError) -> None:
        """Called by the client inside poll: its connections, or the client itself, have trouble."""
        self._listener.on_fault(error.str(), fatal=error.fatal())

    def _on_cut_off(self, message: str) -> None:
        """Called by the client inside poll."""
        self._listener.on_fault(message, fatal=True)


def _text(topic: str, error: KafkaError) -> str:
    return f"{topic}: {error.str()}"
