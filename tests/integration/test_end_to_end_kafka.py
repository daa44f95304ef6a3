"""Aggregators as processes on real Apache Kafka: rebalances, SIGTERM and kills, all accounted for.

The simulated engine answers, so what is tested is the delivery, not the vectors.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator

import pytest

from ops.kafka.node import KafkaNode
from tests.harness.kafka_stack import Stack
from tests.harness.ledger import Ledger
from tests.harness.processes import CommandProcess, free_port, simulated_server

pytestmark = pytest.mark.kafka

PARTITIONS = 4


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    port = free_port()
    with simulated_server(port):
        yield port


@pytest.fixture(params=["classic", "consumer"])
def stack(request: pytest.FixtureRequest, kafka: KafkaNode, server_port: int) -> Stack:
    return Stack(kafka.bootstrap_servers, server_port, request.param, PARTITIONS)


@pytest.fixture
def ledger(stack: Stack) -> Iterator[Ledger]:
    ledger = stack.ledger()
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
    assert ledger.committed() == ledger.sent_ends()


def test_sigterm_under_load_leaves_committed_what_is_done(stack: Stack, ledger: Ledger) -> None:
    send(ledger, 8000)
    with stack.aggregator() as process:
        claims(process)
        assert process.terminate() == 0, process.lines[-5:]
    ledger.read(1.0)
    assert len(ledger.results) > 0
    assert sum(ledger.committed().values()) == len(ledger.results)
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
