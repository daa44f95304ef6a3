"""The brokers that other tests stand on: they start, serve, come back, and leave nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from aggregator.adapters.mock_broker import MockBroker, MockBrokerError
from ops.kafka.node import KafkaNode, NodeOptions
from tests.conftest import TopicFactory

OWNER = """
from aggregator.adapters.mock_broker import MockBroker
broker = MockBroker()
broker.start()
print(broker._process.pid, flush=True)
input()
"""


def send_one(bootstrap_servers: str, topic: str, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": bootstrap_servers})
    failures: list[object] = []

    def report(error: object, _: object) -> None:
        failures.append(error)

    producer.produce(topic, value, partition=0, on_delivery=report)
    assert producer.flush(30) == 0
    assert failures == [None]


def read_one(bootstrap_servers: str, topic: str, offset: int = 0) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "reader"})
    consumer.assign([TopicPartition(topic, 0, offset)])
    message = consumer.poll(30)
    consumer.close()
    assert message is not None
    assert message.error() is None
    value = message.value()
    assert value is None or isinstance(value, bytes)
    return value


@pytest.mark.mock_broker
def test_mock_broker_carries_records(mock_broker: MockBroker, mock_topic: TopicFactory) -> None:
    topic = mock_topic(partitions=3)
    send_one(mock_broker.bootstrap_servers, topic, b"x")
    assert read_one(mock_broker.bootstrap_servers, topic) == b"x"
    topics = Producer({"bootstrap.servers": mock_broker.bootstrap_servers}).list_topics().topics
    assert len(topics[topic].partitions) == 3
    with pytest.raises(MockBrokerError, match="already exists"):
        mock_broker.create_topic(topic, 3)


@pytest.mark.mock_broker
def test_mock_broker_ends_with_its_owner() -> None:
    """The child of an owner that is killed ends by itself: its standard input closes."""
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            OWNER,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    child = int(owner.stdout.readline())
    os.kill(child, 0)
    owner.kill()
    owner.communicate()
    # The child is not ours to wait for: ask ps until it is gone (pytest's timeout bounds this).
    while (
        subprocess.run(["ps", "-p", str(child)], capture_output=True, check=False).returncode == 0
    ):
        state = ["ps", "-o", "stat=", "-p", str(child)]
        if subprocess.run(state, capture_output=True, text=True, check=False).stdout[:1] == "Z":
            break


@pytest.mark.kafka
def test_node_carries_records(kafka: KafkaNode, kafka_topic: TopicFactory) -> None:
    topic = kafka_topic()
    send_one(kafka.bootstrap_servers, topic, b"x")
    assert read_one(kafka.bootstrap_servers, topic) == b"x"


@pytest.mark.kafka
def test_foreground_node_takes_over_a_leftover_and_stops_clean(tmp_path: Path) -> None:
    """A node that was left behind is killed first; its records are there; SIGTERM ends it."""
    leftover = KafkaNode(NodeOptions(data_dir=tmp_path / "node"))
    try:
        leftover.start()
        admin = AdminClient({"bootstrap.servers": leftover.bootstrap_servers})
        admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(30)
        send_one(leftover.bootstrap_servers, "kept", b"x")
        command = [sys.executable, "-m", "ops.kafka", "--port", str(leftover.port)]
        node = subprocess.Popen(
            [*command, "--data-dir", str(leftover.data_dir)], stdout=subprocess.PIPE, text=True
        )
        assert node.stdout is not None
        assert leftover.bootstrap_servers in node.stdout.readline()
        assert not leftover.running
        assert read_one(leftover.bootstrap_servers, "kept") == b"x"
        node.terminate()
        node.communicate()
        assert node.returncode == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", leftover.port))
    finally:
        leftover.stop()
