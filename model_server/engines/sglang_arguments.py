"""Our limits as SGLang's arguments: pure, so that every choice is tested without SGLang.

Sources: facts measured with SGLang 0.5.23 and its `server_args.py`.
"""

from __future__ import annotations

import json
from typing import Any, Final

from model_server.engines.child.options import RunnerOptions

CONTEXT_SPARE_TOKENS: Final = 16
"""SGLang refuses an input as long as its context less what it reserves (6 tokens)."""
MEMORY_FRACTION: Final = 0.8
"""Of a device's memory, at most, for weights and cache; the rest is a pass's."""
PAGE_TOKENS: Final = 1
"""The size of a page of its cache: with more, budgets would have to be larger."""
_HOPPER: Final = 9
_HALF_PRECISION: Final = ("bfloat16", "float16")


def overhead_tokens(options: RunnerOptions) -> int:
    """What SGLang's budgets count beside the tokens themselves, in the worst pass.

    Each input is rounded up to whole pages and charged one page more, and the last one must leave
    something over (its `PrefillAdder`).
    """
    return options.inputs_max * 2 * PAGE_TOKENS + PAGE_TOKENS


def engine_arguments(
    options: RunnerOptions, *, device: str, capability: tuple[int, int] | None
) -> dict[str, Any]:
    """Keyword arguments of SGLang's `Engine`."""
    room = options.pass_tokens_max + overhead_tokens(options)
    arguments: dict[str, Any] = {
        "model_path": options.transformer,
        "is_embedding": True,
        "skip_tokenizer_init": True,
        "device": device.partition(":")[0],
        "base_gpu_id": int(device.partition(":")[2] or 0),
        "dtype": options.dtype,
        "tp_size": options.tensor_parallel,
        "attention_backend": attention_backend(options, device=device, capability=capability),
        "context_length": options.input_tokens_max + CONTEXT_SPARE_TOKENS,
        # One list is one pass.
        "page_size": PAGE_TOKENS,
        "max_prefill_tokens": room,
        "max_total_tokens": room,
        "max_running_requests": options.inputs_max,
        # Its own choice sets 1.5 MB aside for each of `max_prefill_tokens`, on small devices more
        # than there is. The cache is no larger than `max_total_tokens` asks for anyway.
        "mem_fraction_static": options.memory_fraction or MEMORY_FRACTION,
        "chunked_prefill_size": -1,
        # A prefix that texts share would be computed once, for an encoder from other neighbours.
        "disable_radix_cache": True,
        # Graphs of prefills pad them.
        "disable_cuda_graph": True,
        # One list is in flight, so there is nothing to overlap with.
        "disable_overlap_schedule": True,
        # Else an idle scheduler spins.
        "sleep_on_idle": True,
        "skip_server_warmup": True,
        "log_level": options.log_level,
    }
    if options.config_overrides:
        arguments["json_model_override_args"] = json.dumps(dict(options.config_overrides))
    if options.quantization is not None:
        arguments["quantization"] = options.quantization
    return arguments


def attention_backend(
    options: RunnerOptions, *, device: str, capability: tuple[int, int] | None
) -> str:
    """SGLang's own choice fails for some models (flashinfer: head dimension 32)."""
    if options.attention_backend is not None:
        return options.attention_backend
    if device == "cpu":
        return "torch_native"
    hopper = capability is not None and capability[0] == _HOPPER
    return "fa3" if hopper and options.dtype in _HALF_PRECISION else "triton"
