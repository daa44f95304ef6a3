"""What hints call the program: whatever works when it is pasted."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = "from aggregator.commands.own_command import own_command; print(own_command())"


def hint(folder: Path, *command: str, path: str = "/usr/bin:/bin") -> str:
    done = subprocess.run(
        command, cwd=folder, env={"PATH": path}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program of ours in a folder of programs."""
    file = tmp_path / "some bin" / "aggregator"
    file.parent.mkdir()
    file.write_text(f"#!{sys.executable}\n{SCRIPT}\n")
    file.chmod(0o755)
    return file


def test_a_program_on_the_path_is_called_by_its_name(program: Path, tmp_path: Path) -> None:
    path = f"{program.parent}:/usr/bin:/bin"
    assert hint(tmp_path, "sh", "-c", "aggregator", path=path) == "aggregator"
    assert hint(tmp_path, str(program), path=path) == "aggregator"


def test_another_one_is_called_as_it_was_started(program: Path, tmp_path: Path) -> None:
    relative = "some bin/aggregator"
    other = tmp_path / "other" / "aggregator"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    for path in ("/usr/bin:/bin", f"{other.parent}:/usr/bin:/bin"):
        for started in (relative, str(program)):
            printed = hint(tmp_path, "sh", "-c", shlex.quote(started), path=path)
            assert printed == shlex.quote(started)
            # It works when it is pasted.
            assert hint(tmp_path, "sh", "-c", printed, path=path) == printed


def test_a_module_is_called_as_one(tmp_path: Path) -> None:
    package = tmp_path / "aggregator_like"
    package.mkdir()
    (package / "__main__.py").write_text(SCRIPT)
    printed = hint(tmp_path, sys.executable, "-m", "aggregator_like")
    assert printed == f"{shlex.quote(sys.executable)} -m aggregator_like"
