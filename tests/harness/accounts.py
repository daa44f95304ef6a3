"""The rules of delivery, and the books that they are checked against: pure, no broker, no clock.

Owns: what may come of each kind of query, what was sent, answered, dead-lettered and committed, and
the judgement. Rules (DESIGN 4, guarantees 1 to 3, 6, 8 and 9), each of which names its violations:

- *lost*: a record without a result once all has come in.
- *unexpected*: a result of a record that was not sent, or one that its kind can't have.
- *ahead*: an offset committed though a record below it had no result on the topic yet.
- *doubled*: results beyond a record's first: none where nobody died; else at most `duplicates_max`
  a partition for each death, and one a record for each.
- *letters*: an outcome that is dead-lettered without its letter, a letter that is not the record as
  it came, more letters than deaths explain.
- *lone suspects* are no violation but counted apart: a sound query convicted because each of two
  outside kills hit it alone in its pass. More of them than two kills each are one.

A *period* is the time between two closings of the books; duplicates count where they arrive. Not
thread-safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Place = tuple[int, int]
"""(partition, offset)."""
Header = tuple[str, bytes | None]

OK = "OK"
DIED_ALONE = "ENGINE_DIED_ALONE"
LETTERED = frozenset(
    {
        "UNDECODABLE",
        "ENGINE_FAILED_ALONE",
        DIED_ALONE,
        "NOT_FINITE",
        "BAD_ANSWER",
        "SERVER_ERROR",
    }
)
"""Reasons of results that have a dead letter (the table in CONTRACTS)."""
KILLS_A_LONE_SUSPECT = 2
"""Outside kills that each hit its own pass before a sound query is convicted."""
CLOCK_MS = 5
"""How far the clocks of one machine, and their rounding, are apart."""
SHOWN_MAX = 5
"""Examples a violation names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A record on the queries topic; `reasons` are what may come of it (`OK`: a vector)."""

    name: str
    reasons: frozenset[str] = frozenset({OK})
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[Header, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether nothing but a vector may come of it."""
        return self.reasons == {OK}


@dataclass(frozen=True, slots=True)
class Answer:
    """A result: why it is none (`OK`: it is one), and where it lies on the results topic.

    `at_ms`: its timestamp, 0: not known.
    """

    reason: str
    place: Place
    at_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter: why, its content, and where it lies on its topic."""

    reason: str
    place: Place
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]

    def is_whole(self, sent: Sent | None) -> bool:
        """Whether it is the record as it came, its headers in front of those that say why."""
        if sent is None:
            return False
        passed = self.headers[: len(sent.headers)]
        return (self.key, self.value, passed) == (sent.key, sent.value, sent.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What deaths explain. `duplicates_max`: of one partition and death, `window_records_max` +
    `poll_records_max`; 0: exactly once.
    """

    duplicates_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the group had committed, and the ends of the topics written to right after that."""

    committed: Mapping[int, int]
    results_ends: Mapping[int, int]
    letters_ends: Mapping[int, int]


@dataclass(slots=True, kw_only=True)
class Period:
    """What came between two closings of the books, and how many of us died in between."""

    sent: int = 0
    answers: int = 0
    duplicates: int = 0
    duplicates_by_partition: Counter[int] = field(default_factory=Counter)
    deaths: int = 0


class Accounts:
    """See the module."""

    def __init__(self, limits: Limits) -> None:
        """Open the books."""
        self._limits = limits
        self.sent: dict[Place, Sent] = {}
        self.answers: dict[Place, list[Answer]] = {}
        self.letters: dict[Place, list[Letter]] = {}
        self.period = Period()
        self.periods: list[Period] = []
        self.snapshots = 0
        """Of committed offsets that were judged."""
        self.deaths = 0
        """Of members, so far: killed, or frozen for longer than the group waits."""
        self.engine_kills = 0
        """Of model servers, from outside."""
        self.violations: list[str] = []
        self._sent_ms: dict[Place, int] = {}
        self._committed: dict[int, int] = {}
        self._judged: dict[int, int] = {}

    # What happens --------------------------------------------------------------------------------

    def note_sent(self, place: Place, sent: Sent, at_ms: int = 0) -> None:
        """A record is on the queries topic; `at_ms`: its timestamp."""
        self.sent[place] = sent
        self._sent_ms[place] = at_ms
        self.period.sent += 1

    def note_answer(self, source: Place, answer: Answer) -> None:
        """A result was read."""
        answers = self.answers.setdefault(source, [])
        if answer in answers:  # the same record, read twice
            return
        answers.append(answer)
        self.period.answers += 1
        if len(answers) > 1:
            self.period.duplicates += 1
            self.period.duplicates_by_partition[source[0]] += 1

    def note_letter(self, source: Place, letter: Letter) -> None:
        """A dead letter was read."""
        letters = self.letters.setdefault(source, [])
        if letter not in letters:
            letters.append(letter)

    def note_death(self) -> None:
        """A member of the group was killed, or frozen for longer than the group waits."""
        self.deaths += 1
        self.period.deaths += 1

    def judge_commit(self, snapshot: Snapshot) -> None:
        """Check a snapshot; every result below its ends has been noted."""
        self.snapshots += 1
        for partition, offset in snapshot.committed.items():
            low = self._judged.get(partition, 0)
            ahead = [
                (partition, each)
                for each in range(low, offset)
                if not self._durable((partition, each), snapshot)
            ]
            if ahead:
                self._violation("ahead", f"committed {offset} of partition {partition}", ahead)
            self._judged[partition] = max(low, offset)
            self._committed[partition] = offset

    def _durable(self, place: Place, snapshot: Snapshot) -> bool:
        """Whether it had a result by then, and the letter of that result."""
        answers = [a for a in self.answers.get(place, ()) if _below(a.place, snapshot.results_ends)]
        letters = [e for e in self.letters.get(place, ()) if _below(e.place, snapshot.letters_ends)]
        lettered = {letter.reason for letter in letters}
        return any(a.reason in lettered or a.reason not in LETTERED for a in answers)

    # Questions -----------------------------------------------------------------------------------

    @property
    def lost(self) -> list[Place]:
        """Records without a result."""
        return [place for place in self.sent if place not in self.answers]

    @property
    def duplicates(self) -> int:
        """Results beyond the first of each record."""
        return sum(len(answers) - 1 for answers in self.answers.values())

    @property
    def lone_suspects(self) -> list[Place]:
        """Sound queries that were convicted."""
        return [
            place
            for place, answers in self.answers.items()
            if (sent := self.sent.get(place)) is not None
            and DIED_ALONE not in sent.reasons
            and any(answer.reason == DIED_ALONE for answer in answers)
        ]

    def expired_early(self, ttl_ms: int) -> list[Place]:
        """Records that expired when they were not yet as old as that, by their timestamps."""
        return [
            place
            for place, answers in self.answers.items()
            for answer in answers
            if answer.reason == "EXPIRED"
            and answer.at_ms + CLOCK_MS < self._sent_ms.get(place, 0) + ttl_ms
        ]

    def ends(self) -> dict[int, int]:
        """By partition, the offset behind the last record sent."""
        ends: dict[int, int] = {}
        for partition, offset in self.sent:
            ends[partition] = max(ends.get(partition, 0), offset + 1)
        return ends

    @property
    def committed(self) -> dict[int, int]:
        """Of the last snapshot."""
        return dict(self._committed)

    # Judgement -----------------------------------------------------------------------------------

    def close_period(self) -> Period:
        """Judge the period's duplicates and begin the next one; all of it has come in."""
        period, self.period = self.period, Period()
        self.periods.append(period)
        bound = self._limits.duplicates_max * period.deaths
        for partition, count in sorted(period.duplicates_by_partition.items()):
            if count > bound:
                self.violations.append(
                    f"doubled: {count} of partition {partition}, at most {bound} "
                    f"({period.deaths} deaths)"
                )
        return period

    def judge(self) -> list[str]:
        """Judge everything once all has come in; returns every violation found so far."""
        self._violation("lost", "no result", self.lost)
        self._judge_answers()
        self._judge_letters()
        too_often = [place for place, found in self.answers.items() if len(found) > 1 + self.deaths]
        self._violation("doubled", f"more than {1 + self.deaths} results of one record", too_often)
        suspects = self.lone_suspects
        if len(suspects) * KILLS_A_LONE_SUSPECT > self.engine_kills:
            self._violation("unexpected", f"{self.engine_kills} kills convicted", suspects)
        return self.violations

    def _judge_answers(self) -> None:
        self._violation("unexpected", "never sent", [p for p in self.answers if p not in self.sent])
        suspects = frozenset(self.lone_suspects)
        for place, answers in self.answers.items():
            sent = self.sent.get(place)
            if sent is None or place in suspects:
                continue
            wrong = {answer.reason for answer in answers} - sent.reasons
            if wrong:
                self._violation("unexpected", f"{sorted(wrong)} of {sent.name}", [place])

    def _judge_letters(self) -> None:
        missing, torn, baseless = [], [], []
        for place, answers in self.answers.items():
            due = {answer.reason for answer in answers if answer.reason in LETTERED}
            letters = self.letters.get(place, [])
            if due - {letter.reason for letter in letters}:
                missing.append(place)
        for place, letters in self.letters.items():
            if not all(letter.is_whole(self.sent.get(place)) for letter in letters):
                torn.append(place)
            # One that died between the two leaves a letter without its result, or the reverse.
            due_count = sum(answer.reason in LETTERED for answer in self.answers.get(place, []))
            explained = self.deaths if self._limits.duplicates_max else 0
            if abs(len(letters) - due_count) > explained:
                baseless.append(place)
        self._violation("letters", "missing", missing)
        self._violation("letters", "not the record as it came", torn)
        self._violation("letters", "not one for each outcome", baseless)

    def _violation(self, rule: str, what: str, places: Sequence[Place]) -> None:
        if not places:
            return
        shown = ", ".join(self._shown(place) for place in places[:SHOWN_MAX])
        self.violations.append(f"{rule}: {what}: {len(places)} ({shown})")

    def _shown(self, place: Place) -> str:
        sent = self.sent.get(place)
        reasons = [answer.reason for answer in self.answers.get(place, [])]
        return f"{place[0]}-{place[1]} {sent.name if sent else 'unknown'} {reasons}"

    def counts(self) -> dict[str, Any]:
        """The books in numbers, for one line of JSON."""
        reasons = Counter(a.reason for answers in self.answers.values() for a in answers)
        return {
            "sent": len(self.sent),
            "results": sum(reasons.values()),
            "lost": len(self.lost),
            "duplicates": self.duplicates,
            "duplicates_partition_max": max(
                (max(p.duplicates_by_partition.values(), default=0) for p in self.periods),
                default=0,
            ),
            "letters": sum(map(len, self.letters.values())),
            "lone_suspects": len(self.lone_suspects),
            "deaths": self.deaths,
            "engine_kills": self.engine_kills,
            "commits_judged": self.snapshots,
            "reasons": dict(sorted(reasons.items())),
            "violations": len(self.violations),
        }


def _below(place: Place, ends: Mapping[int, int]) -> bool:
    return place[1] < ends.get(place[0], 0)


def merge_counts(all_counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums of `counts()` of several groups, the maximum of maxima."""
    merged: dict[str, Any] = {}
    for counts in all_counts:
        for name, value in counts.items():
            if isinstance(value, Mapping):
                merged[name] = dict(Counter(merged.get(name, {})) + Counter(value))
            elif name.endswith("_max"):
                merged[name] = max(merged.get(name, 0), value)
            else:
                merged[name] = merged.get(name, 0) + value
    return merged
