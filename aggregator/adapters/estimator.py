"""How many tokens a text has, cheaply: what claims are packed by before the server counts exactly.

Owns the two estimators and their bounds. Invariants: `estimate` never raises for any string, gives
at least 1, and takes a bounded time whatever the text; nothing is downloaded. Estimates are raw:
prompts, and for tiktoken special tokens and the vocabulary's difference to the model's, are learnt
by `aggregator.core.calibration`. Knows nothing of queries, models, claims.

A long text is sampled: of more than `characters_max` characters, `SLICES` slices spread over it are
counted and the count scaled up. The bound is on characters since tokenizers' worst cases grow with
them, blanks under tiktoken faster than linearly, up to a panic.
"""

from __future__ import annotations

import gzip
from base64 import b64decode
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from typing import Protocol

import tiktoken
import tokenizers

TIKTOKEN_CHARACTERS_MAX = 4096
MODEL_CHARACTERS_MAX = 8192
SLICES = 4

_CL100K_VOCABULARY = "bpe_openai/data/cl100k_base.tiktoken.gz"
# The split pattern of cl100k_base as tiktoken_ext.openai_public of tiktoken 0.14.0 has it (there
# inside a function that downloads the vocabulary).
_CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_BYTES_PER_TOKEN = 4
_PANIC = "PanicException"


class Estimator(Protocol):
    """Counts tokens."""

    @property
    def exact(self) -> bool:
        """Whether the count is the model's own, special tokens and truncation included."""

    @property
    def failures(self) -> int:
        """Texts that the tokenizer failed on and that were guessed from their bytes instead."""

    def estimate(self, text: str) -> int:
        """Count the tokens of a text, at least 1; never raises."""

    def estimate_many(self, texts: Iterable[str]) -> list[int]:
        """Count each."""


class TiktokenEstimator:
    """Counts by cl100k_base: 2 to 4 us for a query of 11 tokens, at most some 2 ms for any text.

    Measured on `TIKTOKEN_CHARACTERS_MAX` characters and more (milliseconds): words 0.4, one letter
    0.7, blanks 1, emoji 1.2, random scripts 1.6, lone surrogates 4.
    """

    exact = False

    def __init__(self) -> None:
        """Build the encoding from the vocabulary in the package `bpe-openai` (0.3 s)."""
        # Its file, without importing it: that loads all its vocabularies.
        path = Path(str(distribution("bpe-openai").locate_file(_CL100K_VOCABULARY)))
        packed = path.read_bytes()
        lines = (line.split() for line in gzip.decompress(packed).splitlines() if line)
        encoding = tiktoken.Encoding(
            "cl100k_base",
            pat_str=_CL100K_PATTERN,
            mergeable_ranks={b64decode(token): int(rank) for token, rank in lines},
            special_tokens={},
        )
        # Not its batch variant, which is 5 to 50 times slower on short texts; and not `encode`,
        # which refuses text that looks like a special token.
        self._encode = encoding.encode_ordinary
        self.failures = 0

    def estimate(self, text: str) -> int:
        """Count the tokens of a text, at least 1; never raises."""
        try:
            if len(text) <= TIKTOKEN_CHARACTERS_MAX:
                return len(self._encode(text)) or 1
            parts = _sample(text, TIKTOKEN_CHARACTERS_MAX)
            return _scaled([len(self._encode(part)) for part in parts], parts, text)
        except BaseException as error:  # noqa: BLE001 - _guess raises what isn't the tokenizer's
            return _guess(self, text, error)

    def estimate_many(self, texts: Iterable[str]) -> list[int]:
        """Count each."""
        return [self.estimate(text) for text in texts]


class ModelEstimator:
    """Counts by the model's own `tokenizer.json`: 16 to 40 us for a query, at most some 20 ms.

    Special tokens are counted as the tokenizer's post-processor adds them; texts longer than
    `MODEL_CHARACTERS_MAX` are sampled, so theirs are exact only where `tokens_max` cuts them.
    """

    exact = True

    def __init__(self, tokenizer: Path, tokens_max: int | None = None) -> None:
        """Load `tokenizer` (a `tokenizer.json`, or a folder with one).

        `tokens_max`: the model's maximum, where texts are truncated. Raises ValueError if the file
        can't be read as a tokenizer.
        """
        path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        try:
            loaded = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        # The file brings its own along: MiniLM's pads every text to 128 and cuts at 128.
        loaded.no_padding()
        loaded.no_truncation()
        self._tokenizer = loaded
        self._tokens_max = tokens_max
        self._special_tokens = loaded.num_special_tokens_to_add(is_pair=False)
        self.failures = 0

    def estimate(self, text: str) -> int:
        """Count the tokens of a text, at least 1; never raises."""
        try:
            tokens = self._count(text)
        except BaseException as error:  # noqa: BLE001 - _guess raises what isn't the tokenizer's
            tokens = _guess(self, text, error)
        if self._tokens_max is not None and tokens > self._tokens_max:
            return self._tokens_max
        return tokens or 1

    def _count(self, text: str) -> int:
        encode = self._tokenizer.encode
        if len(text) <= MODEL_CHARACTERS_MAX:
            return len(encode(text))
        parts = _sample(text, MODEL_CHARACTERS_MAX)
        counts = [len(encode(part, add_special_tokens=False)) for part in parts]
        return _scaled(counts, parts, text) + self._special_tokens

    def estimate_many(self, texts: Iterable[str]) -> list[int]:
        """Count each."""
        return [self.estimate(text) for text in texts]


def load_estimator(tokenizer: Path | None, tokens_max: int | None = None) -> Estimator:
    """Give the model's own tokenizer where there is one, else tiktoken's cl100k_base."""
    if tokenizer is None:
        return TiktokenEstimator()
    return ModelEstimator(tokenizer, tokens_max)


def _sample(text: str, characters: int) -> list[str]:
    """Give `SLICES` slices of `characters` in all, spread evenly, the outer ones at the ends."""
    size = characters // SLICES
    step = (len(text) - size) / (SLICES - 1)
    return [text[int(step * i) : int(step * i) + size] for i in range(SLICES)]


def _scaled(counts: list[int], parts: list[str], text: str) -> int:
    return max(1, sum(counts) * len(text) // sum(map(len, parts)))


def _guess(estimator: TiktokenEstimator | ModelEstimator, text: str, error: BaseException) -> int:
    """Guess from the bytes, if the tokenizer is at fault; else raise what came.

    Native tokenizers raise anything: lone surrogates a TypeError, a backtracking limit a
    PanicException, which is no Exception and whose class can't be imported. One bad text must not
    end a query otherwise than by the server's own word; `failures` counts them.
    """
    if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
        raise error
    estimator.failures += 1
    return len(text.encode("utf-8", "surrogatepass")) // _BYTES_PER_TOKEN + 1
