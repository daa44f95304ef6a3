"""Queries through a real Kafka node, the aggregator and the torch engine, judged from outside.

`ops/verify.py` is the judge; a user runs it on files of any size (`make verify`).
"""

from __future__ import annotations

import pytest

from ops.bench.common import read_queries
from ops.verify import Engine, verify
from tests.conftest import running_node


@pytest.mark.kafka
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_every_query_gets_the_one_vector_of_its_text() -> None:
    with running_node() as node:
        verdict = verify(read_queries(None, 400), node.bootstrap_servers, Engine(name="torch"))
    assert verdict.ok, verdict
