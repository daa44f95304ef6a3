"""`aggregator dlq list` and `replay` on real Kafka: ends behind markers, kills, a live aggregator.

Letters are written as the aggregator writes them, but for the test in which it does so itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from click.testing import CliRunner, Result
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from aggregator.cli import group
from aggregator.commands import dlq_replay
from aggregator.commands.dlq_replay import BATCH_LETTERS_MAX
from aggregator.commands.dlq_topic import StoredLetter
from aggregator.core.effects import Form
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import Query
from aggregator.wire.dead_letter import encode_letter
from ops.kafka.node import KafkaNode, free_port
from tests.conftest import TopicFactory, unique_name
from tests.harness.ledger import Ledger, Names
from tests.harness.processes import CommandProcess, simulated_server
from tests.unit.wire_builders import decoded

pytestmark = pytest.mark.kafka

WAIT_S = 60.0
Tp = tuple[str, int]


def query_value(identity: str, text: str = "hello") -> bytes:
    return json.dumps({"id": identity, "text": text}).encode()


@dataclass
class Topics:
    """Of one test, on the real broker, seen from outside."""

    bootstrap_servers: str
    queries: str
    letters: str

    def run(self, *arguments: str, **settings: str) -> Result:
        return CliRunner(env=self.settings() | settings).invoke(group, ["dlq", *arguments])

    def settings(self) -> dict[str, str]:
        return {
            "AGGREGATOR_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "AGGREGATOR_QUERIES_TOPIC": self.queries,
            "AGGREGATOR_DLQ_TOPIC": self.letters,
        }

    def listed(self, *arguments: str) -> list[dict[str, Any]]:
        done = self.run("list", "--json", *arguments)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    def producer(self, **config: str | int) -> Producer:
        return Producer({"bootstrap.servers": self.bootstrap_servers, "log_level": 2, **config})

    def write(
        self,
        identities: Sequence[str],
        *,
        reason: Reason = Reason.BAD_ANSWER,
        form: Form = Form.FULL,
        text: str = "hello",
        producer: Producer | None = None,
        partition: int = 0,
    ) -> None:
        """Append letters; with a `producer`, into its transaction."""
        writer = producer or self.producer()
        for offset, identity in enumerate(identities):
            query = decoded(
                query_value(identity, text), key=identity.encode(), tp=(self.queries, 0)
            )
            query.offset = offset
            query.failure = Failure(
                code=Code.INTERNAL, reason=reason, message="as the test wants", dead_letter=True
            )
            key, value, headers = encode_letter(query, form)
            writer.produce(self.letters, value, key, partition, headers=headers)  # type: ignore[arg-type]
        assert writer.flush(WAIT_S) == 0

    def read(self, topic: str) -> list[Message[Any, Any]]:
        """Every committed record, to the end of each partition."""
        reader = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": "outsider",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
            }
        )
        partitions = reader.list_topics(topic, WAIT_S).topics[topic].partitions
        reader.assign([TopicPartition(topic, number, 0) for number in partitions])
        records: list[Message[Any, Any]] = []
        ends = 0
        while ends < len(partitions):
            message = reader.poll(WAIT_S)
            assert message is not None
            error = message.error()
            if error is None:
                records.append(message)
            else:
                assert error.code() == KafkaError._PARTITION_EOF
                ends += 1
        reader.close()
        return records

    def query_of(self, record: Message[Any, Any]) -> Query:
        """Decode a record of the queries topic, as the aggregator does."""
        key, value, headers = record.key(), record.value(), record.headers()
        assert isinstance(key, bytes)
        assert isinstance(value, bytes)
        assert isinstance(headers, list)
        return decoded(value, headers, key=key, tp=(self.queries, 0))  # type: ignore[arg-type]

    def replayed(self) -> Counter[str]:
        """Ids on the queries topic, from the header that a replay adds."""
        return Counter(
            header(record, "__aggregator.replay.id") for record in self.read(self.queries)
        )


def header(record: Message[Any, Any], name: str) -> str:
    value = dict(record.headers() or [])[name]
    assert isinstance(value, bytes)
    return value.decode()


@pytest.fixture
def topics(kafka: KafkaNode, kafka_topic: TopicFactory) -> Topics:
    queries = kafka_topic("queries", partitions=2)
    return Topics(kafka.bootstrap_servers, queries, kafka_topic("letters", partitions=3))


def ids(letters: Sequence[dict[str, Any]]) -> list[str]:
    return [letter["id"] for letter in letters]


def test_an_empty_topic_is_read_to_its_end(topics: Topics) -> None:
    done = topics.run("list")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "0 dead letters\n")
    assert topics.run("replay", "--all").exit_code == 0


def test_the_end_is_found_behind_transactions_and_deleted_records(topics: Topics) -> None:
    """Markers of transactions and aborted records leave offsets that no record ever fills."""
    writer = topics.producer(**{"transactional.id": unique_name("t")})
    writer.init_transactions(WAIT_S)
    for number, end in enumerate(["commit", "abort", "commit", "abort"]):
        writer.begin_transaction()
        topics.write([f"{end} {number}"], producer=writer, partition=number % 2)
        (writer.commit_transaction if end == "commit" else writer.abort_transaction)(WAIT_S)
    # Partition 2: nothing but deleted records.
    topics.write(["gone", "gone too"], partition=2)
    admin = AdminClient({"bootstrap.servers": topics.bootstrap_servers})
    for future in admin.delete_records([TopicPartition(topics.letters, 2, 2)]).values():
        future.result(WAIT_S)
    assert sorted(ids(topics.listed())) == ["commit 0", "commit 2"]
    # And one that is open holds back what lies behind it, but nobody who reads.
    writer.begin_transaction()
    topics.write(["open"], producer=writer, partition=0)
    topics.write(["behind the open one"], partition=0)
    assert sorted(ids(topics.listed())) == ["commit 0", "commit 2"]
    writer.commit_transaction(WAIT_S)
    assert "behind the open one" in ids(topics.listed())


def test_list_shows_when_where_and_why_and_filters(topics: Topics) -> None:
    topics.write(["a", "b"])
    topics.write(["c"], reason=Reason.ENGINE_DIED_ALONE, partition=1)
    foreign = topics.producer()
    foreign.produce(topics.letters, b"no letter", partition=2)
    foreign.flush(WAIT_S)
    done = topics.run("list")
    head, *rows = done.stdout.splitlines()
    assert head.split()[:2] == ["WHEN", "WHERE"]
    assert len(rows) == 3
    (row,) = [row for row in rows if "ENGINE_DIED_ALONE" in row]
    assert f"{topics.queries}-0-0  INTERNAL" in row
    assert row.endswith("c   as the test wants")
    assert done.stderr == "3 dead letters, 1 other record\n"
    (shown,) = topics.listed("--reason", "engine_died_alone")
    assert shown["source"]["topic"] == topics.queries
    assert shown["letter"] == {"partition": 1, "offset": 0}
    assert (shown["id"], shown["not_replayable"]) == ("c", None)
    assert ids(topics.listed("--id", "b")) == ["b"]
    assert ids(topics.listed("--since", "1h", "--reason", "BAD_ANSWER")) == ["a", "b"]
    assert topics.listed("--since", "2100-01-01") == []


def test_replay_sends_once_and_marks(topics: Topics) -> None:
    names = [f"q{n}" for n in range(250)]
    for partition in range(3):
        topics.write(names[partition::3], partition=partition)
    rehearsed = topics.run("replay", "--all", "--dry-run")
    assert rehearsed.exit_code == 0, rehearsed.output
    assert len(rehearsed.stdout.splitlines()) == 251
    assert topics.read(topics.queries) == []
    done = topics.run("replay", "--all", "--rate", "100000")
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    assert done.stderr == "250 sent again, 0 not sent\n"
    for record in topics.read(topics.queries):
        identity = header(record, "__aggregator.replay.id")
        assert (record.key(), record.value()) == (identity.encode(), query_value(identity))
        assert header(record, "__aggregator.replay.attempts") == "1"
        assert not any("errors" in name for name in dict(record.headers() or []))
    assert topics.replayed() == Counter(names)
    again = topics.run("replay", "--all")
    assert (again.exit_code, again.stderr) == (0, "0 sent again, 0 not sent\n")
    assert topics.run("list").stderr == "0 dead letters, 250 replayed before and not shown\n"
    # Markers lie on the partition of their letter, which retention takes first.
    for record in topics.read(topics.letters):
        if record.value() is None:
            place = header(record, "__aggregator.replayed")
            assert place.split("-")[0] == str(record.partition())


def test_replay_takes_what_is_asked_for(topics: Topics) -> None:
    topics.write(["a", "b", "c"])
    topics.write(["d"], reason=Reason.NOT_FINITE)
    assert topics.run("replay", "--reason", "NOT_FINITE").exit_code == 0
    done = topics.run("replay", "--id", "b", "--id", "nobody")
    assert done.exit_code == 1
    assert "no dead letter to replay has the id nobody" in done.stderr
    assert topics.replayed() == Counter(["b", "d"])
    assert ids(topics.listed()) == ["a", "c"]
    for wrong in ([], ["--all", "--id", "a"], ["--all", "--since", "yesterday"]):
        assert topics.run("replay", *wrong).exit_code == 2


def test_letters_that_cannot_be_sent_are_named_and_the_rest_is_sent(
    kafka: KafkaNode, kafka_topic: TopicFactory
) -> None:
    queries = kafka_topic("queries", max_message_bytes="2000")
    topics = Topics(kafka.bootstrap_servers, queries, kafka_topic("letters"))
    topics.write(["first"])
    topics.write(["large"], text="x" * 5000)
    topics.write(["cut"], form=Form.BARE)
    topics.write(["last"])
    done = topics.run("replay", "--all")
    assert done.exit_code == 1
    *named, summary = done.stderr.splitlines()
    (large,) = [line for line in named if "the queries topic refused it" in line]
    assert large.startswith("not sent: large (letter 0-1, BAD_ANSWER): ")
    (cut,) = [line for line in named if "left out (SHA-256" in line]
    assert cut.startswith("not sent: a letter (letter 0-2, BAD_ANSWER): its value of ")
    assert summary == "2 sent again, 2 not sent"
    assert topics.replayed() == Counter(["first", "last"])


def test_a_letter_is_replayed_at_most_so_often(topics: Topics) -> None:
    """Each replay that fails makes a new letter, with its count."""
    topics.write(["q"])
    for replays in range(3):
        assert topics.run("replay", "--all").exit_code == 0
        record = topics.read(topics.queries)[replays]
        sent = topics.query_of(record)
        sent.failure = Failure(code=Code.INTERNAL, reason=Reason.BAD_ANSWER, message="again")
        key, value, headers = encode_letter(sent)
        writer = topics.producer()
        writer.produce(topics.letters, value, key, headers=headers)  # type: ignore[arg-type]
        writer.flush(WAIT_S)
    done = topics.run("replay", "--all")
    assert done.exit_code == 1
    assert "it was replayed 3 times, replay_attempts_max" in done.stderr
    assert len(topics.read(topics.queries)) == 3
    assert topics.run("replay", "--all", AGGREGATOR_REPLAY_ATTEMPTS_MAX="4").exit_code == 0


KILLED_BEFORE_MARK = """
import os, signal
from aggregator.cli import main
from aggregator.commands.dlq_replay import KafkaPort
mark, calls = KafkaPort.mark, []
def killed(self, letters):
    calls.append(letters)
    if len(calls) == {batch}:
        os.kill(os.getpid(), signal.SIGKILL)
    mark(self, letters)
KafkaPort.mark = killed
main()
"""


def test_a_kill_between_send_and_mark_repeats_one_batch(topics: Topics) -> None:
    names = [f"q{n}" for n in range(300)]
    topics.write(names)
    script = KILLED_BEFORE_MARK.format(batch=3)
    command = [sys.executable, "-c", script, "dlq", "replay", "--all", "--rate", "100000"]
    killed = subprocess.run(
        command, env=os.environ | topics.settings(), capture_output=True, check=False, timeout=60
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(topics.read(topics.queries)) == 1 + 2 * BATCH_LETTERS_MAX
    assert topics.run("replay", "--all", "--rate", "100000").exit_code == 0
    counts = topics.replayed()
    assert set(counts) == set(names)
    repeated = [name for name, count in counts.items() if count > 1]
    assert len(repeated) == BATCH_LETTERS_MAX
    assert max(counts.values()) == 2
    assert topics.run("replay", "--all").stderr == "0 sent again, 0 not sent\n"


@pytest.mark.parametrize(
    ("arguments", "after_the_bar"),
    [(("list",), "WHEN"), (("replay", "--all", "--rate", "1000"), "120 sent again")],
)
def test_a_terminal_sees_how_far_it_is(
    topics: Topics, arguments: tuple[str, ...], after_the_bar: str
) -> None:
    """And no line longer than it is wide; the bar is gone where rows are printed."""
    topics.write([f"q{n}" for n in range(120)])
    terminal, theirs = pty.openpty()
    environment = os.environ | topics.settings() | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "aggregator", "dlq", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = read_terminal(terminal)
    assert process.wait(WAIT_S) == 0
    bar, separator, rest = shown.partition(after_the_bar)
    assert separator, shown
    assert f"reading {topics.letters}" in bar
    assert "reading" not in rest
    if arguments == ("list",):
        rows = [line for line in rest.splitlines() if f"{topics.queries}-0-" in line]
        assert len(rows) == 120
        assert {len(row) <= 100 and row.endswith("…") for row in rows} == {True}


def read_terminal(terminal: int) -> str:
    """All that is shown, until nobody holds the other end."""
    shown = b""
    with open(terminal, "rb", buffering=0) as stream, contextlib.suppress(OSError):
        while chunk := stream.read(65536):
            shown += chunk
    return shown.decode()


def test_a_second_replay_says_so_and_leaves_the_first_alone(topics: Topics) -> None:
    names = [f"q{n}" for n in range(40)]
    topics.write(names)
    with CommandProcess(
        "aggregator", "dlq", "replay", "--all", "--rate", "4", environment=topics.settings()
    ) as first:
        reader = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": "w"})
        reader.assign([TopicPartition(topics.queries, partition, 0) for partition in range(2)])
        assert reader.poll(WAIT_S) is not None
        reader.close()
        second = topics.run("replay", "--all")
        assert second.exit_code == 1
        assert second.stderr.startswith(f"Error: another replay of topic '{topics.letters}' runs (")
        assert str(first.process.pid) in second.stderr
        assert second.stderr.count("\n") == 1
        assert topics.run("replay", "--all", "--dry-run").exit_code == 0  # it sends nothing
        assert first.wait() == 0
    assert topics.replayed() == Counter(names)
    # Once it has left the next one may begin.
    assert topics.run("replay", "--all").stderr == "0 sent again, 0 not sent\n"


def test_a_run_that_the_group_gave_up_ends(topics: Topics) -> None:
    """Frozen for longer than its session: another may have begun meanwhile."""
    topics.write([f"q{n}" for n in range(40)])
    with CommandProcess(
        "aggregator", "dlq", "replay", "--all", "--rate", "4", environment=topics.settings()
    ) as first:
        reader = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": "w"})
        reader.assign([TopicPartition(topics.queries, partition, 0) for partition in range(2)])
        assert reader.poll(WAIT_S) is not None
        reader.close()
        first.freeze()
        assert topics.run("replay", "--id", "q39").exit_code == 0
        first.thaw()
        assert first.wait() == 1
        assert any("was taken for dead" in line.get("text", "") for line in first.lines)
    assert topics.replayed()["q39"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_replay_with_its_marks(topics: Topics, number: signal.Signals) -> None:
    topics.write([f"q{n}" for n in range(50)])
    with CommandProcess(
        "aggregator", "dlq", "replay", "--all", "--rate", "2", environment=topics.settings()
    ) as process:
        reader = Consumer({"bootstrap.servers": topics.bootstrap_servers, "group.id": "w"})
        reader.assign([TopicPartition(topics.queries, partition, 0) for partition in range(2)])
        assert reader.poll(WAIT_S) is not None
        reader.close()
        process.process.send_signal(number)
        assert process.wait() == 128 + number
        assert any("stopped before the end" in line.get("text", "") for line in process.lines)
    sent = topics.replayed()
    assert 0 < len(sent) < 50
    assert len(topics.listed()) == 50 - len(sent)


def test_what_cannot_be_reached_is_one_clear_line(
    topics: Topics, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_line(result: Result) -> str:
        assert result.exit_code == 1
        *_, line = result.stderr.splitlines()
        assert line.startswith("Error: ")
        return line

    topics.write(["a"])
    missing = unique_name("missing")
    assert f"there is no topic '{missing}'" in one_line(topics.run("list", "--dlq-topic", missing))
    no_queries = topics.run("replay", "--all", "--queries-topic", missing)
    assert f"there is no topic '{missing}'" in one_line(no_queries)
    same = topics.run("replay", "--all", "--queries-topic", topics.letters)
    assert "can't share topic" in one_line(same)
    nowhere = f"127.0.0.1:{free_port()}"
    assert nowhere in one_line(topics.run("list", "-b", nowhere))
    # Deleted while a replay runs: what was not confirmed is not marked.
    send = dlq_replay.KafkaPort.send

    def deleted_first(
        self: dlq_replay.KafkaPort, letters: Sequence[StoredLetter]
    ) -> dlq_replay.Sent:
        admin = AdminClient({"bootstrap.servers": topics.bootstrap_servers})
        admin.delete_topics([topics.queries])[topics.queries].result(WAIT_S)
        return send(self, letters)

    monkeypatch.setattr(dlq_replay.KafkaPort, "send", deleted_first)
    monkeypatch.setattr(dlq_replay, "_MESSAGE_TIMEOUT_MS", 3_000)
    line = one_line(topics.run("replay", "--all"))
    assert f"topic '{topics.queries}' can't be written" in line
    assert ids(topics.listed()) == ["a"]


POISON = "poison"


@pytest.fixture
def aggregator(topics: Topics, kafka_topic: TopicFactory) -> Iterator[tuple[Topics, Ledger]]:
    """An aggregator that runs on these topics, its engine refusing one text."""
    port = free_port()
    results = kafka_topic("results")
    faults = json.dumps({"faults": {POISON: "raise"}})
    environment = topics.settings() | {
        "AGGREGATOR_RESULTS_TOPIC": results,
        "AGGREGATOR_MODELS": f"minilm=127.0.0.1:{port}",
        "AGGREGATOR_GROUP_ID": unique_name("group"),
        "AGGREGATOR_GROUP_PROTOCOL": "consumer",
        "AGGREGATOR_METRICS_LISTEN": "",
    }
    with (
        simulated_server(port, MODEL_SERVER_SIMULATED=faults),
        CommandProcess("aggregator", "run", environment=environment) as process,
    ):
        names = Names(queries=topics.queries, results=results, dlq=topics.letters)
        ledger = Ledger(topics.bootstrap_servers, names)
        yield topics, ledger
        ledger.close()
        assert process.terminate() == 0


def test_with_a_live_aggregator_each_replay_sends_each_letter_once(
    aggregator: tuple[Topics, Ledger],
) -> None:
    """What is still poison makes a letter again, which the same run leaves alone."""
    topics, ledger = aggregator
    for number in range(20):
        ledger.send(f"poison {number}", query_value(f"p{number}", POISON), partition=number % 2)
        ledger.send(f"sound {number}", query_value(f"s{number}"), partition=number % 2)
    ledger.flush()
    ledger.wait_for_all()
    poisonous = {f"p{number}" for number in range(20)}
    for replays in range(3):
        wait_for_letters(ledger, 20 * (replays + 1))
        letters = topics.listed()
        assert set(ids(letters)) == poisonous
        assert {letter["replays"] for letter in letters} == {replays}
        done = topics.run("replay", "--all")
        assert done.stderr == "20 sent again, 0 not sent\n"
    wait_for_letters(ledger, 80)
    last = topics.run("replay", "--all")
    assert (last.exit_code, last.stderr.splitlines()[-1]) == (1, "0 sent again, 20 not sent")
    # Every record one result, and a replay's has the id of the first.
    ledger.read(1.0)
    results = [result for found in ledger.results.values() for result in found]
    told = Counter(result.id for result in results)
    assert told == Counter({**dict.fromkeys(poisonous, 4), **{f"s{n}": 1 for n in range(20)}})
    for record in topics.read(ledger.names.results):
        assert not any(name.startswith("__aggregator") for name in dict(record.headers() or []))


def wait_for_letters(ledger: Ledger, count: int) -> None:
    for _ in range(600):
        if ledger.letters.total() >= count:
            break
        ledger.read()
    assert ledger.letters.total() == count
