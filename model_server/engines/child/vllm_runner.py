"""vLLM as a runner: the one module that starts it and that knows its interface.

Owns an `LLMEngine` whose scheduler and, on one device, whose worker run in this process, so that a
list is handed over whole before the first step. Invariants: token ids go in, one list at a time;
our head stands in for vLLM's pooler in every worker. The version is pinned: none of it is public.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from model_server.engines.base import EngineError, EnginePass, Tokens, Vectors
from model_server.engines.child.options import RunnerOptions
from model_server.engines.child.pooling_head import PoolingHead
from model_server.engines.child.rows import unpack_rows
from model_server.engines.description import first_installed
from model_server.engines.torch_runtime import after_failed_pass, device_name
from model_server.engines.vllm_arguments import (
    DISTRIBUTIONS,
    engine_arguments,
    room_tokens,
    runs_on_gpu,
)

PROMPT_TOKENS = "prompt_tokens"
_TASK = "embed"
_KEPT = ("config.json", "generation_config.json", "model.safetensors.index.json")


class HeadPooler(nn.Module):
    """Our head where vLLM's worker calls the model's pooler."""

    def __init__(self, head: PoolingHead) -> None:
        super().__init__()
        self._head = head

    def get_supported_tasks(self) -> set[str]:
        """Of vLLM's pooling tasks."""
        return {_TASK}

    def get_pooling_updates(self, task: str) -> Any:
        """Nothing that a worker would have to prepare."""
        from vllm.model_executor.layers.pooler.common import PoolingParamsUpdate  # noqa: PLC0415

        del task
        return PoolingParamsUpdate()

    def forward(self, hidden_states: Any, pooling_metadata: Any) -> Any:
        """`hidden_states` [tokens, size] of the sequences that the metadata describe."""
        prompts = [
            (params.extra_kwargs or {}).get(PROMPT_TOKENS, 0)
            for params in pooling_metadata.pooling_params
        ]
        return self._head.rows(hidden_states, pooling_metadata.prompt_lens, prompts)


def put_head(worker: Any, model_path: str, pooling: str | None) -> None:
    """Run in each worker: replace the model's pooler."""
    model = worker.model_runner.get_model()
    model.pooler = HeadPooler(PoolingHead(model_path, pooling, worker.device))


class VLLMRunner:
    """A started engine."""

    def __init__(self, engine: Any, dimensions: int, ready: Mapping[str, Any]) -> None:
        self._engine = engine
        self._dimensions = dimensions
        self._list = 0
        self.ready = ready
        """Device, versions, and the tokens that a pass may have."""

    def embed(self, inputs: Sequence[Tokens]) -> tuple[Vectors, Sequence[EnginePass]]:
        """One list of token ids: all handed over, then run to their end.

        Raises:
            EngineOutOfMemoryError: a step did not fit the memory.
            EngineDiedError: the device is gone.
        """
        from vllm import PoolingParams  # noqa: PLC0415

        self._list += 1
        added: list[str] = []
        try:
            for i, one in enumerate(inputs):
                params = PoolingParams(
                    task=_TASK,
                    use_activation=False,
                    extra_kwargs={PROMPT_TOKENS: one.prompt_tokens},
                )
                prompt = {"prompt_token_ids": list(one.ids)}
                added.append(self._engine.add_request(f"{self._list}-{i}", prompt, params))
            rows = self._run(len(inputs))
        except Exception as error:
            self._engine.abort_request(added, internal=True)
            raise after_failed_pass(error) from error
        return unpack_rows([rows[i] for i in range(len(inputs))], self._dimensions)

    def _run(self, count: int) -> dict[int, list[float]]:
        """Step until each input of the list has its row."""
        rows: dict[int, list[float]] = {}
        while len(rows) < count:
            for output in self._engine.step():
                if output.error is not None:
                    raise EngineError(f"vLLM: {output.error}")
                rows[int(output.request_id.partition("-")[2])] = output.outputs.data.tolist()
        return rows


def start(options: Mapping[str, Any], died: Callable[[str], None]) -> VLLMRunner:
    """Start vLLM with a model.

    Raises:
        ModelRefusedError: it can't run on the device asked for.
    """
    del died  # its workers' ends are its process's
    chosen = RunnerOptions(**options)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": chosen.log_level.upper(),
    }
    import torch  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

    on_gpu = runs_on_gpu(chosen.device, gpu_found=torch.cuda.is_available())
    with tempfile.TemporaryDirectory(prefix="vllm-model-") as folder:
        weights = bare_folder(Path(chosen.transformer), Path(folder))
        arguments = engine_arguments(chosen, weights, on_gpu=on_gpu)
        engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
    engine.collective_rpc(put_head, args=(chosen.model, chosen.pooling))
    cache = engine.engine_core.engine_core.scheduler.kv_cache_config
    # An encoder's attention keeps nothing, and then there is no group.
    blocks = cache.num_blocks if cache.kv_cache_groups else None
    block_tokens = engine.vllm_config.cache_config.block_size
    runner = VLLMRunner(
        engine,
        chosen.dimensions,
        {
            "device": device_name(torch.device("cuda:0")) if on_gpu else "cpu",
            "versions": {"torch": torch.__version__, **first_installed(DISTRIBUTIONS)},
            "pass_tokens_max": room_tokens(chosen, blocks, block_tokens),
        },
    )
    runner.embed([Tokens(ids=[0])])  # tells whether our head was taken
    return runner


def bare_folder(transformer: Path, folder: Path) -> str:
    """Links to weights and configuration alone: vLLM would pool and project by other files too."""
    for path in transformer.iterdir():
        if path.name in _KEPT or path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
    return str(folder)
