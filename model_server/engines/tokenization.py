"""Texts to token ids, exactly as sentence-transformers makes them.

Owns the prompt's place, the special tokens, the maximum and the truncation. Invariants: the ids are
those of the model's own tokenizer for prompt + text; whatever `tokenizer.json` says of padding and
truncation is off; nothing that a text holds makes it raise. It knows nothing of passes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Encoding, Tokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from model_server.engines.base import Text, TextRefused, Tokens
from model_server.engines.model_folder import ModelRefusedError, TransformerSpec

_PROMPTS_KEPT_MAX: Final = 256
"""Prompts whose length is remembered; a model has a few."""
_UNLIMITED: Final = 10**9
"""transformers says 1e30 where a tokenizer has no maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A model's tokenizer as transformers sets it up from all of its files."""

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    truncation_side: str
    model_max_length: int | None


def load_tokenizer(spec: TransformerSpec) -> TokenizerParts:
    """Read the tokenizer of a model folder.

    It goes through transformers since `tokenizer.json` is not all: special tokens and the maximum
    may be in `tokenizer_config.json` only.

    Raises:
        ModelRefusedError: it can't be read, or is not of the kind that `tokenizers` runs.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    try:
        loaded = AutoTokenizer.from_pretrained(str(spec.path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelRefusedError(f"no tokenizer can be read from {spec.path}: {error}") from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ModelRefusedError(f"{type(loaded).__name__} has no fast tokenizer")
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if spec.do_lower_case and not _has_lowercase(tokenizer.normalizer):
        tokenizer.normalizer = _lowercase_first(tokenizer.normalizer)
    limit = int(loaded.model_max_length)
    parts = TokenizerParts(
        tokenizer=tokenizer,
        special_ids=frozenset(loaded.all_special_ids),
        truncation_side=loaded.truncation_side,
        model_max_length=limit if limit < _UNLIMITED else None,
    )
    if any(tokenizer.encode("a b").type_ids):
        raise ModelRefusedError("the tokenizer gives token types other than 0")
    return parts


def _has_lowercase(normalizer: Any) -> bool:
    """As sentence-transformers looks for it (its `_has_lowercase`)."""
    if isinstance(normalizer, NormalizerSequence):
        return any(isinstance(step, Lowercase) for step in _steps(normalizer))
    return isinstance(normalizer, Lowercase)


def _steps(normalizer: Any) -> list[Any]:
    return list(normalizer)


def _lowercase_first(normalizer: Any) -> Any:
    if normalizer is None:
        return NormalizerSequence([Lowercase()])
    rest = _steps(normalizer) if isinstance(normalizer, NormalizerSequence) else [normalizer]
    return NormalizerSequence([Lowercase(), *rest])


class Tokenization:
    """Encodes texts for one model. Safe to call from several threads at once."""

    def __init__(
        self, parts: TokenizerParts, *, input_tokens_max: int, include_prompt: bool = True
    ) -> None:
        """`include_prompt`: prompt tokens take part in the pooling.

        Raises:
            ModelRefusedError: the maximum leaves no room for a token of the text.
        """
        self._whole = parts.tokenizer
        special = self._whole.num_special_tokens_to_add(is_pair=False)
        if input_tokens_max <= special:
            raise ModelRefusedError(
                f"a maximum of {input_tokens_max} tokens leaves no room beside "
                f"{special} special tokens"
            )
        # Truncation is a setting of a tokenizer, not of a call: so there are two of them.
        self._cut = Tokenizer.from_str(self._whole.to_str())
        self._cut.enable_truncation(input_tokens_max, direction=parts.truncation_side)
        self._special_ids = parts.special_ids
        self._include_prompt = include_prompt
        self._prompt_tokens: dict[str, int] = {}
        self._lock = threading.Lock()
        self.input_tokens_max: Final = input_tokens_max

    def encode(self, texts: Sequence[Text]) -> list[Tokens | TextRefused]:
        """One answer a text, in order."""
        answers: list[Tokens | TextRefused] = [_NOT_UNICODE] * len(texts)
        for tokenizer, truncate in ((self._whole, False), (self._cut, True)):
            chosen = [
                index
                for index, text in enumerate(texts)
                if text.truncate is truncate and _is_unicode(text)
            ]
            encodings = _encode_all(tokenizer, [texts[i].prompt + texts[i].text for i in chosen])
            for index, encoding in zip(chosen, encodings, strict=True):
                answers[index] = self._answer(texts[index], encoding)
        return answers

    def _answer(self, text: Text, encoding: Encoding | TextRefused) -> Tokens | TextRefused:
        if isinstance(encoding, TextRefused):
            return encoding
        ids = encoding.ids
        if not ids:
            return TextRefused(message="the text has no tokens")
        if len(ids) > self.input_tokens_max:
            return TextRefused(
                message=f"the text has {len(ids)} tokens, the model's maximum is "
                f"{self.input_tokens_max}; set truncate to have it cut"
            )
        prompt_tokens = self._tokens_of_prompt(text.prompt) if text.prompt else 0
        if prompt_tokens >= len(ids) and not self._include_prompt:
            return TextRefused(message="the text has no tokens beside its prompt")
        return Tokens(ids=ids, prompt_tokens=min(prompt_tokens, len(ids)))

    def _tokens_of_prompt(self, prompt: str) -> int:
        """As sentence-transformers counts: of the prompt alone, less a special one at its end."""
        with self._lock:
            known = self._prompt_tokens.get(prompt)
        if known is not None:
            return known
        (encoding,) = _encode_all(self._cut, [prompt])
        ids = [] if isinstance(encoding, TextRefused) else encoding.ids
        count = len(ids) - 1 if ids and ids[-1] in self._special_ids else len(ids)
        with self._lock:
            if len(self._prompt_tokens) < _PROMPTS_KEPT_MAX:
                self._prompt_tokens[prompt] = count
        return count


_NOT_UNICODE: Final = TextRefused(message="the text is not valid Unicode")


def _is_unicode(text: Text) -> bool:
    """False for lone surrogates, which no tokenizer takes."""
    try:
        text.text.encode()
        text.prompt.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_all(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding | TextRefused]:
    if not texts:
        return []
    try:
        encodings: list[Encoding | TextRefused] = list(tokenizer.encode_batch_fast(texts))
    except BaseException as error:
        if not _is_tokenizers_failure(error):
            raise
        if len(texts) == 1:
            return [TextRefused(message=f"the model's tokenizer refuses the text: {error}")]
        return [_encode_all(tokenizer, [text])[0] for text in texts]
    return encodings


def _is_tokenizers_failure(error: BaseException) -> bool:
    """The library raises plain Exception for what it can't encode; a panic is a BaseException."""
    return type(error) is Exception or type(error).__name__ == "PanicException"
