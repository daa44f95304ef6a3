"""Estimates: counts where they are known, and no text that raises or goes uncounted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from aggregator.adapters.estimator import (
    MODEL_CHARACTERS_MAX,
    TIKTOKEN_CHARACTERS_MAX,
    Estimator,
    ModelEstimator,
    TiktokenEstimator,
    load_estimator,
)

HOSTILE = {
    "empty": "",
    "blank": " ",
    "a million blanks": " " * 10**6,
    "a million blanks and a letter": " " * 10**6 + "a",
    "one letter a million times": "a" * 10**6,
    "line ends": "\r\n" * 500_000,
    "digits": "1" * 10**6,
    "punctuation": "!" * 10**6,
    "combining": "e" + "\u0301" * 10**6,
    "emoji": "👩‍👩‍👧‍👦" * 50_000,
    "nul": "\x00" * 10**6,
    "lone surrogates": "\ud800\udc00\udfff" * 10_000,
    "a lone surrogate": "caf\ud83d",
    "special tokens": "<|endoftext|><|fim_prefix|>[SEP][CLS]</s>" * 1000,
    "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd" * 10_000,
    "unassigned": "\U000e0fff\uffff" * 10_000,
}


@pytest.fixture(scope="module")
def tiktoken() -> TiktokenEstimator:
    return TiktokenEstimator()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A word tokenizer that adds [CLS] and [SEP], and whose file pads to 16 and cuts at 8."""
    made = Tokenizer(
        models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "word": 3}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.enable_padding(length=16)
    made.enable_truncation(8)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # Counts by tiktoken's own cl100k_base.
        ("hello world", 2),
        ("tiktoken is great!", 6),
        ("how do I reset my password", 6),
        ("antidisestablishmentarianism", 6),
        ("2 + 2 = 4", 7),
        ("お誕生日おめでとう", 9),
    ],
)
def test_cl100k_counts(tiktoken: TiktokenEstimator, text: str, tokens: int) -> None:
    assert tiktoken.estimate(text) == tokens


def test_text_like_special_tokens_is_text(tiktoken: TiktokenEstimator) -> None:
    assert tiktoken.estimate("<|endoftext|>") > 1
    assert tiktoken.failures == 0


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_raises(tiktoken: TiktokenEstimator, tokenizer: Path, name: str) -> None:
    for estimator in (tiktoken, ModelEstimator(tokenizer)):
        assert estimator.estimate(HOSTILE[name]) >= 1


def test_many_are_each_counted(tiktoken: TiktokenEstimator, tokenizer: Path) -> None:
    texts = ["word", "word word", "\ud800", ""]
    for estimator in (tiktoken, ModelEstimator(tokenizer)):
        assert estimator.estimate_many(texts) == [estimator.estimate(text) for text in texts]


@pytest.mark.parametrize("characters", [TIKTOKEN_CHARACTERS_MAX + 1, 50_000, 131_072])
def test_long_texts_are_scaled_up(tiktoken: TiktokenEstimator, characters: int) -> None:
    text = ("the quick brown fox jumps over the lazy dog. " * 3000)[:characters]
    in_full = sum(
        tiktoken.estimate(text[start : start + 4096]) for start in range(0, len(text), 4096)
    )

    assert tiktoken.estimate(text) == pytest.approx(in_full, rel=0.03)


def test_a_long_text_is_sampled_over_its_whole_length(tiktoken: TiktokenEstimator) -> None:
    words, characters = "word " * 10_000, "漢字" * 25_000
    mixed = tiktoken.estimate(words + characters)

    assert mixed == pytest.approx(
        tiktoken.estimate(words) + tiktoken.estimate(characters), rel=0.05
    )


class _Recorder:
    """Stands in for an encoder and notes how much it was given."""

    def __init__(self) -> None:
        self.characters = 0

    def __call__(self, text: str) -> list[int]:
        self.characters += len(text)
        return [0] * len(text)


@pytest.mark.parametrize("characters", [1, 4096, 4097, 4099, 10**6])
def test_what_is_given_to_the_tokenizer_is_bounded(
    tiktoken: TiktokenEstimator, monkeypatch: pytest.MonkeyPatch, characters: int
) -> None:
    recorder = _Recorder()
    monkeypatch.setattr(tiktoken, "_encode", recorder)

    assert tiktoken.estimate("x" * characters) == characters
    assert recorder.characters == min(characters, TIKTOKEN_CHARACTERS_MAX)


def test_the_model_s_own_count_has_special_tokens_and_no_padding(tokenizer: Path) -> None:
    estimator = ModelEstimator(tokenizer)

    assert estimator.estimate("word") == 3
    assert estimator.estimate("word " * 100) == 102
    assert estimator.estimate("") == 2
    assert estimator.exact


def test_a_maximum_cuts(tokenizer: Path) -> None:
    estimator = ModelEstimator(tokenizer.parent, tokens_max=50)

    assert estimator.estimate("word " * 10) == 12
    assert estimator.estimate("word " * 100) == 50
    assert estimator.estimate("word " * 10**5) == 50


def test_long_texts_are_sampled_by_the_model_s_tokenizer_too(tokenizer: Path) -> None:
    text = "word " * (MODEL_CHARACTERS_MAX * 2)

    assert ModelEstimator(tokenizer).estimate(text) == pytest.approx(len(text) / 5, rel=0.01)


class PanicException(BaseException):
    """As pyo3_runtime's, which can't be imported."""


@pytest.mark.parametrize("error", [PanicException("panic"), ValueError("x"), TypeError("x")])
def test_a_tokenizer_that_fails_is_counted_and_the_text_guessed(
    tiktoken: TiktokenEstimator, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(_: str) -> list[int]:
        raise error

    monkeypatch.setattr(tiktoken, "_encode", fail)
    monkeypatch.setattr(tiktoken, "failures", 0)

    assert tiktoken.estimate("x" * 40) == 11
    assert tiktoken.estimate("\ud800" * 4) == 4
    assert tiktoken.failures == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_stop_is_not_swallowed(
    tiktoken: TiktokenEstimator, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def stop(_: str) -> list[int]:
        raise error

    monkeypatch.setattr(tiktoken, "_encode", stop)

    with pytest.raises(error):
        tiktoken.estimate("x")


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_estimator(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_estimator(tmp_path)


def test_the_choice_of_estimator(tokenizer: Path) -> None:
    chosen: Estimator = load_estimator(tokenizer)
    assert chosen.exact
    assert not load_estimator(None).exact


def test_the_vocabulary_is_cl100k(tiktoken: TiktokenEstimator) -> None:
    assert tiktoken._encode("hello world") == [15339, 1917]
