"""Which headers a result carries, and how much of them."""

from __future__ import annotations

import pytest

from aggregator.wire.headers import HeaderRules, bounded, header_bytes, headers_bytes


@pytest.mark.parametrize(
    "name",
    [
        "content-type",
        "Content-Type",
        "EMBEDDING-STATUS",
        "embedding-id",
        "__aggregator.errors.code",
        "__AGGREGATOR.replay.id",
        "contentType",
        "content-encoding",
        "Content-Encoding",
        "__TypeId__",
        "__KeyTypeId__",
        "__ContentTypeId__",
        "__key_schema_id",
        "__value_schema_id",
        "ce_id",
        "CE_specversion",
        "ce_",
        "ce_\nid",
    ],
)
def test_what_would_be_false_of_the_result_is_dropped(name: str) -> None:
    assert HeaderRules().passed_on([(name, b"x"), ("kept", b"y")]) == [("kept", b"y")]


@pytest.mark.parametrize(
    "name", ["traceparent", "ce-id", "xce_id", "content-type2", "__aggregator", "id", "", "é"]
)
def test_anything_else_is_passed_on(name: str) -> None:
    assert HeaderRules().passed_on([(name, b"x")]) == [(name, b"x")]


def test_order_repeats_and_nulls_are_kept() -> None:
    headers = [("b", b"1"), ("a", None), ("b", b""), ("content-type", b"x"), ("b", b"1")]

    assert HeaderRules().passed_on(headers) == [("b", b"1"), ("a", None), ("b", b""), ("b", b"1")]


def test_the_setting_replaces_the_default_and_stars_stand_for_anything() -> None:
    rules = HeaderRules(drop=("x-*-y", "a.b", "q[1]"))

    kept = rules.passed_on([(n, b"") for n in ("x-1-y", "X--Y", "a.b", "axb", "q[1]", "q1", "ce_")])

    assert [name for name, _ in kept] == ["axb", "q1", "ce_"]


def test_headers_that_fit_are_kept_and_one_that_does_not_is_left_out() -> None:
    headers = [("a", b"12345"), ("b", b"1234567"), ("c", b"123")]

    assert bounded(headers, 10) == [("a", b"12345"), ("c", b"123")]


def test_a_limit_is_reached_but_not_passed() -> None:
    rules = HeaderRules(bytes_max=10)

    assert not rules.too_large([("ab", b"12345678")])
    assert rules.too_large([("ab", b"123456789")])
    assert not rules.too_large([("ce_long", b"x" * 100), ("ab", b"12345678")])


def test_sizes_are_utf8_and_none_is_free() -> None:
    assert header_bytes("é", b"123") == 5
    assert header_bytes("", None) == 1
    assert headers_bytes([("", b"")] * 20_000) == 20_000


def test_verdicts_remembered_are_bounded() -> None:
    rules = HeaderRules()
    for number in range(10_000):
        rules.passes(f"name-{number}")
        rules.passes("x" * 300 + str(number))

    assert len(rules._verdicts) <= 4096
    assert rules.passes("name-9999")
    assert not rules.passes("ce_new")
