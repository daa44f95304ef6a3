"""The whole aggregator as users run it: a process, a broker, a simulated model server.

The broker is librdkafka's mock cluster, so this runs anywhere; what only a real broker can show is
in the Kafka tier.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from aggregator.adapters.mock_broker import MockBroker
from protos.embedding.v1 import query_pb2
from tests.harness.ledger import Ledger
from tests.harness.processes import CommandProcess, free_port, simulated_server

pytestmark = pytest.mark.mock_broker

PARTITIONS = 3
PROTOBUF = {"content-type": b"application/protobuf"}
TOPICS = {"queries": PARTITIONS, "results": 2, "queries.dlq": 1}

BAD = {
    "garbage": (b"\x00garbage", {}, "INVALID_ARGUMENT", "UNDECODABLE"),
    "garbage as protobuf": (b"\xff\xff", PROTOBUF, "INVALID_ARGUMENT", "UNDECODABLE"),
    "tombstone": (None, {}, "INVALID_ARGUMENT", "UNDECODABLE"),
    "protobuf tombstone": (None, PROTOBUF, "INVALID_ARGUMENT", "UNDECODABLE"),
    "empty": (b"", {}, "INVALID_ARGUMENT", "UNDECODABLE"),
    "content type": (b"a", {"content-type": b"text/csv"}, "INVALID_ARGUMENT", "UNDECODABLE"),
    "no text": (b"{}", {}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    "empty text": (b'{"text": ""}', {}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    "negative ttl": (b'{"text": "a", "ttl_ms": -1}', {}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    "unknown model": (b'{"text": "a", "model": "gpt"}', {}, "NOT_FOUND", "MODEL_UNKNOWN"),
    "bad dimensions": (b'{"text": "a", "dimensions": 7}', {}, "INVALID_ARGUMENT", "INVALID_FIELD"),
    "too long": (
        json.dumps({"text": "word " * 5000}).encode(),
        {},
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
    ),
    "headers": (b'{"text": "a"}', {"big": bytes(20_000)}, "INVALID_ARGUMENT", "HEADERS_TOO_LARGE"),
    "fails alone": (b'{"text": "please raise"}', {}, "INTERNAL", "ENGINE_FAILED_ALONE"),
    "not finite": (b'{"text": "please nan"}', {}, "INTERNAL", "NOT_FINITE"),
}
"""Records that get an error: value, headers, code, reason."""
LETTERS = {
    *("garbage", "garbage as protobuf", "tombstone", "protobuf tombstone", "empty"),
    *("content type", "fails alone", "not finite"),
}
FAULTS = json.dumps({"please raise": "raise", "please nan": "nan"})


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    with MockBroker(TOPICS) as broker:
        yield broker


@pytest.fixture
def ledger(broker: MockBroker) -> Iterator[Ledger]:
    ledger = Ledger(broker.bootstrap_servers)
    yield ledger
    ledger.close()


@pytest.fixture(scope="module")
def server_port() -> Iterator[int]:
    port = free_port()
    with simulated_server(port, MODEL_SERVER_SIMULATED__FAULTS=FAULTS):
        yield port


def aggregator(broker: MockBroker, server_port: int, **settings: str) -> CommandProcess:
    return CommandProcess(
        "aggregator",
        "run",
        environment={
            "AGGREGATOR_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
            "AGGREGATOR_MODELS": f"minilm=localhost:{server_port}",
            "AGGREGATOR_METRICS_LISTEN": "",
            # The mock cluster ignores that a member leaves: a successor waits for this long.
            "AGGREGATOR_SESSION_TIMEOUT_MS": "2000",
            **settings,
        },
    )


def send_good(ledger: Ledger, count: int) -> None:
    """JSON and Protobuf in turns, over all partitions."""
    for number in range(count):
        text = f"good query number {number}"
        if number % 2:
            value = query_pb2.Query(id=f"id-{number}", text=text).SerializeToString()
            ledger.send(f"good {number}", value, PROTOBUF, partition=number % PARTITIONS)
        else:
            value = json.dumps({"id": f"id-{number}", "text": text}).encode()
            ledger.send(f"good {number}", value, partition=number % PARTITIONS)


def test_one_record_in_one_result_out(broker: MockBroker, ledger: Ledger, server_port: int) -> None:
    send_good(ledger, 500)
    for number, (name, (value, headers, _, _)) in enumerate(BAD.items()):
        ledger.send(name, value, headers, partition=number % PARTITIONS)
    send_good(ledger, 500)
    ledger.flush()
    with aggregator(broker, server_port) as process:
        ledger.wait_for_all()
        status = process.terminate()
    ledger.read(1.0)
    assert status == 0, process.lines[-5:]
    assert (ledger.lost, ledger.duplicates) == ([], 0)
    for name, (_, _, code, reason) in BAD.items():
        result = ledger.result_of(name)
        assert (name, result.status, result.fields["error"]["reason"]) == (name, code, reason)
    good = [r for results in ledger.results.values() for r in results if r.ok]
    assert len(good) == 1000
    assert {len(r.vector) for r in good if r.vector is not None} == {384}
    assert {ledger.sent[place] for place in ledger.letters} == LETTERS
    assert set(ledger.letters.values()) == {1}
    assert ledger.committed() == ledger.sent_ends()


def test_sigterm_in_the_middle_loses_and_doubles_nothing(
    broker: MockBroker, ledger: Ledger, server_port: int
) -> None:
    send_good(ledger, 6000)
    ledger.flush()
    with aggregator(broker, server_port) as process:
        process.wait_for(lambda line: line.get("event") == "claim")
        assert process.terminate() == 0, process.lines[-5:]
    ledger.read(1.0)
    done = len(ledger.results)
    assert done > 0
    committed = sum(ledger.committed().values())
    assert committed == done, "what has a result is committed, and nothing else is"
    with aggregator(broker, server_port) as process:
        ledger.wait_for_all()
        assert process.terminate() == 0
    ledger.read(1.0)
    assert (ledger.lost, ledger.duplicates) == ([], 0)
    assert ledger.committed() == ledger.sent_ends()


def test_a_kill_loses_nothing(broker: MockBroker, ledger: Ledger, server_port: int) -> None:
    send_good(ledger, 6000)
    ledger.flush()
    with aggregator(broker, server_port) as process:
        process.wait_for(lambda line: line.get("event") == "claim")
        process.kill()
    with aggregator(broker, server_port) as process:
        ledger.wait_for_all()
        assert process.terminate() == 0
    ledger.read(1.0)
    assert (ledger.lost, ledger.errors) == ([], [])


def test_a_model_server_that_dies_under_load_costs_nobody_a_result(
    broker: MockBroker, ledger: Ledger, server_port: int
) -> None:
    port = free_port()
    servers = f"minilm=localhost:{server_port},localhost:{port}"
    with (
        simulated_server(port) as second,
        aggregator(broker, server_port, AGGREGATOR_MODELS=servers) as process,
    ):
        process.wait_for(lambda line: str(line.get("server")).endswith(str(port)))
        send_good(ledger, 6000)
        ledger.flush()
        process.wait_for(
            lambda line: line.get("event") == "claim" and line["server"].endswith(str(port))
        )
        second.kill()
        process.wait_for(lambda line: line.get("event") == "no stream")
        ledger.wait_for_all()
        assert process.terminate() == 0
    ledger.read(1.0)
    assert (ledger.lost, ledger.duplicates, ledger.errors) == ([], 0, [])


def test_queries_wait_for_a_server_that_comes_later(
    broker: MockBroker, ledger: Ledger, server_port: int
) -> None:
    port = free_port()
    metrics = free_port()
    with aggregator(broker, port, AGGREGATOR_METRICS_LISTEN=f"127.0.0.1:{metrics}") as process:
        send_good(ledger, 50)
        ledger.flush()
        process.wait_for(lambda line: line.get("event") == "no stream")
        process.wait_for(lambda line: line.get("event") == "partitions assigned")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{metrics}/readyz")
        assert b"no server of minilm is ready" in refused.value.read()
        with simulated_server(port):
            ledger.wait_for_all()
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/readyz") as ready:
                assert ready.read() == b"ok\n"
            assert process.terminate() == 0
    assert ledger.errors == []


def test_sigterm_before_it_works_ends_with_0(broker: MockBroker, server_port: int) -> None:
    with aggregator(broker, server_port) as process:
        process.wait_for(lambda line: line.get("event") == "topics")
        assert process.terminate() == 0, process.lines
        assert not [line for line in process.lines if line.get("event") == "claim"]


def test_brokers_that_are_not_there_are_waited_for_aloud(
    broker: MockBroker, server_port: int
) -> None:
    address = f"127.0.0.1:{free_port()}"
    with aggregator(broker, server_port, AGGREGATOR_BOOTSTRAP_SERVERS=address) as process:
        assert process.wait() == 1
        (waiting,) = [
            line for line in process.lines if line.get("event") == "waiting for the brokers"
        ]
        assert waiting["bootstrap_servers"] == address
        (last,) = [line["text"] for line in process.lines if "text" in line]
    assert last == f"Error: no Kafka broker answers at {address}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"AGGREGATOR_RESULTS_TOPIC": "missing"}, "missing"),
        ({"AGGREGATOR_TTL": "5"}, "did you mean AGGREGATOR_TTL_MS"),
        ({"AGGREGATOR_KAFKA__acks": "1"}, "'acks' is refused"),
        ({"AGGREGATOR_MODELS__minilm__TOKENIZER": "/nowhere.json"}, "/nowhere.json"),
        ({"AGGREGATOR_METRICS_LISTEN": "TAKEN"}, "Address already in use"),
    ],
)
def test_what_is_wrong_at_start_is_one_line(
    broker: MockBroker, server_port: int, settings: dict[str, str], message: str
) -> None:
    taken = f"127.0.0.1:{server_port}"
    settings = {k: taken if v == "TAKEN" else v for k, v in settings.items()}
    with aggregator(broker, server_port, **settings) as process:
        assert process.wait() == 1
        texts = [line["text"] for line in process.lines if "text" in line]
    (line,) = texts
    assert line.startswith("Error: ")
    assert message in line
