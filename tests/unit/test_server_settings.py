"""The model server's settings: sources, unknown names, relations; its command line; its table of
metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from model_server.cli import main
from model_server.settings import (
    Fault,
    ModelServerSettings,
    SettingsError,
    load_settings,
    printable,
)
from model_server.telemetry.http import HEADER_BYTES_MAX, TelemetryServer
from model_server.telemetry.metrics import TABLE, Metrics

SIMULATED = {"MODEL_SERVER_ENGINE": "simulated"}


def load(**environment: str) -> ModelServerSettings:
    given = {f"MODEL_SERVER_{name}": value for name, value in environment.items()}
    return load_settings(environment={**SIMULATED, **given})


def test_defaults() -> None:
    settings = load()
    assert settings.grpc_listen == "127.0.0.1:50051"
    assert (settings.target, settings.target_source) == (600, "default")
    assert settings.served_name == "simulated"
    torch = load(ENGINE="torch", MODEL="org/some-model")
    assert (torch.target, torch.served_name) == (256, "some-model")


def test_a_target_that_is_set_is_the_target() -> None:
    settings = load(BATCH_TOKENS_TARGET="77")
    assert (settings.target, settings.target_source) == (77, "setting")


def test_a_default_target_keeps_to_the_maximum() -> None:
    assert load(BATCH_TOKENS_MAX="550").target == 550


def test_a_simulated_engine_is_not_profiled_at_start_unless_asked() -> None:
    assert load().quick_profile_ms_max == 0
    assert load(PROFILE_MS_MAX="500").quick_profile_ms_max == 500
    torch = load(ENGINE="torch", MODEL="m")
    assert torch.quick_profile_ms_max > 0
    assert load(ENGINE="torch", MODEL="m", PROFILE_MS_MAX="0").quick_profile_ms_max == 0


def test_options_go_over_variables_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'engine = "simulated"\ninputs_max = 1\nthreads = 1\ndevice = "cpu"\n'
        "[simulated]\nfixed_ms = 1\nknee_tokens = 7\n"
    )
    settings = load_settings(
        file,
        options={"device": "cuda", "dtype": None},
        environment={
            "MODEL_SERVER_THREADS": "2",
            "MODEL_SERVER_DEVICE": "mps",
            "MODEL_SERVER_SIMULATED__FIXED_MS": "2.5",
        },
    )
    assert (settings.inputs_max, settings.threads, settings.device) == (1, 2, "cuda")
    assert (settings.simulated.fixed_ms, settings.simulated.knee_tokens) == (2.5, 7)
    assert settings.dtype == "float32"


def test_tables_and_lists_in_variables() -> None:
    settings = load(
        SIMULATED__FAULTS='{"poison": "die"}',
        SIMULATED__MATRYOSHKA_DIMENSIONS="64, 128",
        SIMULATED__PROMPTS='{"query": "q: "}',
    )
    assert settings.simulated.faults == {"poison": Fault.DIE}
    assert settings.simulated.matryoshka_dimensions == (64, 128)
    assert settings.simulated.prompts == {"query": "q: "}
    whole = load(SIMULATED='{"dimensions": 8}', SIMULATED__SLOW_MS="3")
    assert (whole.simulated.dimensions, whole.simulated.slow_ms) == (8, 3)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GRPC_LISTNE": "x"}, "did you mean MODEL_SERVER_GRPC_LISTEN"),
        ({"SIMULATED__FIXD_MS": "1"}, "did you mean MODEL_SERVER_SIMULATED__FIXED_MS"),
        ({"PORT": "50051"}, "unknown setting MODEL_SERVER_PORT"),
        ({"DEVICE__X": "1"}, "unknown setting"),
        ({"SIMULATED__FAULTS": "{"}, "not JSON"),
        ({"SIMULATED__FAULTS": '{"x": "explode"}'}, "simulated.faults.x"),
        ({"INPUTS_MAX": "0"}, "inputs_max"),
        ({"GRPC_LISTEN": "50051"}, "HOST:PORT"),
        ({"METRICS_LISTEN": "localhost"}, "metrics_listen: 'localhost' is not HOST:PORT"),
        ({"METRICS_LISTEN": "a" * 64 + ":9465"}, "no such host can be"),
        ({"GRPC_LISTEN": "\udcff:50051"}, "grpc_listen: .* no such host can be"),
        ({"SIMULATED__FIXED_MS": "inf"}, "simulated.fixed_ms"),
        ({"PASS_MS_MAX": "inf"}, "pass_ms_max"),
        ({"THREADS": "100000000"}, "threads"),
        ({"PASS_MS_MAX": "nan"}, "pass_ms_max"),
        ({"ENGINE": "torch"}, "model is required"),
        ({"ENGINE": "sglang"}, "model is required"),
        ({"QUANTIZATION": "fp8"}, "quantization is for engine sglang and vllm, not "),
        (
            {"TENSOR_PARALLEL": "2"},
            "tensor_parallel is for engine sglang and vllm, not ",
        ),
        (
            {"MEMORY_FRACTION": "0.5"},
            "memory_fraction is for engine sglang and vllm, not ",
        ),
        (
            {"ATTENTION_BACKEND": "triton"},
            "attention_backend is for engine sglang and vllm, not ",
        ),
        (
            {"ENGINE": "sglang", "MODEL": "m", "QUANTIZATION": "fp8"},
            "quantization needs golden_cosine_min",
        ),
        ({"ENGINE": "sglang", "MODEL": "m", "MEMORY_FRACTION": "1"}, "memory_fraction"),
        (
            {"BATCH_TOKENS_TARGET": "600", "BATCH_TOKENS_MAX": "599"},
            "batch_tokens_max must be at least batch_tokens_target",
        ),
        ({"PASS_MS_MAX": "0"}, "pass_ms_max"),
        ({"LATENCY_SLACK_RATIO": "-0.1"}, "latency_slack_ratio"),
        ({"PROFILE_MS_MAX": "-1"}, "profile_ms_max"),
        (
            {"BATCH_TOKENS_TARGET": "100", "BATCH_TOKENS_MAX": "511"},
            "must hold one input of input_tokens_max",
        ),
        ({"REQUEST_BYTES_MAX": "131071"}, "request_bytes_max"),
        ({"SIMULATED__MATRYOSHKA_DIMENSIONS": "384"}, "smaller than dimensions"),
    ],
)
def test_wrong_settings_are_one_clear_line(environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as raised:
        load(**environment)
    assert "\n" not in str(raised.value)


def test_what_kubernetes_injects_is_ignored() -> None:
    load(
        SERVICE_HOST="10.0.0.1",
        SERVICE_PORT="50051",
        SERVICE_PORT_GRPC="50051",
        PORT="tcp://10.0.0.1:50051",
        PORT_50051_TCP="tcp://10.0.0.1:50051",
        PORT_50051_TCP_PROTO="tcp",
        PORT_50051_TCP_PORT="50051",
        PORT_50051_TCP_ADDR="10.0.0.1",
        CANARY_SERVICE_HOST="10.0.0.2",
        CANARY_PORT="tcp://10.0.0.2:50051",
    )


def test_an_unknown_name_in_the_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('engine = "simulated"\nthraeds = 2\n')
    with pytest.raises(SettingsError, match=r"thraeds: unknown setting, did you mean threads\?$"):
        load_settings(file, environment={})
    file.write_text("engine = \n")
    with pytest.raises(SettingsError, match=r"server\.toml"):
        load_settings(file, environment={})


def test_secrets_are_hidden() -> None:
    shown = printable(load(HUB_TOKEN="hf_secret"))
    assert "hf_secret" not in shown
    assert json.loads(shown)["hub_token"] == "**********"


# The command line


def run(*arguments: str, **variables: Any) -> Any:
    return CliRunner().invoke(main, arguments, env={"MODEL_SERVER_ENGINE": None, **variables})


def test_print_config_shows_what_would_be_used() -> None:
    result = run(
        "serve", "--engine", "simulated", "--print-config", "--batch-tokens-target", "77",
        MODEL_SERVER_INPUTS_MAX="5",
    )  # fmt: skip
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert (shown["engine"], shown["batch_tokens_target"], shown["inputs_max"]) == (
        "simulated",
        77,
        5,
    )


@pytest.mark.parametrize("command", ["serve", "embed"])
def test_help_has_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"model-server {command} " in result.stdout.partition("Examples:")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "model is required"),
        (["serve", "--model", "/no/such/folder"], "no such folder"),
        (["embed", "--server", "127.0.0.1:1", "--timeout-s", "5", "a"], "127.0.0.1:1: UNAVAILABLE"),
        (["embed"], "no texts"),
        (["embed", "\udcff"], "is not UTF-8"),
    ],
)
def test_failures_are_one_clear_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("seconds", ["nan", "inf", "0"])
def test_a_timeout_is_a_time(seconds: str) -> None:
    result = run("embed", "--timeout-s", seconds, "a")
    assert result.exit_code == 2
    assert "Invalid value for '--timeout-s'" in result.stderr


def test_lines_that_are_no_text_are_named() -> None:
    result = CliRunner().invoke(main, ["embed"], input=b"one\ntw\xff\n")
    assert result.exit_code == 1
    assert result.stderr == "Error: line 2 is not UTF-8: invalid start byte\n"


# Telemetry


def test_every_metric_of_the_table_is_exposed_with_its_reason() -> None:
    metrics = Metrics()
    server = TelemetryServer(metrics.registry, lambda: None)
    text = server.answer("GET /metrics HTTP/1.1")[2].decode()
    for name, declared in TABLE.items():
        assert f"# HELP {name} {declared.why}" in text
        assert name.endswith(("_total", "_seconds", "_ratio", "_tokens", "_inputs")) or (
            declared.kind.__name__ == "Gauge"
        )


def test_probes_and_other_requests() -> None:
    missing: list[str | None] = [None]
    server = TelemetryServer(CollectorRegistry(), lambda: missing[0])
    assert server.answer("GET /readyz HTTP/1.1")[0] == 200
    missing[0] = "the server is loading"
    status, _, body = server.answer("GET /readyz?verbose HTTP/1.1")
    assert (status, body) == (503, b"the server is loading\n")
    assert server.answer("GET /livez HTTP/1.1")[0] == 200
    assert server.answer("POST /metrics HTTP/1.1")[0] == 405
    assert server.answer("nonsense")[0] == 405


async def test_a_head_without_end_is_dropped_in_silence() -> None:
    loop = asyncio.get_running_loop()
    complaints: list[object] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    server = TelemetryServer(CollectorRegistry(), lambda: None)
    port = await server.listen("127.0.0.1:0")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 4 * HEADER_BYTES_MAX)
    with contextlib.suppress(ConnectionError):  # what it did not read makes it a reset
        assert await reader.read() == b""
    writer.close()
    await server.close()
    assert complaints == []
