"""What engines in processes of their own owe beside the contract of all: one list is one pass.

Run by `make test-sglang` and `make test-vllm`. The numbers of the traps are those of
`ops/adr/0010-engines-in-processes.md`; `tests/contract/test_child_process.py` has what needs no
real engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from model_server.engines.base import (
    Engine,
    EngineError,
    EngineOutOfMemoryError,
    EnginePass,
    Text,
    Tokens,
    Vectors,
)
from model_server.engines.child.engine import ChildEngine
from model_server.engines.golden import cosine
from model_server.settings import SEPARATE_ENGINES
from tests.contract.engines import CASES, Case, as_child, random_inputs

# An engine takes 15 s to start where nothing else runs.
pytestmark = pytest.mark.timeout(900)
COSINE_MIN = 0.9999
RANDOM = random.Random(5)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Only those asked for; then they must be there.

    Each needs an environment of its own: `make test-sglang` (in CI) and `make test-vllm` ask.
    """
    asked = [name for name in metafunc.config.getoption("engine") if name in SEPARATE_ENGINES]
    if not asked:
        pytest.skip("needs --engine sglang or vllm (make test-sglang)", allow_module_level=True)
    found = [case for name in asked for case in CASES[name]]
    if "decoder" in metafunc.fixturenames:
        found = [case for case in found if case.name.endswith("-qwen3")]
    for name in {"engine", "decoder"} & set(metafunc.fixturenames):
        metafunc.parametrize(
            name, found, ids=[case.name for case in found], indirect=True, scope="module"
        )


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, started: Callable[[Case], Engine]) -> ChildEngine:
    return as_child(started(request.param))


@pytest.fixture(scope="module")
def decoder(request: pytest.FixtureRequest, started: Callable[[Case], Engine]) -> ChildEngine:
    """The one that leaves prompts out of the pooling."""
    return as_child(started(request.param))


def alone(engine: ChildEngine, inputs: Sequence[Tokens]) -> Vectors:
    return np.concatenate([engine.embed([one]) for one in inputs])


@pytest.mark.parametrize("count", [1, 2, 32, 333, 1_024])
def test_a_list_is_one_pass(engine: ChildEngine, count: int) -> None:
    """Trap 1."""
    inputs = random_inputs(engine, [RANDOM.choice((3, 4, 5, 9)) for _ in range(count)])
    engine.embed(inputs)
    tokens = sum(len(one.ids) for one in inputs)
    assert list(engine.passes) == [EnginePass(sequences=count, tokens=tokens)]


def test_the_largest_list_is_one_pass(decoder: ChildEngine) -> None:
    """Traps 4 and 5: of as many tokens as it has room for, in inputs of the model's maximum."""
    longest, room = decoder.info.input_tokens_max, decoder._pass_tokens_max
    count = room // longest
    inputs = random_inputs(decoder, [longest] * count + [room - count * longest])
    vectors = decoder.embed(inputs)
    assert list(decoder.passes) == [EnginePass(sequences=count + 1, tokens=room)]
    sample = [0, count // 2, count]
    expected = alone(decoder, [inputs[i] for i in sample])
    assert cosine(vectors[sample], expected).min() >= COSINE_MIN
    with pytest.raises(EngineOutOfMemoryError, match="room for"):
        decoder.embed([*inputs, Tokens(ids=[5])])


def test_a_pass_does_not_depend_on_those_before_it(engine: ChildEngine) -> None:
    longest = engine.info.input_tokens_max
    inputs = random_inputs(engine, [3, longest - 8, 7, longest, 40])
    first = engine.embed(inputs)
    for _ in range(3):
        engine.embed(random_inputs(engine, [RANDOM.randint(1, longest) for _ in range(12)]))
        assert cosine(engine.embed(inputs), first).min() >= COSINE_MIN


def test_prompts_that_are_left_out_of_the_pooling(decoder: ChildEngine) -> None:
    """Trap 2: pooling, and everything after it, is by the model's own files."""
    texts = [
        Text(text=text, prompt=prompt)
        for text in ("alpha bravo", "zulu")
        for prompt in ("", "query: ")
    ]
    mixed = [answer for answer in decoder.tokenize(texts) if isinstance(answer, Tokens)]
    assert [one.prompt_tokens > 0 for one in mixed] == [False, True, False, True]
    expected = decoder.reference(mixed)
    assert cosine(decoder.embed(mixed), expected).min() >= COSINE_MIN
    counted = [Tokens(ids=one.ids) for one in mixed]
    assert cosine(decoder.embed(counted)[1::2], expected[1::2]).min() < COSINE_MIN


def test_matryoshka_dimensions_are_offered_and_vectors_come_whole(decoder: ChildEngine) -> None:
    """Trap 7."""
    assert decoder.info.matryoshka_dimensions == (8, 16)
    vectors = decoder.embed(random_inputs(decoder, [3, 30]))
    assert vectors.shape == (2, 24)


def test_texts_that_share_a_prefix_do_not_share_its_vectors(engine: ChildEngine) -> None:
    """Trap 3: a cache of prefixes would make the later passes shorter, and an encoder's wrong."""
    shared = RANDOM.choices(range(5, 300), k=40)
    inputs = [Tokens(ids=[*shared, last]) for last in (20, 30, 40, 50)]
    whole = EnginePass(sequences=4, tokens=4 * 41)
    once = engine.embed(inputs)
    assert list(engine.passes) == [whole]
    again = engine.embed(inputs[::-1])[::-1]
    assert list(engine.passes) == [whole]
    expected = engine.reference(inputs)
    for vectors in (once, again, alone(engine, inputs)):
        assert cosine(vectors, expected).min() >= COSINE_MIN


def test_a_pass_that_raises_does_not_end_it(engine: ChildEngine) -> None:
    good = random_inputs(engine, [9])
    before, pid = engine.embed(good), engine.pid
    with pytest.raises(EngineError):
        engine.embed([*good, Tokens(ids=[5, 10**8, 6])])
    assert cosine(engine.embed(good), before).min() >= COSINE_MIN
    assert list(engine.passes) == [EnginePass(sequences=1, tokens=9)]
    assert engine.pid == pid
