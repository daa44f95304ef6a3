"""vLLM itself, without a GPU: what `test_separate_engines` has not.

Run by `make test-vllm` in an environment of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from model_server.engines.base import Engine, EngineDiedError
from tests.contract.engines import VLLM_ROBERTA, Case, as_child, random_inputs
from tests.harness.child_engines import group_members

pytestmark = pytest.mark.timeout(900)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Only where vLLM is asked for; then it must be there.

    On demand (`make test-vllm`), in CI neither: an environment of 5 GB for the second such engine.
    """
    if "vllm" not in metafunc.config.getoption("engine"):
        pytest.skip("needs --engine vllm (make test-vllm)", allow_module_level=True)


def test_its_death_is_told_at_once(started: Callable[[Case], Engine]) -> None:
    """The last test of this engine."""
    roberta = as_child(started(VLLM_ROBERTA))
    group = roberta.pid
    os.kill(group, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        roberta.embed(random_inputs(roberta, [3]))
    roberta.close()
    assert not group_members(group)
