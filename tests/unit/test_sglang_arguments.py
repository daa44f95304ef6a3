"""What SGLang is told: every trap that needs no SGLang to be seen.

The numbers of the traps are those of `ops/adr/0010-engines-in-processes.md`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from model_server.engines.sglang_arguments import attention_backend, engine_arguments
from tests.harness.child_engines import RUNNER_OPTIONS


def arguments(device: str = "cpu", capability: tuple[int, int] | None = None, **chosen: Any) -> Any:
    return engine_arguments(replace(RUNNER_OPTIONS, **chosen), device=device, capability=capability)


def test_what_changes_vectors_or_splits_a_list_is_off() -> None:
    """Traps 3, 4 and 9, and graphs that pad."""
    told = arguments()
    assert told["disable_radix_cache"] is True
    assert told["chunked_prefill_size"] == -1
    assert told["disable_cuda_graph"] is True
    assert told["sleep_on_idle"] is True
    assert told["is_embedding"] is True
    assert told["model_path"] == "/models/m/0_Transformer"


@pytest.mark.parametrize(("tokens", "inputs"), [(600, 1), (4_096, 512), (32_768, 4_096)])
def test_limits_hold_the_largest_pass(tokens: int, inputs: int) -> None:
    """Trap 5: budgets count pages and one more for each input, and the last must fit strictly."""
    told = arguments(pass_tokens_max=tokens, inputs_max=inputs)
    page = told["page_size"]
    worst = tokens + inputs * (page - 1)
    assert told["max_prefill_tokens"] > worst
    assert told["max_total_tokens"] >= worst + inputs * page
    assert told["max_running_requests"] == inputs


def test_an_input_of_the_maximum_fits_its_context() -> None:
    """It refuses an input as long as its context, less 6 that it reserves."""
    assert arguments(input_tokens_max=512)["context_length"] - 6 > 512


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "backend"),
    [
        ("cpu", None, "float32", "torch_native"),
        ("cuda", (9, 0), "bfloat16", "fa3"),
        ("cuda", (9, 0), "float16", "fa3"),
        ("cuda", (9, 0), "float32", "triton"),  # fa3 has 16-bit kernels only
        ("cuda", (8, 0), "bfloat16", "triton"),
        ("cuda", (10, 0), "bfloat16", "triton"),
    ],
)
def test_the_attention_backend_is_chosen_by_device(
    device: str, capability: tuple[int, int] | None, dtype: str, backend: str
) -> None:
    """Trap 6: its own choice, flashinfer, fails for head dimensions of 32."""
    options = replace(RUNNER_OPTIONS, dtype=dtype)
    assert attention_backend(options, device=device, capability=capability) == backend
    chosen = replace(options, attention_backend="flashinfer")
    assert attention_backend(chosen, device=device, capability=capability) == "flashinfer"


def test_what_is_asked_for_passes_through() -> None:
    told = arguments(
        device="cuda:1",
        capability=(9, 0),
        dtype="bfloat16",
        quantization="fp8",
        tensor_parallel=2,
        memory_fraction=0.5,
        config_overrides={"a": "b"},
    )
    assert (told["device"], told["base_gpu_id"]) == ("cuda", 1)
    assert told["dtype"] == "bfloat16"
    assert told["quantization"] == "fp8"
    assert told["tp_size"] == 2
    assert told["mem_fraction_static"] == 0.5
    assert told["json_model_override_args"] == '{"a": "b"}'
    plain = arguments()
    assert not {"quantization", "json_model_override_args"} & set(plain)
    assert plain["mem_fraction_static"] == 0.8
