"""The brokers that other tests stand on: they start, serve, come back, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from aggregator.adapters.mock_broker import MockBroker, MockBrokerError
from ops.kafka.node import CACHE_DIR, KafkaNode, kill_leftovers
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


class Foreground:
    """`make kafka`, with what it says."""

    def __init__(self, data_dir: Path, port: int = 0, *arguments: str) -> None:
        command = [sys.executable, "-m", "ops.kafka", "--port", str(port), *arguments]
        self.process = subprocess.Popen(
            [*command, "--data-dir", str(data_dir)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.data_dir = data_dir

    def address(self) -> str:
        """Where it listens, once it does."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Kafka listens on "), self.process.communicate()
        return line.split()[3].rstrip(",")

    def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send it a signal, twice, as make and a terminal do; its status and its complaints."""
        for _ in range(2):
            self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def nodes(self) -> list[str]:
        """Processes that work on its data."""
        listed = subprocess.run(["ps", "-ww", "-eo", "args="], capture_output=True, check=True)
        lines = listed.stdout.decode(errors="replace").splitlines()
        return [line for line in lines if str(self.data_dir) in line and "kafka.Kafka" in line]


@pytest.fixture
def foreground(tmp_path: Path) -> Iterator[Callable[..., Foreground]]:
    """Start one; what is left of them in the end is killed."""
    started: list[Foreground] = []

    def start(data_dir: str = "node", port: int = 0, *arguments: str) -> Foreground:
        started.append(Foreground(tmp_path / data_dir, port, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()
    kill_leftovers(CACHE_DIR)


@pytest.mark.kafka
def test_foreground_node_takes_over_a_leftover_and_stops_clean(
    foreground: Callable[..., Foreground],
) -> None:
    """A node whose owner was killed is killed first; its records are there; SIGTERM ends it."""
    dead = foreground()
    address = dead.address()
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(30)
    send_one(address, "kept", b"x")
    dead.process.kill()
    dead.process.wait()
    assert len(dead.nodes()) == 1
    port = int(address.rpartition(":")[2])
    node = foreground("node", port)
    assert node.address() == address
    assert len(node.nodes()) == 1
    assert read_one(address, "kept") == b"x"
    assert node.end(signal.SIGTERM) == (0, "")
    assert node.nodes() == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.kafka
def test_a_second_foreground_node_leaves_the_first_alone(
    foreground: Callable[..., Foreground],
) -> None:
    first = foreground()
    address = first.address()
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(30)
    send_one(address, "kept", b"x")
    port = int(address.rpartition(":")[2])
    for second, reason in (
        (
            foreground("node", port, "--fresh"),
            r'uses the data in .*\(make kafka ARGS="--port N --data-dir D"\)',
        ),
        (
            foreground("another", port, "--fresh"),
            r'listens there already, .* \(make kafka ARGS="--port N"\)',
        ),
    ):
        said, complained = second.process.communicate(timeout=60)
        assert (second.process.returncode, said) == (1, "")
        assert re.search(reason, complained), complained
        assert complained.count("\n") == 1
    assert read_one(address, "kept") == b"x"
    assert first.end(signal.SIGINT) == (0, "")


@pytest.mark.kafka
def test_a_foreground_node_that_is_told_to_stop_as_it_starts_leaves_no_process(
    foreground: Callable[..., Foreground],
) -> None:
    node = foreground()
    log = node.data_dir / "node.out"  # made as the node's process is
    while not log.exists() and node.process.poll() is None:
        time.sleep(0.005)
    assert node.end(signal.SIGTERM) == (0, "")
    assert node.nodes() == []
