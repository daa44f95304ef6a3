"""librdkafka's configuration for both clients: what is fixed, overridable, refused.

Owns: the keys on which the delivery guarantees stand, which no override may touch. Invariants: an
override either reaches the client it belongs to or is refused by name; the consumer's prefetch and
the producer's queue are bounded. Must not know where settings come from.

Sources: CONFIGURATION.md of librdkafka 2.16; the figures beside the defaults were measured against
Apache Kafka 4.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

ConfigValue = str | int | float | bool
Config = dict[str, object]

PREFETCH_BYTES_MAX = 64 * 1024 * 1024
_FETCH_BYTES_MAX = 4 * 1024 * 1024
"""One fetch response. Each broker may have one on its way when the prefetch is full: with several
the bound is overshot by one of these for each but the first."""

_SET_BY = {
    "bootstrap.servers": "bootstrap_servers",
    "metadata.broker.list": "bootstrap_servers",
    "group.id": "group_id",
    "group.protocol": "group_protocol",
    "max.poll.interval.ms": "max_poll_interval_ms",
    "session.timeout.ms": "session_timeout_ms",
    "transaction.timeout.ms": "transaction_timeout_ms",
}
"""Keys that have a setting of their own."""

_FIXED = frozenset(
    {
        # Offsets are committed by the core, after durability, and by nobody else.
        "enable.auto.commit",
        "auto.commit.enable",
        "enable.auto.offset.store",
        "offset.store.method",
        "auto.offset.reset",
        "isolation.level",
        "enable.partition.eof",
        # Rebalances are incremental and every member of the group agrees on how.
        "partition.assignment.strategy",
        "group.protocol.type",
        # A result is durable when all in-sync replicas have it, each once.
        "acks",
        "request.required.acks",
        "enable.idempotence",
        "max.in.flight",
        "max.in.flight.requests.per.connection",
        "retries",
        "message.send.max.retries",
        "message.timeout.ms",
        "delivery.timeout.ms",
        "message.max.bytes",
        "transactional.id",
        "delivery.report.only.error",
        "dr_cb",
        "dr_msg_cb",
        "on_delivery",
        # Keys land on the partitions on which Java clients put them.
        "partitioner",
        "partitioner_cb",
        # A misspelt topic is an error, and none is hidden.
        "topic.blacklist",
        "allow.auto.create.topics",
        "default.topic.config",
        # Callbacks are ours; a cluster inside the process would take the records with it.
        "error_cb",
        "on_commit",
        "logger",
        "test.mock.num.brokers",
        # A client that has lost its brokers is noticed by these.
        "statistics.interval.ms",
        "stats_cb",
    }
)

_MOVED_TO_BROKER = frozenset({"heartbeat.interval.ms", "session.timeout.ms"})
"""With KIP-848 the broker decides: group.consumer.* in its configuration."""

_CONSUMER_KEYS = frozenset(
    {
        "check.crcs",
        "consume.callback.max.messages",
        "fetch.error.backoff.ms",
        "fetch.max.bytes",
        "fetch.message.max.bytes",
        "fetch.min.bytes",
        "fetch.queue.backoff.ms",
        "fetch.wait.max.ms",
        "group.instance.id",
        "group.remote.assignor",
        "heartbeat.interval.ms",
        "coordinator.query.interval.ms",
        "max.partition.fetch.bytes",
        "queued.max.messages.kbytes",
        "queued.min.messages",
    }
)
_PRODUCER_KEYS = frozenset(
    {
        "batch.num.messages",
        "batch.size",
        "compression.codec",
        "compression.level",
        "compression.type",
        "enable.gapless.guarantee",
        "linger.ms",
        "queue.buffering.backpressure.threshold",
        "queue.buffering.max.kbytes",
        "queue.buffering.max.messages",
        "queue.buffering.max.ms",
        "queuing.strategy",
        "request.timeout.ms",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "sticky.partitioning.linger.ms",
    }
)


class KafkaConfigError(Exception):
    """A setting or an override is wrong: the message is one line that names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaOptions:
    """What both clients are made of.

    `overrides` are raw librdkafka keys. `message_timeout_ms`: a record not acknowledged by then is
    reported as the topic's fault; keep it well below the longest outage that is to be borne.
    """

    bootstrap_servers: str
    group_id: str
    client_id: str = "aggregator"
    group_protocol: Literal["classic", "consumer"] = "classic"
    max_poll_interval_ms: int = 300_000
    session_timeout_ms: int = 45_000
    message_timeout_ms: int = 30_000
    overrides: Mapping[str, ConfigValue] = field(default_factory=dict)


def check_overrides(options: KafkaOptions) -> None:
    """Raise `KafkaConfigError`, naming the key, for the first override that is refused."""
    for key in options.overrides:
        if options.group_protocol == "consumer" and key in _MOVED_TO_BROKER:
            raise KafkaConfigError(
                f"kafka override {key!r} is refused: with group_protocol = consumer the broker "
                f"decides it (group.consumer.{key} in the broker's configuration)"
            )
        if key in _SET_BY:
            raise KafkaConfigError(
                f"kafka override {key!r} is refused: use the setting {_SET_BY[key]}"
            )
        if key in _FIXED:
            raise KafkaConfigError(
                f"kafka override {key!r} is refused: the delivery guarantees stand on it"
            )


def consumer_config(options: KafkaOptions) -> Config:
    """Return the consumer's configuration. Raises `KafkaConfigError`."""
    check_overrides(options)
    config: Config = {
        # The default of 500 adds up to that much where a broker answers an empty fetch late.
        "fetch.wait.max.ms": 10,
        # After a queue was full: the default is a second without records.
        "fetch.queue.backoff.ms": 10,
        # One queue of all partitions: the limit is the whole consumer's, but for one response.
        "queued.max.messages.kbytes": (PREFETCH_BYTES_MAX - _FETCH_BYTES_MAX) // 1024,
        "queued.min.messages": 20_000,
        "fetch.max.bytes": _FETCH_BYTES_MAX,
        # How long records of an added partition lie unseen: at the default of five minutes they
        # outlive their time to live there.
        "topic.metadata.refresh.interval.ms": 10_000,
        **_common(options),
        **_overrides(options, leave_out=_PRODUCER_KEYS),
        "group.id": options.group_id,
        "group.protocol": options.group_protocol,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "isolation.level": "read_committed",
        "allow.auto.create.topics": False,
        "max.poll.interval.ms": options.max_poll_interval_ms,
    }
    if options.group_protocol == "classic":
        config["partition.assignment.strategy"] = "cooperative-sticky"
        config["session.timeout.ms"] = options.session_timeout_ms
        config.setdefault("heartbeat.interval.ms", min(3_000, options.session_timeout_ms // 3))
    return config


def producer_config(
    options: KafkaOptions, *, message_bytes_max: int, batch_bytes_max: int
) -> Config:
    """Return the producer's configuration. Raises `KafkaConfigError`.

    `message_bytes_max` is the largest `max.message.bytes` of the topics written to, so that the
    broker is the judge of a record's size. `batch_bytes_max` is the smallest: a produce batch over
    it would be refused for no fault of its records.
    """
    check_overrides(options)
    config: Config = {
        # Whatever waits for a request in flight forms the next batch by itself: at 0, 0.5, 1, 5 ms
        # a hop took 1.2, 2.0, 2.1, 6.2 ms at low load, for the same CPU per record.
        "linger.ms": 0,
        "queue.buffering.max.messages": 500_000,
        "queue.buffering.max.kbytes": 384 * 1024,
        **_common(options),
        **_overrides(options, leave_out=_CONSUMER_KEYS),
        "acks": "all",
        "enable.idempotence": True,
        "partitioner": "murmur2_random",
        "message.timeout.ms": options.message_timeout_ms,
        # librdkafka counts key, value and its own overhead against this one before it sends.
        "message.max.bytes": max(message_bytes_max, 1_000),
        "allow.auto.create.topics": False,
    }
    batch_bytes = options.overrides.get("batch.size", batch_bytes_max)
    if not isinstance(batch_bytes, int) or batch_bytes > batch_bytes_max:
        raise KafkaConfigError(
            f"kafka override 'batch.size' must be at most {batch_bytes_max}, the smallest "
            "max.message.bytes of the topics written to"
        )
    config["batch.size"] = batch_bytes
    linger_ms = config.get("queue.buffering.max.ms", config["linger.ms"])
    if float(str(linger_ms)) >= options.message_timeout_ms:
        raise KafkaConfigError("kafka override 'linger.ms' must be less than message_timeout_ms")
    return config


def transactional_config(
    options: KafkaOptions,
    *,
    transactional_id: str,
    timeout_ms: int,
    message_bytes_max: int,
    batch_bytes_max: int,
) -> Config:
    """Return that of the producer of transactions. Raises `KafkaConfigError`.

    A record that is not acknowledged when three quarters of `timeout_ms` are over has lost its
    transaction: what is left is for aborting it, before the brokers do and fence its owner.
    """
    within = replace(options, message_timeout_ms=timeout_ms * 3 // 4)
    return {
        # A transaction that begins right after the last one is refused until the markers of that
        # are written: with the default of 100, 65 results took 104 ms each time, with 5, 9 ms.
        "retry.backoff.ms": 5,
        **producer_config(
            within, message_bytes_max=message_bytes_max, batch_bytes_max=batch_bytes_max
        ),
        "transactional.id": transactional_id,
        "transaction.timeout.ms": timeout_ms,
    }


def alone_config(config: Config) -> Config:
    """Return the configuration of the producer that puts each record into a batch of its own."""
    return {**config, "batch.num.messages": 1, "linger.ms": 0}


def admin_config(options: KafkaOptions) -> Config:
    """Return the configuration of an admin client: addresses and security."""
    check_overrides(options)
    return {
        **_common(options),
        **_overrides(options, leave_out=_CONSUMER_KEYS | _PRODUCER_KEYS),
    }


def _common(options: KafkaOptions) -> Config:
    return {
        "bootstrap.servers": options.bootstrap_servers,
        "client.id": options.client_id,
        # After an outage: the default is to look again after up to ten seconds.
        "reconnect.backoff.max.ms": 2_000,
    }


def _overrides(options: KafkaOptions, *, leave_out: frozenset[str]) -> Config:
    return {key: value for key, value in options.overrides.items() if key not in leave_out}
