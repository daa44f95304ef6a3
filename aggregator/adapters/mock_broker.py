"""librdkafka's mock Kafka cluster, in a process of its own: the demo's and the tests' broker.

Owns: the child process and the small protocol on its standard streams (JSON lines). Invariants: the
child says its bootstrap address first, and ends when its standard input closes, so that it can't
outlive its owner. Run by hand: `python -m aggregator.adapters.mock_broker --topics queries:4`.
Must not know anything of queries, settings or the aggregator's own Kafka client.

Limits, which `LIMITS` says to people too: it keeps about 5 MB per partition and silently drops
older records, unread ones included; nothing is kept over a restart; topics can't be created or
described through the admin client; transactions are empty shells. It is for trying things out,
never for truth about Kafka.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

LIMITS = (
    "mock Kafka cluster: keeps about 5 MB per partition and silently drops older records; "
    "nothing survives its end; no topic settings; transactions are not real"
)

_PRODUCER_TYPE = 0  # rd_kafka_type_t.RD_KAFKA_PRODUCER
_ERROR_BYTES = 512


class MockBrokerError(RuntimeError):
    """The mock cluster could not be started, or refused a command."""


class MockBroker:
    """The child process with the mock cluster; a context manager.

    `topics` maps names to partition counts. Topics that clients ask for later come to be with four
    partitions (librdkafka has it so).
    """

    def __init__(self, topics: dict[str, int] | None = None, *, brokers: int = 1) -> None:
        """Start nothing yet."""
        pairs = [f"{name}:{count}" for name, count in (topics or {}).items()]
        self._command = [sys.executable, "-m", "aggregator.adapters.mock_broker"]
        self._command += ["--brokers", str(brokers), "--topics", ",".join(pairs), "--quiet"]
        self._process: subprocess.Popen[str] | None = None
        self.bootstrap_servers = ""

    def __enter__(self) -> Self:
        """Start the child and wait for its address."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the child."""
        self.close()

    def start(self) -> None:
        """Start the child; returns when it listens. Raises `MockBrokerError`."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A Ctrl-C in the terminal is for the owner, which then ends the child.
            start_new_session=True,
        )
        self.bootstrap_servers = self._read()["bootstrap_servers"]

    def close(self) -> None:
        """End the child; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def create_topic(self, name: str, partitions: int) -> None:
        """Make a topic."""
        self._ask("create_topic", name, partitions)

    def push_errors(self, api_key: int, errors: Sequence[int]) -> None:
        """Let the next requests of this API key (Kafka's protocol number) fail with these codes.

        They stay queued until requests use them up: call `clear_errors` when done.
        """
        self._ask("push_errors", api_key, list(errors))

    def clear_errors(self, api_key: int) -> None:
        """Forget the queued errors of this API key."""
        self._ask("clear_errors", api_key)

    def set_broker_up(self, broker_id: int, up: bool) -> None:
        """Take a broker (ids from 1) down: it closes its connections and refuses new ones."""
        self._ask("set_broker_up", broker_id, up)

    def set_round_trip_ms(self, broker_id: int, round_trip_ms: int) -> None:
        """Delay this broker's responses."""
        self._ask("set_round_trip_ms", broker_id, round_trip_ms)

    def set_coordinator(self, group_id: str, broker_id: int) -> None:
        """Make this broker the group's coordinator."""
        self._ask("set_coordinator", group_id, broker_id)

    def _ask(self, command: str, *arguments: object) -> None:
        """Have the child carry a command out. Raises `MockBrokerError`."""
        if self._process is None or self._process.stdin is None:
            raise MockBrokerError("the mock cluster is not running")
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        reply = self._read()
        if reply["error"]:
            raise MockBrokerError(f"{command}: {reply['error']}")

    def _read(self) -> dict[str, Any]:
        if self._process is None or self._process.stdout is None:
            raise MockBrokerError("the mock cluster is not running")
        line = self._process.stdout.readline()
        if not line:
            raise MockBrokerError("the mock cluster's process ended")
        reply: dict[str, Any] = json.loads(line)
        return reply


def find_librdkafka() -> str:
    """Return the path of the librdkafka that confluent-kafka brings along, else the system's."""
    spec = importlib.util.find_spec("confluent_kafka")
    if spec is not None and spec.origin is not None:
        package = Path(spec.origin).parent
        # Where auditwheel (Linux) and delocate (macOS) put a wheel's libraries.
        for folder in (package.parent / "confluent_kafka.libs", package / ".dylibs"):
            for path in sorted(folder.glob("librdkafka*")):
                return str(path)
    system = ctypes.util.find_library("rdkafka")
    if system is None:
        raise MockBrokerError("librdkafka was not found: install the extra 'aggregator'")
    return system


class _Cluster:
    """The cluster in this process, through librdkafka's `rd_kafka_mock_*` functions.

    Source: rdkafka_mock.h of librdkafka 2.16 (public but test-only API).
    """

    def __init__(self, brokers: int) -> None:
        """Make the cluster and the client instance that its threads belong to."""
        self._library = library = ctypes.CDLL(find_librdkafka())
        for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
            getattr(library, name).restype = ctypes.c_void_p
        library.rd_kafka_err2str.restype = ctypes.c_char_p
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        config = ctypes.c_void_p(library.rd_kafka_conf_new())
        # Its remarks about clients that come and go would only worry people.
        library.rd_kafka_conf_set(config, b"log_level", b"3", error, ctypes.c_size_t(_ERROR_BYTES))
        client = library.rd_kafka_new(_PRODUCER_TYPE, config, error, ctypes.c_size_t(_ERROR_BYTES))
        if not client:
            raise MockBrokerError(error.value.decode())
        pointer = library.rd_kafka_mock_cluster_new(ctypes.c_void_p(client), brokers)
        if not pointer:
            raise MockBrokerError("librdkafka made no mock cluster")
        self._cluster = ctypes.c_void_p(pointer)
        # Not three seconds for a group that a person waits for.
        library.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, ctypes.c_int32(0))
        library.rd_kafka_mock_set_group_consumer_heartbeat_interval_ms(self._cluster, 500)
        library.rd_kafka_mock_set_group_consumer_session_timeout_ms(self._cluster, 6_000)
        # Without one, admin requests wait for it until they time out.
        library.rd_kafka_mock_set_controller_id(self._cluster, ctypes.c_int32(1))
        bootstraps = library.rd_kafka_mock_cluster_bootstraps(self._cluster)
        self.bootstrap_servers = bootstraps.decode()

    def create_topic(self, name: str, partitions: int) -> None:
        replicas = 1
        self._check(
            self._library.rd_kafka_mock_topic_create(
                self._cluster, name.encode(), partitions, replicas
            )
        )

    def push_errors(self, api_key: int, errors: list[int]) -> None:
        array = (ctypes.c_int * len(errors))(*errors)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, ctypes.c_int16(api_key), ctypes.c_size_t(len(errors)), array
        )

    def clear_errors(self, api_key: int) -> None:
        self._library.rd_kafka_mock_clear_request_errors(self._cluster, ctypes.c_int16(api_key))

    def set_broker_up(self, broker_id: int, up: bool) -> None:
        name = f"rd_kafka_mock_broker_set_{'up' if up else 'down'}"
        self._check(getattr(self._library, name)(self._cluster, ctypes.c_int32(broker_id)))

    def set_round_trip_ms(self, broker_id: int, round_trip_ms: int) -> None:
        self._check(
            self._library.rd_kafka_mock_broker_set_rtt(
                self._cluster, ctypes.c_int32(broker_id), round_trip_ms
            )
        )

    def set_coordinator(self, group_id: str, broker_id: int) -> None:
        self._check(
            self._library.rd_kafka_mock_coordinator_set(
                self._cluster, b"group", group_id.encode(), ctypes.c_int32(broker_id)
            )
        )

    def _check(self, code: int) -> None:
        if code != 0:
            raise MockBrokerError(self._library.rd_kafka_err2str(code).decode())


def _serve(cluster: _Cluster) -> None:
    """Carry out commands from standard input until it closes."""
    commands: dict[str, Callable[..., None]] = {
        "create_topic": cluster.create_topic,
        "push_errors": cluster.push_errors,
        "clear_errors": cluster.clear_errors,
        "set_broker_up": cluster.set_broker_up,
        "set_round_trip_ms": cluster.set_round_trip_ms,
        "set_coordinator": cluster.set_coordinator,
    }
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        error = ""
        try:
            commands[name](*arguments)
        except (MockBrokerError, KeyError, TypeError) as caught:
            error = str(caught) or repr(caught)
        print(json.dumps({"error": error}), flush=True)  # noqa: T201 - the protocol


def _parse_topics(text: str) -> dict[str, int]:
    """Read `queries:4,results:4`."""
    topics = {}
    for pair in filter(None, text.split(",")):
        name, _, count = pair.rpartition(":")
        if not name or not count.isdecimal() or int(count) < 1:
            raise argparse.ArgumentTypeError(f"{pair!r} is not NAME:PARTITIONS")
        topics[name] = int(count)
    return topics


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> None:
    """Run the mock cluster until standard input closes or SIGTERM comes."""
    parser = argparse.ArgumentParser(
        prog="python -m aggregator.adapters.mock_broker",
        description=LIMITS,
        epilog="Example: ... --topics queries:4,results:4,queries.dlq:1",
    )
    parser.add_argument("--topics", type=_parse_topics, default={}, help="NAME:PARTITIONS,...")
    parser.add_argument("--brokers", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="do not state the limits")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    try:
        cluster = _Cluster(arguments.brokers)
        for name, partitions in arguments.topics.items():
            cluster.create_topic(name, partitions)
    except MockBrokerError as error:
        raise SystemExit(str(error)) from error
    if not arguments.quiet:
        print(LIMITS, file=sys.stderr)  # noqa: T201 - said to people
    address = {"bootstrap_servers": cluster.bootstrap_servers}
    print(json.dumps(address), flush=True)  # noqa: T201 - the protocol
    _serve(cluster)


if __name__ == "__main__":
    main()
