"""SGLang itself, without a GPU: the traps that are its alone, on the engines of the contract.

Run by `make test-sglang` in an environment of its own. The numbers of the traps are those of
`ops/adr/0010-engines-in-processes.md`; `test_separate_engines` has those that any engine may have,
the others need no SGLang (`tests/unit`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_server.engines.base import Engine, EngineDiedError
from model_server.engines.child.engine import ChildEngine
from model_server.engines.golden import cosine
from model_server.engines.model_folder import ModelRefusedError
from tests.contract.engines import (
    SGLANG_BERT,
    Case,
    as_child,
    child_options,
    minilm,
    random_inputs,
)
from tests.harness.child_engines import group_members

# An engine takes 15 s to start where nothing else runs.
pytestmark = pytest.mark.timeout(900)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Only where SGLang is asked for; then it must be there.

    Its pins exclude those of the other tests' environment: `make test-sglang`, in CI a step of its
    own, asks for it.
    """
    if "sglang" not in metafunc.config.getoption("engine"):
        pytest.skip("needs --engine sglang (make test-sglang)", allow_module_level=True)


def load(model: Path, **chosen: Any) -> ChildEngine:
    from model_server.engines.sglang_engine import load_sglang

    return load_sglang(child_options(model, **chosen))


@pytest.fixture(scope="module")
def bert(started: Callable[[Case], Engine]) -> ChildEngine:
    return as_child(started(SGLANG_BERT))


@pytest.fixture(scope="module")
def half() -> Iterator[ChildEngine]:
    """A third one beside them, with less room and in bfloat16; the last test ends it."""
    engine = load(minilm(), dtype="bfloat16", pass_tokens_max=1_024)
    yield engine
    engine.close()


def test_a_model_that_it_has_no_class_for_is_refused(tmp_path: Path) -> None:
    from tests.contract.tiny_models import save_transformer

    save_transformer(tmp_path / "distilbert", "distilbert")
    with pytest.raises(ModelRefusedError, match="no class for DistilBertModel"):
        load(tmp_path / "distilbert", pooling="mean")


def test_bfloat16_has_vectors_of_length_1_near_those_of_float32(
    bert: ChildEngine, half: ChildEngine
) -> None:
    inputs = random_inputs(bert, [3, 17, 120])
    vectors = half.embed(inputs)
    assert half.info.precision == "bfloat16"
    assert half.info.revision != bert.info.revision
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    agreement = cosine(vectors, bert.embed(inputs))
    assert agreement.min() >= 0.999
    assert agreement.min() < 1.0 - 1e-7, "it ran in float32"


# Trap 9: idle


def test_idle_it_sleeps(bert: ChildEngine) -> None:
    """A scheduler that spins takes all of one CPU; asleep it takes next to nothing."""
    bert.embed(random_inputs(bert, [9]))
    before = cpu_ticks(bert.pid)
    signal.sigtimedwait([], 1.0)  # nothing happens for a second
    assert cpu_ticks(bert.pid) - before < os.sysconf("SC_CLK_TCK") // 4


def cpu_ticks(group: int) -> int:
    """Of all processes of a group."""
    total = 0
    for pid in group_members(group):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total


# Trap 10: it keeps to its own processes


def test_nothing_of_it_reaches_this_process(bert: ChildEngine, half: ChildEngine) -> None:
    """Not its handlers, not its settings, and not the death of its scheduler."""
    half.embed(random_inputs(half, [3]))
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD):
        assert signal.getsignal(number) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert multiprocessing.get_start_method() != "spawn"
    assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]
    group = half.pid
    scheduler = process_named(group, "sglang::schedul")
    os.kill(scheduler, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match=f"process {scheduler} ended with -9"):
        half.embed(random_inputs(half, [3]))
    with pytest.raises(EngineDiedError):
        half.embed(random_inputs(half, [3]))
    half.close()
    assert not group_members(group)
    assert bert.embed(random_inputs(bert, [3])).shape == (1, 384)


def process_named(group: int, name: str) -> int:
    """The process of a group whose name begins so."""
    (found,) = [
        pid
        for pid in group_members(group)
        if Path(f"/proc/{pid}/comm").read_text().startswith(name)
    ]
    return found
