"""The state machine under random scripts, against a deliberately dumb model of what must hold.

Hypothesis chooses which of the things that may happen happens next: polls, answers, losses,
reports late and out of order and failed, commits done and failed, revokes, losses, new assignments.
After each step the model checks the invariants; at the end everything is healed and every query of
a partition still owned must be settled and committed.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.forms import BARE, LETTER_BARE
from aggregator.core.query import ABANDONED, SETTLED, Query, TopicPartition
from tests.harness.core import REFUSED, SERVER, TEXT_MISSING, Bench, make_query
from tests.harness.group import PARTITIONS, Group

WINDOW = 40


class Machine(Group):
    """Drives the core; knows which records are durable and what was committed."""

    @initialize()
    def start(self) -> None:
        """Everything is assigned, one server is there."""
        self.begin(Bench(window_records_max=WINDOW))
        self.admitted: dict[TopicPartition, list[Query]] = {tp: [] for tp in PARTITIONS}
        self.durable: set[tuple[TopicPartition, int]] = set()
        self.to_report: list[tuple[Query, bool]] = []
        self.outcomes: dict[int, int] = {}
        self.refailed: set[int] = set()
        self.commits: dict[int, fx.Commit] = {}
        self.feed(ev.ServerChanged(model="model", server=SERVER, phase=ev.ServerPhase.DOWN))
        self.take(self.bench.server())
        self.assign_all()

    def note(self, effect: fx.Effect) -> None:
        """Also what is written and committed."""
        if isinstance(effect, fx.Write):
            for rows in effect.vectors:
                self.written(rows.queries, resent=rows.alone)
            self.written([r.query for r in effect.errors], resent=False)
            self.to_report.extend((row.query, True) for row in effect.letters)
        elif isinstance(effect, fx.Commit):
            self.commits[effect.commit_id] = effect
            for offset in effect.offsets:
                self.check_commit(offset)
        else:
            super().note(effect)

    def written(self, queries: list[Query], *, resent: bool) -> None:
        """A result was handed to the sink."""
        for query in queries:
            self.to_report.append((query, False))
            count = self.outcomes.get(id(query), 0)
            assert count == 0 or resent or self.failed_before(query), "two outcomes in one epoch"
            self.outcomes[id(query)] = count + 1

    def failed_before(self, query: Query) -> bool:
        """Whether a delivery of it failed, so that it may be sent again."""
        return id(query) in self.refailed

    def check_commit(self, offset: fx.CommitOffset) -> None:
        """Nothing below a committed offset may be without a durable result."""
        if self.owned.get(offset.tp) != offset.epoch:
            return  # the source drops it
        for query in self.admitted[offset.tp]:
            if query.offset < offset.offset_next:
                assert (offset.tp, query.offset) in self.durable, f"{query.id} is not durable"

    def assign_all(self) -> None:
        """As ever; what is read of them is counted anew."""
        self.admitted |= {tp: [] for tp in PARTITIONS if tp not in self.owned}
        super().assign_all()

    @rule(data=st.data(), count=st.integers(1, 20), gap=st.integers(0, 2))
    def poll(self, data: st.DataObject, count: int, gap: int) -> None:
        """Records come, of one partition that is not paused."""
        ready = [tp for tp in self.owned if tp not in self.paused and tp not in self.revoking]
        if not ready or self.revoking:
            return
        tp = data.draw(st.sampled_from(ready))
        queries = []
        for _ in range(count):
            kind = data.draw(st.integers(0, 9))
            failure = {0: REFUSED, 1: TEXT_MISSING}.get(kind)
            query = make_query(
                self.next_offset[tp],
                tp=tp,
                epoch=self.owned[tp],
                tokens=5 + 7 * kind,
                failure=failure,
            )
            self.next_offset[tp] += 1 + gap
            queries.append(query)
        self.queries.extend(queries)
        self.admitted[tp].extend(queries)
        position = ev.Position(tp=tp, epoch=self.owned[tp], offset_next=self.next_offset[tp])
        self.take(self.bench.poll(*queries, positions=[position]))

    @precondition(lambda self: self.bench.claims)
    @rule(data=st.data(), part=st.booleans())
    def answer(self, data: st.DataObject, part: bool) -> None:
        """A claim is answered, or its stream lost before it started."""
        claim = self.bench.claims.pop(data.draw(st.sampled_from(sorted(self.bench.claims))))
        if part:
            self.take(self.bench.answer(claim, indexes=range(len(claim.queries))))
        else:
            self.feed(
                ev.ClaimLost(
                    model="model",
                    server=claim.server,
                    claim_id=claim.claim_id,
                    loss=ev.Loss.NOT_STARTED,
                    message="drain",
                )
            )

    @precondition(lambda self: self.to_report)
    @rule(data=st.data(), outcome=st.sampled_from(["ok", "ok", "ok", "record", "alone", "topic"]))
    def deliver(self, data: st.DataObject, outcome: str) -> None:
        """Some delivery reports come, in any order, good or bad."""
        chosen = data.draw(
            st.lists(st.integers(0, len(self.to_report) - 1), min_size=1, max_size=10, unique=True)
        )
        reports = [self.to_report[i] for i in chosen]
        self.to_report = [r for i, r in enumerate(self.to_report) if i not in set(chosen)]
        if outcome == "alone":  # a topic takes the smallest form, or the process would end
            smallest = [each for each in reports if is_smallest(*each)]
            self.report(smallest, "ok")
            reports = [each for each in reports if not is_smallest(*each)]
        self.report(reports, outcome)

    def report(self, reports: list[tuple[Query, bool]], outcome: str) -> None:
        """Tell the core of these deliveries."""
        results = [query for query, letter in reports if not letter]
        letters = [query for query, letter in reports if letter]
        if outcome == "ok":
            self.durable.update((query.tp, query.offset) for query in results)
            self.feed(ev.WritesDurable(results=results, letters=letters))
            return
        fault = {
            "record": ev.WriteFault.RECORD,
            "alone": ev.WriteFault.RECORD_ALONE,
            "topic": ev.WriteFault.TOPIC,
        }[outcome]
        self.refailed.update(id(query) for query in results)
        self.feed(ev.WritesFailed(fault=fault, message="no", results=results, letters=letters))

    @precondition(lambda self: self.commits)
    @rule(done=st.booleans())
    def end_commit(self, done: bool) -> None:
        """The oldest commit ends."""
        commit = self.commits.pop(min(self.commits))
        if done:
            self.accept(commit)
            self.feed(ev.CommitDone(commit_id=commit.commit_id))
        else:
            self.feed(ev.CommitFailed(commit_id=commit.commit_id, message="no"))

    def accept(self, commit: fx.Commit) -> None:
        """The broker keeps the offsets of current epochs."""
        for offset in commit.offsets:
            if self.owned.get(offset.tp) == offset.epoch:
                assert offset.offset_next >= self.committed[offset.tp], "an offset went back"
                self.committed[offset.tp] = offset.offset_next

    @rule(ms=st.sampled_from([0, 1, 20, 150, 1200]))
    def pass_time(self, ms: int) -> None:
        """Time passes."""
        self.take(self.bench.tick(ms))

    @invariant()
    def bounded(self) -> None:
        """No window above its maximum by more than one poll."""
        for tp in self.owned:
            unsettled = [q for q in self.admitted[tp] if q.phase not in (SETTLED, ABANDONED)]
            assert len(unsettled) <= WINDOW + 20

    @invariant()
    def never_negative(self) -> None:
        """Bytes are given back once."""
        assert self.bench.core.buffer_bytes >= 0

    @invariant()
    def never_halts(self) -> None:
        """No outage here lasts long enough for that."""
        assert self.halt is None

    def all_done(self) -> bool:
        """Whether nothing is on its way any more."""
        under_way = (self.to_report, self.commits, self.revoking, self.bench.claims)
        if any(under_way) or self.paused & set(self.owned):
            return False
        return all(
            self.committed[tp] == self.next_offset[tp] for tp in self.owned if self.admitted[tp]
        )

    def teardown(self) -> None:
        """Heal: everything is answered, delivered and committed; then nothing may be left."""
        if not hasattr(self, "bench"):
            return
        for _ in range(200):
            if self.all_done():
                break
            for claim_id in sorted(self.bench.claims):
                self.take(self.bench.answer(self.bench.claims.pop(claim_id)))
            reports, self.to_report = self.to_report, []
            if reports:
                self.report(reports, "ok")
            while self.commits:
                self.end_commit(done=True)
            self.take(self.bench.server())
            self.take(self.bench.tick(250))
        assert not self.revoking
        assert self.bench.core.buffer_bytes == 0
        assert not (self.paused & set(self.owned))
        for tp in self.owned:
            for query in self.admitted[tp]:
                assert query.phase == SETTLED, f"{query.id} is in phase {query.phase}"
            if self.admitted[tp]:
                assert self.committed[tp] == self.next_offset[tp]
        assert all(query.phase in (SETTLED, ABANDONED) for query in self.queries)


def is_smallest(query: Query, letter: bool) -> bool:
    """Whether what is being written of it has no smaller form."""
    return query.letter_step == LETTER_BARE if letter else query.write_step == BARE


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
