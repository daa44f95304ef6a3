"""Exactly once under random scripts, against a deliberately dumb broker.

The broker knows three things: the records of each partition (with gaps), the results that readers
of committed transactions can see, and the committed offsets. What must hold after each step is one
sentence: of every partition, the results that can be seen are those of the records below its
committed offset, each once. A transaction whose offsets were sent while all its partitions were
ours may end either way, whatever happens to the group meanwhile; a partition's next owner waits for
that, as real consumers do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.failures import Failure
from aggregator.core.query import ABANDONED, SETTLED, Query, TopicPartition
from aggregator.core.transactions import TransactionOptions
from tests.harness.core import MODEL, MS, REFUSED, SERVER, TEXT_MISSING, Bench, make_query, of
from tests.harness.group import PARTITIONS, Group

WINDOW = 40
TIMEOUT_MS = 10_000

Place = tuple[TopicPartition, int]


@dataclass
class Open:
    """The transaction under way, as the broker has it."""

    effect: fx.CommitTransaction
    sent: bool = False
    """Its offsets were sent while all its partitions were ours."""
    abort_asked_ns: int | None = None


class Machine(Group):
    """Drives the core and is the broker."""

    @initialize()
    def start(self) -> None:
        """Everything is assigned, one server is there."""
        options = TransactionOptions(
            timeout_ns=TIMEOUT_MS * MS, records_max=25, bytes_max=40 * 1024
        )
        self.begin(Bench(transactions=options, window_records_max=WINDOW))
        self.log: dict[TopicPartition, list[tuple[int, int]]] = {tp: [] for tp in PARTITIONS}
        """By partition: offset and kind of each record."""
        self.end = dict.fromkeys(PARTITIONS, 0)
        self.visible: Counter[Place] = Counter()
        self.letters: Counter[Place] = Counter()
        self.open: Open | None = None
        self.halved: set[int] = set()
        """Claims of which the later half is answered."""
        self.take(self.bench.server())
        self.assign_all()

    # Effects -------------------------------------------------------------------------------------

    def take(self, effects: Sequence[fx.Effect]) -> None:
        """As ever; a stream that is to be cut is."""
        super().take(effects)
        if of(effects, fx.Cancel):
            self.cut_stream()

    def note(self, effect: fx.Effect) -> None:
        """Also the transaction."""
        assert not isinstance(effect, (fx.Write, fx.Commit)), "outside a transaction"
        if isinstance(effect, fx.CommitTransaction):
            assert self.open is None, "two transactions at once"
            assert len(set(effect.offsets)) == len(effect.offsets) > 0
            self.open = Open(effect)
        elif isinstance(effect, fx.AbortTransaction):
            assert self.open is not None
            assert self.open.effect.commit_id == effect.commit_id
            self.open.abort_asked_ns = self.bench.now_ns
        elif isinstance(effect, fx.Release):
            # One of an earlier epoch can't be committed any more.
            sent = self.open is not None and self.open.sent
            assert not (sent and any(map(self.holds, self.revoking))), (
                "released with a transaction open"
            )
        super().note(effect)

    def cut_stream(self) -> None:
        """The server was silent for too long: its claims are lost, and it comes back."""
        for claim in list(self.bench.claims.values()):
            self.end_claim(claim, lost=True)
        self.feed(ev.ServerChanged(model=MODEL, server=SERVER, phase=ev.ServerPhase.DOWN))
        self.take(self.bench.server())

    def holds(self, tp: TopicPartition) -> bool:
        """Whether the open transaction has offsets of a partition."""
        return self.open is not None and any(o.tp == tp for o in self.open.effect.offsets)

    def withheld(self, tp: TopicPartition) -> bool:
        """Its next owner waits for the offsets that are sent."""
        return self.open is not None and self.open.sent and self.holds(tp)

    # Records and answers -------------------------------------------------------------------------

    @precondition(lambda self: not self.halt and not self.revoking)
    @rule(data=st.data(), count=st.integers(0, 20), gap=st.integers(0, 2))
    def poll(self, data: st.DataObject, count: int, gap: int) -> None:
        """Records come, of one partition that is not paused; without any only its position moves.

        Where records have been read before, in an earlier assignment, the same ones come again.
        """
        ready = [tp for tp in self.owned if tp not in self.paused]
        if not ready:
            return
        tp = data.draw(st.sampled_from(ready))
        if all(offset < self.next_offset[tp] for offset, _ in self.log[tp]):
            for _ in range(count):
                self.log[tp].append((self.end[tp], data.draw(st.integers(0, 9))))
                self.end[tp] += 1 + gap
            self.end[tp] += gap
            count = 20
        self.read_on(tp, count)

    def read_on(self, tp: TopicPartition, count: int) -> None:
        """Poll at most so many of the records that are left of a partition."""
        left = [entry for entry in self.log[tp] if entry[0] >= self.next_offset[tp]]
        whole = len(left) <= count
        records = left[:count]
        if whole:
            self.next_offset[tp] = self.end[tp]
        elif records:
            self.next_offset[tp] = records[-1][0] + 1
        queries = [self.query(tp, offset, kind) for offset, kind in records]
        self.queries.extend(queries)
        position = ev.Position(tp=tp, epoch=self.owned[tp], offset_next=self.next_offset[tp])
        self.take(self.bench.poll(*queries, positions=[position]))

    def query(self, tp: TopicPartition, offset: int, kind: int) -> Query:
        failures: dict[int, Failure] = {0: REFUSED, 1: TEXT_MISSING}
        return make_query(
            offset,
            tp=tp,
            epoch=self.owned[tp],
            tokens=5 + 7 * kind,
            failure=failures.get(kind),
            arrived_ns=self.bench.now_ns,
        )

    @precondition(lambda self: not self.halt and self.bench.claims)
    @rule(data=st.data(), outcome=st.sampled_from(["whole", "part", "lost"]))
    def answer(self, data: st.DataObject, outcome: str) -> None:
        """A claim is answered, whole or the rest later, or its stream is lost before it started."""
        claim = self.bench.claims[data.draw(st.sampled_from(sorted(self.bench.claims)))]
        if outcome == "part" and len(claim.queries) > 1 and claim.claim_id not in self.halved:
            self.halved.add(claim.claim_id)
            # The later half first, so that it is held behind the earlier one.
            half = len(claim.queries) // 2
            self.take(self.bench.answer(claim, indexes=range(half, len(claim.queries))))
            return
        self.end_claim(claim, lost=outcome == "lost")

    def end_claim(self, claim: fx.Dispatch, *, lost: bool) -> None:
        """Answer what is left of a claim, or lose it."""
        del self.bench.claims[claim.claim_id]
        if lost:
            self.feed(
                ev.ClaimLost(
                    model=MODEL,
                    server=SERVER,
                    claim_id=claim.claim_id,
                    loss=ev.Loss.NOT_STARTED,
                    message="drain",
                )
            )
            return
        count = len(claim.queries)
        left = range(count // 2) if claim.claim_id in self.halved else range(count)
        self.take(self.bench.answer(claim, indexes=left, last=True))

    # Transactions --------------------------------------------------------------------------------

    @precondition(lambda self: not self.halt and self.open)
    @rule()
    def send_offsets(self) -> None:
        """The consumer's thread checks the epochs and sends them, or has the whole aborted."""
        assert self.open is not None
        if self.open.sent:
            return
        if all(self.owned.get(o.tp) == o.epoch for o in self.open.effect.offsets):
            self.open.sent = True
        else:
            self.abort("not ours any more")

    @precondition(lambda self: not self.halt and self.open and self.open.sent)
    @rule()
    def commit(self) -> None:
        """The broker commits."""
        assert self.open is not None
        effect, self.open = self.open.effect, None
        for query, _ in results_of(effect.write):
            self.visible[query.tp, query.offset] += 1
        for row in effect.write.letters:
            self.letters[row.query.tp, row.query.offset] += 1
        for offset in effect.offsets:
            assert offset.offset_next >= self.committed[offset.tp], "an offset went back"
            self.committed[offset.tp] = offset.offset_next
        self.feed(ev.CommitDone(commit_id=effect.commit_id))

    @precondition(lambda self: not self.halt and self.open)
    @rule(data=st.data(), fault=st.sampled_from([None, *ev.WriteFault]))
    def fail(self, data: st.DataObject, fault: ev.WriteFault | None) -> None:
        """It is aborted: for no fault of a record, or because some were refused."""
        assert self.open is not None
        write = self.open.effect.write
        if fault is not None:
            message = "refused"
            results = [
                query
                for query, smallest in results_of(write)
                if data.draw(st.booleans()) and not smallest
            ]
            letters = [row.query for row in write.letters if row.form is fx.Form.FULL]
            failed = ev.WritesFailed(fault=fault, message=message, results=results, letters=letters)
            if results or letters:
                self.feed(failed)
        self.abort("refused")

    def abort(self, message: str) -> None:
        assert self.open is not None
        commit_id, self.open = self.open.effect.commit_id, None
        self.feed(ev.CommitFailed(commit_id=commit_id, message=message))

    @rule(ms=st.sampled_from([0, 1, 60, 150, 2_100, 6_000]))
    def pass_time(self, ms: int) -> None:
        """Time passes."""
        self.take(self.bench.tick(ms))

    # What must hold ------------------------------------------------------------------------------

    @invariant()
    def exactly_once(self) -> None:
        """What can be seen is what lies below the committed offsets, each once."""
        below = {
            (tp, offset): kind
            for tp in PARTITIONS
            for offset, kind in self.log[tp]
            if offset < self.committed[tp]
        }
        assert dict(self.visible) == dict.fromkeys(below, 1)
        assert dict(self.letters) == {place: 1 for place, kind in below.items() if kind == 0}

    @invariant()
    def bounded(self) -> None:
        """No window above its maximum by more than one poll; bytes are given back once."""
        unsettled = Counter(q.tp for q in self.queries if q.phase not in (SETTLED, ABANDONED))
        assert all(count <= WINDOW + 20 for count in unsettled.values())
        assert self.bench.core.buffer_bytes >= 0

    @invariant()
    def halts_for_a_reason(self) -> None:
        """Only an abort that did not end in time ends this process."""
        if self.halt is None:
            return
        assert self.halt.at_once
        assert self.open is not None
        assert self.open.abort_asked_ns is not None
        assert self.bench.now_ns - self.open.abort_asked_ns >= TIMEOUT_MS * MS

    def all_done(self) -> bool:
        """Whether nothing is on its way any more."""
        if self.open or self.revoking or self.bench.claims or self.paused & set(self.owned):
            return False
        read = all(self.next_offset[tp] == self.end[tp] for tp in PARTITIONS)
        return read and self.committed == self.end

    def teardown(self) -> None:
        """Heal: everything is read, answered and committed; then every record has its result."""
        if not hasattr(self, "bench") or self.halt is not None:
            return
        for _ in range(300):
            if self.all_done():
                break
            while self.open:
                self.send_offsets()
                if self.open:
                    self.commit()
            for claim_id in sorted(self.bench.claims):
                self.end_claim(self.bench.claims[claim_id], lost=False)
            if not self.revoking:
                self.assign_all()
                for tp in [tp for tp in self.owned if tp not in self.paused]:
                    self.read_on(tp, 20)
            self.take(self.bench.server())
            self.take(self.bench.tick(250))
            assert self.halt is None
        assert self.all_done()
        self.exactly_once()
        assert self.bench.core.buffer_bytes == 0
        assert sum(self.visible.values()) == sum(map(len, self.log.values()))
        assert all(query.phase in (SETTLED, ABANDONED) for query in self.queries)


def results_of(write: fx.Write) -> list[tuple[Query, bool]]:
    """Each result's query, and whether it is in its smallest form."""
    vectors = [(query, False) for rows in write.vectors for query in rows.queries]
    return vectors + [(row.query, row.form is fx.Form.BARE) for row in write.errors]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
