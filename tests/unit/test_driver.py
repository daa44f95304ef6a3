"""The driver on fake ports: order, encoding, faults of ours, timers, what is logged and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.dispatch import DispatchOptions
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.machine import Aggregator, AggregatorOptions
from aggregator.core.query import Answer, Query, TopicPartition, VectorGroup
from aggregator.runtime.driver import Driver, Ports
from aggregator.runtime.transactions import Record, TransactionsPort
from aggregator.telemetry import metrics as m
from aggregator.wire.headers import HeaderRules
from aggregator.wire.result import ResultEncoder
from protos.embedding.v1 import query_pb2
from tests.harness.core import MODEL, SERVER, TP, limits, make_query

REVISION = "r1"


class FakeSource:
    """Remembers commands."""

    def __init__(self) -> None:
        self.commands: list[object] = []

    @property
    def commits(self) -> list[fx.Commit]:
        return [command for command in self.commands if isinstance(command, fx.Commit)]

    def commit(self, commit: fx.Commit) -> None:
        self.commands.append(commit)

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        self.commands.append(("pause", tuple(partitions)))

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self.commands.append(("resume", tuple(partitions)))

    def release(self, revoke_id: int) -> None:
        self.commands.append(("release", revoke_id))

    def stop_polling(self) -> None:
        self.commands.append("stop polling")


class FakeSink:
    """Remembers records."""

    def __init__(self) -> None:
        self.results: list[tuple[Query, Record, bool]] = []
        self.letters: list[tuple[Query, Record, bool]] = []

    def send_result(self, query: Query, record: Record, *, alone: bool) -> None:
        self.results.append((query, record, alone))

    def send_letter(self, query: Query, record: Record, *, alone: bool) -> None:
        self.letters.append((query, record, alone))


class FakeServers:
    """Remembers claims."""

    def __init__(self) -> None:
        self.claims: list[fx.Dispatch] = []
        self.cancelled: list[fx.Cancel] = []

    def send(self, dispatch: fx.Dispatch) -> None:
        self.claims.append(dispatch)

    def cancel(self, cancel: fx.Cancel) -> None:
        self.cancelled.append(cancel)


class FakeLog:
    """Remembers lines."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def info(self, event: str, **values: Any) -> None:
        self.lines.append(("info", event, values))

    def warning(self, event: str, **values: Any) -> None:
        self.lines.append(("warning", event, values))

    def error(self, event: str, **values: Any) -> None:
        self.lines.append(("error", event, values))

    exception = error


class BrokenEncoder(ResultEncoder):
    """Fails on chosen queries, as a bug would."""

    broken_ids: frozenset[str] = frozenset()
    broken_errors = False

    def encode_vector(self, query: Query, *args: Any, **kwargs: Any) -> Any:
        if query.id in self.broken_ids:
            raise TypeError("a bug")
        return super().encode_vector(query, *args, **kwargs)

    def encode_error(self, query: Query, form: fx.Form = fx.Form.FULL) -> Any:
        if self.broken_errors and query.id in self.broken_ids:
            raise TypeError("a bug")
        return super().encode_error(query, form)


class ScriptedCore:
    """Gives the effects that the test put behind an event's type."""

    def __init__(self) -> None:
        self.script: dict[type[Any], Callable[[Any], list[fx.Effect]]] = {}
        self.seen: list[ev.Event] = []

    def handle_all(self, events: Sequence[ev.Event], now_ns: int) -> list[fx.Effect]:
        self.seen.extend(events)
        scripts = [self.script.get(type(event), lambda _event: []) for event in events]
        return [
            effect
            for event, script in zip(events, scripts, strict=True)
            for effect in script(event)
        ]


class Stand:
    """A driver with fakes all around it."""

    def __init__(self, core: Any = None, transactions: TransactionsPort | None = None) -> None:
        dispatch = DispatchOptions(model=MODEL)
        self.core = core or Aggregator(AggregatorOptions(models={MODEL: dispatch}))
        self.source, self.sink, self.servers = FakeSource(), FakeSink(), FakeServers()
        self.transactions = transactions
        self.log = FakeLog()
        self.metrics = m.Metrics(models=[MODEL])
        self.encoder = BrokenEncoder(HeaderRules())
        self.now_ns = 10**15
        self.driver = Driver(
            self.core,
            Ports(
                source=self.source,
                sink=self.sink,
                transactions=transactions,
                servers={MODEL: self.servers},
                encoder=self.encoder,
                clock_ns=lambda: self.now_ns,
            ),
            loop=asyncio.get_running_loop(),
            metrics=self.metrics,
            log=cast("Any", self.log),
        )

    def feed(self, *events: ev.Event) -> None:
        self.driver.feed(events)

    def start(self, count: int = 3) -> list[Query]:
        """A partition, a server, and so many queries, which become one claim."""
        queries = [make_query(offset, arrived_ns=self.now_ns) for offset in range(count)]
        position = ev.Position(tp=TP, epoch=1, offset_next=count)
        self.feed(
            ev.PartitionsAssigned(epoch=1, partitions=[TP]),
            ev.ServerChanged(
                model=MODEL,
                server=SERVER,
                phase=ev.ServerPhase.READY,
                limits=limits(),
                model_revision=REVISION,
                dimensions=4,
            ),
            ev.RecordsPolled(records=queries, positions=[position]),
        )
        return queries

    def answer(self, indexes: Sequence[int] | None = None, *, last: bool = True) -> None:
        """Vectors for the last claim, by default for the whole of it."""
        claim = self.servers.claims[-1]
        indexes = range(len(claim.queries)) if indexes is None else indexes
        group = VectorGroup(
            encoding=1,
            dimensions=4,
            indexes=indexes,
            tokens=[12] * len(indexes),
            embeddings=bytes(16 * len(indexes)),
            stride=16,
        )
        answer = Answer(claim_id=claim.claim_id, groups=[group], last=last, inference_us=5000)
        self.now_ns += 7_000_000
        self.feed(ev.ClaimAnswered(model=MODEL, server=SERVER, answer=answer))


async def test_queries_go_all_the_way() -> None:
    stand = Stand()
    queries = stand.start()
    (claim,) = stand.servers.claims
    assert claim.queries == queries
    stand.answer()
    assert [query for query, _, _ in stand.sink.results] == queries
    key, value, headers = stand.sink.results[0][1]
    result = query_pb2.Result.FromString(value or b"")
    assert (key, result.tokens, result.model_revision) == (b"queries-0-0", 12, REVISION)
    assert ("embedding-status", b"OK") in headers
    stand.feed(ev.WritesDurable(results=queries))
    (commit,) = stand.source.commits
    assert commit.offsets[0].offset_next == 3
    assert stand.metrics.value(m.RESULTS, MODEL, "OK") == 3
    assert stand.metrics.count(m.LATENCY_SECONDS) == 3
    assert stand.metrics.count(m.QUEUE_SECONDS, MODEL) == 3


async def test_results_of_a_claim_are_sent_without_pauses() -> None:
    stand = Stand()
    queries = stand.start()
    encode = stand.encoder.encode_vector
    sent_before_encoding: list[int] = []

    def watched(query: Query, *args: Any, **kwargs: Any) -> Any:
        sent_before_encoding.append(len(stand.sink.results))
        return encode(query, *args, **kwargs)

    stand.encoder.encode_vector = watched  # type: ignore[method-assign]
    stand.answer()
    assert sent_before_encoding == [0] * len(queries)
    assert len(stand.sink.results) == len(queries)


async def test_one_canonical_line_for_each_claim() -> None:
    stand = Stand()
    stand.start()
    stand.answer()
    (line,) = [line for line in stand.log.lines if line[1] == "claim"]
    values = line[2]
    assert line[0] == "info"
    assert values["claim_id"] == 1
    assert (values["queries"], values["tokens"], values["target"]) == (3, 36, 600)
    assert (values["fill"], values["total_ms"], values["inference_ms"]) == (0.06, 7.0, 5.0)
    assert (values["outcome"], values["server"], values["reason"]) == ("answered", SERVER, None)
    assert stand.metrics.value(m.CLAIMS, MODEL, "answered") == 1
    stand.feed(
        ev.ClaimLost(model=MODEL, server=SERVER, claim_id=1, loss=ev.Loss.UNKNOWN, message="")
    )
    assert len([line for line in stand.log.lines if line[1] == "claim"]) == 1


async def test_an_answer_that_the_core_finds_bad_is_a_bad_answer() -> None:
    stand = Stand()
    stand.start()
    stand.answer([0])
    (line,) = [line for line in stand.log.lines if line[1] == "claim"]
    assert (line[0], line[2]["outcome"], line[2]["tokens"]) == ("warning", "bad_answer", 0)
    assert line[2]["reason"] == "2 inputs of 3 have no answer"
    assert stand.metrics.value(m.CLAIMS, MODEL, "bad_answer") == 1
    assert stand.metrics.value(m.CLAIMS, MODEL, "answered") == 0
    for histogram in (m.CLAIM_QUERIES, m.CLAIM_FILL, m.ESTIMATE_ERROR, m.QUEUE_SECONDS):
        assert stand.metrics.count(histogram, MODEL) == 0


@pytest.mark.parametrize("refused", [False, True])
async def test_a_claim_stays_bad_whatever_comes_after(refused: bool) -> None:
    stand = Stand()
    stand.start()
    stand.answer([0], last=False)
    stand.answer([0], last=False)
    message = Answer(claim_id=1, last=True)
    if refused:
        message.refused = Failure(code=Code.UNAVAILABLE, reason=Reason.NOT_STARTED, message="")
    stand.feed(ev.ClaimAnswered(model=MODEL, server=SERVER, answer=message))
    (line,) = [line for line in stand.log.lines if line[1] == "claim"]
    assert (line[2]["outcome"], line[2]["tokens"], line[2]["messages"]) == ("bad_answer", 12, 3)
    assert line[2]["reason"] == "an input was answered twice, or was never sent"
    assert stand.metrics.count(m.QUEUE_SECONDS, MODEL) == 1


async def test_results_that_are_sent_again_have_waited_once() -> None:
    stand = Stand()
    queries = stand.start()
    stand.answer()
    stand.feed(
        ev.WritesFailed(fault=ev.WriteFault.TOPIC, message="timed out", results=queries),
    )
    stand.now_ns += 300_000_000
    stand.feed(ev.Tick())
    stand.feed(ev.WritesDurable(results=[queries[0]]))
    assert len(stand.sink.results) == 6, "each again"
    stand.feed(ev.WritesDurable(results=queries[1:]))
    assert stand.metrics.value(m.RESULTS, MODEL, "OK") == 3
    assert stand.metrics.count(m.QUEUE_SECONDS, MODEL) == 3


async def test_lost_claims_are_lines_too() -> None:
    stand = Stand()
    stand.start()
    stand.feed(
        ev.ClaimLost(
            model=MODEL, server=SERVER, claim_id=1, loss=ev.Loss.UNKNOWN, message="reset by peer"
        )
    )
    (line,) = [line for line in stand.log.lines if line[1] == "claim"]
    assert (line[0], line[2]["outcome"]) == ("warning", "lost")
    assert line[2]["reason"] == "unknown: reset by peer"


async def test_a_vector_that_cant_be_encoded_fails_alone() -> None:
    stand = Stand()
    queries = stand.start()
    stand.encoder.broken_ids = frozenset({queries[1].id})
    stand.answer()
    sent = {query.id: record for query, record, _ in stand.sink.results}
    assert set(sent) == {query.id for query in queries}
    statuses = {name: dict(record[2])["embedding-status"] for name, record in sent.items()}
    assert statuses == {
        queries[0].id: b"OK",
        queries[1].id: b"OUT_OF_RANGE",
        queries[2].id: b"OK",
    }
    assert not stand.driver.halted.done()
    stand.feed(ev.WritesDurable(results=queries))
    assert stand.metrics.value(m.RESULTS, MODEL, "OUT_OF_RANGE") == 1


async def test_an_error_that_cant_be_encoded_at_all_stops_the_process() -> None:
    stand = Stand()
    queries = stand.start()
    stand.encoder.broken_ids = frozenset({queries[1].id})
    stand.encoder.broken_errors = True
    stand.answer()
    halt = stand.driver.halted.result()
    assert (halt.exit_code, halt.message) == (1, "internal error: TypeError: a bug")


async def test_a_bug_in_the_core_is_one_line_and_the_end() -> None:
    core = ScriptedCore()

    def broken(_event: ev.Event) -> list[fx.Effect]:
        raise KeyError("claim 7")

    core.script[ev.CommitDone] = broken
    stand = Stand(core)
    stand.feed(ev.CommitDone(commit_id=1))
    stand.feed(ev.CommitDone(commit_id=2))
    assert stand.driver.halted.result().message == "internal error: KeyError: 'claim 7'"
    stand.feed(ev.StopRequested())
    assert core.seen == [ev.CommitDone(commit_id=1)]


async def test_events_from_within_effects_come_afterwards() -> None:
    core = ScriptedCore()
    stand = Stand(core)
    order: list[str] = []

    def first(_event: ev.Event) -> list[fx.Effect]:
        order.append("polled")
        return [fx.Release(revoke_id=1, abandoned=0), fx.StopPolling()]

    def release(_revoke_id: int) -> None:
        stand.feed(ev.StopRequested())
        order.append("released")

    core.script[ev.RecordsPolled] = first
    core.script[ev.StopRequested] = lambda _event: order.append("stop") or []  # type: ignore[func-returns-value]
    cast("Any", stand.source).release = release
    cast("Any", stand.source).stop_polling = lambda: order.append("stopped polling")
    stand.feed(ev.RecordsPolled(records=[], positions=[]))
    assert order == ["polled", "released", "stopped polling", "stop"]


async def test_one_timer_the_last_one_asked_for() -> None:
    core = ScriptedCore()
    stand = Stand(core)
    ticked = asyncio.Event()

    def tick(_event: ev.Event) -> list[fx.Effect]:
        ticked.set()
        return []

    core.script[ev.Tick] = tick
    loop = asyncio.get_running_loop()
    far_ns = int((loop.time() + 1000) * 1e9)
    core.script[ev.CommitDone] = lambda _event: [fx.WakeAt(at_ns=far_ns)]
    core.script[ev.CommitFailed] = lambda _event: [fx.WakeAt(at_ns=int(loop.time() * 1e9))]
    stand.feed(ev.CommitFailed(commit_id=1, message=""), ev.CommitDone(commit_id=1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not ticked.is_set(), "the earlier timer was replaced"
    stand.feed(ev.CommitFailed(commit_id=1, message=""))
    await asyncio.wait_for(ticked.wait(), 10)
    assert [event for event in core.seen if isinstance(event, ev.Tick)] == [ev.Tick()]


async def test_after_the_halt_nothing_reaches_the_core() -> None:
    stand = Stand()
    stand.feed(ev.ShellFailed(message="the producer was fenced"), ev.StopRequested())
    halt = stand.driver.halted.result()
    assert (halt.exit_code, halt.message) == (1, "the producer was fenced")
    assert stand.source.commands == []


async def test_a_drain_ends_with_0() -> None:
    stand = Stand()
    queries = stand.start()
    stand.feed(ev.StopRequested())
    assert stand.source.commands[-1] == "stop polling"
    stand.answer()
    stand.feed(ev.WritesDurable(results=queries))
    commit = stand.source.commands[-1]
    assert isinstance(commit, fx.Commit)
    assert commit.synchronous
    stand.feed(ev.CommitDone(commit_id=commit.commit_id))
    assert stand.driver.halted.result().exit_code == 0
