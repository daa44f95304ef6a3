"""Offsets on their way into a transaction: given up for certain, and a client that never returns.

The client has been seen to hang there after a broker was killed (`make soak`, exactly once, seed
7000): its consumer polled no more, was thrown out of the group, and looked healthy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from aggregator.adapters.kafka_offsets import HANG_LOOKS, OffsetsRequest
from aggregator.core.effects import CommitOffset

OFFSETS = [CommitOffset(tp=("queries", 0), epoch=1, offset_next=5)]
LOOK_S = 0.001


class Producer:
    """Returns when it is let."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.let = threading.Event()
        self.sent = 0

    def send_offsets_to_transaction(self, *_arguments: object) -> None:
        self.entered.set()
        assert self.let.wait(30)
        self.sent += 1


@pytest.fixture
def producer() -> Iterator[Producer]:
    producer = Producer()
    yield producer
    producer.let.set()


def request_of(producer: Producer) -> OffsetsRequest:
    return OffsetsRequest(producer, OFFSETS)  # type: ignore[arg-type] # as far as it is used


def sending(producer: Producer) -> tuple[OffsetsRequest, threading.Thread]:
    """A request in the middle of the client's call."""
    request = request_of(producer)
    thread = threading.Thread(target=request.carry_out, args=("metadata",))
    thread.start()
    assert producer.entered.wait(30)
    return request, thread


def test_a_request_that_was_given_up_is_never_sent(producer: Producer) -> None:
    producer.let.set()
    request = request_of(producer)
    assert request.give_up()
    request.carry_out("metadata")
    assert (producer.sent, request.ended.is_set()) == (0, False)


def test_giving_up_waits_for_a_call_that_returns(producer: Producer) -> None:
    request, thread = sending(producer)
    producer.let.set()
    assert request.give_up()
    thread.join()
    assert (producer.sent, request.ended.is_set()) == (1, True)


def test_giving_up_does_not_wait_for_a_client_that_hangs(producer: Producer) -> None:
    request, _ = sending(producer)
    assert not request.give_up(look_s=LOOK_S)


def test_waiting_notices_a_client_that_hangs(producer: Producer) -> None:
    request, _ = sending(producer)
    looks: list[None] = []
    assert not request.wait(lambda: looks.append(None), look_s=LOOK_S)
    assert len(looks) == HANG_LOOKS - 1


def test_waiting_for_one_that_has_not_begun_is_no_hang(producer: Producer) -> None:
    """The consumer's thread may be busy with a rebalance for long."""
    request = request_of(producer)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3 * HANG_LOOKS:
            request.refuse("not ours")

    assert request.wait(look, look_s=0.0)
    assert request.refusal == "not ours"
