"""How results leave the process: by a producer, or by one that commits transactions.

The setting `delivery` chooses, here and in the core's options and nowhere else. Owns whichever it
is, from the checks at start to the close.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from aggregator.adapters.kafka_config import KafkaOptions
from aggregator.adapters.kafka_sink import KafkaSink, SinkOptions
from aggregator.adapters.kafka_source import KafkaSource
from aggregator.adapters.kafka_topics import Topics, TopicsError
from aggregator.adapters.kafka_transactions import (
    KafkaTransactions,
    TransactionRecord,
    TransactionsOptions,
)
from aggregator.core.effects import CommitOffset
from aggregator.core.query import Query
from aggregator.core.transactions import TransactionOptions
from aggregator.runtime.bridge import Bridge, Letter, SinkPort, Token
from aggregator.runtime.driver import Sink
from aggregator.runtime.transactions import Outgoing, Record, TransactionsPort
from aggregator.telemetry.logs import librdkafka_logger
from aggregator.wire.record_size import batch_bytes

if TYPE_CHECKING:
    from aggregator.settings import AggregatorSettings
    from aggregator.telemetry.logs import Logger

MS = 1_000_000
MOCK_CLUSTER: Final = "mockCluster"
"""How the id of librdkafka's mock cluster begins."""
POLL_MS: Final = 5
"""An idle poll of the consumer: each transaction waits for one. One of 65 results took 14 to 27 ms
at the usual 20, 10 to 13 ms at 5."""


class Outlet(Protocol):
    """What the process needs of either."""

    sink: Sink
    transactions: TransactionsPort | None

    def prepare(self) -> None:
        """Block until it can be used. Raises `TransactionsError`."""

    def start(self, source: KafkaSource) -> None:
        """The source is about to be started."""

    def end_open(self, timeout_s: float) -> None:
        """The group is about to be left: nothing may stay open. Blocks."""

    def close(self, timeout_s: float) -> None:
        """The group was left. Blocks."""


def exactly_once(settings: AggregatorSettings) -> TransactionOptions | None:
    """The core's options of transactions; None: at least once."""
    if settings.delivery != "exactly_once":
        return None
    return TransactionOptions(timeout_ns=settings.transaction_timeout_ms * MS)


def build_outlet(
    settings: AggregatorSettings, kafka: KafkaOptions, topics: Topics, bridge: Bridge, log: Logger
) -> Outlet:
    """Build what `delivery` names; connect to nothing yet.

    Raises:
        KafkaConfigError: A setting of the client is wrong.
        TopicsError: The brokers have transactions in name only.
    """
    if settings.delivery == "exactly_once":
        return _Transactions(settings, kafka, topics, bridge, log)
    return _Sink(settings, kafka, topics, bridge, log)


class _Sink:
    """At least once."""

    transactions: TransactionsPort | None = None

    def __init__(
        self,
        settings: AggregatorSettings,
        kafka: KafkaOptions,
        topics: Topics,
        bridge: Bridge,
        log: Logger,
    ) -> None:
        options = SinkOptions(
            kafka=kafka,
            message_bytes_max=topics.message_bytes_max,
            batch_bytes_max=topics.message_bytes_min,
        )
        self._sink: KafkaSink[Token] = KafkaSink(options, bridge, logger=librdkafka_logger(log))
        self.sink: Sink = SinkPort(
            self._sink, results=settings.results_topic, letters=settings.dlq_topic
        )

    def prepare(self) -> None:
        """Nothing has to be there before the first record."""

    def start(self, source: KafkaSource) -> None:
        """Its commits are the source's own business."""

    def end_open(self, timeout_s: float) -> None:
        """What is not durable is not committed."""

    def close(self, timeout_s: float) -> None:
        self._sink.close(timeout_s)


class _Transactions:
    """Exactly once."""

    def __init__(
        self,
        settings: AggregatorSettings,
        kafka: KafkaOptions,
        topics: Topics,
        bridge: Bridge,
        log: Logger,
    ) -> None:
        if (topics.cluster_id or "").startswith(MOCK_CLUSTER):
            raise TopicsError(
                "delivery = exactly_once needs real brokers: the transactions of librdkafka's mock "
                "cluster commit and abort nothing"
            )
        options = TransactionsOptions(
            kafka=kafka,
            instance_name=settings.instance_name or "",
            timeout_ms=settings.transaction_timeout_ms,
            message_bytes_max=topics.message_bytes_max,
            batch_bytes_max=topics.message_bytes_min,
        )
        self._transactions: KafkaTransactions[Token] = KafkaTransactions(
            options, bridge, logger=librdkafka_logger(log)
        )
        port = _Port(
            self._transactions,
            results=(settings.results_topic, topics.message_bytes[settings.results_topic]),
            letters=(settings.dlq_topic, topics.message_bytes[settings.dlq_topic]),
        )
        self.sink: Sink = port
        self.transactions: TransactionsPort | None = port

    def prepare(self) -> None:
        self._transactions.init()

    def start(self, source: KafkaSource) -> None:
        self._transactions.start(source)

    def end_open(self, timeout_s: float) -> None:
        """Abort it: whoever gets the partitions next would wait for it."""
        self._transactions.close(timeout_s)

    def close(self, timeout_s: float) -> None:
        """There is nothing left."""


class _Port:
    """The transactional producer as the driver knows it: two topics, each with its limit."""

    def __init__(
        self,
        transactions: KafkaTransactions[Token],
        *,
        results: tuple[str, int],
        letters: tuple[str, int],
    ) -> None:
        """Of each topic its name and its `max.message.bytes`."""
        self._transactions = transactions
        self._results, self._result_bytes_max = results
        self._letters, self._letter_bytes_max = letters

    def result_misfit(self, record: Record) -> str | None:
        return _misfit(record, self._results, self._result_bytes_max)

    def letter_misfit(self, record: Record) -> str | None:
        return _misfit(record, self._letters, self._letter_bytes_max)

    def commit(
        self,
        commit_id: int,
        results: Sequence[Outgoing],
        letters: Sequence[Outgoing],
        offsets: Sequence[CommitOffset],
    ) -> None:
        records: list[TransactionRecord[Token]] = [
            TransactionRecord(self._results, key, value, headers, query, alone)
            for query, (key, value, headers), alone in results
        ]
        records += [
            TransactionRecord(self._letters, key, value, headers, Letter(query), alone)
            for query, (key, value, headers), alone in letters
        ]
        self._transactions.commit(commit_id, records, offsets)

    def abort(self, commit_id: int) -> None:
        self._transactions.abort(commit_id)

    def send_result(self, query: Query, record: Record, *, alone: bool) -> None:
        """Raise RuntimeError: nothing is written outside a transaction."""
        del record, alone
        raise RuntimeError(f"{query.id} outside a transaction")

    def send_letter(self, query: Query, record: Record, *, alone: bool) -> None:
        """Raise RuntimeError: nothing is written outside a transaction."""
        del record, alone
        raise RuntimeError(f"{query.id} outside a transaction")


def _misfit(record: Record, topic: str, bytes_max: int) -> str | None:
    """Why the topic would refuse the record; None: it fits."""
    if batch_bytes(*record) <= bytes_max:
        return None
    return f"larger than the max.message.bytes of topic {topic} ({bytes_max})"
