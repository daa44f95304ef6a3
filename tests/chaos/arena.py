"""What is shaken: a real broker, model servers, and groups of aggregators, all processes.

An `Arena` owns the broker and the model servers, which all groups share. Invariant: leaving it ends
every process that was started, frozen ones included. What to do to them and when is `acts`'
business.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import TracebackType
from typing import Any, Self

from ops.kafka.node import KafkaNode, NodeOptions
from tests.chaos.fleets import MODEL, SESSION_MS, Fleet, FleetOptions
from tests.chaos.queries import FAULTS, TOKENS_MAX
from tests.chaos.report import say
from tests.harness.accounts import merge_counts
from tests.harness.processes import CommandProcess, free_port, simulated_server

SERVERS = 2
SIMULATED = {
    "fixed_ms": 10,
    "slope_us_per_token": 10,
    "dimensions": 16,
    "input_tokens_max": TOKENS_MAX,
    "faults": FAULTS,
}
BROKER_SESSION_MS = 9_000
"""Kafka's default: after so long without a heartbeat its partitions have no leader."""
FREEZE_BROKER_S_MAX = 0.75 * BROKER_SESSION_MS / 1_000
"""Of the broker of an arena with transactions: Kafka (4.4.0) takes a partition without a leader
for deleted and does not end a transaction there, so a commit could be lost on this single node
whatever its client does; with replicas there is another leader."""
BROKER = (("group.consumer.session.timeout.ms", str(SESSION_MS)),)
SOON_BACK = (("broker.session.timeout.ms", "2000"), ("broker.heartbeat.interval.ms", "300"))
"""Where there are no transactions: a killed broker is back sooner."""
MARKERS_DROPPED = "likely deleted already and hence can be skipped"
"""In the broker's log: it did not end a transaction in some partitions."""


class Server:
    """A model server with the simulated engine, on one port over its lives."""

    def __init__(self) -> None:
        """Start it and wait until it serves."""
        self.port = free_port()
        self.process: CommandProcess | None = None
        self.start()

    def start(self) -> None:
        """Start it on its port; returns when it serves."""
        self.process = simulated_server(
            self.port, model=MODEL, MODEL_SERVER_SIMULATED=json.dumps(SIMULATED)
        )

    @property
    def pid(self) -> int:
        """Of the process, 0: none runs."""
        running = self.process is not None and self.process.running
        return self.process.process.pid if running and self.process is not None else 0

    def end(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            with self.process:
                pass
            self.process = None


class Arena:
    """See the module; a context manager."""

    def __init__(self, fleets: Sequence[FleetOptions]) -> None:
        """Start nothing yet."""
        self._options = fleets
        self.transactions = any(fleet.delivery == "exactly_once" for fleet in fleets)
        overrides = BROKER if self.transactions else BROKER + SOON_BACK
        self.broker = KafkaNode(NodeOptions(overrides=overrides))
        self.servers: list[Server] = []
        self.fleets: list[Fleet] = []
        self.violations: list[str] = []
        self.engine_kills = 0
        self._lock = threading.Lock()
        """Of the model servers: one at a time is killed, so that one always serves soon."""

    def __enter__(self) -> Self:
        try:
            self.broker.start()
            self.servers = [Server() for _ in range(SERVERS)]
            for options in self._options:
                self.fleets.append(Fleet(options, self))
            self.everywhere(Fleet.wait_until_stable)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything, whatever fails on the way."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.broker.stop)
            stack.callback(self.broker.kill)
            for server in self.servers:
                stack.callback(server.end)
            for fleet in self.fleets:
                stack.callback(fleet.close)

    def everywhere(self, act: Callable[[Fleet], object]) -> None:
        """Do something with all groups at the same time; raises what the first to fail raised."""
        with ThreadPoolExecutor(len(self.fleets)) as pool:
            for done in [pool.submit(act, fleet) for fleet in self.fleets]:
                done.result()

    def kill_server(self, random: Random, down_s: float) -> None:
        """SIGKILL one of the model servers; it is back after `down_s` at the earliest."""
        with self._lock:
            server = random.choice(self.servers)
            server.end()
            self._note_engine_kill()
            time.sleep(down_s)
            server.start()

    def freeze_server(self, random: Random, seconds: float) -> None:
        """SIGSTOP one of them for so long: its streams fall silent, which may count as a death."""
        with self._lock:
            server = random.choice(self.servers)
            self._note_engine_kill()
            if server.process is not None:
                server.process.freeze()
                time.sleep(seconds)
                server.process.thaw()

    def restart_servers(self) -> None:
        """SIGTERM one after the other, each back before the next: no query may suffer from it."""
        with self._lock:
            for server in self.servers:
                status = 0 if server.process is None else server.process.terminate()
                if status:
                    self.violations.append(f"a model server ended with status {status} at SIGTERM")
                server.end()
                server.start()

    def _note_engine_kill(self) -> None:
        self.engine_kills += 1
        for fleet in self.fleets:
            with fleet.traffic.ledger.lock:
                fleet.accounts.engine_kills += 1

    def _excuse_all(self) -> None:
        """An outage of the broker may cost every member its partitions."""
        for fleet in self.fleets:
            fleet.note_death()
            for member in list(fleet.members):
                member.excused = True

    def kill_broker(self, down_s: float) -> None:
        """SIGKILL of the broker; it restarts with its ports and its data after `down_s`."""
        self._excuse_all()
        self.broker.kill()
        time.sleep(down_s)
        self.broker.start()

    def freeze_broker(self, seconds: float) -> None:
        """SIGSTOP it for so long: connections stay, nothing answers."""
        self._excuse_all()
        self.broker.suspend()
        try:
            time.sleep(seconds)
        finally:
            self.broker.unfreeze()

    def tend(self) -> None:
        """A model server that ended by itself is a violation, and started again."""
        if not self._lock.acquire(blocking=False):  # somebody is at it
            return
        try:
            for server in self.servers:
                process = server.process
                if process is not None and not process.running:
                    status = process.process.returncode
                    self.violations.append(
                        f"a model server ended by itself with status {status}: "
                        f"{process.lines[-10:]}"
                    )
                    server.end()
                    server.start()
        finally:
            self._lock.release()

    def autopsy(self) -> None:
        """Print where the threads of every aggregator are, and the ends of their logs; end them."""
        for fleet in self.fleets:
            for member in fleet.members:
                say(member.name, f"owns {sorted(member.owned())}")
                for line in [] if member.process is None else member.process.autopsy():
                    print("   ", line.get("text") or line, flush=True)

    def pids(self) -> dict[str, int]:
        """Every process by name; 0: it is not running."""
        pids = {"broker": self.broker.pid}
        pids |= {f"model-server-{i}": server.pid for i, server in enumerate(self.servers, 1)}
        for fleet in self.fleets:
            pids |= {member.name: member.pid for member in list(fleet.members)}
        return pids

    @property
    def markers_dropped(self) -> int:
        """Transactions that the broker did not end everywhere, by its own log."""
        return self.broker.log_path.read_text(errors="replace").count(MARKERS_DROPPED)

    def judge(self) -> list[str]:
        """Everything that is wrong, once caught up; with what the broker did to transactions."""
        wrong = self.violations + [what for fleet in self.fleets for what in fleet.judge()]
        if wrong and self.transactions and self.markers_dropped:
            wrong.append(
                f"beside this the broker says {self.markers_dropped} times that it did not end a "
                "transaction in partitions without a leader: see FREEZE_BROKER_S_MAX"
            )
        return wrong

    def counts(self) -> dict[str, Any]:
        """For the line of JSON: of all groups together, and of each."""
        by_fleet = {fleet.name: fleet.counts() for fleet in self.fleets}
        merged = merge_counts(by_fleet.values())
        # Each shook all groups.
        merged |= {"engine_kills": self.engine_kills, "markers_dropped": self.markers_dropped}
        return {**merged, "groups": by_fleet}
