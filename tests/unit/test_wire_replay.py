"""Dead letters read back, sent again and marked; whatever else the topic holds is neither."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import pytest

from aggregator.core.effects import Form
from aggregator.core.query import HeaderList, TopicPartition
from aggregator.wire.dead_letter import encode_letter
from aggregator.wire.headers import HeaderRules
from aggregator.wire.replay import (
    DeadLetter,
    encode_replay,
    marker_headers,
    read_letter,
    read_marker,
)
from protos.embedding.v1 import query_pb2
from tests.unit.wire_builders import BROKEN, OFFSET, PROTOBUF_HEADERS, TP, WALL_MS, decoded

JSON = b'{"id": "q1", "text": "hello"}'
PROTOBUF = query_pb2.Query(id="p1", text="hello").SerializeToString()


def letter_of(
    value: bytes | None = JSON,
    headers: HeaderList = (),
    *,
    key: bytes | None = b"k",
    form: Form = Form.FULL,
    tp: TopicPartition = TP,
) -> DeadLetter:
    """Have a record fail, and read its letter back."""
    query = decoded(value, headers, key=key, tp=tp)
    query.failure = query.failure or BROKEN
    query.attempts = 2
    letter = read_letter(*encode_letter(query, form))
    assert letter is not None
    return letter


def test_a_letter_says_what_was_written_into_it() -> None:
    headers = [("x", None), ("content-type", b"application/json"), ("x", b"\xff")]
    assert letter_of(JSON, headers) == DeadLetter(
        key=b"k",
        value=JSON,
        headers=headers,
        tp=TP,
        offset=OFFSET,
        timestamp_ms=WALL_MS,
        stage="inference",
        code="INTERNAL",
        reason="ENGINE_FAILED_ALONE",
        message="the input failed alone",
        attempts=2,
        id="q1",
        replays=0,
        value_bytes=len(JSON),
        value_sha256=None,
    )


@pytest.mark.parametrize(
    ("value", "headers"),
    [
        (JSON, ()),
        (PROTOBUF, PROTOBUF_HEADERS),
        (b'{"text": "no id"}', ()),
        (b'{"id": "refused model", "model": "nobody", "text": "a"}', ()),
        (b"not JSON", ()),
        (None, ()),
        (JSON, [("content-type", b"text/plain")]),
        (JSON, [("__aggregator.replay.id", b"first")]),
        (JSON, [("__aggregator.replay.id", b"\xff")]),
    ],
)
def test_a_replayed_query_has_the_id_that_its_result_had(
    value: bytes | None, headers: HeaderList
) -> None:
    before = decoded(value, headers).id
    letter = letter_of(value, headers)
    key, again, sent = encode_replay(letter)
    after = decoded(again, sent, key=key, tp=("elsewhere", 0)).id
    assert (letter.id, after) == (before, before)


def test_the_longest_default_id_is_kept() -> None:
    tp = ("t" * 249, 2**31 - 1)
    letter = letter_of(b'{"text": "a"}', tp=tp)
    letter = replace(letter, offset=2**63 - 1, id=f"{tp[0]}-{tp[1]}-{2**63 - 1}")
    _, value, headers = encode_replay(letter)
    assert decoded(value, headers).id == letter.id


def test_what_is_sent_again_is_the_record_with_our_two_headers() -> None:
    own = [("x", b"1"), ("__aggregator.errors.code", b"FORGED"), ("x", None)]
    key, value, headers = encode_replay(letter_of(JSON, own))
    assert (key, value) == (b"k", JSON)
    assert headers == [
        ("x", b"1"),
        ("x", None),
        ("__aggregator.replay.id", b"q1"),
        ("__aggregator.replay.attempts", b"1"),
    ]
    assert HeaderRules().passed_on(headers) == [("x", b"1"), ("x", None)]


def test_replays_are_counted_and_end() -> None:
    letter = letter_of()
    for replays in range(3):
        assert (letter.replays, letter.hindrance(3)) == (replays, None)
        key, value, headers = encode_replay(letter)
        letter = letter_of(value, headers, key=key)
    assert letter.id == "q1"
    assert [n for n, _ in letter.headers].count("__aggregator.replay.attempts") == 1
    assert letter.hindrance(3) == "it was replayed 3 times, replay_attempts_max"


@pytest.mark.parametrize("forged", [b"", b"-1", b"x", b"\xff", "\u0663".encode(), b"9" * 20])
def test_a_count_that_we_cannot_have_written_counts_for_nothing(forged: bytes) -> None:
    letter = letter_of(JSON, [("__aggregator.replay.attempts", forged)])
    assert letter.replays == 0
    assert encode_replay(letter)[2][-1] == ("__aggregator.replay.attempts", b"1")


def test_a_record_that_brings_such_headers_along_does_not_speak_for_itself() -> None:
    forged = [
        ("__aggregator.errors.topic", b"somewhere"),
        ("__aggregator.errors.offset", b"7"),
        ("__aggregator.errors.value.size", b"7"),
        ("__aggregator.errors.value.sha256", b"00"),
    ]
    letter = letter_of(None, forged)
    assert (letter.tp, letter.offset, letter.whole) == (TP, OFFSET, True)
    # Alone they make no letter.
    assert read_letter(b"k", None, forged) is None


def test_a_letter_without_its_value_is_named_and_not_sent() -> None:
    letter = letter_of(JSON, form=Form.BARE)
    assert (letter.whole, letter.id, letter.value_bytes) == (False, None, len(JSON))
    digest = sha256(JSON).hexdigest()
    hindrance = letter.hindrance(3)
    assert hindrance is not None
    assert f"{len(JSON)} bytes" in hindrance
    assert digest in hindrance
    with pytest.raises(ValueError, match="without its value"):
        encode_replay(letter)
    replayed = letter_of(JSON, [("__aggregator.replay.id", b"first")], form=Form.BARE)
    assert replayed.id == "first"


def test_a_null_value_is_a_value() -> None:
    letter = letter_of(None, form=Form.BARE)  # nothing was left out
    assert letter.hindrance(3) is None
    assert encode_replay(letter)[:2] == (b"k", None)


def test_a_marker_names_its_letter_and_is_none() -> None:
    headers = marker_headers(3, 41, WALL_MS)
    assert read_marker(None, headers) == (3, 41)
    assert read_letter(b"3-41", None, headers) is None
    assert dict(headers)["__aggregator.replayed.time"] == str(WALL_MS).encode()


def test_a_letter_cannot_pass_for_a_marker() -> None:
    query = decoded(None, marker_headers(3, 41, WALL_MS))
    key, value, headers = encode_letter(query)
    assert read_marker(value, headers) is None
    assert read_letter(key, value, headers) is not None


@pytest.mark.parametrize("place", [None, b"", b"3", b"3-", b"-1-2", b"3-41-5", b"\xff", b"3-4x"])
def test_no_marker_without_a_place(place: bytes | None) -> None:
    assert read_marker(None, [("__aggregator.replayed", place)]) is None
    assert read_marker(b"", marker_headers(1, 2, 3)) is None
