"""The checker of the chaos tests checks: each rule is broken once, and it alone is named."""

from __future__ import annotations

import pytest

from tests.harness.accounts import (
    DIED_ALONE,
    Accounts,
    Answer,
    Letter,
    Limits,
    Sent,
    Snapshot,
    merge_counts,
)

BAD = frozenset({"UNDECODABLE"})
POISON = Sent(name="poison", reasons=BAD, key=b"k", value=b"{", headers=(("a", b"1"),))


def answer(place: tuple[int, int], reason: str = "OK") -> Answer:
    return Answer(reason, place)


def letter(value: bytes | None = b"{", *, offset: int = 0, reason: str = "UNDECODABLE") -> Letter:
    headers = (("a", b"1"), ("__aggregator.errors.reason", reason.encode()))
    return Letter(reason=reason, place=(0, offset), key=b"k", value=value, headers=headers)


def snapshot(committed: int, results: int, letters: int = 0) -> Snapshot:
    return Snapshot(committed={0: committed}, results_ends={0: results}, letters_ends={0: letters})


@pytest.fixture
def accounts() -> Accounts:
    """Four sound queries and one that is poison, each with what is due to it."""
    books = Accounts(Limits(duplicates_max=2))
    for offset in range(4):
        books.note_sent((0, offset), Sent(name=f"sound {offset}"))
        books.note_answer((0, offset), answer((0, offset)))
    books.note_sent((0, 4), POISON)
    books.note_answer((0, 4), answer((0, 4), "UNDECODABLE"))
    books.note_letter((0, 4), letter())
    return books


def rules(accounts: Accounts) -> list[str]:
    accounts.close_period()
    return [what.partition(":")[0] for what in accounts.judge()]


def test_good_books_are_good(accounts: Accounts) -> None:
    accounts.judge_commit(snapshot(5, 5, 1))
    assert rules(accounts) == []
    counts = accounts.counts()
    assert (counts["sent"], counts["results"], counts["letters"]) == (5, 5, 1)
    assert counts["reasons"] == {"OK": 4, "UNDECODABLE": 1}


def test_a_record_without_a_result_is_lost(accounts: Accounts) -> None:
    accounts.note_sent((1, 0), Sent(name="lost"))
    assert rules(accounts) == ["lost"]


def test_a_result_of_nothing_is_unexpected(accounts: Accounts) -> None:
    accounts.note_answer((1, 0), answer((0, 9)))
    assert rules(accounts) == ["unexpected"]


def test_a_result_of_another_kind_is_unexpected(accounts: Accounts) -> None:
    accounts.note_sent((1, 0), Sent(name="sound"))
    accounts.note_answer((1, 0), answer((0, 9), "EXPIRED"))
    assert rules(accounts) == ["unexpected"]


def test_no_duplicate_is_explained_while_all_live(accounts: Accounts) -> None:
    accounts.note_answer((0, 0), answer((0, 9)))
    assert rules(accounts) == ["doubled", "doubled"]  # of the partition, and of the record


@pytest.mark.parametrize(("doubled", "found"), [(2, []), (3, ["doubled"])])
def test_a_death_explains_a_window(accounts: Accounts, doubled: int, found: list[str]) -> None:
    accounts.note_death()
    for offset in range(doubled):
        accounts.note_answer((0, offset), answer((0, 9 + offset)))
    assert rules(accounts) == found


def test_a_death_explains_one_more_of_each_record(accounts: Accounts) -> None:
    accounts.note_death()
    accounts.note_answer((0, 0), answer((0, 9)))
    accounts.note_answer((0, 0), answer((0, 10)))
    assert rules(accounts) == ["doubled"]


def test_exactly_once_explains_none() -> None:
    accounts = Accounts(Limits(duplicates_max=0))
    accounts.note_death()
    accounts.note_sent((0, 0), Sent(name="sound"))
    accounts.note_answer((0, 0), answer((0, 0)))
    accounts.note_answer((0, 0), answer((0, 1)))
    assert rules(accounts) == ["doubled"]


def test_the_same_result_read_twice_is_one(accounts: Accounts) -> None:
    accounts.note_answer((0, 0), answer((0, 0)))
    assert rules(accounts) == []


def test_a_commit_above_a_result_that_is_missing(accounts: Accounts) -> None:
    accounts.judge_commit(snapshot(6, 9, 1))
    assert rules(accounts) == ["ahead"]


def test_a_commit_above_a_result_that_came_later(accounts: Accounts) -> None:
    accounts.judge_commit(snapshot(4, 3, 0))
    assert rules(accounts) == ["ahead"]


def test_a_commit_above_a_letter_that_came_later(accounts: Accounts) -> None:
    accounts.judge_commit(snapshot(5, 5, 0))
    assert rules(accounts) == ["ahead"]


def test_a_dead_letter_is_missing(accounts: Accounts) -> None:
    accounts.letters.clear()
    assert rules(accounts) == ["letters"]


@pytest.mark.parametrize("value", [b"{ ", None])
def test_a_dead_letter_is_another_record(accounts: Accounts, value: bytes | None) -> None:
    accounts.letters[0, 4] = [letter(value)]
    assert rules(accounts) == ["letters"]


def test_a_dead_letter_too_many(accounts: Accounts) -> None:
    accounts.note_letter((0, 4), letter(offset=1))
    assert rules(accounts) == ["letters"]


def test_a_death_explains_a_result_without_its_letter(accounts: Accounts) -> None:
    """The result that the dead one wrote last; its heir wrote another, and the letter."""
    accounts.note_answer((0, 4), answer((0, 9), "UNDECODABLE"))
    assert sorted(rules(accounts)) == ["doubled", "doubled", "letters"]
    accounts.violations.clear()
    accounts.note_death()
    assert rules(accounts) == []


def test_a_dead_letter_of_a_vector(accounts: Accounts) -> None:
    accounts.note_letter((0, 0), letter(offset=1))
    assert rules(accounts) == ["letters", "letters"]  # it is not that record either


@pytest.mark.parametrize(("kills", "found"), [(1, ["unexpected"]), (2, [])])
def test_lone_suspects_are_counted_apart(accounts: Accounts, kills: int, found: list[str]) -> None:
    accounts.note_sent((0, 5), Sent(name="sound", key=b"k", value=b"{", headers=(("a", b"1"),)))
    accounts.note_answer((0, 5), answer((0, 5), DIED_ALONE))
    accounts.note_letter((0, 5), letter(reason=DIED_ALONE, offset=1))
    accounts.engine_kills = kills
    assert rules(accounts) == found
    assert accounts.counts()["lone_suspects"] == 1


def test_counts_of_several_groups_are_summed(accounts: Accounts) -> None:
    accounts.close_period()
    merged = merge_counts([accounts.counts(), accounts.counts()])
    assert (merged["sent"], merged["reasons"]) == (10, {"OK": 8, "UNDECODABLE": 2})
    assert merged["duplicates_partition_max"] == 0


@pytest.mark.parametrize(("after_ms", "early"), [(900, [(0, 0)]), (1_000, [])])
def test_expiry_before_its_time_shows(after_ms: int, early: list[tuple[int, int]]) -> None:
    accounts = Accounts(Limits(duplicates_max=0))
    accounts.note_sent((0, 0), Sent(name="hasty"), 5_000)
    accounts.note_answer((0, 0), Answer("EXPIRED", (0, 0), 5_000 + after_ms))
    assert accounts.expired_early(1_000) == early
