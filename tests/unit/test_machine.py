"""The state machine, event by event: settling, watermarks, windows, rebalances, failed writes."""

from __future__ import annotations

import pytest

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.failures import Reason
from aggregator.core.query import ABANDONED, SETTLED
from tests.harness.core import MS, REFUSED, TEXT_MISSING, TP, Bench, limits, make_query, of

OTHER = ("queries", 1)


@pytest.fixture
def bench() -> Bench:
    """One partition, one idle server."""
    bench = Bench()
    bench.assign(TP)
    bench.server()
    return bench


def committed(bench: Bench) -> list[int]:
    """The offsets asked to be committed for the first partition, in order."""
    return [
        offset.offset_next
        for commit in of(bench.effects, fx.Commit)
        for offset in commit.offsets
        if offset.tp == TP
    ]


def commit_all(bench: Bench) -> None:
    """Let the broker accept every commit that was asked for."""
    for commit in of(bench.effects, fx.Commit):
        bench.feed(ev.CommitDone(commit_id=commit.commit_id))


class TestSettling:
    def test_commits_only_behind_a_durable_result(self, bench: Bench) -> None:
        query = make_query(7)
        [claim] = of(bench.poll(query), fx.Dispatch)
        bench.tick(200)
        effects = bench.answer(claim)
        assert of(effects, fx.Write)[0].vectors[0].queries == [query]
        bench.tick(200)
        assert committed(bench) == []
        bench.durable([query])
        bench.tick(200)
        assert committed(bench) == [8]
        assert query.phase == SETTLED

    def test_a_later_result_does_not_carry_the_watermark_over_an_earlier_one(
        self, bench: Bench
    ) -> None:
        first, second = make_query(0), make_query(1)
        [claim] = of(bench.poll(first, second), fx.Dispatch)
        bench.answer(claim)
        bench.durable([second])
        bench.tick(200)
        assert committed(bench) in ([], [0])
        bench.durable([first])
        bench.feed(ev.CommitDone(commit_id=1))
        bench.tick(200)
        assert committed(bench)[-1] == 2

    def test_a_refused_record_settles_when_result_and_letter_are_durable(
        self, bench: Bench
    ) -> None:
        query = make_query(0, failure=REFUSED)
        [write] = of(bench.poll(query), fx.Write)
        assert [row.query for row in write.errors] == [query]
        assert [row.query for row in write.letters] == [query]
        bench.durable([query])
        assert query.phase != SETTLED
        bench.durable(letters=[query])
        assert query.phase == SETTLED

    def test_a_failure_without_dead_letter_writes_one_record(self, bench: Bench) -> None:
        query = make_query(0, failure=TEXT_MISSING)
        [write] = of(bench.poll(query), fx.Write)
        assert write.letters == []
        bench.durable([query])
        assert query.phase == SETTLED

    def test_the_position_moves_the_watermark_over_gaps(self, bench: Bench) -> None:
        query = make_query(2, failure=TEXT_MISSING)
        position = ev.Position(tp=TP, epoch=1, offset_next=8)
        bench.poll(query, positions=[position])
        bench.durable([query])
        bench.tick(200)
        assert committed(bench)[-1] == 8

    def test_a_position_without_records_is_committed(self, bench: Bench) -> None:
        bench.poll(positions=[ev.Position(tp=TP, epoch=1, offset_next=5)])
        bench.tick(200)
        assert committed(bench) == [5]

    def test_settled_queries_behind_an_unsettled_one_hold_no_payload(self, bench: Bench) -> None:
        first, second = make_query(0), make_query(1)
        [claim] = of(bench.poll(first, second), fx.Dispatch)
        bench.answer(claim)
        before = bench.core.buffer_bytes
        bench.durable([second])
        assert (second.text, second.value, second.headers) == ("", None, ())
        assert bench.core.buffer_bytes < before

    def test_buffer_bytes_return_to_zero(self, bench: Bench) -> None:
        queries = [make_query(n, failure=REFUSED if n % 3 == 0 else None) for n in range(30)]
        bench.poll(*queries)
        for claim in bench.claims.values():
            bench.answer(claim)
        bench.durable(queries, [query for query in queries if query.failure])
        assert bench.core.buffer_bytes == 0
        assert bench.core.gauges().unsettled == 0


class TestCommits:
    def test_one_asynchronous_commit_at_a_time(self, bench: Bench) -> None:
        for offset in range(5):
            query = make_query(offset, failure=TEXT_MISSING)
            bench.poll(query)
            bench.durable([query])
            bench.tick(200)
        assert committed(bench) == [1]
        commit_all(bench)
        bench.tick(200)
        assert committed(bench) == [1, 5]

    def test_a_failed_commit_is_made_again(self, bench: Bench) -> None:
        query = make_query(0, failure=TEXT_MISSING)
        bench.poll(query)
        bench.durable([query])
        bench.tick(200)
        bench.feed(ev.CommitFailed(commit_id=1, message="not now"))
        bench.tick(200)
        assert committed(bench) == [1, 1]

    def test_half_a_window_commits_before_the_interval(self) -> None:
        bench = Bench(window_records_max=10, commit_interval_ns=10_000 * MS)
        bench.assign(TP)
        bench.tick()
        first = make_query(0, failure=TEXT_MISSING)
        bench.poll(first)
        bench.durable([first])  # the first commit of all is due at once
        commit_all(bench)
        few = [make_query(n, failure=TEXT_MISSING) for n in range(1, 5)]
        bench.poll(*few)
        bench.durable(few)
        assert committed(bench)[-1] == 1
        more = make_query(5, failure=TEXT_MISSING)
        bench.poll(more)
        bench.durable([more])
        assert committed(bench)[-1] == 6


class TestWindows:
    def test_a_full_window_pauses_and_an_emptied_one_resumes(self) -> None:
        bench = Bench(window_records_max=10)
        bench.assign(TP)
        queries = [make_query(n, failure=TEXT_MISSING) for n in range(10)]
        [pause] = of(bench.poll(*queries), fx.Pause)
        assert list(pause.partitions) == [TP]
        bench.durable(queries[:4])
        commit_all(bench)
        bench.tick(200)
        commit_all(bench)
        assert of(bench.effects, fx.Resume) == [fx.Resume(partitions=[TP])]  # of the assignment
        bench.durable(queries[4:])
        bench.tick(200)
        commit_all(bench)
        [_, resume] = of(bench.effects, fx.Resume)
        assert list(resume.partitions) == [TP]

    def test_durable_but_uncommitted_records_fill_the_window(self) -> None:
        bench = Bench(window_records_max=10)
        bench.assign(TP)
        queries = [make_query(n, failure=TEXT_MISSING) for n in range(10)]
        bench.poll(*queries)
        assert of(bench.durable(queries), fx.Resume) == []
        bench.tick(200)
        [commit] = of(bench.effects, fx.Commit)
        effects = bench.feed(ev.CommitDone(commit_id=commit.commit_id))
        assert len(of(effects, fx.Resume)) == 1

    def test_a_full_buffer_pauses_everything(self) -> None:
        bench = Bench(buffer_bytes_max=2500)
        bench.assign(TP, OTHER)
        queries = [make_query(n, failure=TEXT_MISSING) for n in range(3)]
        [pause] = of(bench.poll(*queries), fx.Pause)
        assert set(pause.partitions) == {TP, OTHER}
        assert of(bench.durable(queries[:1]), fx.Resume) == []
        [resume] = of(bench.durable(queries[1:2]), fx.Resume)
        assert set(resume.partitions) == {TP, OTHER}

    def test_an_assignment_leaves_the_pauses_of_others(self) -> None:
        bench = Bench(window_records_max=2)
        bench.assign(TP)
        bench.poll(make_query(0, failure=TEXT_MISSING), make_query(1, failure=TEXT_MISSING))
        effects = bench.assign(OTHER, epoch=2)
        [resume] = of(effects, fx.Resume)
        assert list(resume.partitions) == [OTHER]
        assert not of(effects, fx.Pause)


class TestRebalances:
    def test_an_assignment_undoes_a_pause_that_came_too_late(self) -> None:
        bench = Bench(window_records_max=2)
        bench.assign(TP)
        bench.poll(make_query(0, failure=TEXT_MISSING), make_query(1, failure=TEXT_MISSING))
        bench.feed(ev.PartitionsLost(partitions=[TP]))
        [resume] = of(bench.assign(TP, epoch=2), fx.Resume)
        assert list(resume.partitions) == [TP]

    def test_records_of_another_epoch_are_not_admitted(self, bench: Bench) -> None:
        stale = make_query(3, epoch=0)
        bench.poll(stale)
        assert stale.phase == ABANDONED
        assert bench.core.gauges().unsettled == 0
        assert bench.core.watermarks() == {TP: None}

    def test_revoke_finishes_what_was_started_and_drops_the_rest(self, bench: Bench) -> None:
        # A server that is told to be busy takes one claim; the rest stays in the backlog.
        started = [make_query(n, tokens=500) for n in range(1)]
        [claim] = of(bench.poll(*started), fx.Dispatch)
        bench.server(says=limits(window=600, busy_ms=1000))
        waiting = [make_query(n, tokens=500) for n in range(1, 4)]
        bench.poll(*waiting)
        assert of(bench.feed(ev.PartitionsRevoking(revoke_id=9, partitions=[TP])), fx.Release) == []
        assert all(query.phase == ABANDONED for query in waiting)
        bench.answer(claim)
        [commit] = of(bench.durable(started), fx.Commit)
        assert commit.synchronous
        assert [offset.offset_next for offset in commit.offsets] == [1]
        [release] = of(bench.feed(ev.CommitDone(commit_id=commit.commit_id)), fx.Release)
        assert (release.revoke_id, release.abandoned) == (9, 0)
        assert bench.core.gauges().partitions == 0
        assert bench.core.buffer_bytes == 0

    def test_revoked_partitions_admit_nothing_meanwhile(self, bench: Bench) -> None:
        query = make_query(0)
        [claim] = of(bench.poll(query), fx.Dispatch)
        bench.feed(ev.PartitionsRevoking(revoke_id=1, partitions=[TP]))
        late = make_query(1)
        assert of(bench.poll(late), fx.Dispatch) == []
        assert late.phase == ABANDONED
        bench.answer(claim)
        [commit] = of(bench.durable([query]), fx.Commit)
        assert [offset.offset_next for offset in commit.offsets] == [1]

    def test_an_error_above_waiting_queries_makes_them_finish_first(self, bench: Bench) -> None:
        first = make_query(0, tokens=500)
        [claim] = of(bench.poll(first), fx.Dispatch)
        bench.server(says=limits(window=600, busy_ms=1000))
        waiting, refused = make_query(1, tokens=500), make_query(2, failure=TEXT_MISSING)
        bench.poll(waiting, refused)
        bench.feed(ev.PartitionsRevoking(revoke_id=1, partitions=[TP]))
        assert waiting.phase != ABANDONED
        bench.answer(claim)
        bench.durable([first, refused])
        bench.server(says=limits())
        [second] = [c for c in bench.claims.values() if waiting in c.queries]
        bench.answer(second)
        [commit] = of(bench.durable([waiting]), fx.Commit)
        assert [offset.offset_next for offset in commit.offsets] == [3]

    def test_at_the_revoke_deadline_the_unfinished_is_abandoned(self, bench: Bench) -> None:
        done, stuck = make_query(0, failure=TEXT_MISSING), make_query(1)
        [claim] = of(bench.poll(done, stuck), fx.Dispatch)
        bench.durable([done])
        bench.feed(ev.PartitionsRevoking(revoke_id=1, partitions=[TP]))
        [commit] = of(bench.tick(5001), fx.Commit)
        assert commit.synchronous
        [release] = of(bench.feed(ev.CommitDone(commit_id=commit.commit_id)), fx.Release)
        assert release.abandoned == 1
        assert of(bench.answer(claim), fx.Write) == []
        assert stuck.phase == ABANDONED
        assert bench.core.buffer_bytes == 0

    def test_reports_for_abandoned_queries_move_nothing(self, bench: Bench) -> None:
        query = make_query(0)
        [claim] = of(bench.poll(query), fx.Dispatch)
        bench.answer(claim)
        bench.feed(ev.PartitionsLost(partitions=[TP]))
        bench.assign(TP, epoch=2)
        bench.durable([query])
        bench.tick(200)
        assert committed(bench) == []
        assert bench.core.buffer_bytes == 0

    def test_lost_partitions_commit_nothing(self, bench: Bench) -> None:
        query = make_query(0, failure=TEXT_MISSING)
        bench.poll(query)
        bench.durable([query])
        before = len(of(bench.effects, fx.Commit))
        bench.feed(ev.PartitionsLost(partitions=[TP]))
        bench.tick(1000)
        assert len(of(bench.effects, fx.Commit)) == before

    def test_a_revoke_of_nothing_is_released_at_once(self, bench: Bench) -> None:
        [release] = of(
            bench.feed(ev.PartitionsRevoking(revoke_id=4, partitions=[OTHER])), fx.Release
        )
        assert release.revoke_id == 4

    def test_a_failed_commit_still_releases(self, bench: Bench) -> None:
        query = make_query(0, failure=TEXT_MISSING)
        bench.poll(query)
        bench.durable([query])
        bench.poll(make_query(1))
        bench.feed(ev.PartitionsRevoking(revoke_id=4, partitions=[TP]))
        bench.tick(5001)
        commit = of(bench.effects, fx.Commit)[-1]
        assert commit.synchronous
        effects = bench.feed(ev.CommitFailed(commit_id=commit.commit_id, message="gone"))
        assert [release.revoke_id for release in of(effects, fx.Release)] == [4]

    def test_partitions_lost_while_revoking(self, bench: Bench) -> None:
        query = make_query(0)
        bench.poll(query)
        bench.feed(ev.PartitionsRevoking(revoke_id=4, partitions=[TP]))
        effects = bench.feed(ev.PartitionsLost(partitions=[TP]))
        assert [release.revoke_id for release in of(effects, fx.Release)] == [4]
        assert of(effects, fx.Commit) == []


class TestDrain:
    def test_finishes_commits_and_halts_with_zero(self, bench: Bench) -> None:
        query = make_query(0)
        [claim] = of(bench.poll(query), fx.Dispatch)
        assert len(of(bench.feed(ev.StopRequested()), fx.StopPolling)) == 1
        bench.answer(claim)
        [commit] = of(bench.durable([query]), fx.Commit)
        assert commit.synchronous
        [halt] = of(bench.feed(ev.CommitDone(commit_id=commit.commit_id)), fx.Halt)
        assert (halt.exit_code, halt.abandoned) == (0, 0)

    def test_a_commit_refused_by_a_rebalance_is_tried_again(self, bench: Bench) -> None:
        query = make_query(0)
        [claim] = of(bench.poll(query), fx.Dispatch)
        bench.feed(ev.StopRequested())
        bench.answer(claim)
        [commit] = of(bench.durable([query]), fx.Commit)
        for _ in range(3):
            refused = ev.CommitFailed(commit_id=commit.commit_id, message="wait", retryable=True)
            effects = bench.feed(refused)
            assert of(effects, fx.Halt) + of(effects, fx.Commit) == []
            [wake] = of(effects, fx.WakeAt)
            assert 0 < wake.at_ns - bench.now_ns <= 100 * MS
            [again] = of(bench.tick(100), fx.Commit)
            assert (again.synchronous, again.offsets) == (True, commit.offsets)
            commit = again
        effects = bench.feed(ev.CommitDone(commit_id=commit.commit_id))
        assert [halt.exit_code for halt in of(effects, fx.Halt)] == [0]

    def test_no_commit_is_tried_again_after_the_deadline(self, bench: Bench) -> None:
        query = make_query(0)
        [claim] = of(bench.poll(query), fx.Dispatch)
        bench.feed(ev.StopRequested())
        bench.answer(claim)
        [commit] = of(bench.durable([query]), fx.Commit)
        bench.tick(20_001)
        refused = ev.CommitFailed(commit_id=commit.commit_id, message="wait", retryable=True)
        assert len(of(bench.feed(refused), fx.Halt)) == 1

    def test_a_last_commit_without_an_answer_is_given_up(self, bench: Bench) -> None:
        bench.poll(make_query(0), make_query(1))
        [claim] = [effect for effect in bench.effects if isinstance(effect, fx.Dispatch)]
        bench.feed(ev.StopRequested())
        bench.answer(claim)
        bench.durable([claim.queries[0]])
        effects = bench.tick(20_001)
        assert len(of(effects, fx.Commit)) == 1
        [wake] = of(effects, fx.WakeAt)
        assert of(bench.tick(900), fx.Halt) == []
        assert wake.at_ns > bench.now_ns
        [halt] = of(bench.tick(100), fx.Halt)
        assert wake.at_ns <= bench.now_ns
        assert (halt.exit_code, halt.abandoned) == (0, 1)

    def test_a_last_commit_of_time_may_take_all_of_it(self, bench: Bench) -> None:
        query = make_query(0)
        [claim] = of(bench.poll(query), fx.Dispatch)
        bench.feed(ev.StopRequested())
        bench.answer(claim)
        [commit] = of(bench.durable([query]), fx.Commit)
        assert of(bench.tick(19_000), fx.Halt) == []
        [halt] = of(bench.feed(ev.CommitDone(commit_id=commit.commit_id)), fx.Halt)
        assert (halt.exit_code, halt.abandoned) == (0, 0)

    def test_at_the_deadline_it_halts_all_the_same(self, bench: Bench) -> None:
        bench.poll(make_query(0))
        bench.feed(ev.StopRequested())
        effects = bench.tick(20_001)
        for commit in of(effects, fx.Commit):
            effects += bench.feed(ev.CommitDone(commit_id=commit.commit_id))
        [halt] = of(effects, fx.Halt)
        assert (halt.exit_code, halt.abandoned) == (0, 1)

    def test_what_a_revoke_gave_up_is_told_at_the_halt_that_overtakes_it(
        self, bench: Bench
    ) -> None:
        done, stuck = make_query(0, failure=TEXT_MISSING), make_query(1)
        bench.poll(done, stuck)
        bench.durable([done])
        bench.feed(ev.PartitionsRevoking(revoke_id=1, partitions=[TP]))
        bench.feed(ev.StopRequested())
        bench.tick(20_001)  # both deadlines at once, as after a freeze; no commit is answered
        effects = bench.tick(1_001)
        assert not of(effects, fx.Release)
        [halt] = of(effects, fx.Halt)
        assert (halt.exit_code, halt.abandoned) == (0, 1)

    def test_partitions_that_come_during_the_drain_are_left_alone(self, bench: Bench) -> None:
        late = ("queries", 7)
        [claim] = of(bench.poll(make_query(0)), fx.Dispatch)
        bench.feed(ev.StopRequested())
        bench.assign(late, epoch=2)
        query = make_query(0, tp=late, epoch=2)
        # On its way before the source heard that it should stop.
        assert of(bench.poll(query), fx.Dispatch) == []
        assert query.phase == ABANDONED
        bench.answer(claim)
        [commit] = of(bench.durable(claim.queries), fx.Commit)
        assert [offset.tp for offset in commit.offsets] == [TP]
        [halt] = of(bench.feed(ev.CommitDone(commit_id=commit.commit_id)), fx.Halt)
        assert (halt.exit_code, halt.abandoned) == (0, 0)

    def test_a_revoke_during_the_drain_is_served(self, bench: Bench) -> None:
        query = make_query(0)
        [claim] = of(bench.poll(query), fx.Dispatch)
        bench.feed(ev.StopRequested())
        bench.feed(ev.PartitionsRevoking(revoke_id=2, partitions=[TP]))
        bench.answer(claim)
        effects = bench.durable([query])
        for commit in of(effects, fx.Commit):
            effects += bench.feed(ev.CommitDone(commit_id=commit.commit_id))
        assert len(of(effects, fx.Halt)) == 1
        assert of(effects, fx.Halt)[0].exit_code == 0

    def test_nothing_comes_after_the_halt(self, bench: Bench) -> None:
        bench.feed(ev.ShellFailed(message="the consumer's thread died"))
        [halt] = of(bench.effects, fx.Halt)
        assert (halt.exit_code, halt.message) == (1, "the consumer's thread died")
        assert bench.poll(make_query(0)) == []


class TestFailedWrites:
    def fail(
        self, bench: Bench, fault: ev.WriteFault, *, results: list[object], letters: object = ()
    ) -> list[fx.Effect]:
        return bench.feed(
            ev.WritesFailed(fault=fault, message="no", results=results, letters=letters)  # type: ignore[arg-type]
        )

    def test_a_record_is_believed_only_alone_then_shrinks(self, bench: Bench) -> None:
        query = make_query(0)
        [claim] = of(bench.poll(query), fx.Dispatch)
        bench.answer(claim)
        [write] = of(self.fail(bench, ev.WriteFault.RECORD, results=[query]), fx.Write)
        assert write.vectors[0].alone
        [write] = of(self.fail(bench, ev.WriteFault.RECORD_ALONE, results=[query]), fx.Write)
        assert query.failure is not None
        assert query.failure.reason == Reason.RESULT_TOO_LARGE
        assert (write.errors[0].form, write.errors[0].alone) == (fx.Form.FULL, True)
        [write] = of(self.fail(bench, ev.WriteFault.RECORD_ALONE, results=[query]), fx.Write)
        assert (write.errors[0].form, write.errors[0].alone) == (fx.Form.BARE, True)
        bench.durable([query])
        assert query.phase == SETTLED
        assert bench.core.buffer_bytes == 0

    def test_an_error_result_goes_from_alone_to_bare(self, bench: Bench) -> None:
        query = make_query(0, failure=TEXT_MISSING)
        bench.poll(query)
        self.fail(bench, ev.WriteFault.RECORD, results=[query])
        [write] = of(self.fail(bench, ev.WriteFault.RECORD_ALONE, results=[query]), fx.Write)
        assert write.errors[0].form == fx.Form.BARE
        assert query.failure == TEXT_MISSING

    def test_a_letter_goes_from_alone_to_bare(self, bench: Bench) -> None:
        query = make_query(0, failure=REFUSED)
        bench.poll(query)
        bench.durable([query])
        effects = self.fail(bench, ev.WriteFault.RECORD, results=[], letters=[query])
        assert of(effects, fx.Write)[0].letters[0].alone
        effects = self.fail(bench, ev.WriteFault.RECORD_ALONE, results=[], letters=[query])
        assert of(effects, fx.Write)[0].letters[0].form == fx.Form.BARE
        bench.durable(letters=[query])
        assert query.phase == SETTLED
        assert bench.core.buffer_bytes == 0

    def test_where_not_even_the_smallest_form_is_taken_the_process_ends(self, bench: Bench) -> None:
        query = make_query(0, failure=TEXT_MISSING)
        bench.poll(query)
        self.fail(bench, ev.WriteFault.RECORD_ALONE, results=[query])
        effects = self.fail(bench, ev.WriteFault.RECORD_ALONE, results=[query])
        assert of(effects, fx.Write) == []
        [halt] = of(effects, fx.Halt)
        assert (halt.exit_code, halt.message) == (
            1,
            "the smallest form of a result was refused: no",
        )

    def test_nor_that_of_a_dead_letter(self, bench: Bench) -> None:
        query = make_query(0, failure=REFUSED)
        bench.poll(query)
        bench.durable([query])
        self.fail(bench, ev.WriteFault.RECORD_ALONE, results=[], letters=[query])
        effects = self.fail(bench, ev.WriteFault.RECORD_ALONE, results=[], letters=[query])
        assert of(effects, fx.Write) == []
        [halt] = of(effects, fx.Halt)
        assert halt.message == "the smallest form of a dead letter was refused: no"

    def test_a_failing_topic_holds_results_pauses_and_recovers(self, bench: Bench) -> None:
        queries = [make_query(n, failure=TEXT_MISSING) for n in range(5)]
        bench.poll(*queries)
        effects = self.fail(bench, ev.WriteFault.TOPIC, results=list(queries))
        assert of(effects, fx.Write) == []
        assert len(of(effects, fx.Pause)) == 1
        [probe] = of(bench.tick(300), fx.Write)
        assert len(probe.errors) == 1
        effects = bench.durable([probe.errors[0].query])
        [rest] = of(effects, fx.Write)
        assert len(rest.errors) == 4
        assert len(of(effects, fx.Resume)) == 1
        bench.durable([row.query for row in rest.errors])
        assert bench.core.buffer_bytes == 0
        assert all(query.phase == SETTLED for query in queries)

    def test_an_outage_ends_the_process_with_one_line(self, bench: Bench) -> None:
        query = make_query(0, failure=TEXT_MISSING)
        bench.poll(query)
        self.fail(bench, ev.WriteFault.TOPIC, results=[query])
        [halt] = of(bench.tick(300_001), fx.Halt)
        assert halt.exit_code == 1
        assert "results topic" in halt.message

    def test_held_results_of_a_lost_partition_are_let_go(self, bench: Bench) -> None:
        query = make_query(0, failure=TEXT_MISSING)
        bench.poll(query)
        self.fail(bench, ev.WriteFault.TOPIC, results=[query])
        bench.feed(ev.PartitionsLost(partitions=[TP]))
        assert bench.core.buffer_bytes == 0
        bench.tick(300)
        assert not bench.core.gauges().writing_suspended

    @pytest.mark.parametrize("fault", [ev.WriteFault.RECORD, ev.WriteFault.RECORD_ALONE])
    def test_a_refused_probe_that_nobody_wants_any_more_does_not_keep_a_topic_failing(
        self, bench: Bench, fault: ev.WriteFault
    ) -> None:
        query = make_query(0, failure=TEXT_MISSING)
        bench.poll(query)
        self.fail(bench, ev.WriteFault.TOPIC, results=[query])
        assert len(of(bench.tick(300), fx.Write)) == 1
        bench.feed(ev.PartitionsLost(partitions=[TP]))
        self.fail(bench, fault, results=[query])
        bench.tick(5_000)
        assert not bench.core.gauges().writing_suspended
        assert bench.core.buffer_bytes == 0

    @pytest.mark.parametrize("fault", [ev.WriteFault.RECORD, ev.WriteFault.RECORD_ALONE])
    def test_a_refused_record_says_nothing_of_its_topic(
        self, bench: Bench, fault: ev.WriteFault
    ) -> None:
        queries = [make_query(n, failure=TEXT_MISSING) for n in range(2)]
        bench.poll(*queries)
        self.fail(bench, ev.WriteFault.TOPIC, results=list(queries))
        [probe] = of(bench.tick(300), fx.Write)
        probed = probe.errors[0].query
        [write] = of(self.fail(bench, fault, results=[probed]), fx.Write)
        assert [row.query for row in write.errors] == [probed]
        assert bench.core.gauges().writing_suspended
        [halt] = of(bench.tick(300_001), fx.Halt)
        assert "could not be written for" in halt.message

    def test_a_resent_vector_keeps_its_times(self, bench: Bench) -> None:
        query = make_query(0)
        [claim] = of(bench.poll(query), fx.Dispatch)
        bench.now_ns += 7 * MS
        [first] = of(bench.answer(claim), fx.Write)
        [again] = of(self.fail(bench, ev.WriteFault.RECORD, results=[query]), fx.Write)
        assert again.vectors[0].answered_ns == first.vectors[0].answered_ns
        assert again.vectors[0].inference_us == first.vectors[0].inference_us
