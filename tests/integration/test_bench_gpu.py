"""The GPU's script in its smoke form, on a machine that has nothing but what it may count on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model_server.core.saturation import TargetRule
from model_server.profiling.profile import from_json
from ops.bench import gpu_models

ROOT = Path(__file__).parents[2]
NOT_THERE = (
    *("click", "confluent_kafka", "google", "grpc_health", "grpc_reflection", "hypothesis"),
    *("matplotlib", "orjson", "prometheus_client", "pydantic", "pydantic_settings", "pytest"),
    *("rich", "sentence_transformers", "sglang", "structlog", "tiktoken", "vllm"),
)
PYTHON = f"""#!{sys.executable}
import runpy, sys
for name in {NOT_THERE}:
    sys.modules[name] = None
assert sys.argv[1] == "-m", sys.argv
del sys.argv[:2]
module = {"ops.bench.gpu"!r}
sys.path.insert(0, "")
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.torch
def test_it_runs_with_torch_transformers_and_little_else(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o700)
    out = tmp_path / "out"
    ran = subprocess.run(
        ["sh", "ops/bench/gpu.sh", "--smoke", "--out", str(out), "--seconds-max", "100"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": str(python), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3_000:]
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert figures == json.loads((out / "gpu.json").read_text())
    checked = {(row["model"], row["precision"]) for row in figures["correctness"]}
    assert checked == {
        (name, precision)
        for name in gpu_models.SMOKE_ARCHITECTURES
        for precision in ("float32", "bfloat16")
    }
    assert all(row["cosine_min"] >= row["cosine_bound"] for row in figures["correctness"])
    # Each model is measured, or it is said that it was not.
    wanted = {f"{s.name}, {dtype}" for s in gpu_models.SMOKE_SIZES for dtype in s.dtypes}
    measured = {f"{row['model']}, {row['precision']}" for row in figures["profiles"]}
    assert measured | {one.partition(":")[0] for one in figures["left_out"]} == wanted
    assert measured
    for row in figures["profiles"]:
        profile = from_json((out / row["json"]).read_text())
        assert profile.read().target.tokens == row["target_tokens"]
        assert row["target_rule"] in list(TargetRule)
        assert profile.pass_flops is not None
        assert row["mfu_max"] > 0
        assert row["plots"] == []  # no matplotlib there: drawn from the JSON elsewhere
    for row in figures["throughput"]:
        assert set(row["queries_per_s"]) == {
            "batched",
            "padded",
            "one_by_one",
            "one_by_one_padded",
        }


def test_the_sizes_are_what_they_are_called() -> None:
    """In billions of weights, tables of tokens included; counted without making any."""
    import torch
    import transformers

    for size in gpu_models.SIZES:
        with torch.device("meta"):
            model = transformers.AutoModel.from_config(size.config())
        billions = sum(weight.numel() for weight in model.parameters()) / 1e9
        named = {"minilm-sized": 0.0227}.get(size.name) or float(size.name.removesuffix("b"))
        assert billions == pytest.approx(named, rel=0.05)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["cosine_min", "cosine_to_alone_min"])
@pytest.mark.parametrize("value", [0.99, math.nan])
def test_a_wrong_vector_is_told(name: str, value: float) -> None:
    from ops.bench import gpu

    right = {"cosine_min": 1.0, "cosine_to_alone_min": 1.0, "cosine_bound": 0.9999}
    assert gpu.wrong_rows([right, right | {name: value}]) == [right | {name: value}]
