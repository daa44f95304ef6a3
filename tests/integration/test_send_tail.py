"""`aggregator send` and `tail` on librdkafka's mock cluster, against a stand-in that answers.

The stand-in is no aggregator: it answers by what a text asks for, in a different order, with other
people's results in between.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from subprocess import PIPE

import numpy as np
import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from aggregator.adapters.mock_broker import MockBroker
from aggregator.commands.send import WINDOW_QUERIES_MAX, send
from aggregator.commands.tail import tail
from protos.embedding.v1 import query_pb2

pytestmark = pytest.mark.mock_broker

VECTOR = np.array([0.5, -0.25, 0.125, 0.0, 1.0], "<f4")
SCALE = 0.5
PARTITIONS = 3


def answer(message: Message, query: query_pb2.Query) -> query_pb2.Result:
    """OK, but for texts that name an error."""
    result = query_pb2.Result(
        id=query.id, model="tiny", tokens=len(query.text.split()), queue_ms=1.25, inference_ms=2.5
    )
    result.source.topic, result.source.offset = str(message.topic()), message.offset() or 0
    if query.text.startswith("error"):
        result.error.code, result.error.reason = "INVALID_ARGUMENT", "INVALID_FIELD"
        result.error.field, result.error.message = "text", "text is not to our liking"
    elif query.encoding == query_pb2.ENCODING_INT8:
        result.embedding, result.dimensions, result.scale = bytes([2, 254]), 2, SCALE
        result.encoding = query_pb2.ENCODING_INT8
    else:
        result.embedding, result.dimensions = VECTOR.tobytes(), len(VECTOR)
        result.encoding = query_pb2.ENCODING_FLOAT32
    return result


def as_json(result: query_pb2.Result) -> bytes:
    """The JSON schema, as far as the stand-in needs it."""
    fields = {"id": result.id, "tokens": result.tokens, "error": None}
    if result.HasField("error"):
        fields["error"] = {"code": result.error.code, "message": result.error.message}
    else:
        fields |= {"embedding": VECTOR.tolist(), "dimensions": len(VECTOR), "encoding": "float32"}
    return json.dumps(fields).encode()


class StandIn:
    """Reads queries, answers each batch in reverse order, doubling texts that ask for it."""

    def __init__(self, servers: str) -> None:
        self.seen: list[query_pb2.Query] = []
        self._stop = threading.Event()
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "stand-in",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
            }
        )
        self._producer = Producer({"bootstrap.servers": servers, "linger.ms": 0})
        self._consumer.assign([TopicPartition("queries", n, 0) for n in range(PARTITIONS)])
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            first = self._consumer.poll(0.05)
            if first is not None:
                for message in reversed([first, *self._consumer.consume(100, 0)]):
                    self._answer(message)
            self._producer.poll(0)
        self._producer.flush(5)

    def _answer(self, message: Message) -> None:
        headers = dict(message.headers() or [])
        value = message.value()
        assert isinstance(value, bytes)
        json_in = headers["content-type"] == b"application/json"
        query = query_pb2.Query(**json.loads(value)) if json_in else query_pb2.Query()
        if not json_in:
            query.ParseFromString(value)
        self.seen.append(query)
        if query.text == "swallow":
            return
        result = answer(message, query)
        content = as_json(result) if json_in else result.SerializeToString()
        own = {"content-type": headers["content-type"], "embedding-id": query.id.encode()}
        if query.text != "bare":
            own |= headers
        for _ in range(2 if query.text == "twice" else 1):
            self._producer.produce("results", content, headers=list(own.items()))
        # Somebody else's.
        self._producer.produce("results", b"{}", headers={"content-type": b"application/json"})


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    with MockBroker({"queries": PARTITIONS, "results": PARTITIONS}) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(scope="module")
def answering(servers: str) -> Iterator[StandIn]:
    stand_in = StandIn(servers)
    yield stand_in
    stand_in.close()


@pytest.fixture
def stand_in(answering: StandIn) -> StandIn:
    answering.seen.clear()
    return answering


def run(servers: str, *arguments: str, lines: bytes | None = None) -> Result:
    return CliRunner().invoke(send, ["-b", servers, *arguments], input=lines)


def test_one_text_is_sent_with_its_fields_and_its_result_is_printed(
    servers: str, stand_in: StandIn
) -> None:
    fields = ["--model", "m", "--input-type", "query", "--dimensions", "5", "--ttl-ms", "900"]
    done = run(servers, "two words", "--id", "mine", "--truncate", *fields)
    assert done.exit_code == 0, done.output
    assert done.stdout == (
        "mine  OK  2 tokens  queue 1.2 ms  inference 2.5 ms  "
        "5 dims [+0.5000 -0.2500 +0.1250 +0.0000 ...]\n"
    )
    assert stand_in.seen == [
        query_pb2.Query(
            id="mine",
            model="m",
            text="two words",
            input_type=query_pb2.INPUT_TYPE_QUERY,
            dimensions=5,
            truncate=True,
            ttl_ms=900,
        )
    ]


def test_lines_are_printed_in_their_order_whatever_order_results_have(
    servers: str, stand_in: StandIn
) -> None:
    count = 2 * WINDOW_QUERIES_MAX + 7
    lines = "".join(f"line{'' if n % 2 else ' x'}\n\n" for n in range(count)).encode()
    done = run(servers, "--id", "l", "--timeout", "60", lines=lines)
    assert done.exit_code == 0, done.stderr
    printed = [line.split("  ") for line in done.stdout.splitlines()]
    assert [words[0] for words in printed] == [f"l-{n}" for n in range(1, count + 1)]
    assert [words[2] for words in printed[:2]] == ["2 tokens", "1 token"]
    assert done.stderr.splitlines()[-1] == f"{count:,} sent, {count:,} OK, 0 errors"


@pytest.mark.parametrize("content_type", ["protobuf", "json"])
def test_json_prints_whole_results_of_both_content_types(
    servers: str, stand_in: StandIn, content_type: str
) -> None:
    done = run(servers, "hello", "--json", "--content-type", content_type)
    assert done.exit_code == 0, done.output
    fields = json.loads(done.stdout)
    assert fields["embedding"] == VECTOR.tolist()
    assert (fields["dimensions"], fields["encoding"], fields["tokens"]) == (5, "float32", 1)


def test_int8_vectors_are_scaled(servers: str, stand_in: StandIn) -> None:
    done = run(servers, "hello", "--encoding", "int8")
    assert "2 dims [+1.0000 -1.0000]" in done.stdout


def test_errors_missing_results_and_bad_lines_fail_the_command(
    servers: str, stand_in: StandIn
) -> None:
    done = run(servers, "--timeout", "3", "--id", "e", lines=b"error\nswallow\n\xff\nfine\n")
    assert done.exit_code == 1
    first, second, third, fourth = done.stdout.splitlines()
    assert first == ("e-1  INVALID_ARGUMENT  INVALID_FIELD (field text): text is not to our liking")
    assert second == "line 2  MISSING  no result within 3 s: is an aggregator running?"
    assert third.startswith("line 3  NOT_SENT  ")
    assert fourth.startswith("e-4  OK  ")
    assert done.stderr.splitlines()[-1] == ("4 sent, 1 OK, 2 errors, 1 without a result in 3 s")


def test_a_text_alone_is_no_line(servers: str, stand_in: StandIn) -> None:
    done = run(servers, "--timeout", "1", "swallow")
    assert done.exit_code == 1
    assert done.stdout == "MISSING  no result within 1 s: is an aggregator running?\n"
    done = run(servers, "--timeout", "1", "--json", "swallow")
    assert list(json.loads(done.stdout)) == ["error"]


def test_a_result_without_our_headers_is_known_by_its_id(servers: str, stand_in: StandIn) -> None:
    done = run(servers, "bare", "--id", "plain")
    assert (done.exit_code, done.stdout.split()[0]) == (0, "plain"), done.output


def test_results_of_an_earlier_run_with_the_same_id_are_not_taken(
    servers: str, stand_in: StandIn
) -> None:
    assert run(servers, "error", "--id", "same").exit_code == 1
    assert run(servers, "fine", "--id", "same").exit_code == 0


def test_tail_prints_what_is_there_and_says_what_is_no_result(
    servers: str, stand_in: StandIn
) -> None:
    assert run(servers, "twice", "--id", "tailed").exit_code == 0
    arguments = ["-b", servers, "--from-beginning", "--count"]
    one = CliRunner().invoke(tail, [*arguments, "1"])
    assert (one.exit_code, len(one.stdout.splitlines())) == (0, 1), one.output
    many = CliRunner().invoke(tail, [*arguments, "1000", "--json"])
    results = [json.loads(line) for line in many.stdout.splitlines()]
    assert len(results) == 1000
    assert all(result.keys() & {"embedding", "error"} for result in results)
    # The other people's.
    assert "not a result (partition " in many.stderr


def test_tail_says_that_it_waits_while_nothing_comes() -> None:
    with MockBroker({"queries": 1, "results": 1}) as broker:
        command = [sys.executable, "-m", "aggregator", "tail", "-b", broker.bootstrap_servers]
        with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                said = process.stderr.readline()
            finally:
                process.send_signal(signal.SIGINT)
            rest = (process.stdout.read(), process.stderr.read(), process.wait())
    assert said == (
        f"waiting for results on 'results' at {broker.bootstrap_servers} "
        "(--from-beginning shows those there already); Ctrl-C ends\n"
    )
    assert rest == ("", "", 0)


def test_a_missing_topic_is_told_with_what_makes_it() -> None:
    with MockBroker({"queries": 1}) as broker:
        servers = broker.bootstrap_servers
        done = run(servers, "hello", "--results-topic", "none-such")
    assert done.exit_code == 1
    assert done.stderr == (
        f"Error: there is no topic 'none-such' at {servers} "
        "(`aggregator topics create` makes those of the settings)\n"
    )


def test_a_missing_broker_is_one_clear_line() -> None:
    done = run("127.0.0.1:1", "hello")
    assert done.exit_code == 1
    assert done.stderr == "Error: no Kafka broker answers at 127.0.0.1:1\n"
