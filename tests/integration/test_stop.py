"""SIGTERM while nobody answers: `drain_deadline_ms` and a stated grace bound the whole end.

How long it takes is told by the process's own log lines. The bounds checked are far from what the
client's own waits add up to (16 s without a broker at start, 35 s with one that is frozen): not
measurements, differences in kind.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime

import pytest

from aggregator.runtime.process import HANG_S, STOP_GRACE_S
from ops.kafka.node import KafkaNode
from tests.conftest import running_node
from tests.harness.ledger import Ledger
from tests.harness.processes import CommandProcess, Line, free_port, simulated_server

DRAIN_S = 1.0
NOTHING_ANSWERS_S = 16.0
"""What looking for a broker takes by itself."""


def aggregator(bootstrap_servers: str, server_port: int, **settings: str) -> CommandProcess:
    return CommandProcess(
        "aggregator",
        "run",
        environment={
            "AGGREGATOR_BOOTSTRAP_SERVERS": bootstrap_servers,
            "AGGREGATOR_MODELS": f"minilm=localhost:{server_port}",
            "AGGREGATOR_METRICS_LISTEN": "",
            "AGGREGATOR_DRAIN_DEADLINE_MS": str(int(DRAIN_S * 1_000)),
            # How long the heir of one that could not leave its group waits.
            "AGGREGATOR_SESSION_TIMEOUT_MS": "6000",
            **settings,
        },
    )


@contextlib.contextmanager
def silent_broker() -> Iterator[str]:
    """Takes connections and says nothing, as a frozen one does."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def absent_broker() -> Iterator[str]:
    yield f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize("broker", [absent_broker, silent_broker])
def test_without_a_broker_at_start_it_ends_at_once(
    broker: Callable[[], AbstractContextManager[str]],
) -> None:
    with broker() as address, aggregator(address, free_port()) as process:
        # It asks for the brokers' topics by now; what it says first is that it can't reach them.
        process.wait_for(lambda line: line.get("event") == "starting")
        signalled = time.monotonic()
        assert process.terminate() == 0, process.lines
        assert time.monotonic() - signalled < NOTHING_ANSWERS_S / 2
        assert not [line for line in process.lines if "Traceback" in str(line)]


@pytest.fixture
def node() -> Iterator[KafkaNode]:
    with running_node() as node:
        yield node
        node.unfreeze()


def moment(line: Line) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


@pytest.mark.kafka
@pytest.mark.parametrize(
    "settings",
    [
        {"AGGREGATOR_GROUP_PROTOCOL": "classic"},
        {"AGGREGATOR_GROUP_PROTOCOL": "consumer"},
        {"AGGREGATOR_DELIVERY": "exactly_once", "AGGREGATOR_INSTANCE_NAME": "one"},
    ],
    ids=["classic", "consumer", "exactly-once"],
)
def test_a_frozen_broker_holds_nobody_up(node: KafkaNode, settings: dict[str, str]) -> None:
    bootstrap = {"AGGREGATOR_BOOTSTRAP_SERVERS": node.bootstrap_servers}
    subprocess.run(
        [sys.executable, "-m", "aggregator", "topics", "create", "--partitions", "2"],
        env=bootstrap,
        check=True,
        timeout=60,
    )
    ledger = Ledger(node.bootstrap_servers)
    port = free_port()
    with (
        contextlib.closing(ledger),
        simulated_server(port),
        aggregator(node.bootstrap_servers, port, **settings) as process,
    ):
        process.wait_for(lambda line: line.get("event") == "partitions assigned")
        for number in range(5_000):
            value = json.dumps({"text": f"query {number}"}).encode()
            ledger.send(str(number), value, partition=number % 2)
        ledger.flush()
        process.wait_for(lambda line: line.get("event") == "claim")
        node.suspend()
        signalled = time.monotonic()
        assert process.terminate() == 0, process.lines[-20:]
        print(f"{time.monotonic() - signalled:.2f} s from the signal to the exit")
        begin = process.wait_for(lambda line: line.get("event") == "draining")
        end = process.wait_for(lambda line: line.get("event") == "stopped")
        print(f"{moment(end) - moment(begin):.2f} s from the signal to the end")
        assert moment(end) - moment(begin) < DRAIN_S + STOP_GRACE_S + HANG_S
        assert end["exit_code"] == 0
        node.unfreeze()
        with aggregator(node.bootstrap_servers, port, **settings) as heir:
            ledger.wait_for_all(120)
            assert ledger.duplicates == 0 or "AGGREGATOR_DELIVERY" not in settings
            assert heir.terminate() == 0, heir.lines[-20:]
