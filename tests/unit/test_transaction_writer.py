"""Records of a transaction: all made and measured before any is handed on, and what is told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.dispatch import DispatchOptions
from aggregator.core.failures import Reason
from aggregator.core.machine import Aggregator, AggregatorOptions
from aggregator.core.query import SETTLED
from aggregator.core.transactions import TransactionOptions
from aggregator.runtime.transactions import Outgoing, Record
from aggregator.telemetry import metrics as m
from tests.harness.core import MODEL, REFUSED, TP, make_query
from tests.unit.test_driver import Stand


class FakeTransactions:
    """Remembers transactions; what is larger than its limits does not fit."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, Sequence[Outgoing], Sequence[Outgoing]]] = []
        self.offsets: list[Sequence[fx.CommitOffset]] = []
        self.aborted: list[int] = []
        self.result_bytes_max = 1_000
        self.letter_bytes_max = 1_000

    def result_misfit(self, record: Record) -> str | None:
        return "large result" if len(record[1] or b"") > self.result_bytes_max else None

    def letter_misfit(self, record: Record) -> str | None:
        return "large letter" if len(record[1] or b"") > self.letter_bytes_max else None

    def commit(
        self,
        commit_id: int,
        results: Sequence[Outgoing],
        letters: Sequence[Outgoing],
        offsets: Sequence[fx.CommitOffset],
    ) -> None:
        self.begun.append((commit_id, results, letters))
        self.offsets.append(offsets)

    def abort(self, commit_id: int) -> None:
        self.aborted.append(commit_id)


@pytest.fixture
async def stand() -> Stand:
    core = Aggregator(
        AggregatorOptions(
            models={MODEL: DispatchOptions(model=MODEL)}, transactions=TransactionOptions()
        )
    )
    return Stand(core, FakeTransactions())


def port_of(stand: Stand) -> FakeTransactions:
    assert isinstance(stand.transactions, FakeTransactions)
    return stand.transactions


async def test_results_go_out_in_transactions_and_count_when_they_are_committed(
    stand: Stand,
) -> None:
    queries = stand.start()
    stand.answer()
    [(commit_id, results, letters)] = port_of(stand).begun
    assert [query for query, _, alone in results if not alone] == queries
    assert letters == []
    assert port_of(stand).offsets == [[fx.CommitOffset(tp=TP, epoch=1, offset_next=3)]]
    assert stand.metrics.value(m.RESULTS, MODEL, "OK") == 0
    stand.feed(ev.CommitDone(commit_id=commit_id))
    assert {query.phase for query in queries} == {SETTLED}
    assert stand.metrics.value(m.RESULTS, MODEL, "OK") == 3
    assert stand.metrics.count(m.LATENCY_SECONDS) == 3
    assert stand.metrics.value(m.COMMITS, "done") == 1
    assert stand.metrics.count(m.TRANSACTION_SECONDS) == 1
    assert (stand.source.commits, stand.sink.results) == ([], [])


async def test_aborted_results_are_not_counted(stand: Stand) -> None:
    stand.start()
    stand.answer()
    [(commit_id, _, _)] = port_of(stand).begun
    stand.feed(ev.CommitFailed(commit_id=commit_id, message="aborted"))
    assert stand.metrics.value(m.RESULTS, MODEL, "OK") == 0
    assert stand.metrics.value(m.COMMITS, "failed") == 1


async def test_what_does_not_fit_goes_smaller_before_anything_is_produced(stand: Stand) -> None:
    port_of(stand).result_bytes_max = 0
    queries = stand.start(1)
    stand.answer()
    assert port_of(stand).begun == []  # not even the smallest form fits
    halt = stand.driver.halted.result()
    assert halt.message == "the smallest form of a result was refused: large result"
    failure = queries[0].failure
    assert failure is not None
    assert failure.reason is Reason.RESULT_TOO_LARGE


async def test_mates_of_a_misfit_keep_their_vectors(stand: Stand) -> None:
    queries = stand.start()
    stand.encoder.broken_ids = frozenset({queries[1].id})  # as good a reason as its size
    stand.answer()
    [(_, results, _)] = port_of(stand).begun
    statuses = {query.id: dict(record[2])["embedding-status"] for query, record, _ in results}
    assert statuses == {
        queries[0].id: b"OK",
        queries[1].id: b"OUT_OF_RANGE",
        queries[2].id: b"OK",
    }
    assert stand.metrics.value(m.WRITE_FAILURES, ev.WriteFault.RECORD_ALONE) == 1


async def test_a_letter_that_does_not_fit_goes_without_its_value(stand: Stand) -> None:
    port_of(stand).letter_bytes_max = 3
    stand.start(1)
    query = make_query(1, failure=REFUSED)
    stand.answer()
    stand.feed(ev.CommitDone(commit_id=port_of(stand).begun[-1][0]))
    position = ev.Position(tp=TP, epoch=1, offset_next=2)
    stand.feed(ev.RecordsPolled(records=[query], positions=[position]))
    [(commit_id, results, [(_, (_, value, headers), _)])] = port_of(stand).begun[1:]
    assert value is None
    assert dict(headers)["__aggregator.errors.value.size"] == b"5"
    assert [each for each, _, _ in results] == [query]
    stand.feed(ev.CommitDone(commit_id=commit_id))
    assert stand.metrics.value(m.DEAD_LETTERS, Reason.UNDECODABLE) == 1


async def test_an_error_that_cannot_be_made_at_all_ends_the_process(stand: Stand) -> None:
    queries = stand.start()
    stand.encoder.broken_ids = frozenset({queries[1].id})
    stand.encoder.broken_errors = True
    stand.answer()
    halt = stand.driver.halted.result()
    assert halt.exit_code == 1
    assert "not encoded: TypeError: a bug" in halt.message
    assert port_of(stand).begun == []


async def test_an_abort_is_passed_on(stand: Stand) -> None:
    stand.start()
    stand.answer()
    [(commit_id, _, _)] = port_of(stand).begun
    stand.feed(ev.PartitionsRevoking(revoke_id=1, partitions=[TP]))
    stand.now_ns += 5_000_000_000
    stand.feed(ev.Tick())
    assert port_of(stand).aborted == [commit_id]
    stand.feed(ev.CommitFailed(commit_id=commit_id, message="the abort was asked for"))
    assert ("release", 1) in stand.source.commands


async def test_a_transaction_without_a_port_is_a_bug() -> None:
    stand = Stand(
        Aggregator(
            AggregatorOptions(
                models={MODEL: DispatchOptions(model=MODEL)}, transactions=TransactionOptions()
            )
        )
    )
    stand.start()
    stand.answer()
    assert "a transaction without a port" in stand.driver.halted.result().message
