"""Header names that are not UTF-8, read in a loop that the interpreter has specialised."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, Message

from aggregator.adapters.mock_broker import MockBroker
from aggregator.adapters.record_headers import read_headers
from tests.harness.raw_producer import produce_with_raw_header

pytestmark = pytest.mark.mock_broker
WARM = 1_000


def read_in_a_loop(messages: list[Message]) -> list[object]:
    """What each gives; an exception counts as its class."""
    found: list[object] = []
    for message in messages:
        try:
            found.append(read_headers(message))
        except Exception as error:  # noqa: BLE001 - which one is the question
            found.append(type(error))
    return found


def test_a_name_that_is_no_text_raises_at_once_however_warm_the_loop(
    mock_broker: MockBroker,
) -> None:
    mock_broker.create_topic("queries", 1)
    produce_with_raw_header(
        mock_broker.bootstrap_servers,
        "queries",
        key=None,
        value=b"{}",
        name=b"\xff\xfe",
        timestamp_ms=0,
    )
    consumer = Consumer(
        {
            "bootstrap.servers": mock_broker.bootstrap_servers,
            "group.id": "reader",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe(["queries"])
    [record] = consumer.consume(1, 60)
    consumer.close()
    plain = Message(topic="queries", headers=[("a", b"1")])
    found = read_in_a_loop([plain] * WARM + [record] + [plain] * WARM)
    assert found == [[("a", b"1")]] * WARM + [SystemError] + [[("a", b"1")]] * WARM
