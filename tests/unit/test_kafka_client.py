"""Looking topics up: what brokers can't tell yet is asked again, a refusal is said at once.

And what Ctrl-C becomes in the client.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from aggregator.commands import kafka_client
from aggregator.commands.kafka_client import (
    KafkaClientError,
    QuerySender,
    Topics,
    looked_up,
    partitions_of,
)


def saying(*codes: int) -> Callable[[], str]:
    """Fail with each of these in turn, then answer."""
    left = list(codes)

    def ask() -> str:
        if left:
            raise KafkaException(KafkaError(left.pop(0)))
        return "answer"

    return ask


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError._TRANSPORT,
        KafkaError._TIMED_OUT,
    ],
)
def test_what_heals_is_asked_again(code: int) -> None:
    assert looked_up(saying(code, code), "b:1") == "answer"


def test_it_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_client, "METADATA_TIMEOUT_S", -1.0)
    with pytest.raises(KafkaClientError, match="no Kafka broker answers at b:1"):
        looked_up(saying(KafkaError._TRANSPORT, KafkaError._TRANSPORT), "b:1")


def test_a_refusal_is_said_at_once() -> None:
    ask = saying(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(KafkaClientError, match=r"looking up the topics at b:1 failed: .*uthoriz"):
        looked_up(ask, "b:1")
    assert ask() == "answer"  # it was asked once


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            KafkaError.UNKNOWN_TOPIC_OR_PART,
            r"there is no topic 'queries' at b:1 \(`aggregator topics create` makes",
        ),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, "looking up the topics at b:1 failed: .*uthoriz"),
    ],
)
def test_a_topic_that_is_not_ours_to_see_is_not_said_to_be_missing(code: int, says: str) -> None:
    class Client:
        def list_topics(self, topic: str, timeout: float) -> object:
            found = SimpleNamespace(error=KafkaError(code), partitions={})
            return SimpleNamespace(topics={topic: found})

    with pytest.raises(KafkaClientError, match=says):
        partitions_of(cast("Producer", Client()), "queries", "b:1")


class Interrupted(str):
    """Ctrl-C comes at the moment at which the client reads this name."""

    __slots__ = ()

    def __str__(self) -> str:
        raise KeyboardInterrupt


def test_ctrl_c_while_a_header_is_read_stays_ctrl_c() -> None:
    topics = Topics(
        client={"bootstrap.servers": "127.0.0.1:1"}, queries="queries", results="results"
    )
    sender = QuerySender(topics, idempotent=False)
    with pytest.raises(KeyboardInterrupt):
        sender.send(
            b"{}",
            [(Interrupted("correlation"), b"1")],
            key=None,
            on_delivery=lambda _error, _message: None,
        )
