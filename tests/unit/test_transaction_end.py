"""A transaction that is not ended: borne in an outage, fatal where the brokers answer all the same.

The client has been seen never to come back from an abort after its process was frozen (`make chaos
DELIVERY=exactly_once SEED=9100`). Here it is a script, and time is what the script makes of it.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from aggregator.adapters import kafka_transactions
from aggregator.adapters.kafka_config import KafkaOptions
from aggregator.adapters.kafka_offsets import SLICE_S, OffsetsRequest
from aggregator.adapters.kafka_transactions import (
    ROUND_S_MAX,
    TIMEOUTS_UNANSWERED,
    KafkaTransactions,
    TransactionsOptions,
)
from aggregator.core.effects import CommitOffset
from aggregator.core.events import CommitDone, CommitFailed

OPTIONS = TransactionsOptions(
    kafka=KafkaOptions(bootstrap_servers="nowhere", group_id="group"),
    instance_name="one",
    timeout_ms=10_000,
)
LIMIT_S = TIMEOUTS_UNANSWERED * 10.0
OFFSETS = [CommitOffset(tp=("queries", 0), epoch=1, offset_next=5)]


class Script:
    """The client, and the time that its calls take; stands for the module `time` too.

    `down`: from when to when no broker answers. `ends_s`: when the transaction is ended after all.
    """

    def __init__(self, *, down: tuple[float, float] = (0, 0), ends_s: float = 1e9) -> None:
        self.now_s = 0.0
        self.rounds = 0
        self.frozen_s = 0.0
        self.asked: set[object] = set()
        self._down = down
        self._ends_s = ends_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def begin_transaction(self) -> None:
        pass

    def __len__(self) -> int:
        return 0

    def poll(self, timeout_s: float) -> int:
        del timeout_s
        return 0

    def send_offsets_to_transaction(self, *_arguments: object) -> None:
        pass

    def commit_transaction(self, timeout_s: float) -> None:
        self._end(timeout_s)

    def abort_transaction(self, timeout_s: float) -> None:
        self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        self.rounds += 1
        if self.now_s >= self._ends_s:
            return
        self.now_s += timeout_s + self.frozen_s
        self.frozen_s = 0.0
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True))

    def list_topics(self, topic: object, timeout_s: float) -> None:
        self.asked.add(topic)
        since_s, until_s = self._down
        if since_s <= self.now_s < until_s:
            self.now_s += timeout_s
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))


class Heard:
    """What is told, in order."""

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[object] = queue.SimpleQueue()

    def on_event(self, event: CommitDone | CommitFailed) -> None:
        self.said.put(event)

    def on_reports(self, durable: Sequence[object], failed: Sequence[object]) -> None:
        raise AssertionError((durable, failed))

    def on_fault(self, message: str, *, fatal: bool) -> None:
        assert fatal
        self.said.put(message)


class Sends:
    """The consumer's side: sends the offsets, or does not get round to it."""

    def __init__(self, *, stuck: bool) -> None:
        self._stuck = stuck

    def send_offsets(self, request: OffsetsRequest) -> None:
        if not self._stuck:
            request.carry_out("metadata")


@pytest.fixture(params=["committed", "aborted"])
def end(request: pytest.FixtureRequest) -> str:
    """How the transaction is to end."""
    return str(request.param)


def carried_out(script: Script, end: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is told of one transaction that is to end so."""
    monkeypatch.setattr(kafka_transactions, "Producer", lambda _config: script)
    monkeypatch.setattr(kafka_transactions, "time", script)
    heard = Heard()
    transactions: KafkaTransactions[int] = KafkaTransactions(OPTIONS, heard)
    if end == "aborted":
        transactions.abort(1)
    transactions.commit(1, [], OFFSETS)
    transactions.start(Sends(stuck=end == "aborted"))
    told = heard.said.get(timeout=60)
    assert transactions.close(60)
    assert heard.said.empty()
    return told


def kind_of(end: str) -> type[CommitDone] | type[CommitFailed]:
    return CommitDone if end == "committed" else CommitFailed


def test_brokers_that_answer_everything_else_are_given_up(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script()
    told = carried_out(script, end, monkeypatch)
    assert told == (
        f"the open transaction could not be {end} for 30 s, though the brokers answer (no answer)"
    )
    assert LIMIT_S <= script.now_s < LIMIT_S + 2 * SLICE_S
    assert script.asked == {"queries"}


def test_an_outage_is_borne_however_long(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(down=(0, 10 * LIMIT_S), ends_s=11 * LIMIT_S - 1)
    assert isinstance(carried_out(script, end, monkeypatch), kind_of(end))


def test_brokers_that_came_back_have_as_long_as_any(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(down=(LIMIT_S - 2, LIMIT_S + 20))
    assert "though the brokers answer" in carried_out(script, end, monkeypatch)
    since_up_s = script.now_s - (LIMIT_S + 20)
    assert LIMIT_S - 2 * SLICE_S <= since_up_s < LIMIT_S + 2 * SLICE_S


def test_the_time_for_which_the_process_was_frozen_does_not_count(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(ends_s=3_600 + LIMIT_S - 2 * ROUND_S_MAX)
    script.frozen_s = 3_600
    assert isinstance(carried_out(script, end, monkeypatch), kind_of(end))
    assert script.rounds > 2
