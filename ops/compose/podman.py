"""Build and run the compose project with buildah and podman, on stand-ins for the public images.

For machines that have neither a Docker engine nor a way to an image registry. Owns: the stand-in
images (Debian's packages under the names of `FROM` and `image:`; Kafka from its Maven artifacts),
the containers, the network, the volumes; all are removed by `down`. The Debian base, as a tar file,
and uv's downloads stay in .cache/standins. Needs root and Debian's `PACKAGES`; installs none.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ops.compose.project import ROOT, ComposeError, Health, Project, Service
from ops.kafka.node import fetch_jars

PACKAGES = ("buildah", "podman", "runc", "netavark", "aardvark-dns", "iptables", "debootstrap")
STANDINS = Path(__file__).resolve().parent / "standins"
CACHE = ROOT / ".cache" / "standins"
# crun and podman's default limits are refused in a container without privileges.
PODMAN = ("podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs")
LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")
START_S_MAX = 300
"""Until a service is healthy: generous, as other work may share the machine."""
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
"""Copied from this machine, which may reach package registries by way of a proxy of its own."""


def missing_packages() -> list[str]:
    """The Debian packages whose program is not here."""
    programs = {name: name for name in PACKAGES}
    programs |= {
        "netavark": "/usr/lib/podman/netavark",
        "aardvark-dns": "/usr/lib/podman/aardvark-dns",
    }
    return [package for package, program in programs.items() if shutil.which(program) is None]


class PodmanStack:
    """The project in podman's containers."""

    def __init__(self, project: Project) -> None:
        """Nothing is started yet."""
        self._project = project
        self._network = f"{project.name}_default"
        self._images_before: set[str] = set()

    def build(self) -> None:
        """Make the stand-ins and build the project's images."""
        self._images_before = _images()
        built = {s.image: s.build for s in self._project.services.values() if s.build is not None}
        bases = {
            base
            for build in built.values()
            for base in re.findall(r"^FROM (\S+:\S+)", build.dockerfile.read_text(), re.MULTILINE)
        }
        for base in sorted(bases):
            self._import_debian(base)
        for service in self._project.services.values():
            if service.build is None:
                self._build_kafka(service.image)
        for image, build in built.items():
            # PyTorch's own index is not among the registries that such a machine reaches.
            arguments = {**build.arguments, "TORCH_BACKEND": ""}
            self._buildah(image, build.dockerfile, build.context, arguments)

    def up(self) -> None:
        """Start each service when what it depends on is healthy or has ended well."""
        _run(*PODMAN, "network", "create", self._network)
        for volume in self._project.volumes:
            _run(*PODMAN, "volume", "create", f"{self._project.name}_{volume}")
        for service in self._project.services.values():
            self._start(service)
            if service.one_shot:
                self._wait_for_end(service)
            elif service.health is not None:
                self._wait_until_healthy(service, service.health)

    def logs(self) -> str:
        """The last lines of each container."""
        texts = []
        for name in self._project.services:
            done = _run(*PODMAN, "logs", "--tail", "40", self._container(name), check=False)
            texts.append(f"--- {name}\n{done.stdout}{done.stderr}")
        return "\n".join(texts)

    def stop(self) -> Mapping[str, int]:
        """Stop in reverse order, each within its grace; return the exit statuses by service."""
        statuses = {}
        for service in reversed(list(self._project.services.values())):
            container = self._container(service.name)
            _run(*PODMAN, "stop", "--time", f"{service.stop_grace_s:.0f}", container)
            done = _run(*PODMAN, "inspect", "--format", "{{.State.ExitCode}}", container)
            statuses[service.name] = int(done.stdout)
        return statuses

    def down(self, *, images: bool = True) -> None:
        """Remove containers, network, volumes and what `build` made; not there is no error."""
        containers = [self._container(name) for name in reversed(list(self._project.services))]
        _run(*PODMAN, "rm", "--force", "--volumes", *containers, check=False)
        _run(*PODMAN, "network", "rm", "--force", self._network, check=False)
        volumes = [f"{self._project.name}_{volume}" for volume in self._project.volumes]
        _run(*PODMAN, "volume", "rm", "--force", *volumes, check=False)
        made = _images() - self._images_before
        if images and made:
            _run(*PODMAN, "rmi", "--force", *made, check=False)

    def _container(self, service: str) -> str:
        return f"{self._project.name}-{service}-1"

    def _start(self, service: Service) -> None:
        options = ["--network-alias", service.name, "--network", self._network, *LIMITS]
        for name, value in service.environment.items():
            options += ["--env", f"{name}={value}"]
        for host, published, target in service.ports:
            options += ["--publish", f"{host}:{published}:{target}"]
        for volume, path in service.volumes:
            options += ["--volume", f"{self._project.name}_{volume}:{path}"]
        for option in service.security:
            # podman writes it without a value.
            options += ["--security-opt", option.removesuffix(":true")]
        container = self._container(service.name)
        _run(
            *PODMAN,
            "run",
            "--detach",
            "--name",
            container,
            *options,
            service.image,
            *service.command,
        )

    def _wait_for_end(self, service: Service) -> None:
        status = _run(*PODMAN, "wait", self._container(service.name)).stdout.strip()
        if status != "0":
            raise ComposeError(f"{service.name} ended with status {status}\n{self.logs()}")

    def _wait_until_healthy(self, service: Service, health: Health) -> None:
        container = self._container(service.name)
        deadline = time.monotonic() + START_S_MAX
        while True:
            done = _run(*PODMAN, "exec", container, *health.command, check=False)
            if done.returncode == 0:
                return
            state = _run(*PODMAN, "inspect", "--format", "{{.State.Running}}", container).stdout
            if state.strip() != "true" or time.monotonic() > deadline:
                raise ComposeError(f"{service.name} is not healthy: {done.stderr}\n{self.logs()}")
            time.sleep(1)

    def _import_debian(self, image: str) -> None:
        """A Debian with Python under an official image's name."""
        tar = CACHE / "debian.tar"
        if not tar.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory() as folder:
                include = "--include=python3,python3-venv,ca-certificates"
                _run("debootstrap", "--variant=minbase", include, "bookworm", folder)
                shutil.copyfile(CA_BUNDLE, folder + str(CA_BUNDLE))
                _run("tar", "-C", folder, "-cf", f"{tar}.part", ".")
            Path(f"{tar}.part").rename(tar)
        options = [f"--change=ENV {name}={CA_BUNDLE}" for name in ("SSL_CERT_FILE", "PIP_CERT")]
        _run(*PODMAN, "import", *options, str(tar), f"docker.io/library/{image}")

    def _build_kafka(self, image: str) -> None:
        """The same Kafka under the official image's name."""
        with tempfile.TemporaryDirectory() as folder:
            context = Path(folder)
            shutil.copytree(fetch_jars(), context / "libs")
            shutil.copy(STANDINS / "kafka-run.sh", context)
            (context / "kafka-run.sh").chmod(0o755)
            self._buildah(f"docker.io/{image}", STANDINS / "kafka.Dockerfile", context, {})

    def _buildah(
        self, image: str, dockerfile: Path, context: Path, arguments: Mapping[str, str]
    ) -> None:
        options = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        downloads = CACHE / "tmp"
        downloads.mkdir(parents=True, exist_ok=True)
        _run(
            # Where buildah keeps the cache mounts of RUN.
            *("env", f"TMPDIR={downloads}"),
            *("buildah", "bud", "--isolation", "chroot", "--layers", "--pull-never"),
            *("--tag", image, "--file", str(dockerfile), *options, str(context)),
        )


def _images() -> set[str]:
    """The ids of all images, those between layers included."""
    return set(_run(*PODMAN, "images", "--all", "--quiet", "--no-trunc").stdout.split())


def _run(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-25:])
        raise ComposeError(f"{_shown(command)} ended with status {done.returncode}:\n{tail}")
    return done


def _shown(command: Sequence[str]) -> str:
    return " ".join(command[:12])
