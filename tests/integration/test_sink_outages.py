"""A topic that can't be written, each way on a real broker.

What an outage leaves is the same whatever caused it: the process lives, results and dead letters
are held, no offset passes them, and all is written once the topic can be; after
`sink_outage_ms_max` the process stops with one clear line, and its successor has it all.

The broker has an authorizer and two listeners: the aggregator's user has rights that a test takes
away, everybody else may do anything.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.cimpl import NewTopic

from ops.kafka.node import KafkaNode, NodeOptions, free_port
from tests.conftest import unique_name, wait_until_known
from tests.harness.processes import CommandProcess, Line, simulated_server

pytestmark = pytest.mark.kafka

WAIT_S = 60.0
USER, PASSWORD = "aggregator", "secret"
HELD_MS, STOPS_MS = 32_000, 4_000
"""`sink_outage_ms_max`: far longer than the outage; shorter."""


class Broker:
    """A node with an authorizer, and a listener on which the aggregator is somebody."""

    def __init__(self) -> None:
        port, controller, self.sasl_port = free_port(), free_port(), free_port()
        self.existing: set[str] = set()
        clients = f"PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{self.sasl_port}"
        module = "org.apache.kafka.common.security.plain.PlainLoginModule"
        self.node = KafkaNode(
            NodeOptions(
                port=port,
                controller_port=controller,
                overrides=(
                    ("listeners", f"{clients},CONTROLLER://127.0.0.1:{controller}"),
                    ("advertised.listeners", clients),
                    (
                        "listener.security.protocol.map",
                        "PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
                    ),
                    ("sasl.enabled.mechanisms", "PLAIN"),
                    (
                        "listener.name.sasl_plaintext.plain.sasl.jaas.config",
                        f'{module} required user_{USER}="{PASSWORD}";',
                    ),
                    (
                        "authorizer.class.name",
                        "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                    ),
                    ("super.users", "User:ANONYMOUS"),
                ),
            )
        )

    @cached_property
    def admin(self) -> AdminClient:
        """As a user who may do anything."""
        return AdminClient({"bootstrap.servers": self.node.bootstrap_servers, "log_level": 2})

    def allow(self, kind: ResourceType, name: str, operation: AclOperation) -> None:
        for future in self.admin.create_acls([_rule(kind, name, operation)]).values():
            future.result(WAIT_S)

    def deny_writing(self, topic: str) -> None:
        """Take the right to write it away; the broker's copy of the rules follows in a moment."""
        rule = AclBindingFilter(
            ResourceType.TOPIC,
            topic,
            ResourcePatternType.LITERAL,
            f"User:{USER}",
            "*",
            AclOperation.WRITE,
            AclPermissionType.ALLOW,
        )
        for future in self.admin.delete_acls([rule]).values():
            future.result(WAIT_S)

    def create_with_two_replicas(self, names: Sequence[str], folder: Path) -> None:
        """Topics with a replica on a second broker, which then goes for good.

        Where there is but one replica, a broker asks for no more, whatever min.insync.replicas is.
        """
        data = folder / "second" / "data"
        data.mkdir(parents=True)
        first = self.node.data_dir / "data" / "meta.properties"
        (cluster,) = [line for line in first.read_text().splitlines() if "cluster.id" in line]
        (data / "meta.properties").write_text(f"version=1\nnode.id=2\n{cluster}\n")
        port = free_port()
        listener = f"PLAINTEXT://127.0.0.1:{port}"
        options = NodeOptions(
            data_dir=folder / "second",
            port=port,
            overrides=(
                ("process.roles", "broker"),
                ("node.id", "2"),
                ("controller.quorum.voters", f"1@127.0.0.1:{self.node.controller_port}"),
                ("listeners", listener),
                ("advertised.listeners", listener),
            ),
        )
        topics = [NewTopic(name, num_partitions=1, replica_assignment=[[1, 2]]) for name in names]
        with KafkaNode(options):
            for future in self.admin.create_topics(topics).values():
                future.result(WAIT_S)
            for name in names:
                wait_until_known(self.admin, name)
        wait(
            lambda: {
                tuple(self.admin.list_topics(name, WAIT_S).topics[name].partitions[0].isrs)
                for name in names
            },
            lambda found: found == {(1,)},
        )

    def create(self, name: str) -> None:
        if name in self.existing:
            return
        self.admin.create_topics([NewTopic(name, 1, 1)])[name].result(WAIT_S)
        wait_until_known(self.admin, name)

    def delete(self, name: str) -> None:
        self.admin.delete_topics([name])[name].result(WAIT_S)

    def set(self, topic: str, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        self.admin.incremental_alter_configs([resource])[resource].result(WAIT_S)


def _rule(kind: ResourceType, name: str, operation: AclOperation) -> AclBinding:
    return AclBinding(
        kind,
        name,
        ResourcePatternType.LITERAL,
        f"User:{USER}",
        "*",
        operation,
        AclPermissionType.ALLOW,
    )


@pytest.fixture(scope="module")
def broker(kafka: KafkaNode) -> Iterator[Broker]:
    del kafka  # only for its check that Kafka can run here
    broker = Broker()
    with broker.node:
        yield broker


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    port = free_port()
    slow = json.dumps({"faults": {"slow": "slow"}, "slow_ms": 150})
    with simulated_server(port, MODEL_SERVER_SIMULATED=slow):
        yield port


@dataclass
class Stack:
    """Topics and a group of their own, and what came of each record."""

    broker: Broker
    server_port: int
    name: str = field(default_factory=lambda: unique_name("outage"))
    metrics_port: int = field(default_factory=free_port)
    linger_ms: int = 0

    def __post_init__(self) -> None:
        self.queries, self.results, self.letters = (
            f"{self.name}-{part}" for part in ("queries", "results", "letters")
        )
        self.end = 0
        """The offset behind the last query sent."""
        self._undecodable: list[int] = []
        for topic in (self.queries, self.results, self.letters):
            self.broker.create(topic)
        self.broker.allow(ResourceType.TOPIC, self.queries, AclOperation.READ)
        self.broker.allow(ResourceType.GROUP, self.name, AclOperation.READ)
        for topic in (self.results, self.letters):
            self.broker.allow(ResourceType.TOPIC, topic, AclOperation.WRITE)

    def aggregator(self, sink_outage_ms_max: int) -> CommandProcess:
        sasl = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
            "reconnect.backoff.max.ms": 500,
            "linger.ms": self.linger_ms,
        }
        process = CommandProcess(
            "aggregator",
            "run",
            environment={
                "AGGREGATOR_BOOTSTRAP_SERVERS": f"127.0.0.1:{self.broker.sasl_port}",
                "AGGREGATOR_KAFKA": json.dumps(sasl),
                "AGGREGATOR_MODELS": f"minilm=127.0.0.1:{self.server_port}",
                "AGGREGATOR_METRICS_LISTEN": f"127.0.0.1:{self.metrics_port}",
                "AGGREGATOR_GROUP_ID": self.name,
                "AGGREGATOR_GROUP_PROTOCOL": "consumer",
                "AGGREGATOR_QUERIES_TOPIC": self.queries,
                "AGGREGATOR_RESULTS_TOPIC": self.results,
                "AGGREGATOR_DLQ_TOPIC": self.letters,
                "AGGREGATOR_TTL_MS": "0",
                "AGGREGATOR_SINK_OUTAGE_MS_MAX": str(sink_outage_ms_max),
            },
        )
        process.wait_for(lambda line: line.get("event") == "partitions assigned")
        return process

    def send(self, text: str = "query", *, bad: bool = True) -> None:
        """Twenty queries; with `bad`, every fourth undecodable: it has a dead letter too."""
        producer = Producer(self._address)
        for number in range(self.end, self.end + 20):
            value = json.dumps({"text": f"{text} {number}"}).encode()
            if bad and number % 4 == 0:
                value = b"\xff"
                self._undecodable.append(number)
            producer.produce(self.queries, value)
        self.end += 20
        assert producer.flush(WAIT_S) == 0

    @property
    def _address(self) -> dict[str, str | int]:
        address = self.broker.node.bootstrap_servers
        return {"bootstrap.servers": address, "log_level": 2, "reconnect.backoff.max.ms": 500}

    def expected(self, first_result: int, first_letter: int) -> tuple[list[int], list[int]]:
        """What is to be settled, each once: results and letters of offsets from these on."""
        letters = [number for number in self._undecodable if number >= first_letter]
        return list(range(first_result, self.end)), letters

    def settled(self) -> tuple[list[int], list[int]]:
        """Offsets of queries that have a result, and of those that have a dead letter."""
        results = [json.loads(value)["source"]["offset"] for value, _ in self._read(self.results)]
        letters = [
            int(headers["__aggregator.errors.offset"]) for _, headers in self._read(self.letters)
        ]
        return sorted(results), sorted(letters)

    def check_committed(self) -> None:
        """What came before the outage is committed, and nothing without its result and letter.

        A broker follows a change of its rules in a moment, so more than the former may be.
        """
        committed = self.committed()
        assert SETTLED <= committed < self.end
        results, letters = self.settled()
        since = set(range(SETTLED, committed))
        assert since <= set(results)
        assert since & set(self._undecodable) <= set(letters)

    def _read(self, topic: str) -> list[tuple[Any, Any]]:
        """Values and headers to the topic's end; nothing if it is missing."""
        reader = self._consumer()
        try:
            reader.assign([TopicPartition(topic, 0, 0)])
            found: list[tuple[Any, Any]] = []
            while True:
                message = reader.poll(WAIT_S)
                assert message is not None
                error = message.error()
                if error is None:
                    found.append((message.value(), dict(message.headers() or [])))
                elif error.code() == KafkaError._PARTITION_EOF:
                    return found
                else:
                    assert error.retriable() or error.code() == KafkaError._TRANSPORT, error
        finally:
            reader.close()

    def _consumer(self) -> Consumer:
        settings = {"group.id": self.name, "enable.partition.eof": True, **self._address}
        return Consumer({**settings, "enable.auto.commit": False, "fetch.wait.max.ms": 10})

    def committed(self) -> int:
        """The group's offset; asked again while a broker that has just started looks for it."""
        member = self._consumer()
        deadline_s = time.monotonic() + WAIT_S
        try:
            while True:
                try:
                    (place,) = member.committed([TopicPartition(self.queries, 0)], timeout=WAIT_S)
                except KafkaException:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.05)
                else:
                    return place.offset
        finally:
            member.close()

    def metric(self, name: str) -> float:
        """A sample of the aggregator, by its name with its labels."""
        address = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(address, timeout=WAIT_S) as answer:
            for line in answer.read().decode().splitlines():
                sample, _, value = line.rpartition(" ")
                if sample == name:
                    return float(value)
        raise AssertionError(f"no metric {name}")


def wait(ask: Callable[[], Any], holds: Callable[[Any], bool]) -> None:
    """Ask until it holds; fails with the last answer."""
    deadline_s = time.monotonic() + WAIT_S
    while not holds(last := ask()):
        assert time.monotonic() < deadline_s, last
        time.sleep(0.05)


@pytest.fixture(scope="module")
def replicated(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Names of stacks whose topics have two replicas, one of them gone."""
    names = [unique_name("pair") for _ in range(4)]
    topics = [f"{name}-{part}" for name in names for part in ("results", "letters")]
    broker.create_with_two_replicas(topics, tmp_path_factory.mktemp("pair"))
    broker.existing.update(topics)
    return iter(names)


@pytest.fixture
def stack(request: pytest.FixtureRequest, broker: Broker, server_port: int, kind: str) -> Stack:
    if OUTAGES[kind].replicated:
        name = next(request.getfixturevalue("replicated"))
        return Stack(broker, server_port, name=name)
    return Stack(broker, server_port, linger_ms=OUTAGES[kind].linger_ms)


@dataclass(frozen=True)
class Outage:
    """`says`: the cause that the one clear line names besides the topic, if the client tells it."""

    begin: Callable[[Stack], None]
    end: Callable[[Stack], None]
    says: str = ""
    deletes_results: bool = False
    deletes_letters: bool = False
    broker_away: bool = False
    replicated: bool = False
    linger_ms: int = 0

    def strike(self, stack: Stack, process: CommandProcess) -> None:
        """Begin it, with queries that have been settled, and others that are to be."""
        stack.send()
        wait(stack.committed, lambda offset: offset == stack.end)
        if self.broker_away:
            # They must have been read before, and their results must come after.
            stack.send("slow", bad=False)
            in_flight = 'aggregator_in_flight_queries{model="minilm"}'
            wait(lambda: stack.metric(in_flight), lambda number: number == 20)
            self.begin(stack)
        else:
            self.begin(stack)
            stack.send()

    def expected(self, stack: Stack) -> tuple[list[int], list[int]]:
        """What is on the topics in the end: what a topic held is gone when it is deleted."""
        return stack.expected(
            SETTLED if self.deletes_results else 0, SETTLED if self.deletes_letters else 0
        )


SETTLED = 20
"""Queries before the outage."""


def denied(part: str) -> Outage:
    return Outage(
        begin=lambda stack: stack.broker.deny_writing(f"{stack.name}-{part}"),
        end=lambda stack: stack.broker.allow(
            ResourceType.TOPIC, f"{stack.name}-{part}", AclOperation.WRITE
        ),
        says="uthoriz",
    )


def deleted(part: str) -> Outage:
    return Outage(
        begin=lambda stack: stack.broker.delete(f"{stack.name}-{part}"),
        end=lambda stack: stack.broker.create(f"{stack.name}-{part}"),
        deletes_results=part == "results",
        deletes_letters=part == "letters",
    )


def under_replicated(part: str) -> Outage:
    return Outage(
        begin=lambda stack: stack.broker.set(f"{stack.name}-{part}", "min.insync.replicas", "2"),
        end=lambda stack: stack.broker.set(f"{stack.name}-{part}", "min.insync.replicas", "1"),
        replicated=True,
    )


def too_late(part: str) -> Outage:
    """Bounds of a topic that this host's clock is beyond: records are older than it takes any."""
    bound = "message.timestamp.before.max.ms"
    return Outage(
        begin=lambda stack: stack.broker.set(f"{stack.name}-{part}", bound, "0"),
        end=lambda stack: stack.broker.set(f"{stack.name}-{part}", bound, str(2**63 - 1)),
        says="imestamp",
        linger_ms=20,
    )


OUTAGES = {
    "results not authorised": denied("results"),
    "letters not authorised": denied("letters"),
    "results deleted": deleted("results"),
    "letters deleted": deleted("letters"),
    "results with too few replicas": under_replicated("results"),
    "letters with too few replicas": under_replicated("letters"),
    "results too late": too_late("results"),
    "letters too late": too_late("letters"),
    "broker away": Outage(
        begin=lambda stack: stack.broker.node.kill(),
        end=lambda stack: stack.broker.node.start(),
        broker_away=True,
    ),
}


def topic_fault(line: Line) -> bool:
    return line.get("event") == "writes failed" and line.get("fault") == "topic"


@pytest.mark.parametrize("kind", OUTAGES)
def test_it_is_borne_and_all_is_written_once_afterwards(stack: Stack, kind: str) -> None:
    outage = OUTAGES[kind]
    with stack.aggregator(HELD_MS) as process:
        outage.strike(stack, process)
        process.wait_for(topic_fault)
        wait(lambda: stack.metric("aggregator_partitions_paused"), lambda paused: paused == 1)
        if not outage.broker_away:
            stack.send()
            # Few of the first twenty may have been written: a broker follows its rules in a moment.
            assert SETTLED <= stack.committed() < SETTLED + 20
        outage.end(stack)
        wait(stack.committed, lambda offset: offset == stack.end)
        assert process.terminate() == 0, process.lines[-5:]
    assert stack.settled() == outage.expected(stack)


@pytest.mark.parametrize("kind", OUTAGES)
def test_one_that_lasts_stops_the_process_and_the_next_has_it_all(stack: Stack, kind: str) -> None:
    outage = OUTAGES[kind]
    with stack.aggregator(STOPS_MS) as process:
        outage.strike(stack, process)
        assert process.wait() == 1
        (line,) = [line["text"] for line in process.lines if "text" in line]
    what = "dead letter" if kind.startswith("letters") else "results"
    assert line.startswith(f"Error: the {what} topic could not be written for ")
    assert f"{stack.name}-{'letters' if what == 'dead letter' else 'results'}: " in line
    assert outage.says in line
    outage.end(stack)
    stack.check_committed()
    with stack.aggregator(HELD_MS) as process:
        wait(stack.committed, lambda offset: offset == stack.end)
        assert process.terminate() == 0, process.lines[-5:]
    # At least once: what was durable above the committed offset comes again.
    results, letters = stack.settled()
    assert (sorted(set(results)), sorted(set(letters))) == outage.expected(stack)


def test_a_topic_that_takes_no_form_of_a_letter_stops_the_process(
    broker: Broker, server_port: int
) -> None:
    """A compacted topic takes no record without a key, and what is refused has no smaller form."""
    stack = Stack(broker, server_port)
    with stack.aggregator(HELD_MS) as process:
        stack.send()
        wait(stack.committed, lambda offset: offset == stack.end)
        broker.set(stack.letters, "cleanup.policy", "compact")
        stack.send()
        assert process.wait() == 1
        (line,) = [line["text"] for line in process.lines if "text" in line]
    assert line.startswith("Error: the smallest form of a dead letter was refused: ")
    assert f"{stack.letters}: " in line
    stack.check_committed()
    broker.set(stack.letters, "cleanup.policy", "delete")
    with stack.aggregator(HELD_MS) as process:
        wait(stack.committed, lambda offset: offset == stack.end)
        assert process.terminate() == 0, process.lines[-5:]
    results, letters = stack.settled()
    assert (sorted(set(results)), letters) == stack.expected(0, 0)
