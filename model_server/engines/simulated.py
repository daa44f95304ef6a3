"""An engine without a model: exact counts, vectors that are a function of the token ids, a latency
of the real shape, and faults on demand.

*Latency* of a pass: `fixed_ms + slope_us_per_token x max(0, tokens - knee_tokens) / 1000`; all 0:
it answers at once. *Tokens*: by default four bytes of UTF-8 are a token, and two special ones
enclose the text, so that counts are near those of a real vocabulary; or those of a
`tokenizer.json`. *Vectors*: pseudo-random, of length 1, equal for equal ids and distinct for
distinct ones; they mean nothing.

*Faults* happen where a text holds a marker (`faults`: marker -> fault), or by the options below:

- `raise`: the pass raises; `out_of_memory`: as if memory had run out; `die`: the engine is dead
  from then on; `exit`: the process is gone at once, as by a segmentation fault; `slow`: the pass
  takes `slow_ms` more; `nan`: that text's vector is not finite; `short`: the pass returns a row
  less than it should.
- `out_of_memory_above_tokens`: larger passes run out of memory.
- `broken_after_passes`: every pass raises after so many.
- `wrong_reference`: its reference disagrees with it, so that it must not be served.
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from model_server.engines.base import (
    EngineDiedError,
    EngineError,
    EngineOutOfMemoryError,
    ModelInfo,
    Text,
    TextRefused,
    Tokens,
    Vectors,
)
from model_server.settings import Fault

TOKEN_BYTES = 4
EXIT_CODE = 70
_PAD = b"\xff"  # never in UTF-8, so distinct texts have distinct ids
_BEGIN = b"\xff\xff\xff\xfe"
_END = b"\xff\xff\xff\xfd"
_TAILS = [_PAD * (-size % TOKEN_BYTES) + _END for size in range(TOKEN_BYTES)]
_ID_TYPE = "I"  # four bytes wherever Python runs
_SEED = 20_261_130

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOptions:
    """See the module; times in the units of their names, sizes in tokens."""

    fixed_ms: float = 5.0
    slope_us_per_token: float = 10.0
    knee_tokens: int = 600
    dimensions: int = 384
    matryoshka_dimensions: tuple[int, ...] = ()
    input_tokens_max: int = 512
    prompts: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Path | None = None
    faults: Mapping[str, Fault] = field(default_factory=dict)
    slow_ms: float = 1_000.0
    out_of_memory_above_tokens: int | None = None
    broken_after_passes: int | None = None
    wrong_reference: bool = False


@dataclass(slots=True, kw_only=True)
class _FaultyTokens(Tokens):
    """Tokens of a text with a marker."""

    fault: Fault


class SimulatedEngine:
    """See the module."""

    def __init__(
        self, options: SimulatedOptions, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._options = options
        self._sleep = sleep
        self._dead = False
        self._passes = 0
        self._encode = _byte_ids if options.tokenizer is None else _json_tokenizer(options)
        random = np.random.Generator(np.random.PCG64(_SEED))
        self._word_masks = random.integers(0, 2**64, -(-options.dimensions // 8), dtype=np.uint64)
        self._info = ModelInfo(
            revision=_revision(options),
            dimensions=options.dimensions,
            matryoshka_dimensions=options.matryoshka_dimensions,
            normalized=True,
            input_tokens_max=options.input_tokens_max,
            prompts=dict(options.prompts),
            engine="simulated",
            versions={"numpy": np.__version__},
            device="cpu",
            precision="float32",
        )

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    def tokenize(self, texts: Sequence[Text]) -> list[Tokens | TextRefused]:
        """One answer a text, in order."""
        return [self._tokens(text) for text in texts]

    def _tokens(self, text: Text) -> Tokens | TextRefused:
        ids = self._encode(text.prompt + text.text if text.prompt else text.text)
        maximum = self._options.input_tokens_max
        if len(ids) > maximum:
            if not text.truncate:
                return TextRefused(message=f"The text has {len(ids)} tokens; at most {maximum}.")
            ids = ids[: maximum - 1] + ids[-1:]
        if not ids:
            return TextRefused(message="The text has no tokens.")
        for marker, fault in self._options.faults.items():
            if marker in text.text:
                return _FaultyTokens(ids=ids, fault=fault)
        return Tokens(ids=ids)

    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        """One pass; see the module for what it may raise and how long it takes."""
        started = time.monotonic()
        options = self._options
        if self._dead:
            raise EngineDiedError("the simulated engine is dead")
        self._passes += 1
        tokens = sum(len(one.ids) for one in inputs)
        limit = options.out_of_memory_above_tokens
        if limit is not None and tokens > limit:
            raise EngineOutOfMemoryError(f"{tokens} tokens, memory for {limit}")
        if options.broken_after_passes is not None and self._passes > options.broken_after_passes:
            raise EngineError("the simulated engine is broken")
        vectors = self._vectors(inputs)
        delay_ms = options.fixed_ms + options.slope_us_per_token * (
            max(0, tokens - options.knee_tokens) / 1_000
        )
        if options.faults:
            vectors, more_ms = self._faults(inputs, vectors)
            delay_ms += more_ms
        if delay_ms > 0:
            left = started + delay_ms / 1_000 - time.monotonic()
            if left > 0:
                self._sleep(left)
        return vectors

    def _faults(self, inputs: Sequence[Tokens], vectors: Vectors) -> tuple[Vectors, float]:
        more_ms = 0.0
        for row, one in enumerate(inputs):
            fault = one.fault if isinstance(one, _FaultyTokens) else None
            if fault is Fault.RAISE:
                raise EngineError("a text asked for it")
            if fault is Fault.OUT_OF_MEMORY:
                raise EngineOutOfMemoryError("a text asked for it")
            if fault is Fault.DIE:
                self._dead = True
                raise EngineDiedError("a text asked for it")
            if fault is Fault.EXIT:
                os._exit(EXIT_CODE)
            if fault is Fault.SLOW:
                more_ms += self._options.slow_ms
            elif fault is Fault.NAN:
                vectors[row, row % vectors.shape[1]] = np.nan
            elif fault is Fault.SHORT:
                vectors = vectors[:-1]
        return vectors, more_ms

    def reference(self, inputs: Sequence[Tokens]) -> Vectors:
        """Its own function, one input at a time."""
        vectors = np.concatenate([self._vectors([one]) for one in inputs])
        return -vectors if self._options.wrong_reference else vectors

    def close(self) -> None:
        """Nothing to free; dead from here on."""
        self._dead = True

    def _vectors(self, inputs: Sequence[Tokens]) -> Vectors:
        """Ids to 64 bits by two checksums, which any single change alters; 64 bits to a row."""
        rows = [one.ids if type(one.ids) is array else array(_ID_TYPE, one.ids) for one in inputs]
        high = np.array(list(map(zlib.crc32, rows)), dtype=np.uint64)
        low = np.array(list(map(zlib.adler32, rows)), dtype=np.uint64)
        seeds = (high << np.uint64(32)) | low
        # Each word gives eight signed bytes, so each value is one of 256 levels.
        words = _mixed(seeds[:, None] ^ self._word_masks)
        levels = words.astype("<u8", copy=False).view(np.int8)[:, : self._options.dimensions]
        values: Vectors = levels.astype(np.float32)
        values /= np.sqrt(np.einsum("ij,ij->i", values, values))[:, None]
        return values


def _byte_ids(text: str) -> array[int]:
    """Four bytes of UTF-8 a token, between two special ones."""
    data = text.encode("utf-8", "surrogatepass")
    return array(_ID_TYPE, _BEGIN + data + _TAILS[len(data) % TOKEN_BYTES])


def _json_tokenizer(options: SimulatedOptions) -> Callable[[str], array[int]]:
    """The ids of a `tokenizer.json`, without the padding and truncation that it may bring along."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - an extra's package, only where asked for

    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def encode(text: str) -> array[int]:
        clean = text.encode("utf-8", "replace").decode()
        return array(_ID_TYPE, tokenizer.encode(clean).ids)

    return encode


def _mixed(values: Words) -> Words:
    """The finalizer of splitmix64, a bijection, in place: https://prng.di.unimi.it/splitmix64.c."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _revision(options: SimulatedOptions) -> str:
    """Of all that vectors and counts depend on."""
    tokenizer = options.tokenizer.read_bytes() if options.tokenizer is not None else b""
    parts = (options.dimensions, options.input_tokens_max, sorted(options.prompts.items()))
    return hashlib.sha256(repr(parts).encode() + tokenizer).hexdigest()[:16]
