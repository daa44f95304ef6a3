"""Records to queries: what comes of each, whatever raises, and in how many turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest

from aggregator.adapters.kafka_source import RawBatch
from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.failures import Code, Reason
from aggregator.core.query import Query
from aggregator.runtime.bridge import Bridge
from aggregator.runtime.intake import TURN_NS, Intake
from aggregator.telemetry import metrics as m
from aggregator.wire.headers import HeaderRules
from aggregator.wire.query import DecodeOptions
from aggregator.wire.result import ResultEncoder
from tests.harness.core import MODEL, SERVER, TP, limits
from tests.unit.test_driver import REVISION, Stand


class FakeMessage:
    """What the client gives for a record."""

    def __init__(self, offset: int, value: bytes | None, headers: Any = None) -> None:
        self._offset, self._value, self._headers = offset, value, headers

    def topic(self) -> str:
        return TP[0]

    def partition(self) -> int:
        return TP[1]

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> Any:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return (1, 1_000)

    def __len__(self) -> int:
        return len(self._value or b"")


class FakeEstimator:
    """Counts characters up to 50, fails on one text, and takes the time that it is told to."""

    exact = False
    failures = 0
    texts = 0
    text_ns = 0
    now_ns = 0
    looks = 0

    def clock_ns(self) -> int:
        self.looks += 1
        return self.now_ns

    def estimate(self, text: str) -> int:
        self.texts += 1
        self.now_ns += self.text_ns
        if text == "boom":
            raise RuntimeError("a bug")
        return min(len(text), 50)

    def estimate_many(self, texts: Iterable[str]) -> list[int]:
        return [self.estimate(text) for text in texts]


def read(values: Sequence[bytes | None], **fields: Any) -> tuple[list[Query], list[Exception]]:
    bugs: list[Exception] = []
    intake = Intake(
        options=DecodeOptions(models=frozenset({MODEL})),
        estimators={MODEL: FakeEstimator()},
        on_bug=bugs.append,
        **fields,
    )
    batch = RawBatch(
        messages=cast("Any", [FakeMessage(5 + i, value) for i, value in enumerate(values)]),
        epochs={TP: 3},
        positions=[],
    )
    [(polled, last)] = intake.read(batch, arrived_ns=10**15, wall_ms=2_000)
    assert last
    return list(polled.records), bugs


def test_records_become_queries_with_estimates() -> None:
    queries, bugs = read([b'{"text": "four"}', b"garbage", None])
    assert bugs == []
    assert [(query.offset, query.epoch) for query in queries] == [(5, 3), (6, 3), (7, 3)]
    assert (queries[0].estimate_raw, queries[0].failure) == (4, None)
    assert queries[0].deadline_ns == 10**15 + 59_000 * 1_000_000
    for query in queries[1:]:
        assert query.failure is not None
        assert query.failure.reason is Reason.UNDECODABLE


@pytest.mark.parametrize("part", ["estimate", "decode", "classify"])
def test_whatever_raises_is_the_end_of_one_record_only(part: str) -> None:
    def boom(*_args: Any, **_fields: Any) -> Any:
        raise RuntimeError("a bug")

    fields = {} if part == "estimate" else {part: boom}
    queries, bugs = read([b'{"text": "boom"}', b'{"text": "fine"}'], **fields)
    assert len(queries) == 2
    failed = [query for query in queries if query.failure is not None]
    assert len(failed) == len(bugs) == (1 if part == "estimate" else 2)
    for query in failed:
        assert query.failure is not None
        assert (query.failure.code, query.failure.reason) == (Code.INTERNAL, Reason.SERVER_ERROR)
        assert query.failure.dead_letter
        assert query.value is not None
        encoded = ResultEncoder(HeaderRules()).encode_error(query)
        assert b"SERVER_ERROR" in encoded[1]


def test_a_record_whose_headers_the_client_cannot_read_is_undecodable() -> None:
    class Unreadable(FakeMessage):
        """As the client does: the second answer would end the process of whoever looks into it."""

        asked = 0

        def headers(self) -> Any:
            self.asked += 1
            if self.asked > 1:
                raise AssertionError("asked again")
            raise SystemError("returned a result with an exception set")

    bad, good = Unreadable(5, b'{"text": "a"}'), FakeMessage(6, b'{"text": "b"}', [("a", None)])
    intake = Intake(
        options=DecodeOptions(models=frozenset({MODEL})),
        estimators={MODEL: FakeEstimator()},
        on_bug=lambda error: pytest.fail(repr(error)),
    )
    batch = RawBatch(messages=cast("Any", [bad, good]), epochs={TP: 3}, positions=[])
    [(polled, _)] = intake.read(batch, arrived_ns=10**15, wall_ms=2_000)
    refused, mate = polled.records
    assert refused.failure is not None
    assert (refused.failure.reason, refused.failure.dead_letter) == (Reason.UNDECODABLE, True)
    assert (refused.offset, refused.value, refused.headers) == (5, b'{"text": "a"}', ())
    assert (mate.failure, mate.headers) == (None, [("a", None)])


async def test_a_record_that_failed_on_a_bug_of_ours_is_answered_and_lettered() -> None:
    queries, _ = read([b'{"text": "boom"}'])
    stand = Stand()
    stand.feed(
        ev.PartitionsAssigned(epoch=3, partitions=[TP]),
        ev.RecordsPolled(records=queries, positions=[ev.Position(tp=TP, epoch=3, offset_next=6)]),
    )
    assert [query for query, _, _ in stand.sink.results] == queries
    assert [query for query, _, _ in stand.sink.letters] == queries
    stand.feed(ev.WritesDurable(results=queries, letters=queries))
    assert stand.metrics.value(m.DEAD_LETTERS, "SERVER_ERROR") == 1


# Turns of the loop --------------------------------------------------------------------------------

LONG = b'{"text": "%s"}' % (b"word " * 2_000)


def intake_of(estimator: FakeEstimator) -> Intake:
    return Intake(
        options=DecodeOptions(models=frozenset({MODEL}), ttl_ms=0),
        estimators={MODEL: estimator},
        on_bug=lambda error: pytest.fail(repr(error)),
        clock_ns=estimator.clock_ns,
    )


def batch_of(count: int, value: bytes = LONG, *, skip: int = 0) -> RawBatch:
    """Offsets from 0, and a position that is `skip` beyond the last record."""
    return RawBatch(
        messages=cast("Any", [FakeMessage(offset, value) for offset in range(count)]),
        epochs={TP: 1},
        positions=[ev.Position(tp=TP, epoch=1, offset_next=count + skip)],
    )


class Turns:
    """A bridge on a driver, whose estimator takes a third of a turn and more for each text."""

    def __init__(self) -> None:
        self.estimator = FakeEstimator()
        self.estimator.text_ns = TURN_NS * 2 // 3
        self.stand = Stand()
        self.stand.feed(ev.PartitionsAssigned(epoch=1, partitions=[TP]))
        self.idle()
        self.happened: list[str] = []
        self.bridge = Bridge(
            intake_of(self.estimator),
            loop=asyncio.get_running_loop(),
            metrics=self.stand.metrics,
            log=cast("Any", self.stand.log),
        )
        feed = self.stand.driver.feed

        def watched(events: Iterable[ev.Event]) -> None:
            events = list(events)
            polled = [event for event in events if isinstance(event, ev.RecordsPolled)]
            self.happened += [str(len(event.records)) for event in polled]
            feed(events)

        self.stand.driver.feed = watched  # type: ignore[method-assign]
        self.bridge.attach(self.stand.driver, lambda: self.happened.append("taken"))

    @property
    def dispatched(self) -> list[int]:
        return [query.offset for claim in self.stand.servers.claims for query in claim.queries]

    def idle(self) -> None:
        """The server says that it has nothing to do."""
        self.stand.feed(
            ev.ServerChanged(
                model=MODEL,
                server=SERVER,
                phase=ev.ServerPhase.READY,
                limits=limits(),
                model_revision=REVISION,
                dimensions=4,
            )
        )

    async def turn(self) -> None:
        """One turn of the loop, in which other work is done too."""
        self.happened.append("other work")
        await asyncio.sleep(0)


def test_short_queries_are_one_part_and_look_at_the_clock_seldom() -> None:
    estimator = FakeEstimator()
    parts = list(
        intake_of(estimator).read(batch_of(1_000, b'{"text": "four"}'), arrived_ns=1, wall_ms=1_000)
    )
    assert [(len(polled.records), last) for polled, last in parts] == [(1_000, True)]
    assert estimator.looks < 100


async def test_the_loop_goes_on_between_the_parts_of_a_poll_of_long_texts() -> None:
    turns = Turns()
    turns.bridge.on_batch(batch_of(5))
    for _ in range(4):
        await turns.turn()
    assert turns.happened == [
        *("other work", "2"),
        *("other work", "2"),
        *("other work", "1", "taken"),
        "other work",
    ]
    assert turns.stand.metrics.value(m.RECORDS_POLLED) == 5


async def test_parts_are_admitted_in_order_and_each_record_once() -> None:
    turns = Turns()
    stand = turns.stand
    turns.bridge.on_batch(batch_of(7))
    for _ in range(5):
        await turns.turn()
        if len(stand.sink.results) < len(turns.dispatched):
            stand.answer()
            turns.idle()
    assert turns.dispatched == list(range(7))
    assert turns.happened.count("taken") == 1


async def test_no_offset_is_read_before_its_record_is_admitted() -> None:
    turns = Turns()
    stand = turns.stand
    turns.bridge.on_batch(batch_of(3, skip=4))
    await turns.turn()
    stand.answer()
    stand.feed(ev.WritesDurable(results=[query for query, _, _ in stand.sink.results]))
    (commit,) = stand.source.commits
    assert [offset.offset_next for offset in commit.offsets] == [2], "settled, and no further"
    assert "taken" not in turns.happened
    await turns.turn()
    assert stand.core.watermarks() == {TP: 2}
    assert turns.happened[-1] == "taken"


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_partition_lost_between_two_parts_admits_no_more_of_it(comes_back: bool) -> None:
    turns = Turns()
    turns.bridge.on_batch(batch_of(3))
    await turns.turn()
    assert turns.stand.core.gauges().unsettled == 2
    turns.stand.feed(ev.PartitionsLost(partitions=[TP]))
    if comes_back:
        turns.stand.feed(ev.PartitionsAssigned(epoch=2, partitions=[TP]))
    await turns.turn()
    assert turns.stand.core.gauges().unsettled == 0
    assert turns.stand.core.dispatchers[MODEL].waiting == 0
    assert set(turns.stand.core.watermarks().values()) <= {None}
    assert turns.happened[-1] == "taken"


async def test_a_drain_between_two_parts_reads_no_more() -> None:
    turns = Turns()
    stand = turns.stand
    turns.bridge.on_batch(batch_of(6))
    await turns.turn()
    stand.feed(ev.StopRequested())
    await turns.turn()
    assert turns.happened[-2:] == ["other work", "taken"]
    assert turns.estimator.texts == 2
    stand.answer()
    stand.feed(ev.WritesDurable(results=[query for query, _, _ in stand.sink.results]))
    commit = stand.source.commands[-1]
    assert isinstance(commit, fx.Commit)
    assert [offset.offset_next for offset in commit.offsets] == [2]
    await turns.turn()
    assert turns.happened.count("taken") == 1
