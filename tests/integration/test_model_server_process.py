"""`model-server` as a process: signals, exit codes, one line on failure, `embed` for people."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.harness.processes import WAIT_S, CommandProcess, free_port, simulated_server

FAULTS = '{"[[hang]]": "slow", "[[exit]]": "exit"}'


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(port: int) -> Iterator[CommandProcess]:
    with simulated_server(
        port,
        MODEL_SERVER_SIMULATED__FAULTS=FAULTS,
        MODEL_SERVER_SIMULATED__SLOW_MS="600000",
        MODEL_SERVER_PASS_TIMEOUT_MS="500",
    ) as process:
        yield process


def embed(port: int, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MODEL_SERVER_")}
    command = [sys.executable, "-m", "model_server", "embed", "--server", f"127.0.0.1:{port}"]
    return subprocess.run(
        [*command, *arguments],
        input=given,
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize("signal_name", ["SIGTERM", "SIGINT"])
def test_a_signal_drains_and_ends_with_0(server: CommandProcess, signal_name: str) -> None:
    if signal_name == "SIGINT":
        server.process.send_signal(2)
        assert server.wait() == 0
    else:
        assert server.terminate() == 0
    assert server.lines[-1]["event"] == "stopped"


def test_embed_prints_vectors(server: CommandProcess, port: int) -> None:
    short = embed(port, "hello", "x" * 100)
    assert short.returncode == 0
    assert short.stdout.splitlines()[0] == "hello"
    assert "384 dimensions" in short.stdout
    lines = embed(port, "--json", given="one\n\ntwo\n")
    assert [json.loads(line)["text"] for line in lines.stdout.splitlines()] == ["one", "two"]
    assert all(len(json.loads(line)["embedding"]) == 384 for line in lines.stdout.splitlines())


def test_embed_says_what_was_refused(server: CommandProcess, port: int) -> None:
    result = embed(port, "good", "x" * 10_000)
    assert result.returncode == 1
    assert "INVALID_ARGUMENT" in result.stdout
    assert result.stderr == "Error: 1 of 2 texts have no vector\n"


def test_a_hung_pass_is_answered_and_ends_the_process(server: CommandProcess, port: int) -> None:
    result = embed(port, "[[hang]]")
    assert result.returncode == 1
    assert "UNAVAILABLE" in result.stdout
    assert server.wait() == 1
    assert "500 ms" in json.dumps(server.lines[-1])


def test_an_engine_that_takes_the_process_down_is_seen_as_unavailable(
    server: CommandProcess, port: int
) -> None:
    result = embed(port, "[[exit]]")
    assert result.returncode == 1
    assert "UNAVAILABLE" in result.stderr
    assert server.wait() == 70


def test_a_port_in_use_is_one_line(port: int) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        process = CommandProcess(
            "model_server",
            "serve",
            environment={
                "MODEL_SERVER_ENGINE": "simulated",
                "MODEL_SERVER_GRPC_LISTEN": f"127.0.0.1:{port}",
                "MODEL_SERVER_METRICS_LISTEN": "",
            },
        )
        with process:
            assert process.wait() == 1
    errors = [line["text"] for line in process.lines if "text" in line]
    assert len(errors) == 1
    assert errors[0].startswith(f"Error: grpc_listen 127.0.0.1:{port}")


def test_a_server_that_may_not_serve_says_why() -> None:
    process = CommandProcess(
        "model_server",
        "serve",
        environment={
            "MODEL_SERVER_ENGINE": "simulated",
            "MODEL_SERVER_GRPC_LISTEN": f"127.0.0.1:{free_port()}",
            "MODEL_SERVER_METRICS_LISTEN": "",
            "MODEL_SERVER_SIMULATED__WRONG_REFERENCE": "true",
        },
    )
    with process:
        assert process.wait() == 1
    assert "golden text" in process.lines[-1]["text"]
