"""The dumb model of the topics: what must hold of everything that is on them and committed.

Owns every record that was put on the queries topic, with what came of it, and what each reader of a
partition may have doubled. Of the cores it knows only which epochs go on (`checks` keeps those).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from aggregator.core.query import Query, TopicPartition
from tests.sim.books import Epoch, Violation, Watch, read_result
from tests.sim.broker import LETTERS, Broker
from tests.sim.consumer import SimConsumer
from tests.sim.kernel import Kernel
from tests.sim.process import Process
from tests.sim.producer import Sent
from tests.sim.records import LETTER_REASONS, Landed, Record
from tests.sim.texts import vector_of


class TopicChecks:
    """See the module's docstring."""

    def __init__(self, kernel: Kernel, broker: Broker, *, window_max: int, poll_max: int) -> None:
        self.records: dict[TopicPartition, dict[int, Record]] = {tp: {} for tp in broker.tps}
        self.clocks_jump = False
        self.revision_pinned: str | None = None
        self.exactly_once = False
        self.duplicates = 0
        self.resent = 0
        self._kernel = kernel
        self._broker = broker
        self._window_max = window_max
        self._poll_max = poll_max
        self._watches: dict[str, Watch] = {}
        self._offsets: dict[TopicPartition, list[int]] = {tp: [] for tp in broker.tps}
        self._verified: dict[TopicPartition, int] = dict.fromkeys(broker.tps, 0)
        self._readers: dict[TopicPartition, SimConsumer] = {}
        """Who began to read last."""
        self._before: dict[TopicPartition, Epoch] = {}
        """The last epoch of each partition that ended."""
        self._budget: dict[TopicPartition, int] = dict.fromkeys(broker.tps, 0)
        self._doubled: dict[TopicPartition, int] = dict.fromkeys(broker.tps, 0)

    def violated(self, guarantee: int, what: str) -> None:
        raise Violation(guarantee, what)

    def added(self, record: Record) -> None:
        """A record is on the queries topic."""
        self.records[record.tp][record.offset] = record
        self._offsets[record.tp].append(record.offset)

    def deleted_below(self, tp: TopicPartition, offset: int) -> None:
        """Retention took these."""
        for at in self._offsets[tp]:
            if at >= offset:
                break
            self.records[tp][at].deleted = True

    def _watch(self, name: str) -> Watch:
        return self._watches.setdefault(name, Watch())

    # What was done to queries (the servers tell) -------------------------------------------------

    def hit(self, queries: Iterable[Query], what: str) -> None:
        for query in queries:
            self.records[query.tp][query.offset].hits[what] += 1

    def alone_hit(self, query: Query) -> None:
        self.records[query.tp][query.offset].alone_hits += 1

    def poison_left(self) -> int:
        """Queries without a result that kill whatever engine runs them."""
        return sum(
            record.kind == "engine dies" and not record.results and not record.deleted
            for records in self.records.values()
            for record in records.values()
        )

    # The broker ----------------------------------------------------------------------------------

    def committed(self, consumer: SimConsumer, tp: TopicPartition, offset: int) -> None:
        """Guarantee 2: all below it is settled. 3 and 4: by its owner, and never backwards."""
        owner = self._broker.group.owner.get(tp)
        if self.exactly_once:
            # Offsets that were sent in time may be committed later: the next owner waits for that.
            if self._readers.get(tp) is not consumer:
                self.violated(10, f"{consumer.owner.name} committed {tp} behind its next owner")
        elif owner is None or owner.consumer is not consumer:
            self.violated(4, f"{consumer.owner.name} committed {tp} that it does not own")
        verified = self._verified[tp]
        if offset < verified:
            self.violated(3, f"the commit of {tp} went back from {verified} to {offset}")
        if offset > self._broker.logs[tp].end:
            self.violated(2, f"{offset} of {tp} is committed, its end is before that")
        offsets = self._offsets[tp]
        for at in offsets[bisect_left(offsets, verified) : bisect_left(offsets, offset)]:
            self._check_settled(self.records[tp][at])
        self._verified[tp] = offset

    def _check_settled(self, record: Record) -> None:
        if record.deleted:
            return
        if not record.results:
            self.violated(2, f"{record.name} is committed and has no result")
        if not record.letters and all(r.reason in LETTER_REASONS for r in record.results):
            self.violated(2, f"{record.name} is committed and its dead letter is missing")

    def taken_over(self, consumer: SimConsumer, tp: TopicPartition, offset: int) -> None:
        """Guarantee 3, as its next owner starts to read."""
        owner = self._broker.group.owner.get(tp)
        if owner is None or owner.consumer is not consumer:
            return  # it is the last to know, and commits nothing any more
        self._readers[tp] = consumer
        offsets = self._offsets[tp]
        before = self._before.get(tp)
        again = 0
        for at in offsets[bisect_left(offsets, offset) :]:
            record = self.records[tp][at]
            if not record.results:
                continue
            again += 1
            if self.exactly_once:
                self.violated(10, f"{record.name} is read again and has a committed result")
            if before is not None and before.clean:
                for result in record.results:
                    if (result.process, result.epoch) == (before.process, before.number):
                        what = f"{record.name} is read again though {before.process} ended in time"
                        self.violated(3, what)
        if again > self._window_max + self._poll_max:
            self.violated(3, f"{again} results of {tp} are above the committed offset")

    # Writes --------------------------------------------------------------------------------------

    def landed(self, sent: Sent) -> None:
        """A record is on its topic for good."""
        if sent.topic == LETTERS:
            headers = dict(sent.headers)
            partition = int(headers["__aggregator.errors.partition"] or b"")
            offset = int(headers["__aggregator.errors.offset"] or b"")
            tp = (str((headers["__aggregator.errors.topic"] or b"").decode()), partition)
            self.records[tp][offset].letters += 1
            return
        query: Query = sent.token
        tp, offset, reason = self._read(sent, query)
        record = self.records[tp][offset]
        landed = Landed(sent.owner.name, query.epoch, id(query), reason)
        complaint = record.complaint(reason, self._kernel.now_ns, clocks_jump=self.clocks_jump)
        if complaint is not None:
            self.violated(complaint[0], f"{record.name} {complaint[1]}; {dict(record.hits)}")
        if record.results:
            process = sent.owner.process
            has = process.source._epochs.get(tp) if isinstance(process, Process) else None
            self._again(record, landed, owned=has == query.epoch)
        record.results.append(landed)
        self._kernel.fire(f"end: {reason}")

    def _read(self, sent: Sent, query: Query) -> tuple[TopicPartition, int, str]:
        """Where a result belongs and how it ends, by what is in it."""
        result = read_result(sent, protobuf=query.protobuf)
        if result.reason == "OK":
            record = self.records[result.tp][result.offset]
            self._check_vector(sent, record, result.vector, result.revision)
        return result.tp, result.offset, result.reason

    def _check_vector(self, sent: Sent, record: Record, vector: bytes, revision: str) -> None:
        """Guarantee 7: its own text's vector, and of one revision."""
        if vector and vector != vector_of(record.text, revision):
            self.violated(7, f"{record.name} has another text's vector")
        if self.revision_pinned is not None and revision != self.revision_pinned:
            self.violated(7, f"{record.name} has a vector of {revision}, which is not pinned")
        revisions = self._watch(sent.owner.name).revisions
        revisions.add(revision)
        if len(revisions) > 1:
            self.violated(7, f"{sent.owner.name} has published vectors of {sorted(revisions)}")

    def _again(self, record: Record, landed: Landed, *, owned: bool) -> None:
        tp = record.tp
        if self.exactly_once:
            self.violated(10, f"{record.name} has two committed results")
        if any(result.query == landed.query for result in record.results):
            self.resent += 1
            return
        self.duplicates += 1
        self._doubled[tp] += 1
        # Epochs that go on, but for one that the consumer still has: they were cut off already, and
        # their cores will hear of it.
        going_on = sum(
            (epoch := watch.epochs.get(tp)) is not None
            and not (owned and (epoch.process, epoch.number) == (landed.process, landed.epoch))
            for watch in self._watches.values()
        )
        live = going_on * (self._window_max + self._poll_max)
        if self._doubled[tp] > self._budget[tp] + live:
            self.violated(3, f"{self._doubled[tp]} results of {tp} are doubled")
