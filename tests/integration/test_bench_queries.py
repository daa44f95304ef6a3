"""Queries of one's own that can't be had: one line from each bench and from verify."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.common import BenchError, read_queries, read_texts
from ops.bench.latency import read_arrivals


@pytest.mark.parametrize(
    "module", ["ops.bench.claims", "ops.bench.hotpath", "ops.bench.engines", "ops.verify"]
)
def test_a_file_that_is_not_there_is_one_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--queries", "/nope"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.removeprefix("Error: ") == "queries /nope: No such file or directory"


def test_every_text_once_or_as_many_as_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "queries.tsv"
    file.write_text("1\ta\n2\tb\n", encoding="utf-8")
    assert read_texts(file) == ["a", "b"]
    assert read_queries(file, 3) == ["a", "b", "a"]
    file.write_text("\n", encoding="utf-8")
    with pytest.raises(BenchError, match="holds no queries"):
        read_queries(file, 3)


def test_arrivals_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="arrivals /nope: No such file"):
        read_arrivals(Path("/nope"), 3, 100.0)
    file = tmp_path / "arrivals.csv"
    file.write_text("time\n1\n", encoding="utf-8")
    with pytest.raises(BenchError, match="a column arrival_s of numbers"):
        read_arrivals(file, 3, 100.0)
