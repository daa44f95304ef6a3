"""One stack that is sent everything bad at once: what went in, what came out, who still lives.

The aggregator and the model server run as processes, the lying servers in a thread; the broker is a
real one. `observe` runs the whole story and returns `Evidence`, which the tests judge; it waits for
results, for no time to pass, and gives up waiting at a deadline so that each test can say what it
misses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Message, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from aggregator.commands.received import ReceivedResult, read_result
from tests.harness import bad_input as words
from tests.harness.bad_input import Case, Headers, js
from tests.harness.bad_input_faults import ENGINE, LIES, MATES, SERVERS, TIMES, servers
from tests.harness.bad_input_records import FLOOD, HOSTILE_NAME, RECORDS
from tests.harness.lying_server import LyingServer, LyingServers
from tests.harness.processes import CommandProcess, Line, free_port
from tests.harness.raw_producer import produce_with_raw_header

WAIT_S = 45.0
TOKENIZER: dict[str, Any] = {
    # A token a word, and none for a text of spaces.
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"},
}
HOSTILE = "a header's name that is not UTF-8"
SOUND = {f"sound {number}": js({"format": "base64"}, text="sound") for number in range(60)}
CASES: dict[str, Case] = {**RECORDS, **ENGINE, **SERVERS, **TIMES}
CASES[HOSTILE] = words.raw(
    b'{"text": "a"}', [], key=b"k", reason="UNDECODABLE", passed=[], attempts=0
)


@dataclass(frozen=True, slots=True)
class Record:
    """A result or a dead letter."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    result: ReceivedResult | None

    def header(self, name: str) -> bytes | None:
        """The last of that name."""
        return next((value for key, value in reversed(self.headers) if key == name), None)


@dataclass(repr=False)
class Evidence:
    """What is known in the end."""

    topics: tuple[str, str, str]
    sent: dict[int, str] = field(default_factory=dict)
    """Names by offset."""
    sent_ms: dict[int, int] = field(default_factory=dict)
    """Timestamps."""
    results: dict[int, list[Record]] = field(default_factory=dict)
    letters: dict[int, list[Record]] = field(default_factory=dict)
    committed: int = -1
    alive: bool = False
    exit_status: int | None = None
    lines: list[Line] = field(default_factory=list)
    server_alive: bool = False
    liars: list[LyingServer] = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)
    """Names of the sound queries that were sent after everything else."""

    def offset_of(self, name: str) -> int:
        """Where a record lies on the queries topic."""
        (offset,) = [offset for offset, given in self.sent.items() if given == name]
        return offset

    def result_of(self, name: str) -> Record:
        """The one result of a record."""
        (record,) = self.results.get(self.offset_of(name), [])
        return record

    def letter_of(self, name: str) -> Record | None:
        """The one dead letter of a record; None: it has none."""
        letters = self.letters.get(self.offset_of(name), [])
        assert len(letters) <= 1
        return letters[0] if letters else None

    @property
    def end(self) -> int:
        """The offset behind the last record."""
        return max(self.sent) + 1


class Observer:
    """Sends, and reads what comes."""

    def __init__(self, bootstrap_servers: str, group: str, evidence: Evidence) -> None:
        """Read both output topics from their beginning."""
        self._bootstrap = bootstrap_servers
        self._group = group
        self.evidence = evidence
        self._queries, *outputs = evidence.topics
        self._producer = Producer(
            {"bootstrap.servers": bootstrap_servers, "message.max.bytes": words.QUERY_BYTES_MAX}
        )
        self._consumer = self._member(group + "-observer")
        self._consumer.assign([KafkaPartition(topic, 0, 0) for topic in outputs])

    def _member(self, group: str) -> Consumer:
        return Consumer(
            {
                "bootstrap.servers": self._bootstrap,
                "group.id": group,
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
            }
        )

    def send(self, cases: Mapping[str, Case]) -> None:
        """Put records on the queries topic, in order, and wait until they are there."""
        for name, case in cases.items():
            self._produce(name, case)
        assert self._producer.flush(WAIT_S) == 0

    def _produce(self, name: str, case: Case) -> None:
        timestamp_ms = max(time.time_ns() // 1_000_000 - case.age_ms, 1)

        def delivered(error: object, message: Message) -> None:
            assert error is None, error
            offset = message.offset()
            assert offset is not None
            self.evidence.sent[offset] = name
            self.evidence.sent_ms[offset] = timestamp_ms

        self._producer.produce(
            self._queries,
            case.value,
            case.key,
            headers=case.headers,  # type: ignore[arg-type] # lists are invariant
            timestamp=timestamp_ms,
            on_delivery=delivered,
        )
        self._producer.poll(0)

    def send_hostile(self) -> None:
        """The record that clients for Python can't make."""
        case = CASES[HOSTILE]
        offset = max(self.evidence.sent, default=-1) + 1
        timestamp_ms = time.time_ns() // 1_000_000
        produce_with_raw_header(
            self._bootstrap,
            self._queries,
            key=case.key,
            value=case.value,
            name=HOSTILE_NAME,
            timestamp_ms=timestamp_ms,
        )
        self.evidence.sent[offset] = HOSTILE
        self.evidence.sent_ms[offset] = timestamp_ms

    def wait(self, process: CommandProcess) -> None:
        """Read until everything has come, the process has ended, or the time is up."""
        deadline = time.monotonic() + WAIT_S
        while not self._complete():
            if time.monotonic() > deadline or process.process.poll() is not None:
                return
            self.read()

    def _complete(self) -> bool:
        found = self.evidence
        due = [offset for offset, name in found.sent.items() if _letter_due(name)]
        return len(found.results) == len(found.sent) and all(o in found.letters for o in due)

    def read(self, seconds: float = 0.1) -> int:
        """Take in what has come; returns how many records."""
        records = self._consumer.consume(1_000, seconds)
        for message in records:
            assert message.error() is None, message.error()
            self._take(message)
        return len(records)

    def _take(self, message: Message) -> None:
        headers: Headers = list(message.headers() or [])  # type: ignore[arg-type]
        key, value = message.key(), message.value()
        assert key is None or isinstance(key, bytes)
        assert value is None or isinstance(value, bytes)
        if message.topic() == self.evidence.topics[2]:
            letter = Record(key, value, headers, None)
            offset = int(letter.header("__aggregator.errors.offset") or b"")
            self.evidence.letters.setdefault(offset, []).append(letter)
        else:
            result = read_result(message)
            offset = int(result.fields["source"]["offset"])
            self.evidence.results.setdefault(offset, []).append(Record(key, value, headers, result))

    def wait_for_commit(self) -> None:
        """Until the group's offset is the end, or the time is up."""
        member = self._member(self._group)
        deadline = time.monotonic() + WAIT_S
        try:
            while self.evidence.committed < self.evidence.end and time.monotonic() < deadline:
                (place,) = member.committed([KafkaPartition(self._queries, 0)], timeout=10)
                self.evidence.committed = place.offset
        finally:
            member.close()

    def read_to_the_end(self) -> None:
        """Take in all that the topics hold, whatever was waited for."""
        ends = [
            self._consumer.get_watermark_offsets(partition, timeout=10)
            for partition in self._consumer.assignment()
        ]
        written = sum(end for _, end in ends)
        deadline = time.monotonic() + WAIT_S
        while self._count() < written and time.monotonic() < deadline:
            self.read()
        assert self._count() == written

    def _count(self) -> int:
        found = self.evidence
        kept = [*found.results.values(), *found.letters.values()]
        return sum(len(records) for records in kept)

    def close(self) -> None:
        """Let go of the consumer."""
        self._consumer.close()


def _letter_due(name: str) -> bool:
    case = CASES.get(name) or FLOOD.get(name)
    return case is not None and case.outcome.stage != ""


def mixed(bad: Mapping[str, Case], good: Mapping[str, Case]) -> dict[str, Case]:
    """All of them, the good ones spread among the bad."""
    ranked = [
        (number / len(cases), name) for cases in (bad, good) for number, name in enumerate(cases)
    ]
    both = {**bad, **good}
    return {name: both[name] for _, name in sorted(ranked, key=lambda pair: pair[0])}


def observe(bootstrap_servers: str, make_topic: Callable[..., str], folder: Path) -> Evidence:
    """Run the story: bad and good together, then what depends on time, then good ones alone."""
    queries = make_topic(
        "queries",
        max_message_bytes=str(words.QUERY_BYTES_MAX),
        message_timestamp_type="CreateTime",
    )
    results = make_topic("results", max_message_bytes=str(words.RESULT_BYTES_MAX))
    letters = make_topic("letters", max_message_bytes=str(words.LETTER_BYTES_MAX))
    evidence = Evidence((queries, results, letters))
    observer = Observer(bootstrap_servers, f"group-{queries}", evidence)
    first = mixed({**FLOOD, **RECORDS, **ENGINE, **SERVERS}, {**SOUND, **MATES})
    with ExitStack() as stack:
        stack.callback(observer.close)
        liars = stack.enter_context(LyingServers(servers()))
        evidence.liars = liars.servers
        port = free_port()
        server = stack.enter_context(_model_server(port, folder))
        observer.send_hostile()
        observer.send(first)
        server.wait_for(lambda line: line.get("phase") == "serving")
        addresses = {words.MODEL: [f"127.0.0.1:{port}"], **liars.addresses}
        aggregator = stack.enter_context(_aggregator(bootstrap_servers, evidence, addresses))
        observer.wait(aggregator)
        observer.send({"all servers are ready": js()})  # one may have died last
        observer.wait(aggregator)
        observer.send(TIMES)
        observer.wait(aggregator)
        last = _recovered([words.MODEL, *LIES])
        evidence.recovered = list(last)
        observer.send(last)
        observer.wait(aggregator)
        observer.wait_for_commit()
        evidence.alive = aggregator.process.poll() is None
        evidence.server_alive = server.process.poll() is None
        evidence.exit_status = aggregator.terminate()
        observer.read_to_the_end()
        evidence.lines = aggregator.lines
    return evidence


def _recovered(models: Sequence[str]) -> dict[str, Case]:
    return {
        f"recovered: {model}": js({"model": model, "format": "base64"}, text="after all")
        for model in models
        if model != "silent"  # its stream has something unanswered until it is cut
    }


def _model_server(port: int, folder: Path) -> CommandProcess:
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(json.dumps(TOKENIZER))
    simulated = {
        "fixed_ms": 0,
        "slope_us_per_token": 0,
        "dimensions": words.DIMENSIONS,
        "matryoshka_dimensions": words.MATRYOSHKA,
        "input_tokens_max": words.TOKENS_MAX,
        "tokenizer": str(tokenizer),
        "faults": words.FAULTS,
    }
    return CommandProcess(
        "model_server",
        "serve",
        environment={
            "MODEL_SERVER_ENGINE": "simulated",
            "MODEL_SERVER_SERVED_MODEL_NAME": words.MODEL,
            "MODEL_SERVER_SIMULATED": json.dumps(simulated),
            "MODEL_SERVER_GRPC_LISTEN": f"127.0.0.1:{port}",
            "MODEL_SERVER_METRICS_LISTEN": "",
        },
    )


def _aggregator(
    bootstrap_servers: str, evidence: Evidence, addresses: Mapping[str, Sequence[str]]
) -> CommandProcess:
    queries, results, letters = evidence.topics
    models = {**addresses, words.ABSENT: [f"127.0.0.1:{free_port()}"]}
    return CommandProcess(
        "aggregator",
        "run",
        environment={
            "AGGREGATOR_BOOTSTRAP_SERVERS": bootstrap_servers,
            "AGGREGATOR_MODELS": ";".join(f"{m}={','.join(a)}" for m, a in models.items()),
            "AGGREGATOR_DEFAULT_MODEL": words.MODEL,
            "AGGREGATOR_GROUP_ID": f"group-{queries}",
            "AGGREGATOR_GROUP_PROTOCOL": "consumer",
            "AGGREGATOR_QUERIES_TOPIC": queries,
            "AGGREGATOR_RESULTS_TOPIC": results,
            "AGGREGATOR_DLQ_TOPIC": letters,
            "AGGREGATOR_TTL_MS": str(words.TTL_MS),
            "AGGREGATOR_METRICS_LISTEN": "",
        },
    )
