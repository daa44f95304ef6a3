"""Exactly once in the core: what enters a transaction, when it begins, and how it may end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.failures import Reason
from aggregator.core.query import ABANDONED, SETTLED, WRITING, Query
from aggregator.core.transactions import ALONE_MAX, TransactionOptions
from tests.harness.core import MS, REFUSED, TEXT_MISSING, TP, Bench, make_query, of

OTHER = ("queries", 1)
THIRD = ("queries", 2)


def make_bench(**options: int) -> Bench:
    """Three partitions, one idle server, exactly once."""
    transactions = TransactionOptions(**options)
    bench = Bench(transactions=transactions, window_records_max=100_000)
    bench.assign(TP, OTHER, THIRD)
    bench.server()
    return bench


@pytest.fixture
def bench() -> Bench:
    return make_bench()


def refused(bench: Bench, *queries: Query) -> fx.CommitTransaction:
    """Poll records that end at once, and return the transaction that begins with them."""
    [transaction] = of(bench.poll(*queries), fx.CommitTransaction)
    return transaction


def bad(offset: int, tp: tuple[str, int] = TP) -> Query:
    """A record that ends with an error as soon as it is there."""
    return make_query(offset, tp=tp, failure=TEXT_MISSING)


def queries_in(transaction: fx.CommitTransaction) -> list[int]:
    """The offsets of the queries whose results are in it."""
    write = transaction.write
    vectors = [query.offset for rows in write.vectors for query in rows.queries]
    return sorted(vectors + [row.query.offset for row in write.errors])


def offsets_in(transaction: fx.CommitTransaction) -> dict[tuple[str, int], int]:
    return {offset.tp: offset.offset_next for offset in transaction.offsets}


def done(bench: Bench, transaction: fx.CommitTransaction) -> list[fx.Effect]:
    return bench.feed(ev.CommitDone(commit_id=transaction.commit_id))


def failed(bench: Bench, transaction: fx.CommitTransaction) -> list[fx.Effect]:
    return bench.feed(ev.CommitFailed(commit_id=transaction.commit_id, message="aborted"))


class TestWhatEnters:
    def test_results_and_offsets_are_committed_together_and_nothing_else_is_written(
        self, bench: Bench
    ) -> None:
        queries = [make_query(n) for n in range(5)]
        [claim] = of(bench.poll(*queries), fx.Dispatch)
        [transaction] = of(bench.answer(claim), fx.CommitTransaction)
        [rows] = transaction.write.vectors
        assert [query.offset for query in rows.queries] == [0, 1, 2, 3, 4]
        assert list(rows.rows) == [0, 1, 2, 3, 4]
        assert offsets_in(transaction) == {TP: 5}
        assert {query.phase for query in queries} == {WRITING}
        done(bench, transaction)
        assert {query.phase for query in queries} == {SETTLED}
        assert bench.core.buffer_bytes == 0
        bench.tick(1000)
        assert not of(bench.effects, fx.Write)
        assert not of(bench.effects, fx.Commit)
        assert len(of(bench.effects, fx.CommitTransaction)) == 1

    def test_a_result_behind_an_unfinished_query_is_held(self, bench: Bench) -> None:
        first, second = make_query(0), make_query(1)
        [claim] = of(bench.poll(first, second), fx.Dispatch)
        assert not of(bench.answer(claim, indexes=[1]), fx.CommitTransaction)
        assert bench.core.buffer_bytes > first.size_bytes + second.size_bytes
        [transaction] = of(bench.answer(claim, indexes=[0]), fx.CommitTransaction)
        assert queries_in(transaction) == [0, 1]
        assert offsets_in(transaction) == {TP: 2}

    def test_an_unfinished_query_of_one_partition_holds_up_no_other(self, bench: Bench) -> None:
        bench.poll(make_query(0))
        transaction = refused(bench, bad(7, OTHER))
        assert queries_in(transaction) == [7]
        assert offsets_in(transaction) == {OTHER: 8}

    def test_the_offset_is_that_of_the_first_one_left_out(self, bench: Bench) -> None:
        [claim] = of(bench.poll(make_query(3), make_query(9)), fx.Dispatch)
        [transaction] = of(bench.answer(claim, indexes=[0]), fx.CommitTransaction)
        assert offsets_in(transaction) == {TP: 9}

    def test_the_position_goes_over_gaps(self, bench: Bench) -> None:
        position = ev.Position(tp=TP, epoch=1, offset_next=8)
        [transaction] = of(bench.poll(bad(2), positions=[position]), fx.CommitTransaction)
        assert offsets_in(transaction) == {TP: 8}

    def test_a_dead_letter_goes_with_its_result(self, bench: Bench) -> None:
        query = make_query(0, failure=REFUSED)
        transaction = refused(bench, query)
        assert [row.query for row in transaction.write.letters] == [query]
        done(bench, transaction)
        assert query.phase == SETTLED
        assert bench.core.buffer_bytes == 0

    def test_vectors_of_one_answer_stay_together(self, bench: Bench) -> None:
        [claim] = of(
            bench.poll(*(make_query(n, tp=tp) for n in range(3) for tp in (TP, OTHER))),
            fx.Dispatch,
        )
        [transaction] = of(bench.answer(claim), fx.CommitTransaction)
        [rows] = transaction.write.vectors
        in_order = sorted(rows.queries, key=lambda query: (query.tp, query.offset))
        assert rows.queries == in_order
        assert list(rows.rows) == [claim.queries.index(query) for query in in_order]


class TestWhenItBegins:
    def test_one_at_a_time_and_what_comes_meanwhile_gathers(self, bench: Bench) -> None:
        first = refused(bench, bad(0))
        for offset in (1, 2, 3):
            assert not of(bench.poll(bad(offset)), fx.CommitTransaction)
        [second] = of(done(bench, first), fx.CommitTransaction)
        assert queries_in(second) == [1, 2, 3]
        assert second.commit_id != first.commit_id

    def test_offsets_alone_wait_for_the_interval(self, bench: Bench) -> None:
        refused_once = refused(bench, bad(0))
        done(bench, refused_once)
        position = ev.Position(tp=TP, epoch=1, offset_next=5)
        assert not of(bench.poll(positions=[position]), fx.CommitTransaction)
        [transaction] = of(bench.tick(101), fx.CommitTransaction)
        assert offsets_in(transaction) == {TP: 5}
        assert queries_in(transaction) == []
        done(bench, transaction)
        assert not of(bench.tick(500), fx.CommitTransaction)

    def test_it_is_bounded_by_records_and_the_rest_follows(self) -> None:
        bench = make_bench(records_max=4)
        first = refused(bench, *(bad(n) for n in range(10)))
        assert queries_in(first) == [0, 1, 2, 3]
        assert offsets_in(first) == {TP: 4}
        [second] = of(done(bench, first), fx.CommitTransaction)
        assert queries_in(second) == [4, 5, 6, 7]
        [third] = of(done(bench, second), fx.CommitTransaction)
        assert offsets_in(third) == {TP: 10}

    def test_it_is_bounded_by_bytes_but_one_record_always_goes(self) -> None:
        bench = make_bench(bytes_max=2500)
        first = refused(bench, *(bad(n) for n in range(3)))
        assert queries_in(first) == [0, 1]
        small = make_bench(bytes_max=1)
        assert queries_in(refused(small, bad(0), bad(1))) == [0]

    def test_no_partition_starves(self) -> None:
        """What came first goes first, whatever its partition."""
        bench = make_bench(records_max=4)
        under_way = refused(bench, *(bad(n) for n in range(8)))
        bench.now_ns += MS
        for tp in (OTHER, THIRD):
            late = [bad(n, tp) for n in range(2)]
            for query in late:
                query.arrived_ns = bench.now_ns
            bench.poll(*late)
        [second] = of(done(bench, under_way), fx.CommitTransaction)
        assert offsets_in(second) == {TP: 8}
        bench.poll(*(make_query(n, failure=TEXT_MISSING, arrived_ns=2**62) for n in range(8, 20)))
        [third] = of(done(bench, second), fx.CommitTransaction)
        assert offsets_in(third) == {OTHER: 2, THIRD: 2}


class TestAborts:
    def test_everything_enters_the_next_one_after_a_pause(self, bench: Bench) -> None:
        first = refused(bench, bad(0))
        bench.poll(bad(1))
        assert not of(failed(bench, first), fx.CommitTransaction)
        assert not of(bench.tick(40), fx.CommitTransaction)
        [second] = of(bench.tick(10), fx.CommitTransaction)
        assert queries_in(second) == [0, 1]
        done(bench, second)
        assert bench.core.buffer_bytes == 0
        third = refused(bench, bad(2))  # no pause is left from then
        assert queries_in(third) == [2]

    def test_pauses_grow_and_intake_stops_until_one_succeeds(self, bench: Bench) -> None:
        transaction = refused(bench, bad(0))
        pauses = []
        for _ in range(8):
            failed(bench, transaction)
            started_ns = bench.now_ns
            begun: list[fx.CommitTransaction] = []
            while not begun:
                bench.now_ns = of(bench.effects, fx.WakeAt)[-1].at_ns
                begun = of(bench.tick(), fx.CommitTransaction)
            [transaction] = begun
            pauses.append((bench.now_ns - started_ns) // MS)
        assert pauses == [50, 100, 200, 400, 800, 1600, 2000, 2000]
        assert bench.core.gauges().writing_suspended
        assert of(bench.effects, fx.Pause)
        assert of(done(bench, transaction), fx.Resume)
        assert not bench.core.gauges().writing_suspended

    def test_offsets_alone_are_tried_again_too(self, bench: Bench) -> None:
        position = ev.Position(tp=TP, epoch=1, offset_next=5)
        [first] = of(bench.poll(positions=[position]), fx.CommitTransaction)
        failed(bench, first)
        [second] = of(bench.tick(100), fx.CommitTransaction)
        assert offsets_in(second) == {TP: 5}

    def test_failures_over_what_is_lost_by_now_stop_nothing(self, bench: Bench) -> None:
        transactions = [refused(bench, bad(0))]
        for pause_ms in (50, 100, 200):
            failed(bench, transactions[-1])
            transactions += of(bench.tick(pause_ms), fx.CommitTransaction)
        assert bench.core.gauges().writing_suspended
        bench.feed(ev.PartitionsLost(partitions=[TP]))
        failed(bench, transactions[-1])
        assert not of(bench.tick(2_000), fx.CommitTransaction)
        assert not bench.core.gauges().writing_suspended
        assert queries_in(refused(bench, bad(3, OTHER))) == [3]

    def test_a_lost_partition_s_results_are_dropped_and_the_others_go_on(
        self, bench: Bench
    ) -> None:
        mine, theirs = bad(0), bad(0, OTHER)
        first = refused(bench, mine, theirs)
        bench.feed(ev.PartitionsLost(partitions=[OTHER]))
        assert theirs.phase == ABANDONED
        failed(bench, first)
        [second] = of(bench.tick(50), fx.CommitTransaction)
        assert [row.query for row in second.write.errors] == [mine]
        assert offsets_in(second) == {TP: 1}
        done(bench, second)
        assert bench.core.buffer_bytes == 0

    def test_results_of_an_earlier_epoch_never_enter_again(self, bench: Bench) -> None:
        old = bad(0)
        first = refused(bench, old)
        bench.feed(ev.PartitionsLost(partitions=[TP]))
        bench.assign(TP, epoch=2)
        new = make_query(0, epoch=2, failure=TEXT_MISSING)
        bench.poll(new)
        failed(bench, first)
        [second] = of(bench.tick(50), fx.CommitTransaction)
        assert [row.query for row in second.write.errors] == [new]
        assert second.offsets == [fx.CommitOffset(tp=TP, epoch=2, offset_next=1)]

    def test_what_was_committed_after_all_counts_although_the_partition_is_lost(
        self, bench: Bench
    ) -> None:
        first = refused(bench, bad(0))
        bench.feed(ev.PartitionsLost(partitions=[TP]))
        done(bench, first)
        assert bench.core.buffer_bytes == 0
        assert not of(bench.tick(500), fx.CommitTransaction)

    def test_no_success_for_too_long_is_one_clear_end(self) -> None:
        bench = Bench(transactions=TransactionOptions(), sink_outage_ns_max=5_000 * MS)
        bench.assign(TP)
        transaction = refused(bench, bad(0))
        failed(bench, transaction)
        for _ in range(50):
            for begun in of(bench.tick(100), fx.CommitTransaction):
                bench.feed(ev.CommitFailed(commit_id=begun.commit_id, message="not authorised"))
        [halt] = of(bench.effects, fx.Halt)
        assert halt.exit_code == 1
        assert halt.message == "no transaction could be committed for 5 s: not authorised"

    def test_one_that_does_not_end_stops_the_intake_then_the_process(self) -> None:
        bench = Bench(
            transactions=TransactionOptions(timeout_ns=1000 * MS), sink_outage_ns_max=5_000 * MS
        )
        bench.assign(TP)
        refused(bench, bad(0))
        assert not bench.core.gauges().writing_suspended
        assert of(bench.tick(1000), fx.Pause)
        assert bench.core.gauges().writing_suspended
        [halt] = of(bench.tick(4000), fx.Halt)
        assert "does not end" in halt.message
        assert not halt.at_once

    def test_a_stray_report_is_a_bug(self, bench: Bench) -> None:
        with pytest.raises(RuntimeError, match="outside a transaction"):
            bench.durable([bad(0)])


class TestRefusedRecords:
    def test_a_large_result_is_written_in_its_next_form_and_its_mates_as_before(
        self, bench: Bench
    ) -> None:
        queries = [make_query(n) for n in range(3)]
        [claim] = of(bench.poll(*queries), fx.Dispatch)
        [first] = of(bench.answer(claim), fx.CommitTransaction)
        second = self.refuse(bench, first, [queries[1]], ev.WriteFault.RECORD_ALONE)
        [rows] = second.write.vectors
        assert [query.offset for query in rows.queries] == [0, 2]
        [error] = second.write.errors
        assert error.query.failure is not None
        assert error.query.failure.reason is Reason.RESULT_TOO_LARGE
        third = self.refuse(bench, second, [queries[1]], ev.WriteFault.RECORD_ALONE)
        assert [row.form for row in third.write.errors] == [fx.Form.BARE]
        done(bench, third)
        assert bench.core.buffer_bytes == 0
        assert offsets_in(third) == {TP: 3}

    def test_a_refused_batch_is_sent_one_by_one(self, bench: Bench) -> None:
        queries = [make_query(n, tokens=1) for n in range(ALONE_MAX + 10)]
        bench.poll(*queries)
        transactions = [
            transaction
            for claim in list(bench.claims.values())
            for transaction in of(bench.answer(claim), fx.CommitTransaction)
        ]
        while transactions:
            [transaction] = transactions
            rows = transaction.write.vectors
            assert sum(each.alone for each in rows) <= ALONE_MAX
            blamed = [query for each in rows if not each.alone for query in each.queries]
            if blamed:
                transactions = [self.refuse(bench, transaction, blamed, ev.WriteFault.RECORD)]
            else:
                transactions = of(done(bench, transaction), fx.CommitTransaction)
        assert {query.phase for query in queries} == {SETTLED}

    def test_a_letter_that_is_too_large_goes_bare(self, bench: Bench) -> None:
        query = make_query(0, failure=REFUSED)
        first = refused(bench, query)
        bench.feed(
            ev.WritesFailed(fault=ev.WriteFault.RECORD_ALONE, message="large", letters=[query])
        )
        [second] = of(failed(bench, first), fx.CommitTransaction)
        assert [row.form for row in second.write.letters] == [fx.Form.BARE]
        assert [row.form for row in second.write.errors] == [fx.Form.FULL]

    def test_where_not_even_the_smallest_form_fits_the_process_ends(self, bench: Bench) -> None:
        query = make_query(0, failure=REFUSED)
        first = refused(bench, query)
        second = self.refuse(bench, first, [query], ev.WriteFault.RECORD_ALONE)
        with pytest.raises(ValueError, match="not enough values"):
            self.refuse(bench, second, [query], ev.WriteFault.RECORD_ALONE)
        [halt] = of(bench.effects, fx.Halt)
        assert halt.message == "the smallest form of a result was refused: large"

    @staticmethod
    def refuse(
        bench: Bench,
        transaction: fx.CommitTransaction,
        results: list[Query],
        fault: ev.WriteFault,
    ) -> fx.CommitTransaction:
        """Fail a transaction over some of its results; the next one begins without a pause."""
        bench.feed(ev.WritesFailed(fault=fault, message="large", results=results))
        [following] = of(failed(bench, transaction), fx.CommitTransaction)
        return following


class TestRevokes:
    def test_what_is_settled_is_committed_before_the_release(self, bench: Bench) -> None:
        transaction = refused(bench, bad(0))
        assert not of(self.revoke(bench), fx.Release)
        bench.poll(bad(1))  # nothing more is admitted
        [release] = of(done(bench, transaction), fx.Release)
        assert release.abandoned == 0

    def test_what_is_dispatched_is_finished_and_committed_first(self, bench: Bench) -> None:
        [claim] = of(bench.poll(make_query(0)), fx.Dispatch)
        assert not of(self.revoke(bench), fx.Release)
        [transaction] = of(bench.answer(claim), fx.CommitTransaction)
        assert offsets_in(transaction) == {TP: 1}
        assert of(done(bench, transaction), fx.Release)

    def test_an_idle_partition_commits_its_position_at_once(self, bench: Bench) -> None:
        done(bench, refused(bench, bad(0)))
        bench.poll(positions=[ev.Position(tp=TP, epoch=1, offset_next=5)])
        [transaction] = of(self.revoke(bench), fx.CommitTransaction)
        assert offsets_in(transaction) == {TP: 5}
        assert of(done(bench, transaction), fx.Release)

    def test_nothing_to_commit_releases_at_once(self, bench: Bench) -> None:
        assert of(self.revoke(bench), fx.Release)

    def test_a_transaction_of_others_is_not_waited_for(self, bench: Bench) -> None:
        refused(bench, bad(0, OTHER))
        assert of(self.revoke(bench), fx.Release)

    def test_at_the_deadline_the_open_transaction_is_aborted(self, bench: Bench) -> None:
        transaction = refused(bench, bad(0), bad(0, OTHER))
        self.revoke(bench)
        assert not of(bench.tick(4_999), fx.AbortTransaction)
        effects = bench.tick(1)
        assert of(effects, fx.AbortTransaction) == [
            fx.AbortTransaction(commit_id=transaction.commit_id)
        ]
        assert not of(effects, fx.Release)
        effects = failed(bench, transaction)
        [release] = of(effects, fx.Release)
        assert release.abandoned == 1
        [rest] = of(effects, fx.CommitTransaction)  # the other partition's, without a pause
        assert offsets_in(rest) == {OTHER: 1}

    def test_a_commit_that_was_faster_than_the_abort_releases_too(self, bench: Bench) -> None:
        transaction = refused(bench, bad(0))
        self.revoke(bench)
        bench.tick(5_000)
        assert of(done(bench, transaction), fx.Release)
        assert bench.core.buffer_bytes == 0

    def test_an_abort_that_does_not_end_halts_without_a_release(self, bench: Bench) -> None:
        refused(bench, bad(0))
        self.revoke(bench)
        bench.tick(5_000)
        assert not of(bench.tick(9_999), fx.Halt)
        [halt] = of(bench.tick(1), fx.Halt)
        assert (halt.exit_code, halt.at_once) == (1, True)
        assert not of(bench.effects, fx.Release)

    def test_at_the_deadline_the_unfinished_is_abandoned(self, bench: Bench) -> None:
        [claim] = of(bench.poll(make_query(0), make_query(1)), fx.Dispatch)
        bench.answer(claim, indexes=[1])
        self.revoke(bench)
        [release] = of(bench.tick(5_000), fx.Release)
        assert release.abandoned == 2
        assert bench.core.buffer_bytes == 0

    @staticmethod
    def revoke(bench: Bench) -> list[fx.Effect]:
        return bench.feed(ev.PartitionsRevoking(revoke_id=1, partitions=[TP]))


class TestDrain:
    def test_finishes_commits_and_halts_with_zero(self, bench: Bench) -> None:
        [claim] = of(bench.poll(make_query(0), bad(1)), fx.Dispatch)
        bench.feed(ev.StopRequested())
        [transaction] = of(bench.answer(claim), fx.CommitTransaction)
        assert queries_in(transaction) == [0, 1]
        [halt] = of(done(bench, transaction), fx.Halt)
        assert (halt.exit_code, halt.abandoned, halt.at_once) == (0, 0, False)

    def test_an_abort_before_the_deadline_is_tried_again(self, bench: Bench) -> None:
        first = refused(bench, bad(0))
        bench.feed(ev.StopRequested())
        failed(bench, first)
        [second] = of(bench.tick(50), fx.CommitTransaction)
        [halt] = of(done(bench, second), fx.Halt)
        assert halt.exit_code == 0

    def test_at_the_deadline_the_open_transaction_is_aborted_still_with_zero(
        self, bench: Bench
    ) -> None:
        transaction = refused(bench, bad(0))
        bench.feed(ev.StopRequested())
        assert of(bench.tick(20_000), fx.AbortTransaction)
        [halt] = of(failed(bench, transaction), fx.Halt)
        assert (halt.exit_code, halt.abandoned) == (0, 1)

    def test_an_abort_that_does_not_end_is_not_waited_for(self, bench: Bench) -> None:
        """No callback waits: the brokers abort it, and the next owner waits for that."""
        refused(bench, bad(0))
        bench.feed(ev.StopRequested())
        bench.tick(20_000)
        assert not of(bench.tick(999), fx.Halt)
        [halt] = of(bench.tick(1), fx.Halt)
        assert (halt.exit_code, halt.abandoned, halt.at_once) == (0, 1, False)


@pytest.mark.parametrize("end", [done, failed])
def test_an_answer_to_no_transaction_is_ignored(
    bench: Bench, end: Callable[[Bench, fx.CommitTransaction], list[fx.Effect]]
) -> None:
    transaction = refused(bench, bad(0))
    done(bench, transaction)
    end(bench, transaction)
    following = refused(bench, bad(1))
    assert queries_in(following) == [1]
