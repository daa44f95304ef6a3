"""When a client counts as cut off: its own statistics, against an answer to another client."""

from __future__ import annotations

import json

import pytest

from aggregator.adapters import kafka_watch
from aggregator.adapters.kafka_config import KafkaOptions
from aggregator.adapters.kafka_sink import KafkaSink, SinkOptions
from aggregator.adapters.kafka_source import KafkaSource, SourceOptions
from aggregator.adapters.kafka_transactions import KafkaTransactions, TransactionsOptions
from aggregator.adapters.kafka_watch import ConnectionWatch, brokers_answer
from aggregator.adapters.mock_broker import MockBroker
from tests.contract.kafka_world import Told
from tests.harness.processes import free_port

COORDINATOR = ("logical", "UP")
LOST = [COORDINATOR, ("internal", "UP"), ("learned", "INIT")]
KEPT = [("learned", "DOWN"), ("configured", "UP")]


class Watched:
    """A watch in a time of its own, whose brokers answer when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.answers = True
        self.asked = self.received = 0
        self.told: list[str] = []
        monkeypatch.setattr(kafka_watch, "brokers_answer", self._answer)
        self._watch = ConnectionWatch(
            "consumer",
            KafkaOptions(bootstrap_servers="b", group_id="g"),
            self.told.append,
            clock_s=lambda: self.now_s,
        )

    def _answer(self, _options: KafkaOptions) -> bool:
        self.asked += 1
        return self.answers

    @property
    def connected(self) -> bool:
        return self._watch.connected

    def look(
        self, brokers: list[tuple[str, str]], *, after_s: float = 5.0, received: int = 0
    ) -> list[str]:
        """Let it look, and end the question that it asks."""
        self.now_s += after_s
        self.received += received
        states = {
            str(i): {"name": str(i), "source": source, "state": state, "rx": self.received}
            for i, (source, state) in enumerate(brokers)
        }
        self._watch.look(json.dumps({"brokers": states}))
        if self._watch._question is not None:
            self._watch._question.join()
        return self.told


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_client_without_a_connection_is_cut_off_when_others_are_answered(
    watched: Watched,
) -> None:
    assert watched.look(KEPT) == watched.look(LOST) == []
    assert watched.asked == 0
    assert watched.look(LOST) == []  # they are asked, and answer
    assert watched.look(LOST) == []
    assert watched.look(LOST) == []  # and again
    (message,) = watched.look(LOST)
    assert message.startswith("the Kafka consumer has had no connection for 20 s")
    assert watched.look(LOST) == [message]
    assert watched.asked == 2


def test_one_that_has_no_broker_at_all_is_so_too(watched: Watched) -> None:
    for _ in range(5):
        watched.look([COORDINATOR])
    assert watched.told


def test_while_no_broker_answers_anybody_it_is_an_outage(watched: Watched) -> None:
    watched.answers = False
    for _ in range(100):
        assert watched.look(LOST) == []
    assert watched.asked == 99
    watched.answers = True
    assert watched.look(LOST) == watched.look(LOST) == watched.look(LOST) == []
    assert watched.look(LOST)


def test_brokers_that_answer_now_and_then_are_an_outage_too(watched: Watched) -> None:
    for number in range(100):
        watched.answers = number % 3 == 0
        assert watched.look(LOST) == []


def test_a_connection_between_two_looks_counts(watched: Watched) -> None:
    for _ in range(10):
        for received in (0, 0, 0, 1):
            assert watched.look(LOST, received=received) == []


def test_one_that_connects_again_is_not(watched: Watched) -> None:
    for _ in range(10):
        for brokers in (LOST, LOST, LOST, KEPT):
            assert watched.look(brokers) == []
            assert watched.connected == (brokers is KEPT)


def test_a_process_that_was_frozen_is_asked_about_first(watched: Watched) -> None:
    watched.look(LOST)
    assert watched.look(LOST, after_s=3_600) == []
    assert watched.look(KEPT) == []


def test_brokers_that_answer_name_themselves() -> None:
    with MockBroker() as broker:
        assert brokers_answer(
            KafkaOptions(bootstrap_servers=broker.bootstrap_servers, group_id="g")
        )


def test_all_clients_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_watch, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(kafka_watch, "PATIENCE_S", 0.0)
    monkeypatch.setattr(kafka_watch, "brokers_answer", lambda _options: True)
    kafka = KafkaOptions(bootstrap_servers=f"127.0.0.1:{free_port()}", group_id="group")
    by_source, by_sink, by_transactions = Told(), Told(), Told()
    source = KafkaSource(SourceOptions(kafka=kafka, topic="queries"), by_source)
    sink: KafkaSink[int] = KafkaSink(SinkOptions(kafka=kafka), by_sink)
    transactions: KafkaTransactions[int] = KafkaTransactions(
        TransactionsOptions(kafka=kafka, instance_name="one"), by_transactions
    )
    source.start()
    transactions.start(source)
    for told, name in (
        (by_source, "the Kafka consumer "),
        (by_sink, "the Kafka producer "),
        (by_transactions, "the Kafka producer of transactions "),
    ):
        told.wait(lambda: [m for m, fatal in told.faults if fatal and m.startswith(name)])  # noqa: B023
    assert transactions.close()
    sink.close()
    assert source.close(60.0)
