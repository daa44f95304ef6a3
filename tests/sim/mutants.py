"""Bugs planted on purpose, one at a time: each breaks a guarantee, and the checkers must see it.

A mutant patches the code under test for the length of a run; the simulation itself stays as it is.
Those named after other systems are defects that have been reported of them. A mutant that no seed
catches means a blind spot of the simulation, not a harmless bug.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from aggregator.adapters import kafka_commits, kafka_offsets, kafka_source
from aggregator.core import (
    delivery,
    dispatch,
    machine,
    outcomes,
    replies,
    retry,
    suspects,
    transactions,
)
from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.backlog import NEVER_NS
from aggregator.core.claims import Claim
from aggregator.core.packing import PackLimits
from aggregator.core.partitions import Ledger
from aggregator.core.query import ABANDONED, SETTLED, WAITING, WRITING, Query
from aggregator.core.servers import Server
from aggregator.runtime import bridge, intake
from aggregator.wire import rpc
from model_server.core import isolation, passes
from model_server.core.effects import PassKind
from model_server.core.passes import Chosen


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug. `guarantees`: those of which a violation may tell of it."""

    name: str
    guarantees: Sequence[int]
    owner: Any
    attribute: str
    replacement: Any


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Run what follows with the bug."""
    with mock.patch.object(mutant.owner, mutant.attribute, mutant.replacement):
        yield


# Commits and watermarks --------------------------------------------------------------------------


def _highest_seen(ledger: Ledger) -> int | None:
    return ledger.offset_next


def _advance_over_writing(ledger: Ledger) -> bool:
    """The watermark moves as soon as a result is handed to the producer."""
    moved = False
    while ledger.unsettled and ledger.unsettled[0].phase >= 2:  # WRITING
        ledger.unsettled.popleft()
        ledger.settled += 1
        moved = True
    return moved


def _settled_by_first_report(
    core: machine.Aggregator, event: ev.WritesDurable, now_ns: int
) -> None:
    """A result makes its record settled though its dead letter is not yet durable."""
    for query in event.results:
        if query.writes_pending == 2:
            query.writes_pending = 1
    _ORIGINAL_DURABLE(core, event, now_ns)
    for query in event.letters:
        query.writes_pending = max(query.writes_pending, 0)


_ORIGINAL_DURABLE = machine.Aggregator._writes_durable


def _position_always(core: machine.Aggregator, event: ev.RecordsPolled, now_ns: int) -> None:
    """The position of a poll is taken for settled before its records are admitted."""
    for position in event.positions:
        ledger = core._ledgers.get(position.tp)
        if ledger is not None and ledger.epoch == position.epoch and not ledger.unsettled:
            ledger.offset_next = position.offset_next
            core._commits.moved(ledger)
            ledger.closed, closed = False, ledger.closed
            core._commit_if_due(now_ns + 10**12)
            ledger.closed = closed
    _ORIGINAL_POLLED(core, event, now_ns)


_ORIGINAL_POLLED = machine.Aggregator._records_polled


def _store_any_epoch(commits: kafka_commits.Commits, epochs: kafka_commits.Epochs) -> list[int]:
    """Commits of partitions that are somebody else's by now are sent all the same."""
    waiting, commits._waiting = commits._waiting, []
    for commit in waiting:
        for offset in commit.offsets:
            consumer: Any = commits._consumer
            consumer._stored[offset.tp] = offset.offset_next
    return [commit.commit_id for commit in waiting]


# Epochs, revokes, the drain ----------------------------------------------------------------------


def _forget_nothing(core: machine.Aggregator, abandoned: list[Query]) -> None:
    """What is abandoned stays in the backlog."""
    core._query_bytes -= sum(query.size_bytes for query in abandoned)


def _keep_phase(ledger: Ledger) -> list[Query]:
    """Late answers of an epoch that is over are written all the same."""
    ledger.closed = True
    return [q for q in ledger.unsettled if q.phase not in (SETTLED, ABANDONED)]


def _close_keeps_backlog(ledger: Ledger) -> list[Query]:
    """Nothing is dropped on a revoke: all of the backlog is worked off, new records of it too."""
    ledger.closed = True
    return []


def _close_drops_all(ledger: Ledger) -> list[Query]:
    """On a revoke all that is unfinished is dropped, what is in flight included."""
    ledger.closed = True
    dropped: list[Query] = []
    while ledger.unsettled:
        query = ledger.unsettled.pop()
        if query.phase != SETTLED:
            query.phase = ABANDONED
            dropped.append(query)
        ledger.offset_next = query.offset
    return dropped


def _release_without_commit(core: machine.Aggregator, now_ns: int) -> None:
    for rendezvous in list(core._rendezvous):
        if any(ledger.unsettled for ledger in rendezvous.ledgers):
            if now_ns < rendezvous.deadline_ns:
                continue
            for ledger in rendezvous.ledgers:
                core._forget(ledger.abandon())
        core._part(rendezvous)


def _no_deadline(core: machine.Aggregator, event: ev.PartitionsRevoking, now_ns: int) -> None:
    ledgers = [core._ledgers[tp] for tp in event.partitions if tp in core._ledgers]
    core._meet(
        machine._Rendezvous(
            revoke_id=event.revoke_id, ledgers=ledgers, deadline_ns=now_ns + 3_600 * 10**9
        )
    )


def _lost_as_revoked(core: machine.Aggregator, event: ev.PartitionsLost, now_ns: int) -> None:
    """Losses are ignored, as without `on_lost`."""


def _returns_at_once(source: kafka_source.KafkaSource) -> None:
    """The rebalance callback does not wait for the core."""


def _not_waited_for(source: kafka_source.KafkaSource, consumer: Any, partitions: list[Any]) -> None:
    """As it was: an assignment's callback returns before the core has said what it is to pause."""
    with mock.patch.object(source, "_serve_commands", return_value=None):
        _ORIGINAL_ON_ASSIGN(source, consumer, partitions)
    source._out = False


def _polled_before_the_parts(
    admits: bridge.Bridge, parts: Iterator[tuple[ev.RecordsPolled, bool]]
) -> None:
    """The next poll does not wait for the last part."""
    polled, last = next(parts)
    admits._driver.feed([polled])
    admits._taken()
    if not last:
        admits._loop.call_soon(admits._admit_part, parts)


def _positions_with_each_part(
    reads: intake.Intake, batch: kafka_source.RawBatch, **times: int
) -> Iterator[tuple[ev.RecordsPolled, bool]]:
    for polled, last in _ORIGINAL_READ(reads, batch, **times):
        yield ev.RecordsPolled(records=polled.records, positions=batch.positions), last


_ORIGINAL_READ = intake.Intake.read


def _never_told(source: kafka_source.KafkaSource) -> None:
    """Where the group stopped is asked for once only."""


_ORIGINAL_ON_ASSIGN = kafka_source.KafkaSource._on_assign


def _never_gives_up_draining(
    core: machine.Aggregator, event: ev.StopRequested, now_ns: int
) -> None:
    core._draining = True
    core._effects.append(fx.StopPolling())
    ledgers = list(core._ledgers.values())
    core._meet(
        machine._Rendezvous(revoke_id=None, ledgers=ledgers, deadline_ns=now_ns + 3_600 * 10**9)
    )


def _fails_when_drained(core: machine.Aggregator, halt: fx.Halt) -> None:
    if halt.message == "drained":
        halt = fx.Halt(exit_code=1, message=halt.message, abandoned=halt.abandoned)
    _ORIGINAL_HALT(core, halt)


_ORIGINAL_HALT = machine.Aggregator._halt


# Bounds ------------------------------------------------------------------------------------------


def _never_pause(core: machine.Aggregator) -> None:
    core._windows_moved = False


_ORIGINAL_ASSIGNED = machine.Aggregator._partitions_assigned


def _pause_forgotten(core: machine.Aggregator, event: ev.PartitionsAssigned, now_ns: int) -> None:
    """What is assigned while all are paused counts as paused and is not."""
    _ORIGINAL_ASSIGNED(core, event, now_ns)
    core._effects = [effect for effect in core._effects if not isinstance(effect, fx.Pause)]
    for ledger in core._ledgers.values():
        ledger.paused = ledger.paused or core._everything_paused


def _never_resume(core: machine.Aggregator) -> None:
    _ORIGINAL_PAUSE(core)
    core._effects = [effect for effect in core._effects if not isinstance(effect, fx.Resume)]


_ORIGINAL_PAUSE = machine.Aggregator._pause_and_resume


def _bytes_given_back_twice(core: machine.Aggregator, event: ev.WritesDurable, now_ns: int) -> None:
    _ORIGINAL_DURABLE(core, event, now_ns)
    core._query_bytes -= sum(query.size_bytes for query in event.letters)


def _pass_over_target(chooser: passes.Passes, chosen: Chosen, limits: Any, _tokens: int) -> None:
    """Passes are filled to four times the maximum."""
    wide = PackLimits(
        tokens=4 * limits.batch_tokens_max, inputs=4 * limits.inputs_max, size_bytes=1 << 30
    )
    parts, tokens = chooser.queue.cut(wide)
    if parts:
        chosen.kind, chosen.parts, chosen.tokens = PassKind.NORMAL, parts, tokens


# Blame and retries -------------------------------------------------------------------------------


def _blame_left_over(
    halves: isolation.Isolation,
    parts: Sequence[Any],
    message: str,
    *,
    alone: bool,
    out_of_memory: bool = False,
) -> None:
    """As it was until simulation found it: one that is left over is taken to have raised alone."""
    if sum(len(part.indexes) for part in parts) == 1:
        halves._suspect = isolation.Suspect(part=parts[0], message=message)
    else:
        halves.halve(parts)


def _blame_all(
    halves: isolation.Isolation,
    parts: Sequence[Any],
    message: str,
    *,
    alone: bool,
    out_of_memory: bool = False,
) -> None:
    """Whoever is first in a pass that raised is blamed."""
    halves._suspect = isolation.Suspect(part=parts[0], message=message)


def _convict_at_first(*arguments: Any, **named: Any) -> suspects.Verdict:
    """A death of a claim is blamed on all that were in it."""
    verdict = _ORIGINAL_JUDGE(*arguments, **named)
    convicted = [query for group in verdict.groups for query in group.queries]
    return suspects.Verdict([*verdict.retry], [], [*verdict.convicted, *convicted])


_ORIGINAL_JUDGE = suspects.judge


def _acquit_always(*arguments: Any, **named: Any) -> suspects.Verdict:
    """Poison is tried again for ever."""
    queries: Sequence[Query] = arguments[0]
    for query in queries:
        query.deaths = 0
    return suspects.Verdict(list(queries), [], [])


def _expired_at_once(waiting: retry.Waiting, now_ns: int) -> list[Query]:
    return _ORIGINAL_EXPIRE(waiting, now_ns + 10**9)


_ORIGINAL_EXPIRE = retry.Waiting.expire


def _again_for_ever(
    waiting: retry.Waiting, query: Query, claim: Claim, failure: Any, now_ns: int
) -> tuple[list[Query], Any]:
    """Started attempts are not counted."""
    if query.phase == ABANDONED:
        return [], None
    return waiting._again(query, claim.server, now_ns), None


def _give_up_too_soon(
    waiting: retry.Waiting, query: Query, claim: Claim, fault: str, now_ns: int
) -> tuple[list[Query], Any]:
    """One bad answer ends a query."""
    if query.phase == ABANDONED:
        return [], None
    return [query], outcomes.bad_answer(fault)


def _lose_retries(waiting: retry.Waiting, query: Query, server: str, now_ns: int) -> None:
    """What is to be retried is forgotten."""
    query.phase = WAITING


def _wakes_nobody(server: Server) -> int:
    """As it was until simulation found it: while a boundary is known, silence is not noticed."""
    if server.boundary_ns < NEVER_NS:
        return NEVER_NS
    return _ORIGINAL_PRESUMED(server)


_ORIGINAL_PRESUMED = Server.presumed_idle_at_ns


# Answers -----------------------------------------------------------------------------------------


def _unchecked(claim: Claim, answer: Any) -> str | None:
    """Answers that are missing or doubled go unnoticed."""
    claim.answered_inputs = len(claim.queries)
    return None


def _any_length(encoding: int, embeddings: bytes, scales: Sequence[float]) -> None:
    """Vectors that are not finite pass."""


def _any_revision(dispatcher: dispatch.Dispatcher, revision: str) -> bool:
    return True


def _mates_vector(  # noqa: PLR0917 - as what it replaces
    self: replies.Replies, server: Any, claim: Claim, answer: Any, group: Any, now_ns: int
) -> list[fx.VectorRows]:
    """Rows are counted among those kept, not in the group."""
    rows = _ORIGINAL_VECTORS(self, server, claim, answer, group, now_ns)
    for each in rows:
        each.rows = range(len(each.queries))
    return rows


_ORIGINAL_VECTORS = replies.Replies._vectors


def _answers_of_others(  # noqa: PLR0917 - as what it replaces
    self: replies.Replies, server: Any, claim: Claim, answer: Any, group: Any, now_ns: int
) -> list[fx.VectorRows]:
    """Late answers count: a query that another claim has by now is answered twice."""
    for index in group.indexes:
        query = claim.queries[index]
        if query.phase < SETTLED:
            query.phase, query.claim_id = 1, claim.claim_id  # IN_FLIGHT
    return _ORIGINAL_VECTORS(self, server, claim, answer, group, now_ns)


# Writes ------------------------------------------------------------------------------------------


def _drop_letters(
    self: delivery.Delivery, results: Sequence[Query], letters: Sequence[Query], **named: Any
) -> None:
    """A dead letter that can't be written is logged and dropped (arroyo)."""
    self.durable([], letters)
    _ORIGINAL_RECORD_FAILED(self, results, (), **named)


_ORIGINAL_RECORD_FAILED = delivery.Delivery.record_failed


def _believe_batches(
    self: delivery.Delivery, results: Sequence[Query], letters: Sequence[Query], **named: Any
) -> None:
    """A record is blamed for what was wrong with another of its produce batch."""
    for query in results:
        query.write_step = max(query.write_step, 1)
    _ORIGINAL_RECORD_FAILED(self, results, letters, **(named | {"alone": True}))


def _drop_on_topic_fault(
    self: delivery.Delivery, results: Sequence[Query], letters: Sequence[Query], **named: Any
) -> None:
    """What an outage fails is taken for written."""
    self.durable(results, letters)
    for query in results:
        query.phase = SETTLED


def _forget_held(self: delivery.Delivery, topic: Any) -> None:
    """After an outage one record only is sent again."""
    topic.failing_since_ns, topic.probing, topic.held = None, False, topic.held[:0]


def _give_up_outage(self: delivery.Delivery, now_ns: int) -> str | None:
    for topic in (self._results, self._letters):
        if topic.failing_since_ns is not None:
            return f"the {topic.name} topic could not be written for 0 s: {topic.message}"
    return None


def _resend_before_report(self: delivery.Delivery, now_ns: int) -> None:
    """All that is held is sent at each probe, and held too."""
    for topic in (self._results, self._letters):
        if topic.failing_since_ns is not None and now_ns >= topic.probe_at_ns:
            topic.probe_at_ns = now_ns + topic.probe_pause_ns
            for query in topic.held:
                self._resend(topic, query)


# Exactly once ------------------------------------------------------------------------------------


def _no_prefix(ledger: Ledger, room: Any) -> Any:
    """Results go into a transaction though one before them is not there yet."""
    queries = [query for query in ledger.unsettled if query.phase == WRITING]
    if not queries or ledger.offset_next is None:
        return None
    return transactions._Share(
        ledger=ledger, queries=queries, offset_next=ledger.offset_next, settled=ledger.settled
    )


def _offsets_forgotten(request: kafka_offsets.OffsetsRequest, reason: str) -> None:
    """Offsets that may not be sent are left out, and the records committed all the same."""
    request.ended.set()


def _aborted_is_done(
    self: transactions.Transactions, commit_id: int, *, message: str, now_ns: int
) -> None:
    """What an abort took back is taken for committed."""
    for query in self.done(commit_id):
        query.phase = SETTLED


A, D, W, L = machine.Aggregator, delivery.Delivery, retry.Waiting, Ledger
T, Q = transactions.Transactions, kafka_offsets.OffsetsRequest
R, S, C, H = replies.Replies, kafka_source.KafkaSource, kafka_commits.Commits, isolation.Isolation

_TABLE: tuple[tuple[str, Sequence[int], Any, str, Any], ...] = (
    # Name, guarantees, and what is replaced by what.
    ("retries are lost", (0, 1), W, "_delay", _lose_retries),
    ("an abandoned query goes on", (0, 1, 4, 5), A, "_forget", _forget_nothing),
    ("late answers of an old claim count", (0, 1), R, "_vectors", _answers_of_others),
    ("expired a second too soon", (1,), W, "expire", _expired_at_once),
    (
        "the highest offset is committed (arroyo)",
        (2,),
        L,
        "watermark",
        property(_highest_seen),
    ),
    ("the watermark moves before durability", (1, 2), L, "advance", _advance_over_writing),
    (
        "settled before its letter is",
        (0, 1, 2),
        A,
        "_writes_durable",
        _settled_by_first_report,
    ),
    ("positions count before records are admitted", (2,), A, "_records_polled", _position_always),
    (
        "the positions of a poll come with its first part",
        (1, 2, 10),
        intake.Intake,
        "read",
        _positions_with_each_part,
    ),
    (
        "the next poll does not wait for the last part",
        (1, 5),
        bridge.Bridge,
        "_admit_part",
        _polled_before_the_parts,
    ),
    ("the parts of a poll have no positions", (2, 10), intake, "_behind", lambda _: []),
    ("a revoke does not commit", (3,), A, "_advance_rendezvous", _release_without_commit),
    (
        "the callback does not wait",
        (3, 4),
        S,
        "_wait_for_release",
        _returns_at_once,
    ),
    (
        "commits of other epochs are sent (connect)",
        (2, 3, 4),
        C,
        "_store_waiting",
        _store_any_epoch,
    ),
    ("late reports and answers of an old epoch count", (1, 4, 5), L, "abandon", _keep_phase),
    ("the backlog is worked off on a revoke", (4,), L, "close", _close_keeps_backlog),
    ("what is in flight is dropped on a revoke", (1, 2, 3, 4, 5), L, "close", _close_drops_all),
    ("a revoke has no deadline", (4,), A, "_partitions_revoking", _no_deadline),
    ("losses are ignored", (1, 3, 4), A, "_partitions_lost", _lost_as_revoked),
    ("full windows do not pause", (5,), A, "_pause_and_resume", _never_pause),
    (
        "pauses are forgotten on an assignment (kafka-go)",
        (0, 5),
        A,
        "_partitions_assigned",
        _pause_forgotten,
    ),
    ("an assignment is not waited for", (5,), S, "_on_assign", _not_waited_for),
    ("what is held stays held", (0,), S, "_start_held", _never_told),
    ("partitions are not resumed", (0,), A, "_pause_and_resume", _never_resume),
    ("bytes are given back twice", (5,), A, "_writes_durable", _bytes_given_back_twice),
    ("passes above the maximum", (5,), passes.Passes, "_waiting", _pass_over_target),
    ("mates are blamed", (6,), H, "raised", _blame_all),
    ("all that died together are convicted", (6,), retry, "judge", _convict_at_first),
    ("poison is tried for ever", (0,), retry, "judge", _acquit_always),
    ("one bad answer ends a query", (6,), W, "bad_answer", _give_up_too_soon),
    ("answers are not checked for count", (0, 1, 6), replies, "_fault", _unchecked),
    ("vectors are not checked for finiteness", (7,), rpc, "_check_finite", _any_length),
    ("revisions are mixed", (7,), dispatch.Dispatcher, "_accepts", _any_revision),
    ("rows are counted among those kept", (7,), R, "_vectors", _mates_vector),
    ("a drain ends as a failure", (8,), A, "_halt", _fails_when_drained),
    ("the drain has no deadline", (0, 3, 8), A, "_stop_requested", _never_gives_up_draining),
    ("dead letters that fail are dropped (arroyo)", (0, 1, 2), D, "record_failed", _drop_letters),
    ("a batch's fault is believed of each record", (6,), D, "record_failed", _believe_batches),
    ("a transaction holds no prefix", (10, 1, 2), transactions, "_prefix", _no_prefix),
    ("offsets are left out of a transaction", (0, 10), Q, "refuse", _offsets_forgotten),
    ("an abort is taken for a commit", (0, 1, 2, 5, 10), T, "failed", _aborted_is_done),
    ("an outage loses what it fails", (0, 1, 2, 5), D, "topic_failed", _drop_on_topic_fault),
    ("what was held is forgotten", (0, 1), D, "_recover", _forget_held),
    ("the first fault of a topic ends the process", (9,), D, "_outage", _give_up_outage),
    ("held records are sent at each probe", (1,), D, "_probe", _resend_before_report),
)
_RARE: tuple[tuple[str, Sequence[int], Any, str, Any], ...] = (
    # What simulation has found, at one seed in a thousand or so; each has a unit test.
    ("whoever is left of a pass is blamed", (6,), H, "raised", _blame_left_over),
    ("a server is busy for as long as it says", (0,), rpc, "_BUSY_MS_MAX", 1e9),
    ("a tick that comes late is the last", (0,), Server, "presumed_idle_at_ns", _wakes_nobody),
)
MUTANTS: tuple[Mutant, ...] = tuple(Mutant(*row) for row in _TABLE)
RARE: tuple[Mutant, ...] = tuple(Mutant(*row) for row in _RARE)
