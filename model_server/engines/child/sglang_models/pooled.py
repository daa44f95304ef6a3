"""SGLang's own model classes with our pooling instead of theirs.

SGLang imports this in each of its processes that loads a model, and takes `EntryClass` over its own
class of the same name. Invariant: vectors are those of our pooling, or there are none.
"""

from __future__ import annotations

import os
import pkgutil
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import sglang.srt.models
import torch
from sglang.srt.layers.pooler import EmbeddingPoolerOutput
from sglang.srt.layers.rotary_embedding import base as rotary_embedding
from sglang.srt.runtime_context import get_parallel
from torch import nn

from model_server.engines.base import EngineOutOfMemoryError
from model_server.engines.child.pooling_head import PoolingHead, ended
from model_server.engines.child.rows import Ended
from model_server.engines.child.sglang_model import MODEL_VARIABLE, unpack_model
from model_server.engines.model_folder import ModelRefusedError
from model_server.engines.torch_runtime import after_failed_pass


class HeadPooler(nn.Module):
    """Our head where SGLang's class calls its pooler."""

    def __init__(self, model_path: str, pooling: str | None, device: torch.device) -> None:
        super().__init__()
        self._head = PoolingHead(model_path, pooling, device)
        self.output: EmbeddingPoolerOutput | None = None
        """What it made last."""

    def forward(self, hidden: torch.Tensor, batch: Any) -> EmbeddingPoolerOutput:
        """`hidden` [tokens, size] of the sequences that `batch` describes."""
        prompts = [prompt_tokens(rid) for rid in batch.rids]
        rows = self._head.rows(hidden, batch.extend_seq_lens, prompts)
        self.output = EmbeddingPoolerOutput(embeddings=rows)
        return self.output


def prompt_tokens(rid: str) -> int:
    """How many leading tokens are the prompt's, as a request's id says."""
    return int(rid.rpartition("-")[2])


def pooled(base: type[nn.Module], model_path: str, pooling: str | None) -> type[nn.Module]:
    """A subclass of the same name, which SGLang's registry then takes for the original."""

    def initialize(self: Any, *args: Any, **given: Any) -> None:
        base.__init__(self, *args, **given)
        if not isinstance(getattr(self, "pooler", None), nn.Module):
            raise ModelRefusedError(f"SGLang's {base.__name__} has no pooler to put ours in for")
        self.pooler = HeadPooler(model_path, pooling, torch.get_default_device())

    def forward(self: Any, *args: Any, **given: Any) -> EmbeddingPoolerOutput:
        batch = given["forward_batch"] if "forward_batch" in given else args[2]
        try:
            output = base.forward(self, *args, **given)
        except Exception as error:
            # It would end the scheduler, and with it every pass for the time of a restart. Among
            # several ranks it has to: the others wait for this one.
            if get_parallel().tp_size > 1:
                raise
            traceback.print_exc()
            out_of_memory = isinstance(after_failed_pass(error), EngineOutOfMemoryError)
            why = Ended.OUT_OF_MEMORY if out_of_memory else Ended.RAISED
            device = next(self.parameters()).device
            return EmbeddingPoolerOutput(embeddings=ended(len(batch.rids), device, why))
        if output is not self.pooler.output:
            raise ModelRefusedError(f"SGLang's {base.__name__} changes vectors after its pooler")
        return output

    return type(base.__name__, (base,), {"__init__": initialize, "forward": forward})


def sglang_class(architecture: str) -> type[nn.Module]:
    """SGLang's own class for an architecture, without importing all its other models.

    Raises:
        ModelRefusedError: it has none.
    """
    package = sglang.srt.models
    for module in pkgutil.iter_modules(package.__path__):
        path = Path(package.__path__[0]) / f"{module.name}.py"
        if not path.is_file() or f"class {architecture}(" not in path.read_text("utf-8"):
            continue
        entry = getattr(import_module(f"{package.__name__}.{module.name}"), "EntryClass", ())
        for candidate in entry if isinstance(entry, list) else [entry]:
            if isinstance(candidate, type) and candidate.__name__ == architecture:
                return candidate
    raise ModelRefusedError(f"SGLang has no class for {architecture}")


def use_torch_for_rotary_embeddings() -> None:
    """Without SGLang's CPU kernels its constructor asks for one of vLLM's, which it never calls."""
    if not torch.cuda.is_available():
        vars(rotary_embedding)["_is_cpu"] = True


use_torch_for_rotary_embeddings()
_MODEL = unpack_model(os.environ[MODEL_VARIABLE])
EntryClass = [pooled(sglang_class(_MODEL.architecture), _MODEL.path, _MODEL.pooling)]
