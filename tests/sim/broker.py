"""The simulated Kafka: logs with gaps, one consumer group, committed offsets, two output topics.

Owns what is true on the brokers. It protects nobody: a commit of a member of the group is taken
whatever partition and offset it names, as measured on the real one. What a client is told of it,
and when, is the clients' matter; what must hold of it is the checkers'.

Owners change as in incremental rebalancing: a partition is first revoked by its owner, whose
callback may take its time, and then assigned to the next. A member that is not heard of, or does
not poll for too long, loses all it has at once and hears of it later.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from confluent_kafka import KafkaError, Message

from aggregator.core.query import TopicPartition
from tests.sim.kernel import MS, Kernel

if TYPE_CHECKING:
    from tests.sim.consumer import SimConsumer
    from tests.sim.transactions import TransactionLog

QUERIES, RESULTS, LETTERS = "queries", "results", "queries.dlq"


class Log:
    """One partition: entries at ascending offsets that need not be consecutive.

    An entry without a message is a transaction marker: it takes an offset and is never handed out.
    """

    def __init__(self) -> None:
        self.start = 0
        self.end = 0
        self._offsets: list[int] = []
        self._messages: list[Message[Any, Any] | None] = []

    def append(self, message: Message[Any, Any] | None) -> None:
        self._offsets.append(self.end)
        self._messages.append(message)
        self.end += 1

    def skip(self, offsets: int) -> None:
        """Take up offsets without an entry, as compaction leaves them."""
        self.end += offsets

    def next_from(self, offset: int) -> tuple[int, Message[Any, Any] | None]:
        """The first record at or after an offset, and where it is; none: the end of the log."""
        at = bisect_left(self._offsets, max(offset, self.start))
        while at < len(self._offsets):
            message = self._messages[at]
            if message is not None:
                return self._offsets[at], message
            at += 1
        return self.end, None

    def delete_below(self, offset: int) -> None:
        """As retention does."""
        self.start = max(self.start, min(offset, self.end))


@dataclass(slots=True)
class OutputTopic:
    """A topic that is written to, and what is wrong with it."""

    name: str
    message_bytes_max: int
    down_until_ns: int = 0
    """Nothing lands before this: a full disk, no leader."""
    refused_until_ns: int = 0
    """Every write is refused before this: not authorised."""


class Observer(Protocol):
    """Who judges what happens on the broker."""

    def committed(self, consumer: SimConsumer, tp: TopicPartition, offset: int) -> None: ...
    def taken_over(self, consumer: SimConsumer, tp: TopicPartition, offset: int) -> None: ...
    def revoke_returned(
        self, process: Any, tps: Sequence[TopicPartition], waited_ns: int
    ) -> None: ...


@dataclass(eq=False, slots=True)
class Member:
    """One consumer as the coordinator knows it."""

    consumer: SimConsumer
    generation: int = 0
    busy: bool = False
    """It has not yet finished what the last rebalance asked of it."""
    gone: bool = False


@dataclass(slots=True)
class Moves:
    """What one member is to do next."""

    generation: int
    revoke: list[TopicPartition] = field(default_factory=list)
    assign: list[TopicPartition] = field(default_factory=list)


class Coordinator:
    """The one group: who is in it, who owns what, who should."""

    def __init__(self, kernel: Kernel, tps: list[TopicPartition]) -> None:
        self._kernel = kernel
        self._tps = tps
        self.members: list[Member] = []
        self.owner: dict[TopicPartition, Member] = {}
        self.target: dict[TopicPartition, Member] = {}
        self.generation = 0
        self.refusing_until_ns = 0
        """Commits from outside of callbacks are refused: the group is between two generations."""
        self._revoking: set[TopicPartition] = set()

    def join(self, consumer: SimConsumer) -> Member:
        member = Member(consumer)
        self.members.append(member)
        self.rebalance()
        return member

    def leave(self, member: Member) -> None:
        """It left, or was given up: what it had is free."""
        if member.gone:
            return
        member.gone = True
        self.members.remove(member)
        for tp in [tp for tp, owner in self.owner.items() if owner is member]:
            del self.owner[tp]
            self._revoking.discard(tp)
        self.rebalance()

    def rebalance(self, *, shuffle: bool = False) -> None:
        """A new generation with a new plan; shuffled: most partitions change hands."""
        kernel = self._kernel
        self.generation += 1
        kernel.fire("group: rebalance")
        if kernel.chance(0.5):
            self.refusing_until_ns = kernel.now_ns + kernel.delay_ns(MS, 400 * MS)
        self.target = self._shuffled() if shuffle else self._sticky()
        self._move()

    def _shuffled(self) -> dict[TopicPartition, Member]:
        rng = self._kernel.rng
        return {tp: rng.choice(self.members) for tp in self._tps} if self.members else {}

    def _sticky(self) -> dict[TopicPartition, Member]:
        if not self.members:
            return {}
        target: dict[TopicPartition, Member] = {}
        counts = {id(member): 0 for member in self.members}
        most = -(-len(self._tps) // len(self.members))
        for tp in self._tps:
            owner = self.owner.get(tp)
            if owner is not None and counts[id(owner)] < most:
                target[tp] = owner
                counts[id(owner)] += 1
        for tp in self._tps:
            if tp not in target:
                least = min(self.members, key=lambda member: counts[id(member)])
                target[tp] = least
                counts[id(least)] += 1
        return target

    def _move(self) -> None:
        """Tell each member that is free to listen what it is to give up and what it gets."""
        for member in list(self.members):
            if member.busy:
                continue
            moves = Moves(self.generation)
            for tp in self._tps:
                owner, target = self.owner.get(tp), self.target.get(tp)
                if owner is member and target is not member and tp not in self._revoking:
                    moves.revoke.append(tp)
                elif owner is None and target is member:
                    moves.assign.append(tp)
            if not (moves.revoke or moves.assign) and member.generation == self.generation:
                continue
            self._revoking.update(moves.revoke)
            for tp in moves.assign:
                self.owner[tp] = member
            member.busy = True
            delay_ns = self._kernel.delay_ns(MS, 120 * MS)
            consumer = member.consumer
            self._kernel.after(
                delay_ns,
                consumer.owner,
                "heartbeat",
                partial(consumer.told, member, moves),
            )

    def revoked(self, member: Member, tps: list[TopicPartition]) -> None:
        """Its callback has returned: these are free."""
        for tp in tps:
            if self.owner.get(tp) is member:
                del self.owner[tp]
                self._revoking.discard(tp)

    def finished(self, member: Member) -> None:
        """It has done all that the rebalance asked of it."""
        member.busy = False
        self._move()

    def judge_commit(self, member: Member | None, generation: int) -> int | None:
        """The error of a commit request, if it is refused."""
        if member is None or member.gone:
            return KafkaError.UNKNOWN_MEMBER_ID
        if generation != member.generation:
            return KafkaError.ILLEGAL_GENERATION
        waiting = member.consumer.in_callback
        if self._kernel.now_ns < self.refusing_until_ns and not waiting:
            return KafkaError.REBALANCE_IN_PROGRESS
        return None


class Broker:
    """All topics and the group."""

    def __init__(self, kernel: Kernel, partitions: int, topics: Mapping[str, int]) -> None:
        """`topics`: of the two written to, with their max.message.bytes."""
        self.kernel = kernel
        self.logs: dict[TopicPartition, Log] = {(QUERIES, p): Log() for p in range(partitions)}
        self.outputs = {name: OutputTopic(name, limit) for name, limit in topics.items()}
        self.committed: dict[TopicPartition, int] = {}
        self.group = Coordinator(kernel, list(self.logs))
        self.down_until_ns = 0
        """The whole cluster is away."""
        self.observer: Observer
        self.transactions: TransactionLog

    @property
    def tps(self) -> list[TopicPartition]:
        return list(self.logs)

    def up_at_ns(self) -> int:
        """When a request that is sent now is served at the earliest."""
        return max(self.kernel.now_ns, self.down_until_ns)

    def append(self, tp: TopicPartition, message: Message[Any, Any] | None) -> None:
        """Put a record, or a marker, at the end, and let who reads there know."""
        self.logs[tp].append(message)
        self._poke(tp)

    def skip(self, tp: TopicPartition, offsets: int) -> None:
        self.logs[tp].skip(offsets)
        self._poke(tp)

    def _poke(self, tp: TopicPartition) -> None:
        for member in self.group.members:
            member.consumer.appended(tp)

    def commit(
        self, consumer: SimConsumer, offsets: Mapping[TopicPartition, int], generation: int
    ) -> int | None:
        """Take a commit request in; returns the error it is answered with."""
        error = self.group.judge_commit(consumer.member, generation)
        if error is None:
            self.take_offsets(consumer, offsets)
        return error

    def take_offsets(self, consumer: SimConsumer, offsets: Mapping[TopicPartition, int]) -> None:
        """These are committed."""
        for tp, offset in offsets.items():
            self.committed[tp] = offset
            self.observer.committed(consumer, tp, offset)

    def lag(self) -> dict[TopicPartition, int]:
        """Offsets between what is committed and the end, by partition, where there are any."""
        return {
            tp: log.end - self.committed.get(tp, 0)
            for tp, log in self.logs.items()
            if log.end > max(self.committed.get(tp, 0), log.start if log.start == log.end else 0)
        }
