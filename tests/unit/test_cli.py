"""The command line: every command's help with an example, settings shown, failures in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from aggregator.cli import COMMANDS, group

MODELS = {"AGGREGATOR_MODELS": "minilm=localhost:50051"}


def commands() -> list[list[str]]:
    """Every command with its subcommands, as words."""
    context = click.Context(group)
    found = []
    for name in COMMANDS:
        command = group.get_command(context, name)
        found.append([name])
        if isinstance(command, click.Group):
            found += [[name, sub] for sub in command.list_commands(context)]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_has_help_with_an_example(words: list[str]) -> None:
    result = CliRunner().invoke(group, [*words, "--help"])
    assert result.exit_code == 0
    assert "Example" in result.output
    assert f"aggregator {' '.join(words)}" in result.output


def test_the_group_lists_all_and_imports_none() -> None:
    probe = (
        "import sys, aggregator.cli as c; from click.testing import CliRunner as R; "
        "r = R().invoke(c.group, ['--help']); assert r.exit_code == 0, r.output; "
        "assert all(name in r.output for name in c.COMMANDS); "
        "assert not {'grpc', 'confluent_kafka', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


def test_print_config_shows_what_results(tmp_path: Path) -> None:
    config = tmp_path / "aggregator.toml"
    config.write_text('ttl_ms = 5\n[kafka]\n"ssl.key.password" = "hunter2"\n')
    result = CliRunner(env=MODELS).invoke(group, ["run", "--config", str(config), "--print-config"])
    assert result.exit_code == 0
    shown = json.loads(result.output)
    assert shown["ttl_ms"] == 5
    assert shown["models"]["minilm"]["servers"] == ["localhost:50051"]
    assert "hunter2" not in result.output


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"AGGREGATOR_MODELS": ""}, "models: required"),
        ({**MODELS, "AGGREGATOR_TTL": "5"}, "unknown setting AGGREGATOR_TTL"),
        ({**MODELS, "AGGREGATOR_KAFKA__acks": "1"}, "'acks' is refused"),
    ],
)
def test_failures_are_one_line(environment: dict[str, str], message: str) -> None:
    result = CliRunner(env=environment).invoke(group, ["run"])
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    assert message in line


def test_an_unknown_command_is_said_to_be_one() -> None:
    result = CliRunner().invoke(group, ["rnu"])
    assert result.exit_code == 2
    assert "No such command 'rnu'" in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
@pytest.mark.parametrize(
    "words",
    [
        "aggregator --help",
        "aggregator run --print-config",
        "model_server --help",
        "model_server serve --engine simulated --print-config",
    ],
)
def test_a_full_disk_is_one_line(words: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", *words.split()],
            check=False,
            env={**os.environ, **MODELS},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 1
    assert ended.stderr == "Error: the output can't be written: No space left on device\n"


@pytest.mark.parametrize("module", ["aggregator", "model_server"])
def test_closed_standard_streams_are_not_given_to_sockets(module: str) -> None:
    probe = (
        "import os, sys; [os.close(number) for number in range(3)]; "
        "sys.stdin = sys.stdout = sys.stderr = None; "
        f"from {module}.cli import open_standard_streams; open_standard_streams(); "
        "print('nowhere'); print('nowhere', file=sys.stderr); "
        "nulls = [os.fstat(n).st_rdev == os.stat(os.devnull).st_rdev for n in range(3)]; "
        "os._exit(0 if all(nulls) and sys.stdin.read() == '' and not sys.stdin.isatty() else 1)"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dlq", "replay", "--all", "--rate", "nan"], "'--rate': nan"),
        (["send", "--timeout", "inf", "a"], "'--timeout': inf"),
        (["send", "--bootstrap-servers", "", "a"], "it is empty"),
        (["send", "--results-topic", "\udcff", "a"], "is not UTF-8"),
        (["dlq", "list", "--dlq-topic", ""], "it is empty"),
    ],
)
def test_an_option_that_can_not_be_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(group, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


_SIGNALLED_IN_AN_IMPORT = """
import os, signal, sys
from {package}.cli import _end
signal.signal(signal.SIGTERM, _end)
sys.argv = ["program", "{command}"]
class Descriptor:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.SIGTERM)
class Imported:
    described = Descriptor()
"""


@pytest.mark.parametrize(
    ("package", "command", "status"),
    [
        ("aggregator", "run", 0),
        ("aggregator", "send", 128 + signal.SIGTERM),
        ("model_server", "serve", 0),
        ("model_server", "embed", 128 + signal.SIGTERM),
    ],
)
def test_a_signal_before_anything_is_started_ends_in_order(
    package: str, command: str, status: int
) -> None:
    script = _SIGNALLED_IN_AN_IMPORT.format(package=package, command=command)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")
