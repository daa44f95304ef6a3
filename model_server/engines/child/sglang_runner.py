"""SGLang as a runner: the one module that starts it and that knows its interface.

Owns an SGLang `Engine`, whose own processes run the passes. Invariants: token ids go in, and one
list is in flight at a time. The version is pinned: `generate_request` is not public.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import wait
from typing import Any, Final

from model_server.engines.base import EnginePass, Tokens, Vectors
from model_server.engines.child.options import RunnerOptions
from model_server.engines.child.rows import unpack_rows
from model_server.engines.child.sglang_model import MODEL_VARIABLE, PooledModel, pack_model
from model_server.engines.model_folder import ModelRefusedError
from model_server.engines.sglang_arguments import engine_arguments, overhead_tokens

MODELS: Final = "model_server.engines.child.sglang_models"


class SGLangRunner:
    """A started engine."""

    def __init__(self, engine: Any, dimensions: int, ready: Mapping[str, Any]) -> None:
        self._engine = engine
        self._dimensions = dimensions
        self._list = 0
        self.ready = ready
        """Device, versions, and the tokens that a pass may have."""

    def embed(self, inputs: Sequence[Tokens]) -> tuple[Vectors, Sequence[EnginePass]]:
        """One list of token ids, which SGLang schedules as one batch."""
        from sglang.srt.managers.io_struct import EmbeddingReqInput  # noqa: PLC0415

        self._list += 1
        request = EmbeddingReqInput(
            input_ids=[list(one.ids) for one in inputs],
            rid=[f"{self._list}-{i}-{one.prompt_tokens}" for i, one in enumerate(inputs)],
        )
        answers = self._engine.tokenizer_manager.generate_request(request, None)
        results = self._engine.loop.run_until_complete(anext(answers))
        return unpack_rows([result["embedding"] for result in results], self._dimensions)

    def probe(self) -> None:
        """A first pass of one token.

        It tells whether SGLang took our class, and has SGLang put in its handler for SIGTERM, which
        would end the process in the middle of a pass.
        """
        self.embed([Tokens(ids=[0])])
        self._engine.loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def start(options: Mapping[str, Any], died: Callable[[str], None]) -> SGLangRunner:
    """Start SGLang with a model.

    Raises:
        ModelRefusedError: it can't run on the device asked for.
    """
    chosen = RunnerOptions(**options)
    model = PooledModel(architecture=chosen.architecture, path=chosen.model, pooling=chosen.pooling)
    os.environ |= {
        MODEL_VARIABLE: pack_model(model),
        "SGLANG_EXTERNAL_MODEL_PACKAGE": MODELS,
        # It refuses an input as long as its context: ours is longer than the model's maximum.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    # SGLang ignores a module that it can't import, and then takes its own class.
    importlib.import_module(f"{MODELS}.pooled")
    import sglang  # noqa: PLC0415 - after the environment is set
    import torch  # noqa: PLC0415

    from model_server.engines.torch_runtime import device_name  # noqa: PLC0415

    device = chosen.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        raise ModelRefusedError(f"device {device!r}: SGLang finds no GPU here")
    capability = torch.cuda.get_device_capability(device) if on_gpu else None
    arguments = engine_arguments(chosen, device=device, capability=capability)
    engine = sglang.Engine(**arguments)
    threading.Thread(target=_watch_its_processes, args=(died,), daemon=True).start()
    room = engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"]
    runner = SGLangRunner(
        engine,
        chosen.dimensions,
        {
            "device": device_name(torch.device(device)) if on_gpu else device,
            "versions": {name: metadata.version(name) for name in ("sglang", "torch")},
            "attention_backend": arguments["attention_backend"],
            "pass_tokens_max": min(chosen.pass_tokens_max, int(room) - overhead_tokens(chosen)),
        },
    )
    runner.probe()
    return runner


def _watch_its_processes(died: Callable[[str], None]) -> None:
    """SGLang itself looks for a dead process once a second; a caller is told within one."""
    children = multiprocessing.active_children()
    (first, *_) = wait([child.sentinel for child in children])
    (child,) = (child for child in children if child.sentinel == first)
    child.join()
    died(f"SGLang's process {child.pid} ended with {child.exitcode}")
