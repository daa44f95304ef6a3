"""The demo's own queries: their lengths, their variety, and that they never change by chance."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from aggregator.commands.demo_foreign import FOREIGN
from aggregator.commands.demo_queries import QUERIES_COUNT, demo_queries, read_queries
from aggregator.commands.demo_topics import TOPICS


def words(queries: list[str]) -> list[int]:
    return sorted(len(query.split()) for query in queries)


def test_lengths_are_those_of_search_queries() -> None:
    lengths = words(demo_queries())
    count = len(lengths)
    assert 6 <= lengths[count // 2] <= 7
    assert lengths[count // 10] <= 4
    assert 9 <= lengths[count * 9 // 10] <= 13
    # The tail is thin and long.
    assert 0.01 <= sum(length > 25 for length in lengths) / count <= 0.04
    assert 35 <= lengths[-1] <= 60


def test_they_are_distinct_and_the_same_each_time() -> None:
    queries = demo_queries()
    assert len(set(queries)) == len(queries) == QUERIES_COUNT
    assert queries == demo_queries()
    assert queries[:50] == demo_queries(50)
    assert queries != demo_queries(seed=1)


def test_any_stretch_of_them_mixes_topics() -> None:
    stretch = " | ".join(demo_queries(400))
    for name, topic in TOPICS.items():
        assert any(subject in stretch for subject in topic.subjects), name


def test_some_are_in_other_scripts() -> None:
    scripts = {
        unicodedata.name(letter).split()[0]
        for query in demo_queries()
        for letter in query
        if letter.isalpha()
    }
    assert {"LATIN", "CYRILLIC", "GREEK", "ARABIC", "DEVANAGARI", "CJK", "HANGUL"} <= scripts


def test_every_pattern_has_its_place_for_a_subject() -> None:
    for topic in TOPICS.values():
        for pattern in (*topic.keywords, *topic.questions):
            assert pattern.count("{s}") == 1, pattern
        for subject in topic.subjects:
            assert subject == " ".join(subject.split())
    for subjects, patterns in FOREIGN.values():
        assert all(pattern.count("{s}") == 1 for pattern in patterns)
        assert len(set(subjects)) == len(subjects)


def test_more_than_the_grammar_has_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 6000"):
        demo_queries(6_001)


def test_a_file_of_queries_is_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "queries.txt"
    file.write_bytes(b"first\n\n  zweite Zeile \r\n")
    assert read_queries(file) == ["first", "zweite Zeile"]
    file.write_bytes(b"q1\tfirst\nq2\t\nq\t3\tthird\n")
    assert read_queries(file) == ["first", "third"]
    file.write_bytes(b"caf\xe9\n")
    with pytest.raises(ValueError, match=f"^{file} is not UTF-8: .* at byte 3$"):
        read_queries(file)
    file.write_bytes(b"\n \n")
    with pytest.raises(ValueError, match="holds no queries"):
        read_queries(file)
