"""The bytes of results, letters and requests are those that consumers know."""

from __future__ import annotations

import json

import pytest

from tests.golden.wire_records import FILE, records

GOLDEN: dict[str, object] = json.loads(FILE.read_text(encoding="ascii"))
MADE = records()


def test_the_same_records_are_made() -> None:
    assert list(MADE) == list(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    assert json.loads(json.dumps(MADE[name])) == GOLDEN[name]
