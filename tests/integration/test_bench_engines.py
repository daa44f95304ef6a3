"""The engines' benchmark on an engine that costs nothing, and what it says of absent ones."""

from __future__ import annotations

import json
import signal
import subprocess
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


def test_a_bench_that_is_terminated_leaves_no_server_behind() -> None:
    bench = subprocess.Popen(
        [sys.executable, "-m", "ops.bench.engines", "--engines", "simulated", "--rounds", "100000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert bench.stderr is not None
    try:
        while "round 1 of" not in (line := bench.stderr.readline()):
            assert line, "the bench ended"
        children = [child for child, parent in processes() if parent == bench.pid]
        assert children
        bench.terminate()
        assert bench.wait(60) == 128 + signal.SIGTERM
        assert not set(children) & {pid for pid, _ in processes()}
    finally:
        bench.kill()
        bench.stderr.close()


def processes() -> list[tuple[int, int]]:
    """Ids of processes and of their parents, as Linux and macOS tell them."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return [(int(child), int(parent)) for child, parent in pairs]
