"""What vLLM is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from model_server.engines.model_folder import ModelRefusedError
from model_server.engines.vllm_arguments import engine_arguments, room_tokens, runs_on_gpu
from tests.harness.child_engines import RUNNER_OPTIONS


def test_what_changes_vectors_or_splits_a_list_is_off() -> None:
    told = engine_arguments(RUNNER_OPTIONS, "/links", on_gpu=True)
    assert told["model"] == "/links"
    assert told["runner"] == "pooling"
    assert told["enable_prefix_caching"] is False
    assert told["enable_chunked_prefill"] is False
    assert told["async_scheduling"] is False
    assert told["enforce_eager"] is True
    assert told["max_num_batched_tokens"] == 4_096
    assert told["max_num_seqs"] == 512
    assert told["max_model_len"] == 256
    assert not {"quantization", "attention_backend"} & set(told)


def test_what_is_asked_for_passes_through() -> None:
    chosen = replace(
        RUNNER_OPTIONS,
        dtype="bfloat16",
        quantization="fp8",
        tensor_parallel=2,
        memory_fraction=0.5,
        attention_backend="FLASH_ATTN",
        config_overrides={"a": "b"},
    )
    told = engine_arguments(chosen, "/links", on_gpu=True)
    assert told["dtype"] == "bfloat16"
    assert told["quantization"] == "fp8"
    assert told["tensor_parallel_size"] == 2
    assert told["gpu_memory_utilization"] == 0.5
    assert told["attention_backend"] == "FLASH_ATTN"
    assert told["hf_overrides"] == {"a": "b"}


def test_memory_is_asked_for_by_device() -> None:
    assert engine_arguments(RUNNER_OPTIONS, "/l", on_gpu=True)["gpu_memory_utilization"] == 0.8
    assert engine_arguments(RUNNER_OPTIONS, "/l", on_gpu=False)["gpu_memory_utilization"] == 0.25


def test_a_pass_has_room_whatever_its_inputs() -> None:
    """512 inputs of one token take 512 blocks."""
    assert room_tokens(RUNNER_OPTIONS, 10_000, 16) == 4_096
    assert room_tokens(RUNNER_OPTIONS, 600, 16) == 600 * 16 - 512 * 15
    assert room_tokens(RUNNER_OPTIONS, None, 16) == 4_096


@pytest.mark.parametrize(
    ("device", "gpu_found", "expected"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("cpu", False, False),
        ("cuda", True, True),
        ("cuda:0", True, True),
    ],
)
def test_it_runs_on_the_device_asked_for(device: str, gpu_found: bool, expected: bool) -> None:
    assert runs_on_gpu(device, gpu_found=gpu_found) is expected


@pytest.mark.parametrize(
    ("device", "gpu_found", "why"),
    [
        ("cpu", True, "vLLM runs on the GPU"),
        ("cuda", False, "finds no GPU"),
        ("cuda:0", False, "finds no GPU"),
        ("cuda:1", True, "CUDA_VISIBLE_DEVICES"),
        ("mps", False, "auto, cpu or cuda"),
        ("gpu", True, "auto, cpu or cuda"),
    ],
)
def test_a_device_that_it_can_not_run_on_is_refused(device: str, gpu_found: bool, why: str) -> None:
    with pytest.raises(ModelRefusedError, match=f"device '{device}': .*{why}"):
        runs_on_gpu(device, gpu_found=gpu_found)
