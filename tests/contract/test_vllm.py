"""vLLM itself, without a GPU: what its adapter has to see to beside the contract.

Run by `make test-vllm` in an environment of its own.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence

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
from tests.contract.engines import VLLM_BERT, VLLM_QWEN3, VLLM_ROBERTA, Case
from tests.harness.child_engines import group_members

pytestmark = pytest.mark.timeout(900)
COSINE_MIN = 0.9999
RANDOM = random.Random(5)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Only where vLLM is asked for; then it must be there."""
    if "vllm" not in metafunc.config.getoption("engine"):
        pytest.skip("needs --engine vllm (make test-vllm)", allow_module_level=True)


def child(engine: Engine) -> ChildEngine:
    assert isinstance(engine, ChildEngine)
    return engine


@pytest.fixture(scope="module")
def bert(started: Callable[[Case], Engine]) -> ChildEngine:
    return child(started(VLLM_BERT))


@pytest.fixture(scope="module")
def qwen(started: Callable[[Case], Engine]) -> ChildEngine:
    return child(started(VLLM_QWEN3))


@pytest.fixture(scope="module")
def roberta(started: Callable[[Case], Engine]) -> ChildEngine:
    return child(started(VLLM_ROBERTA))


def random_inputs(engine: ChildEngine, lengths: Sequence[int]) -> list[Tokens]:
    """Ids that any of these vocabularies has."""
    assert max(lengths) <= engine.info.input_tokens_max
    return [Tokens(ids=RANDOM.choices(range(5, 300), k=length)) for length in lengths]


def alone(engine: ChildEngine, inputs: Sequence[Tokens]) -> Vectors:
    return np.concatenate([engine.embed([one]) for one in inputs])


@pytest.mark.parametrize("count", [1, 2, 32, 333, 1_024])
def test_a_list_is_one_pass(bert: ChildEngine, count: int) -> None:
    inputs = random_inputs(bert, [RANDOM.choice((3, 4, 5, 9)) for _ in range(count)])
    bert.embed(inputs)
    tokens = sum(len(one.ids) for one in inputs)
    assert list(bert.passes) == [EnginePass(sequences=count, tokens=tokens)]


def test_the_largest_list_is_one_pass(qwen: ChildEngine) -> None:
    """Of as many tokens as it has room for, in inputs of the model's maximum."""
    longest = qwen.info.input_tokens_max
    count = qwen._pass_tokens_max // longest
    inputs = random_inputs(qwen, [longest] * count + [qwen._pass_tokens_max - count * longest])
    vectors = qwen.embed(inputs)
    assert list(qwen.passes) == [EnginePass(sequences=count + 1, tokens=qwen._pass_tokens_max)]
    sample = [0, count // 2, count]
    assert cosine(vectors[sample], alone(qwen, [inputs[i] for i in sample])).min() >= COSINE_MIN
    with pytest.raises(EngineOutOfMemoryError, match="room for"):
        qwen.embed([*inputs, Tokens(ids=[5])])


def test_the_most_inputs_are_one_pass(qwen: ChildEngine) -> None:
    """Each takes a whole block of the cache, however short it is."""
    inputs = random_inputs(qwen, [3] * 1_024)
    qwen.embed(inputs)
    assert list(qwen.passes) == [EnginePass(sequences=1_024, tokens=3_072)]


def test_prompts_that_are_left_out_of_the_pooling(qwen: ChildEngine) -> None:
    texts = [
        Text(text=text, prompt=prompt)
        for text in ("alpha bravo", "zulu")
        for prompt in ("", "query: ")
    ]
    mixed = [answer for answer in qwen.tokenize(texts) if isinstance(answer, Tokens)]
    assert [one.prompt_tokens > 0 for one in mixed] == [False, True, False, True]
    expected = qwen.reference(mixed)
    assert cosine(qwen.embed(mixed), expected).min() >= COSINE_MIN
    counted = [Tokens(ids=one.ids) for one in mixed]
    assert cosine(qwen.embed(counted)[1::2], expected[1::2]).min() < COSINE_MIN


def test_texts_that_share_a_prefix_do_not_share_its_vectors(qwen: ChildEngine) -> None:
    shared = RANDOM.choices(range(5, 300), k=40)
    inputs = [Tokens(ids=[*shared, last]) for last in (20, 30, 40)]
    once = qwen.embed(inputs)
    assert list(qwen.passes) == [EnginePass(sequences=3, tokens=3 * 41)]
    again = qwen.embed(inputs)
    assert list(qwen.passes) == [EnginePass(sequences=3, tokens=3 * 41)]
    expected = qwen.reference(inputs)
    assert cosine(once, expected).min() >= COSINE_MIN
    assert cosine(again, expected).min() >= COSINE_MIN


def test_a_pass_that_raises_does_not_end_it(roberta: ChildEngine) -> None:
    good = random_inputs(roberta, [9])
    before = roberta.embed(good)
    with pytest.raises(EngineError):
        roberta.embed([*good, Tokens(ids=[0, 10**8, 2])])
    assert cosine(roberta.embed(good), before).min() >= COSINE_MIN
    assert list(roberta.passes) == [EnginePass(sequences=1, tokens=9)]


def test_its_death_is_told_at_once(roberta: ChildEngine) -> None:
    """The last test of this engine."""
    group = roberta.pid
    os.kill(group, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        roberta.embed(random_inputs(roberta, [3]))
    roberta.close()
    assert not group_members(group)
