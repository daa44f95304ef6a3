"""Fixtures that more than one tier uses: brokers and topics.

Nothing starts before a test asks for it. What a tier needs and this machine lacks is a visible
skip on a developer's machine and a failure with CI=true.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from aggregator.adapters.mock_broker import MockBroker
from ops.kafka.node import KafkaNode, KafkaUnavailableError

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

# Examples are judged by what they show, never by the time that a busy machine takes for them.
settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a job in the background: all that tests start would be deaf to SIGINT too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Engines of an environment of their own are asked for by name, and then must be there."""
    parser.addoption(
        "--engine",
        action="append",
        default=[],
        metavar="NAME",
        help="test this engine instead of those of the development environment (may be repeated)",
    )


TopicFactory = Callable[..., str]
"""`make(prefix="topic", partitions=1, **config)` -> name; underscores in config keys are dots."""


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or fail it where every tier must run."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI=true forbids skipping a tier: {reason}")
    pytest.skip(reason)


def unique_name(prefix: str) -> str:
    """Return a name that no other test uses: for topics, groups, transactional ids."""
    return f"{prefix}-{uuid.uuid4().hex[:10]}"


@contextlib.contextmanager
def running_node() -> Iterator[KafkaNode]:
    """A real Apache Kafka node of one's own, where one can run."""
    node = KafkaNode()
    try:
        node.start()
    except KafkaUnavailableError as error:
        unavailable(str(error))
    try:
        yield node
    finally:
        node.stop()


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaNode]:
    """One real Apache Kafka node for the whole session; `bootstrap_servers` is its address.

    Tests that kill or freeze it start their own.
    """
    with running_node() as node:
        yield node


def wait_until_known(admin: AdminClient, topic: str) -> None:
    """A topic is made a moment before the broker tells its leaders."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        found = admin.list_topics(timeout=30).topics.get(topic)
        if found and not found.error and all(p.leader >= 0 for p in found.partitions.values()):
            return
        time.sleep(0.01)
    pytest.fail(f"topic {topic} was made but did not appear")


def topic_factory(kafka: KafkaNode) -> TopicFactory:
    """Make topics of unique names on a real node."""
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})

    def make(prefix: str = "topic", partitions: int = 1, **config: str) -> str:
        name = unique_name(prefix)
        dotted = {key.replace("_", "."): value for key, value in config.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=dotted)
        admin.create_topics([topic])[name].result(30)
        wait_until_known(admin, name)
        return name

    return make


@pytest.fixture
def kafka_topic(kafka: KafkaNode) -> TopicFactory:
    """Make topics of unique names on the node of all tests."""
    return topic_factory(kafka)


@pytest.fixture
def mock_broker() -> Iterator[MockBroker]:
    """A mock cluster of its own for this test."""
    with MockBroker() as broker:
        yield broker


@pytest.fixture
def mock_topic(mock_broker: MockBroker) -> TopicFactory:
    """Make topics of unique names on the mock cluster, which knows no topic settings."""

    def make(prefix: str = "topic", partitions: int = 1) -> str:
        name = unique_name(prefix)
        mock_broker.create_topic(name, partitions)
        return name

    return make
