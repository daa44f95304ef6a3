"""Real embeddings with torch: any encoder or decoder in the sentence-transformers layout.

Owns the loaded model and its one forward pass over texts laid end to end, without padding.
Invariants: a text's vector does not depend on its pass mates; a model whose attention can't be
computed so exactly is refused at load, with its reason. It knows nothing of requests, batching or
deadlines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from model_server.engines.base import (
    EngineDiedError,
    ModelInfo,
    Text,
    TextRefused,
    Tokens,
    Vectors,
)
from model_server.engines.description import (
    Running,
    describe,
    installed_versions,
    least_maximum,
    vector_dimensions,
)
from model_server.engines.model_folder import ModelFolder, ModelRefusedError, read_model_folder
from model_server.engines.stock_model import (
    ReferenceModel,
    load_tail,
    load_transformer,
    pool_and_finish,
)
from model_server.engines.tokenization import Tokenization, load_tokenizer
from model_server.engines.torch_attention import (
    ATTENTION_NAME,
    UnsupportedAttentionError,
    pack,
    register,
)
from model_server.engines.torch_runtime import (
    DTYPES,
    after_failed_pass,
    choose_device,
    device_name,
    free_cached_memory,
    set_threads,
)

Ids = np.ndarray[tuple[int], np.dtype[np.int64]]
"""[tokens] of a pass: token ids or positions."""

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
_PROBE_LENGTHS: Final = (3, 11, 3, 7)
_PROBE_COSINE_MIN: Final = 0.999
_PROBE_FAILURES: Final = (
    UnsupportedAttentionError,
    AttributeError,
    IndexError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model raises that does not expect its texts to lie end to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """How to load a model."""

    model_path: str | Path
    device: str = "auto"
    """`auto` (CUDA if there is one, else CPU) or what `torch.device` takes."""
    dtype: str = "float32"
    """`float32`, `bfloat16`, or `float16` (CUDA)."""
    threads: int = 0
    """Of torch, on a CPU; 0: as many as this process may use."""
    pooling: str | None = None
    """Only for a folder without `modules.json`: a mode, or several with commas."""
    input_tokens_max: int | None = None
    """Lowers the model's maximum."""
    cache_dir: Path | None = None
    """Where hashes of unchanged files are remembered."""


class TorchModel(Protocol):
    """A transformer on torch with pooling and the modules after it."""

    folder: ModelFolder
    device: torch.device
    dimensions: int
    positions_max: int | None
    """Positions that the transformer has; None: no bound is known."""

    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        """One forward pass; float32 [inputs, dimensions], in order."""
        ...


class TorchEngine:
    """The engine protocol on torch; `load` makes one."""

    def __init__(self, model: TorchModel, tokenization: Tokenization, info: ModelInfo) -> None:
        self._model: TorchModel | None = model
        self._tokenization = tokenization
        self._info = info

    @classmethod
    def load(cls, options: TorchOptions) -> TorchEngine:
        """Load a model from a local folder; nothing is downloaded.

        Raises:
            ModelRefusedError: the model can't be served exactly, or an option contradicts it.
        """
        return cls.around(_probed, options, name="torch")

    @classmethod
    def around(
        cls,
        make: Callable[[ModelFolder, torch.device, torch.dtype], TorchModel],
        options: TorchOptions,
        *,
        name: str,
    ) -> TorchEngine:
        """The same with another way to run the model, under another name.

        Raises:
            ModelRefusedError: as `load`.
        """
        if options.dtype not in DTYPES:
            raise ModelRefusedError(f"dtype {options.dtype!r} is none of {', '.join(DTYPES)}")
        set_threads(options.threads)
        folder = read_model_folder(options.model_path, options.pooling)
        device = choose_device(options.device)
        model = make(folder, device, DTYPES[options.dtype])
        parts = load_tokenizer(folder.transformer)
        maximum = least_maximum(
            options.input_tokens_max,
            folder.transformer.max_seq_length,
            parts.model_max_length,
            model.positions_max,
        )
        tokenization = Tokenization(
            parts, input_tokens_max=maximum, include_prompt=folder.pooling.include_prompt
        )
        running = Running(
            engine=name,
            versions=installed_versions("torch", "transformers", "tokenizers"),
            device=device_name(device),
            dtype=options.dtype,
        )
        info = describe(
            folder,
            running,
            dimensions=model.dimensions,
            input_tokens_max=maximum,
            cache_dir=options.cache_dir,
        )
        return cls(model, tokenization, info)

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    def tokenize(self, texts: Sequence[Text]) -> list[Tokens | TextRefused]:
        """Count and encode, one answer a text, in order."""
        return self._tokenization.encode(texts)

    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        """One forward pass; float32 [inputs, dimensions].

        Raises:
            EngineOutOfMemoryError: the pass was too large for the memory.
            EngineDiedError: the device is gone, or the engine is closed.
        """
        if self._model is None:
            raise EngineDiedError("the engine is closed")
        try:
            return self._model.embed(inputs)
        except (MemoryError, RuntimeError) as error:
            raise after_failed_pass(error) from error

    def reference(self, inputs: Sequence[Tokens]) -> Vectors:
        """The same vectors by transformers' stock attention in float32, one input at a time.

        Loads a second copy of the weights for the time of the call, on the CPU where the device has
        no room for it.
        """
        if self._model is None:
            raise EngineDiedError("the engine is closed")
        reference = ReferenceModel(self._model.folder, self._model.device)
        return np.concatenate([reference.embed(one) for one in inputs])

    def close(self) -> None:
        """Free the weights. Idempotent."""
        self._model = None
        free_cached_memory()


def _probed(folder: ModelFolder, device: torch.device, dtype: torch.dtype) -> PackedModel:
    """The model with packed attention, which it is known to bear."""
    register()
    transformer = load_transformer(folder, device, dtype, attention=ATTENTION_NAME)
    model = PackedModel(folder, transformer, device)
    model.probe()
    return model


class PackedModel:
    """A transformer with packed attention (`ATTENTION_NAME`), our pooling and modules."""

    def __init__(self, folder: ModelFolder, transformer: Any, device: torch.device) -> None:
        """`transformer` is on the device already.

        Raises:
            ModelRefusedError: its attention can't be computed without padding.
        """
        self.folder = folder
        self.device = device
        self._transformer = transformer
        self._position_offset, self.positions_max = positions(self._transformer)
        _refuse_unknown_architecture(self._transformer)
        self._tail = load_tail(folder, device)
        self.dimensions = vector_dimensions(folder, size(self._transformer, "hidden_size"))

    @torch.inference_mode()
    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        """One pass over all inputs, sorted by length inside, answered in their order."""
        if not inputs:
            return np.empty((0, self.dimensions), dtype=np.float32)
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].ids))
        lengths = [len(inputs[index].ids) for index in order]
        ids = np.concatenate([np.asarray(inputs[index].ids, dtype=np.int64) for index in order])
        output = self._transformer(
            input_ids=self._on_device(ids),
            position_ids=self._on_device(self._position_ids(ids, lengths)),
            packing=pack(lengths, self.device),
            **extra_inputs(self._transformer),
        )
        vectors = pool_and_finish(
            output.last_hidden_state[0], [inputs[index] for index in order], self.folder, self._tail
        )
        answers = np.empty((len(inputs), self.dimensions), dtype=np.float32)
        answers[order] = vectors
        return answers

    def _on_device(self, values: Ids) -> torch.Tensor:
        return torch.from_numpy(values)[None].to(self.device)

    def _position_ids(self, ids: Ids, lengths: list[int]) -> Ids:
        """Each token's position in its own text, as the model counts positions."""
        count = np.asarray(lengths, dtype=np.int64)
        starts = np.cumsum(count) - count
        if self._position_offset == 0:
            return np.asarray(np.arange(len(ids)) - np.repeat(starts, count))
        # RoBERTa's way (transformers' create_position_ids_from_input_ids): padding tokens, which a
        # text may spell out, have the padding position and are not counted.
        padding = self._position_offset - 1
        real = (ids != padding).astype(np.int64)
        before = np.concatenate([[0], np.cumsum(real)])
        place = before[1:] - np.repeat(before[starts], count)
        return np.asarray(place * real + padding)

    def probe(self) -> None:
        """Embed random ids together and alone: tells whether texts are kept apart.

        Raises:
            ModelRefusedError: the architecture does not work with packed attention.
        """
        kind = type(self._transformer).__name__
        random = np.random.default_rng(7)
        vocabulary = size(self._transformer, "vocab_size")
        probes = [
            Tokens(ids=random.integers(vocabulary, size=length).tolist())
            for length in _PROBE_LENGTHS
        ]
        try:
            together = self.embed(probes)
            alone = np.concatenate([self.embed([probe]) for probe in probes])
        except torch.OutOfMemoryError:
            raise
        except _PROBE_FAILURES as error:
            raise ModelRefusedError(f"{kind} can't run without padding: {error}") from error
        products = np.sum(together * alone, axis=1)
        norms = np.linalg.norm(together, axis=1) * np.linalg.norm(alone, axis=1)
        if not np.all(products >= _PROBE_COSINE_MIN * norms):
            raise ModelRefusedError(f"{kind} mixes texts that lie end to end")


def size(model: Any, name: str) -> int:
    """A number of the model's configuration.

    Raises:
        ModelRefusedError: there is none.
    """
    value = getattr(model.config, name, None)
    if not isinstance(value, int):
        raise ModelRefusedError(f"{type(model).__name__}: config.json declares no {name}")
    return value


def _refuse_unknown_architecture(model: Any) -> None:
    kind = type(model).__name__
    if not model.is_backend_compatible():
        raise ModelRefusedError(
            f"{kind} has an attention of its own (such as relative position biases), which can't "
            "run without padding"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelRefusedError(f"{kind} takes no position_ids")
    types = set(getattr(model.config, "layer_types", None) or ())
    if types - _LAYER_TYPES:
        raise ModelRefusedError(f"{kind} has layers of {', '.join(sorted(types - _LAYER_TYPES))}")
    for name in ("attn_logit_softcapping", "attention_chunk_size"):
        if getattr(model.config, name, None) is not None:
            raise ModelRefusedError(f"{kind}: {name} is not computed here")


def positions(model: Any) -> tuple[int, int | None]:
    """The first position's number, and how many positions there are (None: no bound is known).

    Models with a learned table and a padding position (RoBERTa's family) count from the padding
    position + 1.
    """
    for module in model.modules():
        padding = getattr(module, "padding_idx", None)
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding) and isinstance(padding, int):
            return padding + 1, table.num_embeddings - padding - 1
    declared = getattr(model.config, "max_position_embeddings", None)
    return 0, declared if isinstance(declared, int) and declared > 0 else None


def extra_inputs(model: Any) -> dict[str, Any]:
    """What the model's forward wants besides its tokens."""
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}
