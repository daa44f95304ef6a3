"""Plain transformers as a runner: what golden vectors are made from, in a process of its own.

So the server's process needs no torch, and the second copy of the weights is gone afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from model_server.engines.base import EnginePass, Tokens, Vectors
from model_server.engines.model_folder import read_model_folder
from model_server.engines.stock_model import ReferenceModel


class ReferenceRunner:
    """The stock model, one text a pass, on the device asked for or else on the CPU."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`model`: the folder, `pooling`: the option, `device`: of torch."""
        folder = read_model_folder(options["model"], options["pooling"])
        self._model = ReferenceModel(folder, torch.device(options["device"]))

    @property
    def ready(self) -> Mapping[str, Any]:
        """Nothing that its parent would not know."""
        return {}

    def embed(self, inputs: Sequence[Tokens]) -> tuple[Vectors, Sequence[EnginePass]]:
        """Each input alone."""
        vectors = [self._model.embed(one) for one in inputs]
        passes = [EnginePass(sequences=1, tokens=len(one.ids)) for one in inputs]
        return np.concatenate(vectors), passes


def start(options: Mapping[str, Any], died: Callable[[str], None]) -> ReferenceRunner:
    """Load the model."""
    del died
    return ReferenceRunner(options)
