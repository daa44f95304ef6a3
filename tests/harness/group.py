"""A consumer group of one under random scripts: what it owns, what is paused, what is asked back.

A state machine for others to build on: they add records, answers and the ends of commits. The rules
here are those of the group alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.query import Query, TopicPartition
from tests.harness.core import Bench

PARTITIONS: list[TopicPartition] = [("queries", n) for n in range(3)]


class Group(RuleBasedStateMachine):
    """Drives a core; `begin` comes first."""

    def begin(self, bench: Bench) -> None:
        """Nothing is assigned yet."""
        self.bench = bench
        self.epoch = 0
        self.owned: dict[TopicPartition, int] = {}
        self.next_offset = dict.fromkeys(PARTITIONS, 0)
        self.committed = dict.fromkeys(PARTITIONS, 0)
        self.queries: list[Query] = []
        self.revoking: list[TopicPartition] = []
        self.revoke_id = 0
        self.paused: set[TopicPartition] = set()
        self.halt: fx.Halt | None = None

    def feed(self, event: ev.Event) -> None:
        """Hand an event in and carry out what is immediate."""
        self.take(self.bench.feed(event))

    def take(self, effects: Sequence[fx.Effect]) -> None:
        """Note what the core asked for."""
        for effect in effects:
            self.note(effect)

    def note(self, effect: fx.Effect) -> None:
        """What the group does for an effect."""
        if isinstance(effect, fx.Release):
            for tp in self.revoking:
                self.owned.pop(tp, None)
            self.revoking = []
        elif isinstance(effect, fx.Pause):
            self.paused.update(effect.partitions)
        elif isinstance(effect, fx.Resume):
            self.paused.difference_update(effect.partitions)
        elif isinstance(effect, fx.Halt):
            self.halt = effect

    def withheld(self, tp: TopicPartition) -> bool:
        """Whether a partition that is away can't come back yet."""
        del tp
        return False

    def assign_all(self) -> None:
        """Bring every partition that is away, from its committed offset on."""
        away = [tp for tp in PARTITIONS if tp not in self.owned and not self.withheld(tp)]
        self.epoch += 1
        for tp in away:
            self.owned[tp] = self.epoch
            self.next_offset[tp] = self.committed[tp]
            self.paused.discard(tp)
        self.feed(ev.PartitionsAssigned(epoch=self.epoch, partitions=away))

    @precondition(lambda self: not self.halt and not self.revoking)
    @rule()
    def assign(self) -> None:
        """What is away comes back."""
        self.assign_all()

    @precondition(lambda self: not self.halt and not self.revoking and self.owned)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        """Some partitions are asked back."""
        self.revoking = data.draw(
            st.lists(st.sampled_from(sorted(self.owned)), min_size=1, unique=True)
        )
        self.revoke_id += 1
        self.feed(ev.PartitionsRevoking(revoke_id=self.revoke_id, partitions=list(self.revoking)))

    @precondition(lambda self: not self.halt and not self.revoking and self.owned)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Some partitions are gone."""
        lost = data.draw(st.lists(st.sampled_from(sorted(self.owned)), min_size=1, unique=True))
        for tp in lost:
            del self.owned[tp]
        self.feed(ev.PartitionsLost(partitions=lost))
