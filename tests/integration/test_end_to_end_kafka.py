"""Aggregators as processes on real Apache Kafka: rebalances, SIGTERM and kills, all accounted for.

The simulated engine answers, so what is tested is the delivery, not the vectors.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ops.kafka.node import KafkaNode
from tests.harness.ledger import Ledger, Names
from tests.harness.processes import CommandProcess, free_port, simulated_server

pytestmark = pytest.mark.kafka

PARTITIONS = 4


@dataclass
class Stack:
    """Topics and a group of their own on the real broker, and a model server."""

    bootstrap_servers: str
    server_port: int
    protocol: str
    suffix: str

    def settings(self) -> dict[str, str]:
        return {
            "AGGREGATOR_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "AGGREGATOR_MODELS": f"minilm=localhost:{self.server_port}",
            "AGGREGATOR_METRICS_LISTEN": "",
            "AGGREGATOR_GROUP_ID": f"group-{self.suffix}",
            "AGGREGATOR_GROUP_PROTOCOL": self.protocol,
            "AGGREGATOR_QUERIES_TOPIC": f"queries-{self.suffix}",
            "AGGREGATOR_RESULTS_TOPIC": f"results-{self.suffix}",
            "AGGREGATOR_DLQ_TOPIC": f"dlq-{self.suffix}",
        }

    def aggregator(self, **settings: str) -> CommandProcess:
        return CommandProcess("aggregator", "run", environment={**self.settings(), **settings})


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    port = free_port()
    with simulated_server(port):
        yield port


@pytest.fixture(params=["classic", "consumer"])
def stack(request: pytest.FixtureRequest, kafka: KafkaNode, server_port: int) -> Stack:
    stack = Stack(kafka.bootstrap_servers, server_port, request.param, uuid.uuid4().hex[:8])
    create = [sys.executable, "-m", "aggregator", "topics", "create"]
    create += ["--partitions", str(PARTITIONS), "--replication-factor", "1"]
    done = subprocess.run(
        create, env=stack.settings(), capture_output=True, text=True, check=True, timeout=60
    )
    assert f"queries-{stack.suffix}: created, {PARTITIONS} partitions" in done.stdout
    return stack


@pytest.fixture
def ledger(stack: Stack) -> Iterator[Ledger]:
    names = Names(
        queries=f"queries-{stack.suffix}",
        results=f"results-{stack.suffix}",
        dlq=f"dlq-{stack.suffix}",
    )
    ledger = Ledger(stack.bootstrap_servers, names)
    yield ledger
    ledger.close()


NUMBERS = itertools.count()


def send(ledger: Ledger, count: int) -> None:
    for number in itertools.islice(NUMBERS, count):
        value = json.dumps({"text": f"query number {number}"}).encode()
        ledger.send(str(number), value, partition=number % PARTITIONS)
    ledger.flush()


def claims(process: CommandProcess) -> None:
    """Wait until it works."""
    process.wait_for(lambda line: line.get("event") == "claim")


def test_members_come_and_go_and_nothing_is_lost_or_doubled(stack: Stack, ledger: Ledger) -> None:
    send(ledger, 3000)
    with stack.aggregator() as first:
        claims(first)
        with stack.aggregator() as second:
            second.wait_for(lambda line: line.get("event") == "partitions assigned")
            send(ledger, 3000)
            claims(second)
            send(ledger, 3000)
            assert second.terminate() == 0, second.lines[-5:]
            send(ledger, 3000)
            ledger.wait_for_all()
        assert first.terminate() == 0, first.lines[-5:]
    ledger.read(1.0)
    assert (ledger.lost, ledger.duplicates) == ([], 0)
    assert ledger.errors == []
    assert ledger.committed(f"group-{stack.suffix}") == ledger.sent_ends()


def test_sigterm_under_load_leaves_committed_what_is_done(stack: Stack, ledger: Ledger) -> None:
    send(ledger, 8000)
    with stack.aggregator() as process:
        claims(process)
        assert process.terminate() == 0, process.lines[-5:]
    ledger.read(1.0)
    assert len(ledger.results) > 0
    assert sum(ledger.committed(f"group-{stack.suffix}").values()) == len(ledger.results)
    assert ledger.duplicates == 0


def test_a_kill_loses_nothing(stack: Stack, ledger: Ledger) -> None:
    send(ledger, 8000)
    classic = {"AGGREGATOR_SESSION_TIMEOUT_MS": "6000"} if stack.protocol == "classic" else {}
    with stack.aggregator(**classic) as process:
        claims(process)
        time.sleep(0.2)  # so that it is killed in the middle of things
        process.kill()
    with stack.aggregator(**classic) as process:
        ledger.wait_for_all(120)
        assert process.terminate() == 0, process.lines[-5:]
    ledger.read(1.0)
    assert ledger.lost == []
    assert ledger.errors == []
    assert ledger.duplicates <= PARTITIONS * (10_000 + 1_000)
