"""The simulated engine: latency, counts, vectors and each fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers

from model_server.engines.base import (
    EngineDiedError,
    EngineError,
    EngineOutOfMemoryError,
    Text,
    TextRefused,
    Tokens,
)
from model_server.engines.simulated import SimulatedEngine, SimulatedOptions
from model_server.settings import Fault

WORDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "red": 3, "blue": 4}


def engine(**options: Any) -> SimulatedEngine:
    return SimulatedEngine(SimulatedOptions(**{"fixed_ms": 0, "slope_us_per_token": 0, **options}))


def tokens_of(made: SimulatedEngine, *texts: str) -> list[Tokens]:
    answers = made.tokenize([Text(text=text) for text in texts])
    assert all(isinstance(answer, Tokens) for answer in answers)
    return [answer for answer in answers if isinstance(answer, Tokens)]


def slept(tokens: int, **options: Any) -> float:
    """Seconds that a pass of so many tokens would take."""
    naps: list[float] = []
    options = {"slope_us_per_token": 0, **options}
    made = SimulatedEngine(SimulatedOptions(**options), sleep=naps.append)
    made.embed([Tokens(ids=range(tokens))])
    return sum(naps)


def test_latency_is_flat_up_to_the_knee_and_grows_above_it() -> None:
    shape = {"fixed_ms": 10_000, "slope_us_per_token": 100_000, "knee_tokens": 50}
    assert slept(10, **shape) == pytest.approx(10, abs=0.5)
    assert slept(50, **shape) == pytest.approx(10, abs=0.5)
    assert slept(150, **shape) == pytest.approx(20, abs=0.5)


def test_it_answers_at_once_when_told_to() -> None:
    assert slept(500, fixed_ms=0) == 0


@pytest.mark.parametrize(("text", "count"), [("a", 3), ("abcd", 3), ("abcde", 4), ("ж" * 4, 4)])
def test_four_bytes_are_a_token_between_two_special_ones(text: str, count: int) -> None:
    assert len(tokens_of(engine(), text)[0].ids) == count


def test_texts_that_differ_have_ids_and_vectors_that_differ() -> None:
    made = engine()
    texts = [f"{word}{end}" for word in ("a", "ab", "abc", "abcd") for end in ("", "\0", "\0\0")]
    texts += [f"query number {i}" for i in range(3_000)]
    vectors = made.embed(tokens_of(made, *texts))
    assert len({row.tobytes() for row in vectors}) == len(texts)


def test_vectors_are_the_same_in_every_process() -> None:
    made = engine(dimensions=3)
    vector = made.embed(tokens_of(made, "a text"))[0]
    assert vector.tolist() == pytest.approx([-0.60615551, 0.49684879, -0.62106097], abs=1e-6)


def test_exact_counts_come_from_a_tokenizer_json(tmp_path: Any) -> None:
    path = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_padding(length=7)
    made.enable_truncation(max_length=2)
    made.save(str(path))
    simulated = engine(tokenizer=path)
    assert list(tokens_of(simulated, "red blue red")[0].ids) == [3, 4, 3]
    (blank,) = simulated.tokenize([Text(text="   ")])
    assert isinstance(blank, TextRefused)
    assert "no tokens" in blank.message


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.RAISE, EngineError),
        (Fault.OUT_OF_MEMORY, EngineOutOfMemoryError),
        (Fault.DIE, EngineDiedError),
    ],
)
def test_a_marker_makes_its_pass_raise(fault: Fault, error: type[Exception]) -> None:
    made = engine(faults={"poison": fault})
    good, bad = tokens_of(made, "good", "some poison here")
    made.embed([good])
    with pytest.raises(error):
        made.embed([good, bad])
    if fault is Fault.DIE:
        with pytest.raises(EngineDiedError):
            made.embed([good])
    else:
        made.embed([good])


def test_markers_that_spoil_one_row() -> None:
    made = engine(faults={"nan": Fault.NAN, "short": Fault.SHORT})
    good, nan, short = tokens_of(made, "good", "nan", "short")
    vectors = made.embed([good, nan])
    assert np.isfinite(vectors).all(axis=1).tolist() == [True, False]
    assert len(made.embed([good, short])) == 1


def test_a_slow_text_takes_longer() -> None:
    naps: list[float] = []
    options = SimulatedOptions(
        fixed_ms=0, slope_us_per_token=0, faults={"slow": Fault.SLOW}, slow_ms=5_000
    )
    made = SimulatedEngine(options, sleep=naps.append)
    made.embed(tokens_of(made, "quick", "slow"))
    assert sum(naps) == pytest.approx(5, abs=0.5)


def test_faults_by_setting() -> None:
    small = engine(out_of_memory_above_tokens=5)
    small.embed([Tokens(ids=range(5))])
    with pytest.raises(EngineOutOfMemoryError):
        small.embed([Tokens(ids=range(6))])
    broken = engine(broken_after_passes=1)
    broken.embed([Tokens(ids=[1])])
    with pytest.raises(EngineError):
        broken.embed([Tokens(ids=[1])])


def test_revisions_differ_where_vectors_or_counts_do() -> None:
    revisions = {
        engine(**options).info.revision
        for options in ({}, {"dimensions": 8}, {"input_tokens_max": 9}, {"prompts": {"query": "q"}})
    }
    assert len(revisions) == 4
    assert engine(fixed_ms=3).info.revision == engine().info.revision
