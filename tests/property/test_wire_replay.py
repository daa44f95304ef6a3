"""Whatever lies on the dead letter topic, reading it gives a letter, a marker or neither."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aggregator.core.query import HeaderList
from aggregator.wire.headers import ERROR_PREFIX, REPLAY_ATTEMPTS, REPLAY_ID, REPLAYED
from aggregator.wire.replay import encode_replay, read_letter, read_marker
from tests.unit.wire_builders import decoded

PARTS = ("topic", "partition", "offset", "timestamp", "code", "reason", "attempts", "value.sha256")
NAMES = st.one_of(
    st.sampled_from([ERROR_PREFIX + part for part in PARTS]),
    st.sampled_from([REPLAYED, REPLAY_ID, REPLAY_ATTEMPTS, "content-type"]),
    st.text(max_size=5),
)
VALUES = st.one_of(
    st.none(),
    st.binary(max_size=8),
    st.integers(-1, 10**20).map(lambda number: str(number).encode()),
)
COMPLETE = [
    (ERROR_PREFIX + part, value)
    for part, value in (
        *(("topic", b"queries"), ("partition", b"3"), ("offset", b"41")),
        *(("code", b"INTERNAL"), ("reason", b"BAD_ANSWER")),
    )
]
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=12)
RECORD_VALUES = st.one_of(st.none(), st.binary(max_size=20), st.just(b'{"id": "x", "text": "a"}'))


@given(RECORD_VALUES, HEADERS)
def test_nothing_raises_and_nothing_is_both(value: bytes | None, headers: HeaderList) -> None:
    letter, marker = read_letter(None, value, headers), read_marker(value, headers)
    assert letter is None or marker is None


@given(RECORD_VALUES, HEADERS)
def test_a_letter_sent_again_is_the_same_query_once_more(
    value: bytes | None, own: HeaderList
) -> None:
    letter = read_letter(b"k", value, [*own, *COMPLETE])
    assert letter is not None
    assert letter.headers == own
    assert letter.whole
    _, again, headers = encode_replay(letter)
    query = decoded(again, headers)
    assert query.id == letter.id
    once_more = read_letter(b"k", again, [*headers, *COMPLETE])
    assert once_more is not None
    assert (once_more.id, once_more.replays) == (letter.id, letter.replays + 1)
