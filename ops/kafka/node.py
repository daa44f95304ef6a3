"""One real Apache Kafka node on the loopback interface, for tests and the demo.

Owns: the jars (fetched once by Maven into a cache folder, keyed by the pom), the node's data folder
and its process. Invariants: a `KafkaNode` that was stopped, killed or left behind by a dead owner
leaves no process (each start kills such leftovers first); a data folder has one living owner, by a
lock that dies with it; a restart keeps ports and data. Needs Java 17 and Maven on the PATH. Must
not know anything of the aggregator.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

HERE = Path(__file__).resolve().parent
CACHE_DIR = HERE.parents[1] / ".cache" / "kafka"
READY_LINE = "Kafka Server started"
JVM_OPTIONS = ("-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""A quick start counts for more than peak throughput here."""
PORTS_FREE_S = 10.0
"""How long what was killed may take to give its ports back."""
LOCK_NAME = "owner.lock"
LOOK_S = 0.05
"""How late the node's end, or a wish to stop, may be noticed."""


class KafkaUnavailableError(RuntimeError):
    """Java, Maven or the jars are missing, another node is in the way, or this one did not start.

    Says what to do.
    """


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """How to run a node.

    `data_dir` None: a temporary folder, removed by `stop`. `fresh`: what it holds of topics and
    records is forgotten at the first start. Ports 0: free ones, then kept for the node's life.
    `overrides` are server properties that win over `server.properties`.
    """

    cache_dir: Path = CACHE_DIR
    data_dir: Path | None = None
    fresh: bool = False
    port: int = 0
    controller_port: int = 0
    heap_mib: int = 512
    start_timeout_s: float = 180.0
    stop_timeout_s: float = 20.0
    overrides: tuple[tuple[str, str], ...] = ()


def fetch_jars(cache_dir: Path = CACHE_DIR) -> Path:
    """Return the folder with the jars of `pom.xml`, fetching them when they are not there yet.

    Safe against parallel callers. Raises `KafkaUnavailableError`.
    """
    pom = HERE / "pom.xml"
    folder = cache_dir / f"jars-{hashlib.sha256(pom.read_bytes()).hexdigest()[:12]}"
    if folder.is_dir():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        raise KafkaUnavailableError("Maven (mvn) is not on the PATH: it fetches Kafka's jars")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / "fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        part = Path(tempfile.mkdtemp(prefix="part-", dir=cache_dir))
        goal = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
        command = [maven, "-q", "-B", "-f", str(pom), goal, f"-DoutputDirectory={part}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(part)
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
            raise KafkaUnavailableError(f"Maven could not fetch Kafka's jars:\n{tail}")
        part.rename(folder)
    return folder


def free_port() -> int:
    """Return a TCP port of the loopback interface that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class KafkaNode:
    """A broker and controller in one process; a context manager that starts and stops it."""

    def __init__(self, options: NodeOptions | None = None) -> None:
        """Choose ports and folders; start nothing."""
        self.options = options or NodeOptions()
        self.port = self.options.port or free_port()
        self.controller_port = self.options.controller_port or free_port()
        self.bootstrap_servers = f"127.0.0.1:{self.port}"
        self._temporary = self.options.data_dir is None
        self.data_dir = self.options.data_dir or Path(tempfile.mkdtemp(prefix="kafka-node-"))
        self.log_path = self.data_dir / "node.log"
        self._fresh = self.options.fresh
        self._lock: TextIO | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start the node and wait until it serves."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it and remove a temporary data folder."""
        self.stop()

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.pid != 0

    @property
    def pid(self) -> int:
        """Of its process; 0: there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def start(self, stopping: Callable[[], bool] = _never) -> None:
        """Start, or start again with the same ports and data; returns when it serves.

        Returns sooner once `stopping()` is true: then `stop` is due. Raises
        `KafkaUnavailableError`, with the end of the log where there is one.
        """
        if self.running:
            return
        java = shutil.which("java")
        if java is None:
            raise KafkaUnavailableError("Java 17 (java) is not on the PATH")
        jars = fetch_jars(self.options.cache_dir)
        classpath = f"{jars}/*"
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._claim_data()
        killed = kill_leftovers(self.options.cache_dir, self.data_dir)
        self._check_ports(PORTS_FREE_S if killed else 0.0)
        if self._fresh:
            self._fresh = False
            shutil.rmtree(self.data_dir / "data", ignore_errors=True)
        properties = self._write_properties()
        if not (self.data_dir / "data" / "meta.properties").exists():
            # A formatted folder knows no ports: one is made per version and copied, since each
            # start of a Java machine is two seconds of CPU.
            template = jars.with_name(jars.name.replace("jars", "formatted"))
            if not template.is_dir():
                self._format(java, classpath, properties)
                _publish(self.data_dir / "data", template)
            shutil.copytree(template, self.data_dir / "data", dirs_exist_ok=True)
        if stopping():
            return
        seen_bytes = self.log_path.stat().st_size if self.log_path.exists() else 0
        command = [java, *JVM_OPTIONS, f"-Xmx{self.options.heap_mib}m", *self._log_options()]
        with (self.data_dir / "node.out").open("ab") as out:
            self._process = subprocess.Popen(
                [*command, "-cp", classpath, "kafka.Kafka", str(properties)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # A Ctrl-C in the terminal is for us: we then stop it in order.
                start_new_session=True,
            )
        _remember(self.options.cache_dir, self._process.pid, self.data_dir)
        self._wait_until_ready(seen_bytes, stopping)

    def stop(self) -> None:
        """Stop in order, by force after `stop_timeout_s`; idempotent."""
        process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(self.options.stop_timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._forget(process.pid)
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def kill(self) -> None:
        """Kill it as a crash would (SIGKILL); `start` brings it back with its data."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            self._forget(process.pid)

    def suspend(self) -> None:
        """Freeze its process (SIGSTOP), as a stalled machine would; `unfreeze` ends it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def unfreeze(self) -> None:
        """Let a suspended process go on (SIGCONT)."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def wait(self, stopping: Callable[[], bool] = _never) -> int | None:
        """Wait for the process to end by itself and return its exit status.

        None: there is no process, or `stopping()` was true before.
        """
        while self._process is not None and not stopping():
            try:
                return self._process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        return None

    def _claim_data(self) -> None:
        """Become the owner of the data folder; one whose owner died is free."""
        if self._lock is not None:
            return
        lock = (self.data_dir / LOCK_NAME).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise KafkaUnavailableError(
                f"a node that runs uses the data in {self.data_dir}: stop it, or choose another "
                'folder and port (make kafka ARGS="--port N --data-dir D")'
            ) from None
        self._lock = lock

    def _check_ports(self, wait_s: float) -> None:
        """Raise if one can't be had; what was killed needs a moment to give its ports back."""
        deadline = time.monotonic() + wait_s
        for port in (self.port, self.controller_port):
            while (error := _taken(port)) is not None:
                if time.monotonic() >= deadline:
                    raise KafkaUnavailableError(
                        f"127.0.0.1:{port} can't be had ({error.strerror}): stop what listens "
                        'there already, or choose another port (make kafka ARGS="--port N")'
                    ) from error
                time.sleep(0.05)

    def _forget(self, pid: int) -> None:
        self._process = None
        _record_path(self.options.cache_dir, pid).unlink(missing_ok=True)

    def _write_properties(self) -> Path:
        """Write the node's own server properties and return their path."""
        own = {
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},"
            f"CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.quorum.voters": f"1@127.0.0.1:{self.controller_port}",
            "log.dirs": str(self.data_dir / "data"),
            **dict(self.options.overrides),
        }
        path = self.data_dir / "server.properties"
        lines = [f"{key}={value}" for key, value in own.items()]
        # Of a key given twice, java.util.Properties keeps the last.
        path.write_text((HERE / "server.properties").read_text() + "\n".join(lines) + "\n")
        return path

    def _log_options(self) -> list[str]:
        config = HERE / "log4j2.properties"
        return [f"-Dlog4j2.configurationFile={config}", f"-Dnode.log={self.log_path}"]

    def _format(self, java: str, classpath: str, properties: Path) -> None:
        """Give the data folder a cluster id, as KRaft wants before the first start."""
        cluster_id = base64.urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")
        if cluster_id.startswith("-"):  # would read as an option
            cluster_id = "A" + cluster_id[1:]
        tool = ["kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)]
        done = subprocess.run(
            [java, *JVM_OPTIONS, *self._log_options(), "-cp", classpath, *tool],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise KafkaUnavailableError(f"Kafka's storage tool failed:\n{done.stderr[-2000:]}")

    def _wait_until_ready(self, seen_bytes: int, stopping: Callable[[], bool]) -> None:
        """Wait for the line that the server writes once it serves."""
        deadline = time.monotonic() + self.options.start_timeout_s
        while time.monotonic() < deadline:
            if stopping():
                return
            if self.log_path.exists():
                with self.log_path.open("rb") as log:
                    log.seek(seen_bytes)
                    if READY_LINE.encode() in log.read():
                        return
            if not self.running:
                break
            time.sleep(LOOK_S)
        tail = self._log_tail()
        self.kill()
        raise KafkaUnavailableError(f"Kafka did not start; the end of its log:\n{tail}")

    def _log_tail(self) -> str:
        paths = [self.data_dir / "node.out", self.log_path]
        lines = [line for p in paths if p.exists() for line in p.read_text().splitlines()[-15:]]
        return "\n".join(lines)


def kill_leftovers(cache_dir: Path, data_dir: Path | None = None) -> list[int]:
    """Kill nodes whose owner died without stopping them, and any that uses `data_dir`.

    Returns their process ids. Temporary data folders of theirs are removed.
    """
    killed = []
    for record in sorted((cache_dir / "running").glob("*")):
        try:
            owner, folder = record.read_text().split("\n", 1)
        except (FileNotFoundError, ValueError):  # another process has just cleaned it up
            continue
        pid = int(record.name)
        if _alive(int(owner)) and folder != str(data_dir):
            continue
        # The number may belong to somebody else by now; the command line names our folder.
        if folder in _command_line(pid):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            while _alive(pid) and folder in _command_line(pid):
                time.sleep(0.02)
        if Path(folder).name.startswith("kafka-node-") and folder != str(data_dir):
            shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)
    return killed


def _taken(port: int) -> OSError | None:
    """Why a node can't listen there; None: it can."""
    with socket.socket() as probe:
        # As the node will: connections that are still closing are in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error
    return None


def _publish(folder: Path, target: Path) -> None:
    """Copy a folder to where others may look for it at any moment; the first to do so wins."""
    part = Path(tempfile.mkdtemp(prefix="part-", dir=target.parent))
    shutil.copytree(folder, part, dirs_exist_ok=True)
    try:
        part.rename(target)
    except OSError:
        shutil.rmtree(part)
        if not target.is_dir():
            raise


def _record_path(cache_dir: Path, pid: int) -> Path:
    return cache_dir / "running" / str(pid)


def _remember(cache_dir: Path, pid: int, data_dir: Path) -> None:
    path = _record_path(cache_dir, pid)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{os.getpid()}\n{data_dir}")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _command_line(pid: int) -> str:
    """Return a process's command line; empty when it is gone or a zombie."""
    command = ["ps", "-ww", "-o", "args=", "-p", str(pid)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
