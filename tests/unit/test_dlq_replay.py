"""The order of a replay: a batch out, marks for what was confirmed, and only then the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from aggregator.commands.dlq_replay import (
    BATCH_BYTES_MAX,
    HINDERED_SHOWN_MAX,
    Outcome,
    Replay,
    ReplayOptions,
    SendError,
    Sent,
)
from aggregator.commands.dlq_show import COLUMNS, json_lines, table
from aggregator.commands.dlq_topic import OffsetSet, StoredLetter
from aggregator.commands.wording import shown
from aggregator.wire.dead_letter import encode_letter
from aggregator.wire.replay import read_letter
from tests.unit.wire_builders import BROKEN, TP, WALL_MS, decoded

OPTIONS = ReplayOptions(queries_topic=TP[0], replay_attempts_max=3, rate=1_000_000.0)


def stored(
    offset: int, value: bytes = b'{"text": "a"}', *, topic: str = TP[0], replays: int = 0
) -> StoredLetter:
    """A letter on partition 1 of its topic."""
    headers = [("__aggregator.replay.attempts", str(replays).encode())] if replays else []
    query = decoded(value, headers, tp=(topic, 0))
    query.failure = query.failure or BROKEN
    letter = read_letter(*encode_letter(query))
    assert letter is not None
    return StoredLetter(partition=1, offset=offset, time_ms=WALL_MS, letter=letter)


class Script:
    """A port that confirms everything but what the test says."""

    def __init__(
        self,
        *,
        refuse: Iterable[int] = (),
        broken_at: int | None = None,
        unmarkable: bool = False,
        on_send: Callable[[], None] = lambda: None,
    ) -> None:
        self.log: list[tuple[str, list[int]]] = []
        self._refuse = set(refuse)
        self._broken_at = broken_at
        self._unmarkable = unmarkable
        self._on_send = on_send

    def send(self, letters: Sequence[StoredLetter]) -> Sent:
        self._on_send()
        self.log.append(("send", [letter.offset for letter in letters]))
        confirmed: list[StoredLetter] = []
        refused: list[tuple[StoredLetter, str]] = []
        for letter in letters:
            if letter.offset == self._broken_at:
                return Sent(confirmed=confirmed, refused=refused, broken="not authorised")
            if letter.offset in self._refuse:
                refused.append((letter, "too large"))
            else:
                confirmed.append(letter)
        return Sent(confirmed=confirmed, refused=refused)

    def mark(self, letters: Sequence[StoredLetter]) -> None:
        if self._unmarkable:
            raise SendError("no marks")
        self.log.append(("mark", [letter.offset for letter in letters]))

    def of(self, what: str) -> list[list[int]]:
        return [offsets for kind, offsets in self.log if kind == what]


def test_batches_are_marked_before_the_next_is_sent_and_the_first_is_one_letter() -> None:
    port = Script()
    outcome = Replay(port, OPTIONS).run(stored(n) for n in range(250))
    assert (outcome.sent, outcome.hindered_count, outcome.stopped) == (250, 0, False)
    assert [kind for kind, _ in port.log] == ["send", "mark"] * 4
    assert [len(batch) for batch in port.of("send")] == [1, 100, 100, 49]
    assert port.of("mark") == port.of("send")
    assert [n for batch in port.of("send") for n in batch] == list(range(250))


def test_a_batch_holds_few_large_letters() -> None:
    port = Script()
    value = b'{"text": "%s"}' % (b"a" * (BATCH_BYTES_MAX // 2))
    Replay(port, OPTIONS).run(stored(n, value) for n in range(6))
    assert [len(batch) for batch in port.of("send")] == [1, 2, 2, 1]


def test_what_cannot_be_sent_is_named_and_the_rest_is_sent() -> None:
    port = Script(refuse=[4])
    letters = [
        stored(0),
        stored(1, topic="another"),
        stored(2, replays=3),
        stored(3),
        stored(4),
        stored(5),
    ]
    outcome = Replay(port, OPTIONS).run(letters)
    assert outcome.sent == 3
    assert [(letter.offset, why) for letter, why in outcome.hindered] == [
        (1, "it is from topic 'another', not 'queries'"),
        (2, "it was replayed 3 times, replay_attempts_max"),
        (4, "too large"),
    ]
    assert port.of("mark") == [[0], [3, 5]]


def test_the_report_of_hindered_letters_is_bounded() -> None:
    outcome = Replay(Script(), OPTIONS).run(stored(n, replays=9) for n in range(100))
    assert (outcome.hindered_count, len(outcome.hindered)) == (100, HINDERED_SHOWN_MAX)


def test_a_broken_topic_ends_the_run_with_marks_for_what_was_confirmed() -> None:
    port = Script(broken_at=5)
    replay = Replay(port, OPTIONS)
    with pytest.raises(SendError, match="not authorised"):
        replay.run(stored(n) for n in range(300))
    assert port.log[-1] == ("mark", [1, 2, 3, 4])
    assert replay.outcome.sent == 5


def test_unmarkable_letters_end_the_run_after_one() -> None:
    port = Script(unmarkable=True)
    with pytest.raises(SendError, match="no marks"):
        Replay(port, OPTIONS).run(stored(n) for n in range(300))
    assert port.of("send") == [[0]]


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.mark.parametrize("rate", [0.5, 1.0, 7.5, 40.0, 1000.0])
def test_the_rate_is_kept(rate: float) -> None:
    clock = Clock()
    sends: list[float] = []
    port = Script(on_send=lambda: sends.append(clock.now_s))
    options = ReplayOptions(queries_topic=TP[0], replay_attempts_max=3, rate=rate)
    replay = Replay(port, options, clock_s=lambda: clock.now_s, sleep=clock.sleep)
    replay.run(stored(n) for n in range(220))
    sizes = [len(batch) for batch in port.of("send")]
    assert max(sizes) <= max(1, rate)
    before = 0
    for sent_s, size in zip(sends, sizes, strict=True):
        assert before <= (sent_s - 1000.0) * rate + 1e-6
        before += size
    # And no slower than that.
    assert sends[-1] - 1000.0 <= (220 - sizes[-1]) / rate + 1e-6


def test_a_stop_ends_between_two_batches() -> None:
    asked: list[bool] = []
    port = Script(on_send=lambda: asked.append(True))
    outcome = Replay(port, OPTIONS, stopping=lambda: len(asked) == 2).run(
        stored(n) for n in range(300)
    )
    assert port.of("mark") == port.of("send") == [[0], list(range(1, 101))]
    assert (outcome.sent, outcome.stopped) == (101, True)


def test_a_stop_ends_a_wait() -> None:
    clock = Clock()
    options = ReplayOptions(queries_topic=TP[0], replay_attempts_max=3, rate=0.01)
    port = Script()
    outcome = Replay(
        port,
        options,
        stopping=lambda: clock.now_s > 1010,
        clock_s=lambda: clock.now_s,
        sleep=clock.sleep,
    ).run([stored(0), stored(1)])
    assert (port.of("send"), outcome.stopped) == ([[0]], True)
    assert clock.now_s < 1011


def test_offsets_are_kept_by_the_bit() -> None:
    offsets = OffsetSet()
    kept = {0, 1, 4095, 4096, 10**6, 2**62}
    for offset in kept:
        offsets.add(offset)
    assert {n for n in (*range(5000), 10**6, 10**6 + 1, 2**62, 2**62 - 1) if n in offsets} == kept


# Showing -----------------------------------------------------------------------------------------


def test_the_table_has_a_row_a_letter_and_a_head() -> None:
    head, first, second = table([stored(0), stored(1, b"\x00")], 3)
    assert head.split() == list(COLUMNS)
    assert first.split(None, 7) == [
        "2023-11-14T22:13:20Z",
        "queries-0-41",
        "INTERNAL",
        "ENGINE_FAILED_ALONE",
        "0",
        "0",
        "queries-0-41",
        "the input failed alone",
    ]
    assert "UNDECODABLE" in second
    assert list(table([], 3)) == []


def test_a_table_of_many_is_given_as_they_come() -> None:
    taken: list[int] = []

    def letters() -> Iterable[StoredLetter]:
        for offset in range(2_000):
            taken.append(offset)
            yield stored(offset)

    rows = iter(table(letters(), 3))
    next(rows)
    assert len(taken) < 500
    assert len(list(rows)) == 2_000


def test_nothing_in_a_record_moves_a_terminals_cursor() -> None:
    value = b'{"text": "a", "id": "\\u001b[2Jx\\n\\u202e"}'
    (_, row) = table([stored(0, value)], 3)
    assert row.isprintable()
    assert "\\x1b[2Jx\\n\\u202e" in row
    (line,) = json_lines([stored(0, value)], 3)
    assert line.isascii()
    assert line.isprintable()
    assert shown("grün 好") == "grün 好"


def test_an_outcome_starts_empty() -> None:
    assert Replay(Script(), OPTIONS).run([]) == Outcome()
