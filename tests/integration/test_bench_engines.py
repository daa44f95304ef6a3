"""The engines' benchmark on an engine that costs nothing, and what it says of absent ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ops.bench import engines


def test_engines_that_are_here_are_measured_and_others_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    code = engines.main(["--engines", "simulated,sglang,vllm", "--rounds", "2"])
    out, err = capfd.readouterr()
    assert code == 0, err
    figures = json.loads(out.splitlines()[-1])
    row = figures["engines"]["simulated"]
    assert row["batch_tokens_target"] == 600
    assert len(row["list_64_rounds_ms"]) == len(row["list_512_rounds_ms"]) == 2
    assert row["list_512_queries_per_s"] == pytest.approx(512e3 / row["list_512_ms"], rel=0.01)
    assert figures["not_measured"] == {
        "sglang": ".venv-sglang is not there; make .venv-sglang/.installed",
        "vllm": ".venv-vllm is not there; make .venv-vllm/.installed",
    }
    assert "not measured: .venv-vllm is not there" in out


def test_a_run_without_any_engine_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    assert engines.main(["--engines", "sglang"]) == 1
    assert "no engine can be measured here" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--engines", "onnx"], ["--engines", ""], ["--rounds", "0"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        engines.main(arguments)
    assert ended.value.code == 2
