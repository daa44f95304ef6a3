"""What every engine must do (`model_server.engines.base`): one suite for all of them.

An engine joins by its cases in `tests/contract/engines.py`; each is started once for all tests.
The assertions are about the protocol only, so they hold for any model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from model_server.engines.base import Engine, EngineDiedError, Text, TextRefused, Tokens, Vectors
from model_server.engines.golden import GOLDEN_TEXTS, check_golden, cosine
from tests.contract.engines import Case, cases

# An engine with a process of its own takes 15 s to start where nothing else runs.
pytestmark = pytest.mark.timeout(600)
COSINE_MIN = 0.9999
TEXTS = (
    "a",
    "how do I reset my password",
    "Wie spät ist es? 今何時ですか。 👍🏽",
    " leading and trailing ",
    "tab\tnewline\nnul\0end",
    "[CLS] <s> </s> [SEP] <|endoftext|>",
    "x" * 3_000,
    "word " * 2_000,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One engine of each case for all tests; `case`: those that are cheap to make.

    For the others `tests/contract/test_child_process.py` has what needs an engine of its own.
    """
    found = cases(metafunc.config.getoption("engine"))
    if "engine" in metafunc.fixturenames:
        metafunc.parametrize(
            "engine", found, ids=[case.name for case in found], indirect=True, scope="module"
        )
    if "case" in metafunc.fixturenames:
        cheap = [case for case in found if case.cheap] or cases(["simulated"])
        metafunc.parametrize("case", cheap, ids=[case.name for case in cheap])


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, started: Callable[[Case], Engine]) -> Engine:
    return started(request.param)


def tokens_of(engine: Engine, *texts: str) -> list[Tokens]:
    answers = engine.tokenize([Text(text=text, truncate=True) for text in texts])
    tokens = [answer for answer in answers if isinstance(answer, Tokens)]
    assert len(tokens) == len(texts)
    return tokens


def assert_equal(left: Vectors, right: Vectors) -> None:
    assert np.min(cosine(left, right)) >= COSINE_MIN


def test_info_is_complete(engine: Engine) -> None:
    info = engine.info
    assert info.revision
    assert info.dimensions > 0
    assert info.input_tokens_max > 0
    assert all(0 < size < info.dimensions for size in info.matryoshka_dimensions)
    assert info.engine
    assert info.device
    assert info.precision in ("float32", "bfloat16", "float16")


def test_one_answer_a_text_in_order(engine: Engine) -> None:
    together = engine.tokenize([Text(text=text, truncate=True) for text in TEXTS])
    alone = [engine.tokenize([Text(text=text, truncate=True)])[0] for text in TEXTS]
    assert len(together) == len(TEXTS)
    for left, right in zip(together, alone, strict=True):
        assert isinstance(left, Tokens)
        assert isinstance(right, Tokens)
        assert list(left.ids) == list(right.ids)
        assert 0 < len(left.ids) <= engine.info.input_tokens_max
    assert engine.tokenize([]) == []


def test_a_text_over_the_maximum_is_refused_unless_it_may_be_cut(engine: Engine) -> None:
    long = "word " * (engine.info.input_tokens_max + 10)
    refused, cut, short = engine.tokenize(
        [Text(text=long), Text(text=long, truncate=True), Text(text="a")]
    )
    assert isinstance(refused, TextRefused)
    assert str(engine.info.input_tokens_max) in refused.message
    assert isinstance(cut, Tokens)
    assert len(cut.ids) == engine.info.input_tokens_max
    assert isinstance(short, Tokens)


def test_a_prompt_precedes_the_text(engine: Engine) -> None:
    with_prompt, joined, without = engine.tokenize(
        [Text(text="cats", prompt="query: "), Text(text="query: cats"), Text(text="cats")]
    )
    assert isinstance(with_prompt, Tokens)
    assert isinstance(joined, Tokens)
    assert isinstance(without, Tokens)
    assert list(with_prompt.ids) == list(joined.ids)
    assert len(with_prompt.ids) > len(without.ids)


@pytest.mark.parametrize(
    "text",
    ["\ud800 lone surrogate", "\0", "a" * 131_072, " " * 131_072, "👍🏽" * 10_000, "\u202e\ufeff"],
)
def test_no_text_raises(engine: Engine, text: str) -> None:
    (answer,) = engine.tokenize([Text(text=text, truncate=True)])
    if isinstance(answer, Tokens):
        assert len(answer.ids) <= engine.info.input_tokens_max
        assert np.isfinite(engine.embed([answer])).all()
    else:
        assert answer.message


def test_vectors_are_rows_of_float32_in_order(engine: Engine) -> None:
    tokens = tokens_of(engine, *TEXTS)
    vectors = engine.embed(tokens)
    assert vectors.shape == (len(TEXTS), engine.info.dimensions)
    assert vectors.dtype == np.float32
    assert vectors.flags.c_contiguous
    assert np.isfinite(vectors).all()
    assert_equal(engine.embed(tokens[::-1])[::-1], vectors)
    if engine.info.normalized:
        assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(len(TEXTS)), abs=1e-2)


def test_a_vector_does_not_depend_on_its_pass_mates(engine: Engine) -> None:
    tokens = tokens_of(engine, *TEXTS)
    alone = np.concatenate([engine.embed([one]) for one in tokens])
    assert_equal(engine.embed(tokens), alone)
    crowd = [tokens[0], *tokens * 2, tokens[1]]
    assert_equal(engine.embed(crowd)[1 : 1 + len(tokens)], alone)


def test_distinct_texts_have_distinct_vectors(engine: Engine) -> None:
    vectors = engine.embed(tokens_of(engine, *TEXTS))
    for row in range(len(TEXTS)):
        others = np.delete(vectors, row, axis=0)
        assert np.max(cosine(others, np.repeat(vectors[row : row + 1], len(others), 0))) < 0.99999


def test_it_agrees_with_its_reference(engine: Engine) -> None:
    report = check_golden(engine)
    assert report is not None
    assert len(report.cosines) == len(GOLDEN_TEXTS)
    assert min(report.cosines) >= report.cosine_min


def test_prompts_are_pooled_as_by_its_reference(engine: Engine) -> None:
    """Some models leave them out of the pooling, most do not."""
    answers = engine.tokenize(
        [
            Text(text=text, prompt=prompt)
            for text in ("how are you", "cats")
            for prompt in ("", "query: ")
        ]
    )
    tokens = [answer for answer in answers if isinstance(answer, Tokens)]
    assert len(tokens) == len(answers)
    expected = engine.reference(tokens)
    assert expected is not None
    assert_equal(engine.embed(tokens), expected)


def test_an_empty_pass_has_no_rows(engine: Engine) -> None:
    assert engine.embed([]).shape == (0, engine.info.dimensions)


def test_ids_may_be_any_sequence(engine: Engine) -> None:
    (tokens,) = tokens_of(engine, "how are you")
    plain = Tokens(ids=[int(i) for i in tokens.ids], prompt_tokens=tokens.prompt_tokens)
    assert_equal(engine.embed([plain]), engine.embed([tokens]))


def test_a_closed_engine_is_dead(case: Case) -> None:
    engine = case.make()
    tokens = tokens_of(engine, "a")
    engine.close()
    engine.close()
    with pytest.raises(EngineDiedError):
        engine.embed(tokens)
