"""One thing is not many."""

from __future__ import annotations

import pytest

from aggregator.commands.wording import counted


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (0, "0 dead letters"),
        (1, "1 dead letter"),
        (2, "2 dead letters"),
        (1234, "1,234 dead letters"),
    ],
)
def test_counted(count: int, says: str) -> None:
    assert counted(count, "dead letter") == says
