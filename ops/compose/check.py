"""`make test-compose`: build the images, bring the whole stack up, check vectors, take it down.

With Docker and its compose plugin where there is a working engine; else with buildah and podman on
stand-ins for the public base images (see podman.py). Queries go in from outside the containers, by
`aggregator send` on the published port. Exits with 1 and one clear reason when anything is wrong.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import Protocol

from ops.compose import podman, vectors
from ops.compose.project import COMPOSE_FILE, ComposeError, Project, load


class Stack(Protocol):
    """The project on some container engine."""

    def build(self) -> None:
        """Build the images."""

    def up(self) -> None:
        """Start all, in order, until healthy."""

    def stop(self) -> Mapping[str, int]:
        """Stop all; exit statuses by service."""

    def down(self, *, images: bool = True) -> None:
        """Remove all that was made; what is not there is no error."""


class DockerStack:
    """The project in Docker's containers: docker compose does it all."""

    def __init__(self, project: Project) -> None:
        """Nothing is started yet."""
        self._project = project

    def build(self) -> None:
        """Build the images."""
        self._compose("build")

    def up(self) -> None:
        """Start all; `--wait` returns when every service is healthy or has ended well."""
        self._compose("up", "--detach", "--wait")

    def stop(self) -> Mapping[str, int]:
        """Stop all within their grace."""
        self._compose("stop")
        listed = self._compose("ps", "--all", "--format", "{{.Service}} {{.ExitCode}}")
        return {line.split()[0]: int(line.split()[1]) for line in listed.splitlines()}

    def down(self, *, images: bool = True) -> None:
        """Remove containers, network and volumes; images stay, `make up` runs the same."""
        del images
        self._compose("down", "--volumes", "--timeout", "30")

    def _compose(self, *arguments: str) -> str:
        command = ["docker", "compose", "--project-name", self._project.name]
        command += ["--file", str(COMPOSE_FILE), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ComposeError(f"docker compose {arguments[0]} failed:\n{done.stderr[-4000:]}")
        return done.stdout


def docker_works() -> bool:
    """Whether a Docker engine answers, with the compose plugin."""
    try:
        for arguments in (("info",), ("compose", "version")):
            subprocess.run(["docker", *arguments], capture_output=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def choose(project: Project) -> Stack:
    """Docker where it works, else podman; raises `ComposeError` when neither can."""
    if docker_works():
        return DockerStack(project)
    if missing := podman.missing_packages():
        raise ComposeError(
            "No Docker engine answers, and for podman these Debian packages are missing: "
            f"apt-get install --no-install-recommends {' '.join(missing)}"
        )
    return podman.PodmanStack(project)


def check(project: Project, stack: Stack) -> None:
    """Build, start, ask, stop; raises `ComposeError` for whatever is not as it should be."""
    started = time.monotonic()

    def step(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    step(f"building the images ({type(stack).__name__})")
    stack.build()
    step("starting " + ", ".join(project.services))
    stack.up()
    host, port, _ = project.services["kafka"].ports[0]
    step(f"sending {len(vectors.TEXTS)} queries by {host}:{port}")
    cosine = vectors.cosine_min(vectors.send(f"{host}:{port}"))
    step(f"smallest cosine to the model's own vectors: {cosine:.6f}")
    if not cosine >= vectors.COSINE_MIN:
        raise ComposeError(f"a cosine of {cosine:.6f} is below {vectors.COSINE_MIN}")
    statuses = stack.stop()
    step("stopped: " + ", ".join(f"{name} {status}" for name, status in statuses.items()))
    for name in ("topics", "aggregator", "model-server"):
        if statuses[name] != 0:
            raise ComposeError(f"{name} ended with status {statuses[name]}, not 0")


def main() -> int:
    """Run the check; remove everything in any case."""
    parser = argparse.ArgumentParser(prog="python -m ops.compose.check", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the stack as it is at the end")
    parser.add_argument("--keep-images", action="store_true", help="podman: a faster next run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    stack: Stack | None = None
    try:
        project = load()
        # Of its own, so that a stack that somebody works with is left alone.
        project = replace(project, name=f"{project.name}-check")
        stack = choose(project)
        # What an earlier run that was killed may have left.
        stack.down(images=False)
        check(project, stack)
    except ComposeError as error:
        print(f"test-compose: {error}", file=sys.stderr)
        return 1
    finally:
        if stack is not None and not arguments.keep:
            stack.down(images=not arguments.keep_images)
    print("test-compose: the whole stack works")
    return 0


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
