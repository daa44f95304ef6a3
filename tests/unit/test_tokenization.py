"""Token ids are the model's own: prompt, special tokens, truncation, and no text makes it raise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_server.engines.base import Text, TextRefused, Tokens
from model_server.engines.model_folder import ModelRefusedError, TransformerSpec
from model_server.engines.tokenization import Tokenization, load_tokenizer
from tests.contract.tiny_models import MAX_TOKENS, WORDS, byte_level, unigram, wordpiece

pytestmark = pytest.mark.torch
MAKERS: dict[str, Callable[[], Any]] = {
    "wordpiece": wordpiece,
    "unigram": unigram,
    "byte-level": byte_level,
    "no special tokens": lambda: byte_level(end_token=False),
}


@pytest.fixture(scope="module", params=MAKERS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenization, Any]:
    """Ours and transformers' own, from the same files."""
    import transformers

    path = tmp_path_factory.mktemp("tokenizer")
    MAKERS[request.param]().save_pretrained(path)
    parts = load_tokenizer(TransformerSpec(path=path))
    assert parts.model_max_length == MAX_TOKENS
    ours = Tokenization(parts, input_tokens_max=MAX_TOKENS)
    return ours, transformers.AutoTokenizer.from_pretrained(path)


def one(tokenization: Tokenization, text: Text) -> Tokens | TextRefused:
    (answer,) = tokenization.encode([text])
    return answer


def ids(tokenization: Tokenization, text: Text) -> list[int]:
    answer = one(tokenization, text)
    assert isinstance(answer, Tokens), answer
    return list(answer.ids)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(
        st.tuples(
            st.one_of(
                st.text(max_size=200),
                st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join),
                st.sampled_from(["", " ", "\x00", "[SEP]</s><|end|>", "\ud800", "a" * 5_000]),
            ),
            st.sampled_from(["", "query: ", "passage:"]),
            st.booleans(),
        ),
        max_size=5,
    )
)
def test_ids_are_those_of_the_models_tokenizer(
    pair: tuple[Tokenization, Any], texts: list[tuple[str, str, bool]]
) -> None:
    ours, theirs = pair
    answers = ours.encode(
        [Text(text=text, prompt=prompt, truncate=truncate) for text, prompt, truncate in texts]
    )
    assert len(answers) == len(texts)
    for answer, (text, prompt, truncate) in zip(answers, texts, strict=True):
        try:
            expected = theirs(
                prompt + text, truncation="longest_first" if truncate else "do_not_truncate"
            )["input_ids"]
        except (UnicodeEncodeError, TypeError):
            assert isinstance(answer, TextRefused)
            assert "Unicode" in answer.message
            continue
        if not expected or len(expected) > MAX_TOKENS:
            assert isinstance(answer, TextRefused)
            assert str(len(expected)) in answer.message or not expected
        else:
            assert isinstance(answer, Tokens)
            assert list(answer.ids) == expected


def test_truncation_keeps_the_special_tokens(pair: tuple[Tokenization, Any]) -> None:
    ours, _ = pair
    whole = ids(ours, Text(text="alpha"))
    special = ours._whole.num_special_tokens_to_add(is_pair=False)
    cut = ids(ours, Text(text="alpha bravo " * 500, truncate=True))
    assert len(cut) == MAX_TOKENS
    if special:
        assert cut[-1] == whole[-1]
    refused = one(ours, Text(text="alpha bravo " * 500))
    assert isinstance(refused, TextRefused)
    assert f"maximum is {MAX_TOKENS}" in refused.message
    assert "truncate" in refused.message


def test_prompt_tokens_leave_out_a_special_token_at_the_end(
    pair: tuple[Tokenization, Any],
) -> None:
    ours, theirs = pair
    answer = one(ours, Text(text="alpha", prompt="query: "))
    assert isinstance(answer, Tokens)
    alone = theirs("query: ")["input_ids"]
    ends_special = alone[-1] in theirs.all_special_ids
    assert answer.prompt_tokens == len(alone) - ends_special
    unprompted = one(ours, Text(text="query: alpha"))
    assert isinstance(unprompted, Tokens)
    assert unprompted.prompt_tokens == 0
    assert list(unprompted.ids) == list(answer.ids)


def test_a_prompt_that_fills_everything_is_refused_where_prompts_are_not_pooled(
    tmp_path: Path,
) -> None:
    byte_level(end_token=False).save_pretrained(tmp_path)
    parts = load_tokenizer(TransformerSpec(path=tmp_path))
    text = Text(text="alpha", prompt="bravo " * 100, truncate=True)
    kept = Tokenization(parts, input_tokens_max=8)
    assert len(ids(kept, text)) == 8
    left_out = Tokenization(parts, input_tokens_max=8, include_prompt=False)
    refused = one(left_out, text)
    assert isinstance(refused, TextRefused)
    assert "prompt" in refused.message


def test_no_tokens_are_refused(tmp_path: Path) -> None:
    byte_level(end_token=False).save_pretrained(tmp_path)
    ours = Tokenization(load_tokenizer(TransformerSpec(path=tmp_path)), input_tokens_max=8)
    assert one(ours, Text(text="")) == TextRefused(message="the text has no tokens")


def test_do_lower_case_comes_before_the_models_own_normalizer(tmp_path: Path) -> None:
    wordpiece(lowercase=False).save_pretrained(tmp_path)
    cased = Tokenization(load_tokenizer(TransformerSpec(path=tmp_path)), input_tokens_max=48)
    spec = TransformerSpec(path=tmp_path, do_lower_case=True)
    lowered = Tokenization(load_tokenizer(spec), input_tokens_max=48)
    again = Tokenization(load_tokenizer(spec), input_tokens_max=48)
    text, lower = Text(text="ALPHA Bravo"), Text(text="alpha bravo")
    assert ids(cased, text) != ids(cased, lower)
    assert ids(lowered, text) == ids(lowered, lower) == ids(cased, lower) == ids(again, text)


def test_special_tokens_of_the_tokenizer_config_count(tmp_path: Path) -> None:
    """A BERT tokenizer.json without its template: [CLS] and [SEP] are in the other file only."""
    wordpiece().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    raw = json.loads(file.read_text(encoding="utf-8"))
    raw["post_processor"] = None
    file.write_text(json.dumps(raw), encoding="utf-8")
    config_file = tmp_path / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "BertTokenizer"
    config_file.write_text(json.dumps(config), encoding="utf-8")
    ours = Tokenization(load_tokenizer(TransformerSpec(path=tmp_path)), input_tokens_max=48)
    tokens = ids(ours, Text(text="alpha"))
    assert tokens[0] == 2
    assert tokens[-1] == 3


def test_a_maximum_without_room_is_refused(tmp_path: Path) -> None:
    wordpiece().save_pretrained(tmp_path)
    parts = load_tokenizer(TransformerSpec(path=tmp_path))
    with pytest.raises(ModelRefusedError, match="2 special tokens"):
        Tokenization(parts, input_tokens_max=2)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="tokenizer"):
        load_tokenizer(TransformerSpec(path=tmp_path))
