"""docker-compose.yml as data: loaded and validated by the reference loader, in the order of start.

Owns the reading only. Needs Go, which runs `loader/main.go` (the library that docker compose itself
uses, pinned in `loader/go.mod`). What the file must say is in tests/integration/test_compose.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"
UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class ComposeError(RuntimeError):
    """The compose file is wrong, or what runs it failed; says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """How an image is built: paths are absolute."""

    context: Path
    dockerfile: Path
    arguments: Mapping[str, str]

    def instruction(self, name: str) -> tuple[str, ...]:
        """The last ENTRYPOINT or CMD of the Dockerfile, which must have the form of a JSON list."""
        pattern = re.compile(rf"^{name} (\[.*\])$", re.MULTILINE)
        found = pattern.findall(self.dockerfile.read_text(encoding="utf-8"))
        return tuple(json.loads(found[-1])) if found else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A health check: a command and how often it is tried, in seconds."""

    command: tuple[str, ...]
    interval_s: float
    timeout_s: float
    start_period_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One container, as the loader normalized it."""

    name: str
    image: str
    build: Build | None
    command: tuple[str, ...]
    environment: Mapping[str, str]
    ports: tuple[tuple[str, int, int], ...]
    """Host address, host port, container port."""
    volumes: tuple[tuple[str, str], ...]
    """Named volume, path."""
    conditions: Mapping[str, str]
    """By service: `service_healthy`, `service_completed_successfully` or `service_started`."""
    health: Health | None
    security: tuple[str, ...]
    stop_grace_s: float
    restart: str
    """The policy; `no` where none is said."""
    one_shot: bool
    """Another service waits for its end."""

    @property
    def process(self) -> tuple[str, ...]:
        """What runs in the container of an image built here: ENTRYPOINT, then command or CMD."""
        if self.build is None:
            return self.command
        return self.build.instruction("ENTRYPOINT") + (
            self.command or self.build.instruction("CMD")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """All services by name, each after those that it waits for."""

    name: str
    services: Mapping[str, Service]
    volumes: tuple[str, ...]


def load(environment: Mapping[str, str] | None = None, file: Path = COMPOSE_FILE) -> Project:
    """Load a compose file with `environment` over this process's; raises `ComposeError`."""
    try:
        done = subprocess.run(
            ["go", "run", ".", str(file)],
            cwd=Path(__file__).resolve().parent / "loader",
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ComposeError("Go is not on the PATH: it runs the compose file's loader") from error
    if done.returncode != 0:
        raise ComposeError(f"{file.name} is refused: {done.stderr.strip()}")
    raw = json.loads(done.stdout)
    services: dict[str, Any] = raw["services"]
    awaited = {
        name
        for service in services.values()
        for name, how in (service.get("depends_on") or {}).items()
        if how["condition"] == "service_completed_successfully"
    }
    read = {
        name: _service(name, service, one_shot=name in awaited)
        for name, service in services.items()
    }
    return Project(
        name=raw["name"],
        services={name: read[name] for name in _start_order(read)},
        volumes=tuple(raw.get("volumes") or {}),
    )


def _service(name: str, raw: Mapping[str, Any], *, one_shot: bool) -> Service:
    build = raw.get("build")
    check = raw.get("healthcheck")
    return Service(
        name=name,
        image=raw["image"],
        build=None
        if build is None
        else Build(
            context=Path(build["context"]),
            dockerfile=Path(build["context"]) / build["dockerfile"],
            arguments=build.get("args") or {},
        ),
        command=tuple(raw["command"] or ()),
        environment=raw.get("environment") or {},
        ports=tuple(
            (port.get("host_ip", "0.0.0.0"), int(port["published"]), port["target"])
            for port in raw.get("ports") or ()
        ),
        volumes=tuple((volume["source"], volume["target"]) for volume in raw.get("volumes") or ()),
        conditions={
            other: how["condition"] for other, how in (raw.get("depends_on") or {}).items()
        },
        health=None
        if check is None
        else Health(
            # CMD, then the command; a shell's command line is not used here.
            command=tuple(check["test"][1:]),
            interval_s=seconds(check["interval"]),
            timeout_s=seconds(check["timeout"]),
            start_period_s=seconds(check["start_period"]),
        ),
        security=tuple(raw.get("security_opt") or ()),
        stop_grace_s=seconds(raw.get("stop_grace_period", "10s")),
        restart=raw.get("restart", "no"),
        one_shot=one_shot,
    )


def seconds(duration: str) -> float:
    """Read a Go duration such as `1m30s`."""
    parts = re.findall(r"([0-9.]+)(ms|h|m|s)", duration)
    return sum(float(number) * UNIT_S[unit] for number, unit in parts)


def _start_order(services: Mapping[str, Service]) -> Iterator[str]:
    """Each name after those it depends on; the loader has refused cycles."""
    done: set[str] = set()
    while len(done) < len(services):
        for name, service in services.items():
            if name not in done and done.issuperset(service.conditions):
                done.add(name)
                yield name
