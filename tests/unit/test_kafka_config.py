"""Configuration of the Kafka clients: what is fixed, what is refused, what goes where."""

from __future__ import annotations

from typing import Any

import pytest

from aggregator.adapters.kafka_config import (
    PREFETCH_BYTES_MAX,
    ConfigValue,
    KafkaConfigError,
    KafkaOptions,
    admin_config,
    alone_config,
    consumer_config,
    producer_config,
    transactional_config,
)
from aggregator.adapters.kafka_sink import KafkaSink, SinkOptions
from aggregator.adapters.kafka_source import KafkaSource, SourceOptions
from aggregator.settings import AggregatorSettings


def options(overrides: dict[str, ConfigValue] | None = None, **more: Any) -> KafkaOptions:
    return KafkaOptions(bootstrap_servers="host:1", group_id="g", overrides=overrides or {}, **more)


def producer(kafka: KafkaOptions) -> dict[str, object]:
    return producer_config(kafka, message_bytes_max=2_000_000, batch_bytes_max=1_000_000)


def test_delivery_stands_on_these() -> None:
    reads = consumer_config(options())
    assert reads["enable.auto.commit"] is False
    assert reads["enable.auto.offset.store"] is False
    assert reads["auto.offset.reset"] == "earliest"
    assert reads["partition.assignment.strategy"] == "cooperative-sticky"
    writes = producer(options())
    assert writes["acks"] == "all"
    assert writes["enable.idempotence"] is True
    assert writes["partitioner"] == "murmur2_random"
    assert writes["batch.size"] == 1_000_000
    assert writes["message.max.bytes"] == 2_000_000


def test_prefetch_is_bounded() -> None:
    reads = consumer_config(options())
    queued, fetch = reads["queued.max.messages.kbytes"], reads["fetch.max.bytes"]
    assert isinstance(queued, int)
    assert isinstance(fetch, int)
    assert queued * 1024 + fetch <= PREFETCH_BYTES_MAX


def test_an_added_partition_is_seen_before_its_records_expire() -> None:
    refresh_ms = consumer_config(options())["topic.metadata.refresh.interval.ms"]
    assert isinstance(refresh_ms, int)
    assert refresh_ms * 2 < AggregatorSettings.model_fields["ttl_ms"].default


@pytest.mark.parametrize(
    "key",
    [
        "acks",
        "request.required.acks",
        "auto.offset.reset",
        "bootstrap.servers",
        "default.topic.config",
        "delivery.report.only.error",
        "delivery.timeout.ms",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.idempotence",
        "enable.partition.eof",
        "group.id",
        "group.protocol",
        "isolation.level",
        "max.poll.interval.ms",
        "message.timeout.ms",
        "metadata.broker.list",
        "on_delivery",
        "partition.assignment.strategy",
        "partitioner",
        "retries",
        "session.timeout.ms",
        "test.mock.num.brokers",
        "transaction.timeout.ms",
        "transactional.id",
    ],
)
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_overrides_that_would_break_delivery_are_refused_by_name(key: str, protocol: Any) -> None:
    kafka = options({key: "1"}, group_protocol=protocol)
    for build in (consumer_config, producer, admin_config):
        with pytest.raises(KafkaConfigError, match=f"'{key}'"):
            build(kafka)


def test_what_kip_848_moved_to_the_broker_is_refused_there_only() -> None:
    heartbeat: dict[str, ConfigValue] = {"heartbeat.interval.ms": 100}
    assert consumer_config(options(heartbeat))["heartbeat.interval.ms"] == 100
    with pytest.raises(KafkaConfigError, match=r"group\.consumer\.heartbeat\.interval\.ms"):
        consumer_config(options(heartbeat, group_protocol="consumer"))
    reads = consumer_config(options(group_protocol="consumer"))
    moved = {"session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy"}
    assert not moved & reads.keys()


def test_overrides_reach_the_client_they_belong_to() -> None:
    kafka = options({"linger.ms": 5, "fetch.wait.max.ms": 50, "security.protocol": "ssl"})
    assert consumer_config(kafka)["fetch.wait.max.ms"] == 50
    assert "linger.ms" not in consumer_config(kafka)
    assert producer(kafka)["linger.ms"] == 5
    assert "fetch.wait.max.ms" not in producer(kafka)
    for config in (consumer_config(kafka), producer(kafka), admin_config(kafka)):
        assert config["security.protocol"] == "ssl"
    assert not {"linger.ms", "fetch.wait.max.ms"} & admin_config(kafka).keys()


def test_produce_batches_fit_the_smallest_topic() -> None:
    assert producer(options({"batch.size": 1_000}))["batch.size"] == 1_000
    for value in (1_000_001, "many"):
        with pytest.raises(KafkaConfigError, match=r"'batch\.size' must be at most 1000000"):
            producer(options({"batch.size": value}))


def test_a_transaction_and_its_records_time_out_together() -> None:
    config = transactional_config(
        options({"linger.ms": 2}),
        transactional_id="group/one",
        timeout_ms=7_000,
        message_bytes_max=1_000_000,
        batch_bytes_max=900_000,
    )
    assert config["transactional.id"] == "group/one"
    assert (config["transaction.timeout.ms"], config["message.timeout.ms"]) == (7_000, 5_250)
    plain = producer(options({"linger.ms": 2}))
    for key in ("acks", "enable.idempotence", "partitioner", "linger.ms"):
        assert config[key] == plain[key]
    assert config["batch.size"] == 900_000
    assert config["retry.backoff.ms"] == 5


def test_alone_means_one_record_a_batch() -> None:
    config = alone_config(producer(options({"batch.num.messages": 500})))
    assert config["batch.num.messages"] == 1
    assert config["linger.ms"] == 0


def test_linger_must_be_less_than_the_outage_that_is_reported() -> None:
    with pytest.raises(KafkaConfigError, match=r"linger\.ms"):
        producer(options({"linger.ms": 2_000}, message_timeout_ms=2_000))


class _Silent:
    """A listener for clients that never connect."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize("overrides", [{"no.such.key": 1}, {"socket.timeout.ms": "soon"}])
def test_unknown_keys_and_values_are_one_clear_line(overrides: dict[str, ConfigValue]) -> None:
    (key,) = overrides
    with pytest.raises(KafkaConfigError, match=key):
        KafkaSource(SourceOptions(kafka=options(overrides), topic="t"), _Silent())
    with pytest.raises(KafkaConfigError, match=key):
        KafkaSink(SinkOptions(kafka=options(overrides)), _Silent())
