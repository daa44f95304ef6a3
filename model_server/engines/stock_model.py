"""A model by plain transformers: its stock attention in float32, one text at a time, our pooling.

Owns the loading of a transformer and of the modules after it, which all engines on torch share, and
the reference that golden vectors are made from. Invariant: nothing is downloaded, no code of the
model's own runs, and weights that are missing refuse the model. It knows nothing of packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from model_server.engines.base import EngineOutOfMemoryError, Tokens, Vectors
from model_server.engines.model_folder import ModelFolder, ModelRefusedError
from model_server.engines.modules import Tail
from model_server.engines.pooling import pool
from model_server.engines.torch_runtime import after_failed_pass


class StockModel:
    """Plain transformers with stock attention, float32, one text at a time."""

    def __init__(self, folder: ModelFolder, device: torch.device) -> None:
        self._folder = folder
        self._device = device
        self._transformer = load_transformer(folder, device, torch.float32, attention=None)
        self._tail = load_tail(folder, device)

    @torch.inference_mode()
    def embed(self, one: Tokens) -> Vectors:
        """Its vector, float32 [1, dimensions]."""
        ids = torch.tensor([list(one.ids)], device=self._device)
        output = self._transformer(input_ids=ids, attention_mask=torch.ones_like(ids))
        return pool_and_finish(output.last_hidden_state[0], [one], self._folder, self._tail)


class ReferenceModel:
    """The stock model beside an engine: on the device asked for, on the CPU where that is full."""

    def __init__(self, folder: ModelFolder, device: torch.device) -> None:
        self._folder = folder
        try:
            self._model = StockModel(folder, device)
        except RuntimeError as error:
            self._model = self._on_cpu(error)

    def embed(self, one: Tokens) -> Vectors:
        """Its vector, float32 [1, dimensions]."""
        try:
            return self._model.embed(one)
        except RuntimeError as error:
            self._model = self._on_cpu(error)
        return self._model.embed(one)

    def _on_cpu(self, error: RuntimeError) -> StockModel:
        if not isinstance(after_failed_pass(error), EngineOutOfMemoryError):
            raise error
        return StockModel(self._folder, torch.device("cpu"))


def pool_and_finish(
    hidden: torch.Tensor, inputs: Sequence[Tokens], folder: ModelFolder, tail: Tail
) -> Vectors:
    """`hidden` [tokens, size] of a pass over `inputs` to float32 [inputs, dimensions]."""
    lengths = torch.tensor([len(one.ids) for one in inputs], device=hidden.device)
    prompt_tokens = [one.prompt_tokens for one in inputs]
    vectors: Vectors = tail(pool(hidden, lengths, folder.pooling, prompt_tokens)).cpu().numpy()
    return vectors


def load_transformer(
    folder: ModelFolder, device: torch.device, dtype: torch.dtype, attention: str | None
) -> Any:
    """The transformer on its device, to be run only; `attention` None: its stock attention.

    Raises:
        ModelRefusedError: transformers can't load it, or weights are missing.
    """
    from safetensors import SafetensorError  # noqa: PLC0415
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415 - slow to import
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    path = str(folder.transformer.path)
    chosen = {} if attention is None else {"attn_implementation": attention}
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model, loading = AutoModel.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **chosen,
        )
    except SafetensorError as error:
        raise ModelRefusedError(f"weights in {path} can't be read: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        raise ModelRefusedError(f"transformers can't load {path}: {error}") from error
    # A pooler (of BERT's next sentence task) is not read by any pooling mode.
    missing = sorted(name for name in loading["missing_keys"] if not name.startswith("pooler."))
    missing += [str(entry) for entry in loading.get("mismatched_keys", ())]
    if missing:
        raise ModelRefusedError(f"weights are missing in {path}: {', '.join(missing[:5])}")
    if hasattr(model, "pooler"):
        model.pooler = None
    return model.to(device).eval()


def load_tail(folder: ModelFolder, device: torch.device) -> Tail:
    """The modules after the pooling, on their device."""
    return Tail(folder.tail, folder.truncate_dim).to(device).eval()
