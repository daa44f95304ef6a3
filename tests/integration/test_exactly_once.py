"""Exactly once on real Apache Kafka: what readers of committed results see, whatever dies.

The ledger reads with `isolation.level = read_committed`; the simulated engine answers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from aggregator.adapters.mock_broker import MockBroker
from ops.kafka.node import KafkaNode, NodeOptions, free_port
from tests.harness.kafka_stack import Stack
from tests.harness.ledger import Ledger
from tests.harness.processes import CommandProcess, Line, simulated_server

pytestmark = pytest.mark.kafka

WAIT_S = 60.0
EXACTLY_ONCE = {
    "AGGREGATOR_DELIVERY": "exactly_once",
    "AGGREGATOR_INSTANCE_NAME": "one",
}


@dataclass
class ExactStack(Stack):
    """With aggregators that commit transactions, under one name unless told otherwise."""

    extra: dict[str, str] = field(default_factory=lambda: dict(EXACTLY_ONCE))
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def settings(self) -> dict[str, str]:
        return {**super().settings(), **self.extra}

    def send(self, ledger: Ledger, count: int, **fields: object) -> None:
        """Put so many queries on all partitions in turn."""
        for number in itertools.islice(self.numbers, count):
            value = json.dumps({"text": f"query number {number}", **fields}).encode()
            ledger.send(str(number), value, partition=number % self.partitions)
        ledger.flush()


def works(line: Line) -> bool:
    """Whether a log line says that a claim was answered."""
    return line.get("event") == "claim"


def has_partitions(line: Line) -> bool:
    """Whether a log line says that partitions were assigned."""
    return line.get("event") == "partitions assigned"


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    port = free_port()
    with simulated_server(port):
        yield port


@pytest.fixture(params=["classic", "consumer"])
def stack(request: pytest.FixtureRequest, kafka: KafkaNode, server_port: int) -> ExactStack:
    return made(kafka.bootstrap_servers, server_port, request.param)


@pytest.fixture
def one_stack(kafka: KafkaNode, server_port: int) -> ExactStack:
    """Where the group's protocol makes no difference."""
    return made(kafka.bootstrap_servers, server_port, "consumer")


def made(bootstrap_servers: str, server_port: int, protocol: str) -> ExactStack:
    stack = ExactStack(bootstrap_servers, server_port, protocol)
    if protocol == "classic":
        stack.extra["AGGREGATOR_SESSION_TIMEOUT_MS"] = "6000"
    return stack


@pytest.fixture
def open_ledger() -> Iterator[Callable[[ExactStack], Ledger]]:
    ledgers: list[Ledger] = []

    def make(stack: ExactStack) -> Ledger:
        ledgers.append(Ledger(stack.bootstrap_servers, stack.names))
        return ledgers[-1]

    yield make
    for ledger in ledgers:
        ledger.close()


def written(stack: ExactStack) -> int:
    """How many results are on the topic, those of aborted and open transactions too."""
    consumer = Consumer(
        {
            "bootstrap.servers": stack.bootstrap_servers,
            "group.id": "written",
            "isolation.level": "read_uncommitted",
            "enable.auto.commit": False,
        }
    )
    places = [TopicPartition(stack.names.results, number, 0) for number in range(stack.partitions)]
    ends = {p.partition: consumer.get_watermark_offsets(p, WAIT_S)[1] for p in places}
    consumer.assign(places)
    count = 0
    while any(p.offset < ends[p.partition] for p in consumer.position(places) if ends[p.partition]):
        count += sum(message.error() is None for message in consumer.consume(5_000, 0.2))
    consumer.close()
    return count


def judge(stack: ExactStack, ledger: Ledger) -> None:
    """Every query has one result that readers see, and the group has committed them all."""
    ledger.wait_for_all(120)
    ledger.read(1.0)
    assert (ledger.lost, ledger.duplicates) == ([], 0)
    assert ledger.committed() == ledger.sent_ends()


def test_members_come_and_go_and_no_result_is_seen_twice(
    stack: ExactStack, open_ledger: Callable[[ExactStack], Ledger]
) -> None:
    ledger = open_ledger(stack)
    stack.send(ledger, 2_000)
    with stack.aggregator() as first:
        first.wait_for(works)
        with stack.aggregator(AGGREGATOR_INSTANCE_NAME="two") as second:
            second.wait_for(has_partitions)
            stack.send(ledger, 2_000)
            second.wait_for(works)
            assert second.terminate() == 0, second.lines[-5:]
            stack.send(ledger, 1_000)
            ledger.wait_for_all(120)
        assert first.terminate() == 0, first.lines[-5:]
    judge(stack, ledger)
    assert ledger.errors == []


def test_sigterm_under_load_leaves_seen_what_is_committed(
    stack: ExactStack, open_ledger: Callable[[ExactStack], Ledger]
) -> None:
    ledger = open_ledger(stack)
    stack.send(ledger, 8_000)
    with stack.aggregator() as process:
        process.wait_for(works)
        assert process.terminate() == 0, process.lines[-5:]
    ledger.read(1.0)
    assert len(ledger.results) > 0
    assert sum(ledger.committed().values()) == len(ledger.results)
    assert ledger.duplicates == 0
    assert written(stack) == len(ledger.results)  # nothing was aborted


def held_back(stack: ExactStack) -> bool:
    """Whether an open transaction holds results: what is written is more than what can be seen."""
    ends: list[list[int]] = []
    for isolation in ("read_committed", "read_uncommitted"):
        consumer = Consumer(
            {
                "bootstrap.servers": stack.bootstrap_servers,
                "group.id": "ends",
                "isolation.level": isolation,
            }
        )
        places = [TopicPartition(stack.names.results, n) for n in range(stack.partitions)]
        ends.append([consumer.get_watermark_offsets(place, WAIT_S)[1] for place in places])
        consumer.close()
    return any(seen < end for seen, end in zip(*ends, strict=True))


def kill_in_transaction(process: CommandProcess, stack: ExactStack) -> None:
    """Stop it, look, and kill it if it has results in an open transaction, else go on."""
    for _ in range(100):
        process.freeze()
        if held_back(stack):
            process.kill()
            return
        process.thaw()
        process.wait_for(works, after=len(process.lines))
    raise AssertionError("never stopped with a transaction open")


def test_kills_in_the_middle_of_transactions_are_never_seen(
    stack: ExactStack, open_ledger: Callable[[ExactStack], Ledger]
) -> None:
    ledger = open_ledger(stack)
    stack.send(ledger, 10_000)
    for _ in range(2):
        with stack.aggregator() as process:
            process.wait_for(works)
            kill_in_transaction(process, stack)
        ledger.read(0.5)
        assert ledger.duplicates == 0
        stack.send(ledger, 1_000)
    with stack.aggregator() as process:
        judge(stack, ledger)
        assert process.terminate() == 0, process.lines[-5:]
    assert written(stack) > len(ledger.results)


def test_a_restart_under_the_same_name_fences_the_predecessor(
    one_stack: ExactStack, open_ledger: Callable[[ExactStack], Ledger]
) -> None:
    stack, ledger = one_stack, open_ledger(one_stack)
    stack.send(ledger, 4_000)
    with stack.aggregator() as first:
        first.wait_for(works)
        with stack.aggregator() as second:
            second.wait_for(has_partitions)
            stack.send(ledger, 400)
            assert first.wait() == 1
            [error] = [line["text"] for line in first.lines if "text" in line]
            assert error.startswith(
                "Error: fenced: another aggregator has started as instance_name 'one' of group "
                f"'{stack.names.group}', or a transaction outlasted transaction_timeout_ms ("
            )
            judge(stack, ledger)
            assert second.terminate() == 0, second.lines[-5:]


def test_a_result_too_large_for_its_topic_aborts_nothing(
    one_stack: ExactStack, open_ledger: Callable[[ExactStack], Ledger]
) -> None:
    stack, ledger = one_stack, open_ledger(one_stack)
    stack.configure(stack.names.results, "max.message.bytes", "1500")
    stack.send(ledger, 200, encoding="ubinary")
    stack.send(ledger, 50)  # 384 numbers as JSON
    stack.send(ledger, 200, encoding="ubinary")
    ledger.send("unreadable", b"{")
    ledger.flush()
    with stack.aggregator() as process:
        judge(stack, ledger)
        assert process.terminate() == 0, process.lines[-5:]
    reasons = [
        result.fields["error"]["reason"] for (result,) in ledger.results.values() if not result.ok
    ]
    assert sorted(reasons) == ["RESULT_TOO_LARGE"] * 50 + ["UNDECODABLE"]
    assert sum(ledger.letters.values()) == 1
    assert written(stack) == len(ledger.results)  # none was begun and aborted


def test_a_limit_lowered_later_costs_an_abort_and_no_result(
    one_stack: ExactStack, open_ledger: Callable[[ExactStack], Ledger]
) -> None:
    """The broker refuses whole batches; their records are sent alone, and the large one smaller."""
    stack, ledger = one_stack, open_ledger(one_stack)
    with stack.aggregator() as process:
        process.wait_for(has_partitions)
        stack.configure(stack.names.results, "max.message.bytes", "1500")
        stack.send(ledger, 20, encoding="ubinary")
        stack.send(ledger, 2)
        judge(stack, ledger)
        assert process.terminate() == 0, process.lines[-5:]
    assert len(ledger.errors) == 2
    assert all("RESULT_TOO_LARGE" in line for line in ledger.errors)


def test_queries_of_transactional_producers_leave_no_lag(
    one_stack: ExactStack, open_ledger: Callable[[ExactStack], Ledger]
) -> None:
    """Markers and aborted records are offsets without queries."""
    stack, ledger = one_stack, open_ledger(one_stack)
    producer = Producer(
        {"bootstrap.servers": stack.bootstrap_servers, "transactional.id": stack.suffix}
    )
    producer.init_transactions(WAIT_S)
    for round_number in range(6):
        producer.begin_transaction()
        for number in range(20):
            value = json.dumps({"text": f"query {round_number} {number}"}).encode()
            producer.produce(stack.names.queries, value, partition=number % stack.partitions)
        producer.flush(WAIT_S)
        if round_number % 2:
            producer.abort_transaction(WAIT_S)
        else:
            producer.commit_transaction(WAIT_S)
    ends = dict.fromkeys(range(stack.partitions), 36)  # of each: 30 records, 6 markers
    with stack.aggregator() as process:
        ledger.wait_until(lambda: ledger.committed() == ends)
        assert process.terminate() == 0, process.lines[-5:]
    ledger.read(1.0)
    assert [len(results) for results in ledger.results.values()] == [1] * 60


def test_a_killed_broker_costs_a_restart_at_most(
    server_port: int, open_ledger: Callable[[ExactStack], Ledger], kafka: KafkaNode
) -> None:
    """It comes back within the transaction's timeout or later: a fenced process is restarted."""
    del kafka  # only for its check that Kafka can run here
    with KafkaNode(NodeOptions()) as node:
        stack = made(node.bootstrap_servers, server_port, "consumer")
        stack.extra["AGGREGATOR_TRANSACTION_TIMEOUT_MS"] = "2000"
        ledger = open_ledger(stack)
        stack.send(ledger, 6_000)
        process = stack.aggregator()
        try:
            process.wait_for(works)
            node.kill()
            node.start()
            while ledger.lost:
                ledger.read()
                if not process.running:
                    assert process.wait() == 1
                    process = restarted(process, stack)
            judge(stack, ledger)
            assert process.terminate() == 0, process.lines[-5:]
        finally:
            with process:
                pass


def test_an_abort_that_does_not_end_ends_the_process_inside_the_callback(
    kafka: KafkaNode,
) -> None:
    """It doesn't leave the group; the broker is frozen from the revoke on."""
    del kafka  # only for its check that Kafka can run here
    port = free_port()
    slow = simulated_server(port, MODEL_SERVER_SIMULATED__FIXED_MS="200")
    with KafkaNode(NodeOptions()) as node, slow:
        stack = made(node.bootstrap_servers, port, "consumer")
        stack.extra["AGGREGATOR_TRANSACTION_TIMEOUT_MS"] = "1000"
        stack.extra["AGGREGATOR_REVOKE_DEADLINE_MS"] = "2000"
        ledger = stack.ledger()
        stack.send(ledger, 4_000)
        with stack.aggregator() as first:
            first.wait_for(works)
            with stack.aggregator(AGGREGATOR_INSTANCE_NAME="two") as second:
                first.wait_for(lambda line: line.get("event") == "partitions revoked")
                node.suspend()
                assert first.wait() == 1
                node.unfreeze()
                [error] = [line["text"] for line in first.lines if "text" in line]
                assert error == "Error: the open transaction was not aborted within 1 s"
                judge(stack, ledger)
                assert second.terminate() == 0, second.lines[-5:]
        ledger.close()


def restarted(process: CommandProcess, stack: ExactStack) -> CommandProcess:
    """What a supervisor does."""
    with process:
        return stack.aggregator()


def test_start_fails_without_a_name_and_says_so(one_stack: ExactStack) -> None:
    settings = one_stack.settings()
    del settings["AGGREGATOR_INSTANCE_NAME"]
    with CommandProcess("aggregator", "run", environment=settings) as process:
        assert process.wait() == 1
        [line] = process.lines
        assert line["text"] == (
            "Error: instance_name is required with delivery = exactly_once: unique in the group, "
            "and the same after a restart"
        )


@pytest.mark.mock_broker
def test_start_is_refused_on_the_mock_cluster(mock_broker: MockBroker) -> None:
    for topic in ("queries", "results", "queries.dlq"):
        mock_broker.create_topic(topic, 1)
    environment = {
        "AGGREGATOR_BOOTSTRAP_SERVERS": mock_broker.bootstrap_servers,
        "AGGREGATOR_MODELS": "minilm=localhost:1",
        "AGGREGATOR_METRICS_LISTEN": "",
        **EXACTLY_ONCE,
    }
    with CommandProcess("aggregator", "run", environment=environment) as process:
        assert process.wait() == 1
        [error] = [line["text"] for line in process.lines if "text" in line]
        assert error == (
            "Error: delivery = exactly_once needs real brokers: the transactions of librdkafka's "
            "mock cluster commit and abort nothing"
        )
