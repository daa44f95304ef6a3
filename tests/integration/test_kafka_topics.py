"""Topics against real Kafka and the mock cluster: created as they must be, checked at start."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from aggregator.adapters.kafka_config import KafkaOptions
from aggregator.adapters.kafka_topics import (
    LETTER_EXTRA_BYTES,
    TopicPlan,
    Topics,
    TopicsError,
    check_topics,
    create_topics,
    outcome_lines,
)
from aggregator.adapters.mock_broker import MockBroker
from ops.kafka.node import KafkaNode, free_port
from tests.conftest import TopicFactory, unique_name

FALLBACK = 777_777


def options_of(bootstrap_servers: str) -> KafkaOptions:
    return KafkaOptions(bootstrap_servers=bootstrap_servers, group_id="g")


def check(bootstrap_servers: str, queries: str, results: str, dlq: str) -> Topics:
    return check_topics(
        options_of(bootstrap_servers),
        queries=queries,
        results=results,
        dlq=dlq,
        fallback_max_message_bytes=FALLBACK,
    )


@pytest.mark.kafka
def test_transactions_on_one_replica_are_warned_of(
    kafka: KafkaNode, kafka_topic: TopicFactory
) -> None:
    queries, results, dlq = kafka_topic(), kafka_topic(), kafka_topic()
    found = check_topics(
        options_of(kafka.bootstrap_servers),
        queries=queries,
        results=results,
        dlq=dlq,
        fallback_max_message_bytes=FALLBACK,
        transactions=True,
    )
    (warning,) = [line for line in found.warnings if "replica" in line]
    assert warning.startswith(f"one replica in {results}, {dlq}")
    assert queries not in warning
    plain = check(kafka.bootstrap_servers, queries, results, dlq)
    assert not [line for line in plain.warnings if "replica" in line]


def config_of(node: KafkaNode, topic: str) -> dict[str, str]:
    admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
    resource = ConfigResource(ResourceType.TOPIC, topic)
    entries = admin.describe_configs([resource])[resource].result(30)
    return {key: entry.value for key, entry in entries.items()}


@pytest.mark.kafka
def test_created_topics_are_as_they_must_be(kafka: KafkaNode) -> None:
    name = unique_name("made")
    plan = TopicPlan(queries=name, results=f"{name}-results", dlq=f"{name}.dlq", partitions=3)
    options = options_of(kafka.bootstrap_servers)
    outcomes = create_topics(options, plan)
    assert [(o.name, o.created, o.partitions, o.notes) for o in outcomes] == [
        (plan.queries, True, 3, []),
        (plan.results, True, 3, []),
        (plan.dlq, True, 3, []),
    ]
    queries, results, dlq = (config_of(kafka, o.name) for o in outcomes)
    assert queries["message.timestamp.type"] == "LogAppendTime"
    assert results["cleanup.policy"] == dlq["cleanup.policy"] == "delete"
    limit = int(queries["max.message.bytes"])
    assert int(dlq["max.message.bytes"]) == limit + LETTER_EXTRA_BYTES
    # Again: nothing changes, and nothing is wrong with them.
    again = create_topics(options, plan)
    assert [(o.created, o.notes) for o in again] == [(False, [])] * 3
    assert outcome_lines(again)[0] == f"{plan.queries}: exists, 3 partitions"
    found = check(kafka.bootstrap_servers, plan.queries, plan.results, plan.dlq)
    assert found == Topics(
        message_bytes={
            plan.results: int(results["max.message.bytes"]),
            plan.dlq: limit + LETTER_EXTRA_BYTES,
        },
        cluster_id=found.cluster_id,
    )
    assert found.cluster_id
    assert found.message_bytes_min == int(results["max.message.bytes"])
    assert found.message_bytes_max == limit + LETTER_EXTRA_BYTES


@pytest.mark.kafka
def test_existing_topics_are_reported_on(kafka: KafkaNode, kafka_topic: TopicFactory) -> None:
    queries, results, dlq = kafka_topic("q"), kafka_topic("r"), kafka_topic("d")
    plan = TopicPlan(queries=queries, results=results, dlq=dlq)
    outcomes = {o.name: o for o in create_topics(options_of(kafka.bootstrap_servers), plan)}
    assert not any(o.created for o in outcomes.values())
    assert "LogAppendTime" in outcomes[queries].notes[0]
    assert "max.message.bytes" in outcomes[dlq].notes[0]
    found = check(kafka.bootstrap_servers, queries, results, dlq)
    assert found.warnings == outcomes[dlq].notes


@pytest.mark.kafka
@pytest.mark.parametrize("what", ["results", "dead letter"])
def test_compacted_topics_are_refused(
    kafka: KafkaNode, kafka_topic: TopicFactory, what: str
) -> None:
    queries, results, dlq = kafka_topic("q"), kafka_topic("r"), kafka_topic("d")
    for policy in ("compact", "compact,delete"):
        compacted = kafka_topic("c", cleanup_policy=policy)
        if what == "results":
            results = compacted
        else:
            dlq = compacted
        with pytest.raises(TopicsError, match=rf"^{what} topic '{compacted}' is compacted"):
            check(kafka.bootstrap_servers, queries, results, dlq)
        with pytest.raises(TopicsError, match="is compacted"):
            create_topics(
                options_of(kafka.bootstrap_servers),
                TopicPlan(queries=queries, results=results, dlq=dlq),
            )


@pytest.mark.kafka
def test_missing_topic_is_named_and_not_created(
    kafka: KafkaNode, kafka_topic: TopicFactory
) -> None:
    queries, results = kafka_topic("q"), kafka_topic("r")
    missing = unique_name("missing")
    for _ in range(2):  # the first look has not created it
        with pytest.raises(TopicsError, match=rf"'{missing}' does not exist"):
            check(kafka.bootstrap_servers, queries, results, missing)
    with pytest.raises(TopicsError, match="three topics"):
        check(kafka.bootstrap_servers, queries, results, queries)


@pytest.mark.mock_broker
def test_limits_that_cannot_be_read_fall_back(
    mock_broker: MockBroker, mock_topic: TopicFactory
) -> None:
    queries, results, dlq = mock_topic("q"), mock_topic("r"), mock_topic("d")
    found = check(mock_broker.bootstrap_servers, queries, results, dlq)
    assert (found.message_bytes_min, found.message_bytes_max) == (FALLBACK, FALLBACK)
    assert len(found.warnings) == 2
    assert str(FALLBACK) in found.warnings[0]
    with pytest.raises(TopicsError, match="was not created"):
        create_topics(
            options_of(mock_broker.bootstrap_servers),
            TopicPlan(queries="new", results=results, dlq=dlq),
        )


def test_no_broker_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aggregator.adapters.kafka_topics.TIMEOUT_S", 0.3)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(TopicsError, match=f"^no Kafka broker answers at {address}$"):
        check(address, "q", "r", "d")
    with pytest.raises(TopicsError, match=f"^no Kafka broker answers at {address}$"):
        create_topics(options_of(address), TopicPlan(queries="q", results="r", dlq="d"))
