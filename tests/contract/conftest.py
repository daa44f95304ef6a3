"""Engines that take long to start are started once for all tests of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from model_server.engines.base import Engine
from tests.contract.engines import Case


@pytest.fixture(scope="package")
def started() -> Iterator[Callable[[Case], Engine]]:
    """The engine of a case, started when it is first asked for; closed after this folder's tests.

    Each takes gigabytes, and other folders start servers of their own.
    """
    made: dict[str, Engine] = {}

    def get(case: Case) -> Engine:
        if case.name not in made:
            made[case.name] = case.make()
        return made[case.name]

    yield get
    for engine in made.values():
        engine.close()
