"""SGLang itself, without a GPU: each trap that was found in it, on the engines of the contract.

Run by `make test-sglang` in an environment of its own. The numbers of the traps are those of
`ops/adr/0010-engines-in-processes.md`; the others need no SGLang (`tests/unit`).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_server.engines.base import (
    Engine,
    EngineDiedError,
    EngineError,
    EngineOutOfMemoryError,
    EnginePass,
    Text,
    Tokens,
    Vectors,
)
from model_server.engines.child.engine import ChildEngine
from model_server.engines.golden import cosine
from model_server.engines.model_folder import ModelRefusedError
from tests.contract.engines import SGLANG_BERT, SGLANG_QWEN3, Case, child_options, minilm
from tests.harness.child_engines import group_members

# An engine takes 15 s to start where nothing else runs.
pytestmark = pytest.mark.timeout(900)
COSINE_MIN = 0.9999
RANDOM = random.Random(5)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Only where SGLang is asked for; then it must be there."""
    if "sglang" not in metafunc.config.getoption("engine"):
        pytest.skip("needs --engine sglang (make test-sglang)", allow_module_level=True)


def load(model: Path, **chosen: Any) -> ChildEngine:
    from model_server.engines.sglang_engine import load_sglang

    return load_sglang(child_options(model, **chosen))


@pytest.fixture(scope="module")
def bert(started: Callable[[Case], Engine]) -> ChildEngine:
    return as_child(started(SGLANG_BERT))


@pytest.fixture(scope="module")
def qwen(started: Callable[[Case], Engine]) -> ChildEngine:
    return as_child(started(SGLANG_QWEN3))


@pytest.fixture(scope="module")
def half() -> Iterator[ChildEngine]:
    """A third one beside them, with less room and in bfloat16; the last test ends it."""
    engine = load(minilm(), dtype="bfloat16", pass_tokens_max=1_024)
    yield engine
    engine.close()


def as_child(engine: Engine) -> ChildEngine:
    assert isinstance(engine, ChildEngine)
    return engine


def tokens_of(engine: ChildEngine, texts: Sequence[str], prompt: str = "") -> list[Tokens]:
    answers = engine.tokenize([Text(text=text, prompt=prompt, truncate=True) for text in texts])
    return [answer for answer in answers if isinstance(answer, Tokens)]


def alone(engine: ChildEngine, inputs: Sequence[Tokens]) -> Vectors:
    return np.concatenate([engine.embed([one]) for one in inputs])


def random_inputs(engine: ChildEngine, lengths: Sequence[int]) -> list[Tokens]:
    """Ids that any of these vocabularies has."""
    assert max(lengths) <= engine.info.input_tokens_max
    return [Tokens(ids=RANDOM.choices(range(5, 300), k=length)) for length in lengths]


# Trap 1: one list, one pass


@pytest.mark.parametrize("count", [1, 2, 32, 333, 1_024])
def test_a_list_is_one_pass(bert: ChildEngine, count: int) -> None:
    inputs = random_inputs(bert, [RANDOM.choice((3, 4, 5, 9)) for _ in range(count)])
    bert.embed(inputs)
    assert list(bert.passes) == [
        EnginePass(sequences=count, tokens=sum(len(i.ids) for i in inputs))
    ]


def test_the_largest_list_is_one_pass(qwen: ChildEngine) -> None:
    """Traps 4 and 5: of as many tokens as it has room for, in inputs of the model's maximum."""
    longest = qwen.info.input_tokens_max
    count = qwen._pass_tokens_max // longest
    inputs = random_inputs(qwen, [longest] * count + [qwen._pass_tokens_max - count * longest])
    vectors = qwen.embed(inputs)
    assert list(qwen.passes) == [EnginePass(sequences=count + 1, tokens=qwen._pass_tokens_max)]
    sample = [0, count // 2, count]
    assert cosine(vectors[sample], alone(qwen, [inputs[i] for i in sample])).min() >= COSINE_MIN
    with pytest.raises(EngineOutOfMemoryError, match="room for"):
        qwen.embed([*inputs, Tokens(ids=[5])])


def test_a_pass_does_not_depend_on_those_before_it(bert: ChildEngine) -> None:
    inputs = random_inputs(bert, [3, 200, 7, 256, 40])
    first = bert.embed(inputs)
    for _ in range(3):
        bert.embed(random_inputs(bert, [RANDOM.randrange(1, 257) for _ in range(12)]))
        assert cosine(bert.embed(inputs), first).min() >= COSINE_MIN


# Trap 2: pooling, and everything after it, by the model's own files


def test_prompts_that_are_left_out_of_the_pooling(qwen: ChildEngine) -> None:
    with_prompt = tokens_of(qwen, ["alpha bravo", "zulu"], prompt="query: ")
    without = tokens_of(qwen, ["alpha bravo", "zulu"])
    mixed = [with_prompt[0], without[0], with_prompt[1], without[1]]
    assert with_prompt[0].prompt_tokens > 0
    expected = qwen.reference(mixed)
    assert cosine(qwen.embed(mixed), expected).min() >= COSINE_MIN
    counted = [Tokens(ids=one.ids) for one in mixed]
    assert cosine(qwen.embed(counted)[:1], expected[:1]).min() < COSINE_MIN


def test_a_model_that_it_has_no_class_for_is_refused(tmp_path: Path) -> None:
    from tests.contract.tiny_models import save_transformer

    save_transformer(tmp_path / "distilbert", "distilbert")
    with pytest.raises(ModelRefusedError, match="no class for DistilBertModel"):
        load(tmp_path / "distilbert", pooling="mean")


# Trap 3: the cache of prefixes


def test_texts_that_share_a_prefix_do_not_share_its_vectors(bert: ChildEngine) -> None:
    shared = RANDOM.choices(range(1_000, 20_000), k=100)
    inputs = [Tokens(ids=[101, *shared, last, 102]) for last in (2_000, 3_000, 4_000, 5_000)]
    once = bert.embed(inputs)
    assert list(bert.passes) == [EnginePass(sequences=4, tokens=4 * 103)]
    again = bert.embed(inputs[::-1])[::-1]
    one_by_one = alone(bert, inputs)
    assert cosine(once, one_by_one).min() >= COSINE_MIN
    assert cosine(again, one_by_one).min() >= COSINE_MIN
    assert cosine(one_by_one, bert.reference(inputs)).min() >= COSINE_MIN


# Trap 7: Matryoshka dimensions, and the length of a vector


def test_matryoshka_dimensions_are_offered_and_vectors_come_whole(qwen: ChildEngine) -> None:
    assert qwen.info.matryoshka_dimensions == (8, 16)
    vectors = qwen.embed(random_inputs(qwen, [3, 30]))
    assert vectors.shape == (2, 24)


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


# Bad input


def test_a_pass_that_raises_does_not_end_it(bert: ChildEngine) -> None:
    good = random_inputs(bert, [9])
    pid = bert.pid
    with pytest.raises(EngineError, match="the forward pass raised"):
        bert.embed([*good, Tokens(ids=[101, 10**8, 102])])
    assert bert.embed(good).shape == (1, 384)
    assert bert.pid == pid


# Trap 9: idle


def test_idle_it_sleeps(bert: ChildEngine) -> None:
    """A scheduler that spins is never found asleep twice in a row without having run."""
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
