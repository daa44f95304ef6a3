"""What is shaken: a real broker, model servers, and groups of aggregators, all processes.

An `Arena` owns the broker and the model servers, which all groups share; a `Fleet` is one group
with its topics, its members and its traffic. Invariants: leaving the arena ends every process that
was started, frozen ones included; a process that ends by itself is a violation, unless its client
was cut off or its group is allowed that (`FleetOptions.may_end`). What to do to them and when is
`acts`' business.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Any, Literal, Self

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from ops.kafka.node import KafkaNode, NodeOptions
from tests.chaos.queries import FAULTS, PARTITIONS, RESULT_BYTES_MAX, TOKENS_MAX, Mix
from tests.chaos.traffic import Traffic, TrafficError
from tests.harness.accounts import Accounts, Limits, Period, merge_counts
from tests.harness.ledger import Ledger, Names
from tests.harness.processes import CommandProcess, Line, free_port, simulated_server

Delivery = Literal["at_least_once", "exactly_once"]
Protocol = Literal["classic", "consumer"]

SESSION_MS = 4_000
MAX_POLL_MS = 8_000
REVOKE_DEADLINE_MS = 2_000
DRAIN_DEADLINE_MS = 5_000
TRANSACTION_TIMEOUT_MS = 4_000
STREAM_SILENCE_MS = 6_000
"""Above the 5 s in which a server that lives says something."""
WINDOW_RECORDS = 300
POLL_RECORDS = 50
"""Small, so that windows fill at these rates and their bounds are put to the test."""
SERVERS = 2
WAIT_S = 120.0
"""Generous: a machine under load takes a minute for what takes ten seconds."""
MODEL = "minilm"
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
CUT_OFF = "the brokers answer another client"
"""What a process says that ends since a client of its has lost the brokers (`kafka_watch`)."""
FENCED = ("fenced", "transaction")
"""What a process says that may not go on with its transactions."""
STARTED_AT = time.monotonic()


def say(who: str, what: str) -> None:
    """Print what happens, and when."""
    print(f"{time.monotonic() - STARTED_AT:7.1f} s  {who:22} {what}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """A group: how it is run and what is sent to it."""

    name: str
    protocol: Protocol
    delivery: Delivery = "at_least_once"
    members: int = 2
    rate: float = 100.0
    seed: int = 1

    @property
    def limits(self) -> Limits:
        """What a death may double."""
        if self.delivery == "exactly_once":
            return Limits(duplicates_max=0)
        return Limits(duplicates_max=WINDOW_RECORDS + POLL_RECORDS)

    @property
    def may_end(self) -> bool:
        """Whether a member may end by itself, once fenced."""
        return self.delivery == "exactly_once"


class Member:
    """One aggregator, under a name that it keeps over restarts."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        """Start nothing yet."""
        self.name = name
        self._environment = {**environment, "AGGREGATOR_INSTANCE_NAME": name}
        self.process: CommandProcess | None = None
        self.seen = 0
        """Lines of its log that were looked at."""
        self.excused = False
        """What it is through explains that it loses its partitions."""
        self.frozen = False

    def start(self) -> None:
        """Start it; it joins the group when it is ready."""
        self.process = CommandProcess(
            "aggregator", "run", environment=self._environment, forget=("claim",)
        )
        self.seen = 0
        self.excused = self.frozen = False

    @property
    def lines(self) -> list[Line]:
        """What it has logged since it was started."""
        return [] if self.process is None else list(self.process.lines)

    @property
    def pid(self) -> int:
        """Of the process, 0: none runs."""
        running = self.process is not None and self.process.running
        return self.process.process.pid if running and self.process is not None else 0

    def owned(self) -> set[str]:
        """The partitions that it says it has."""
        owned: set[str] = set()
        if not self.pid:
            return owned
        for line in self.lines:
            match line.get("event"):
                case "partitions assigned":
                    owned |= set(line["partitions"])
                case "partitions revoked" | "partitions lost":
                    owned -= set(line["partitions"])
        return owned

    @property
    def last_words(self) -> str:
        """Its status and why it stopped."""
        status = None if self.process is None else self.process.process.returncode
        reasons = [line.get("reason") for line in self.lines if line.get("event") == "stopped"]
        return f"status {status}, {reasons[-1] if reasons else 'without a word'}"

    @property
    def was_fenced(self) -> bool:
        """Whether it ended because the brokers had given its transaction up, as it must."""
        return any(word in self.last_words for word in FENCED)

    @property
    def was_cut_off(self) -> bool:
        """Whether it ended because its client could not find the brokers again, as it must."""
        return CUT_OFF in self.last_words

    @property
    def found_no_broker(self) -> bool:
        """Whether it ended because no broker answered at its start, as it must."""
        return any("no Kafka broker answers" in str(line.get("text")) for line in self.lines)

    def end(self) -> None:
        """SIGKILL and no more of it."""
        if self.process is not None:
            with self.process:
                pass
            self.process = None


class Fleet:
    """One group; see the module."""

    def __init__(self, options: FleetOptions, arena: Arena) -> None:
        """Make its topics and start its members and its traffic."""
        self.options = options
        self.name = options.name
        self.arena = arena
        self.random = Random(options.seed)
        self.names = Names(
            queries=f"{self.name}.queries",
            results=f"{self.name}.results",
            dlq=f"{self.name}.dlq",
            group=f"{self.name}.group",
        )
        self.accounts = Accounts(options.limits)
        self.violations: list[str] = []
        self.ended_by_themselves = 0
        self.cut_off = 0
        """Of them: their client did not find the brokers again after an outage."""
        self.evictions = 0
        """Deaths that nobody meant: partitions lost, or given up late, on a machine that stalls."""
        self._numbers = itertools.count(1)
        self.members: list[Member] = []
        self._make_topics()
        ledger = Ledger(
            arena.broker.bootstrap_servers, self.names, self.accounts, keep_results=False
        )
        self.traffic = Traffic(ledger, Mix(options.seed), rate=options.rate)
        for _ in range(options.members):
            self.add().start()

    def _make_topics(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.arena.broker.bootstrap_servers})
        topics = [
            NewTopic(self.names.queries, PARTITIONS, 1),
            NewTopic(self.names.results, 2, 1, config={"max.message.bytes": str(RESULT_BYTES_MAX)}),
            NewTopic(self.names.dlq, 1, 1, config={"max.message.bytes": str(1_200_000)}),
        ]
        for made in admin.create_topics(topics).values():
            made.result(30)
        while not {topic.topic for topic in topics} <= admin.list_topics(timeout=10).topics.keys():
            time.sleep(0.05)

    def _environment(self) -> dict[str, str]:
        addresses = ",".join(f"127.0.0.1:{server.port}" for server in self.arena.servers)
        environment = {
            "AGGREGATOR_BOOTSTRAP_SERVERS": self.arena.broker.bootstrap_servers,
            "AGGREGATOR_MODELS": f"{MODEL}={addresses}",
            "AGGREGATOR_METRICS_LISTEN": "",
            "AGGREGATOR_GROUP_ID": self.names.group,
            "AGGREGATOR_GROUP_PROTOCOL": self.options.protocol,
            "AGGREGATOR_QUERIES_TOPIC": self.names.queries,
            "AGGREGATOR_RESULTS_TOPIC": self.names.results,
            "AGGREGATOR_DLQ_TOPIC": self.names.dlq,
            "AGGREGATOR_SESSION_TIMEOUT_MS": str(SESSION_MS),
            "AGGREGATOR_MAX_POLL_INTERVAL_MS": str(MAX_POLL_MS),
            "AGGREGATOR_DRAIN_DEADLINE_MS": str(DRAIN_DEADLINE_MS),
            "AGGREGATOR_REVOKE_DEADLINE_MS": str(REVOKE_DEADLINE_MS),
            "AGGREGATOR_WINDOW_RECORDS_MAX": str(WINDOW_RECORDS),
            "AGGREGATOR_POLL_RECORDS_MAX": str(POLL_RECORDS),
            "AGGREGATOR_TTL_MS": "0",
            "AGGREGATOR_RESOLVE_INTERVAL_MS": "500",
            "AGGREGATOR_STREAM_SILENCE_MS_MAX": str(STREAM_SILENCE_MS),
        }
        if self.options.delivery != "at_least_once":
            environment["AGGREGATOR_DELIVERY"] = self.options.delivery
            environment["AGGREGATOR_TRANSACTION_TIMEOUT_MS"] = str(TRANSACTION_TIMEOUT_MS)
        return environment

    # Members -------------------------------------------------------------------------------------

    def add(self) -> Member:
        """A member more; start it when you like."""
        member = Member(f"{self.name}-{next(self._numbers)}", self._environment())
        self.members.append(member)
        return member

    def remove(self, member: Member) -> None:
        """Forget a member that has ended."""
        self._look(member)
        member.end()
        self.members.remove(member)

    def kill(self, member: Member) -> None:
        """SIGKILL."""
        self.note_death()
        self._look(member)
        member.end()

    def note_death(self) -> None:
        """One more death that explains duplicates."""
        with self.traffic.ledger.lock:
            self.accounts.note_death()

    def terminate(self, member: Member) -> None:
        """SIGTERM; it must end with status 0."""
        assert member.process is not None
        status = member.process.terminate()
        # One that has said nothing yet had no handler.
        unborn = status == -signal.SIGTERM and not member.lines
        excused = unborn or member.found_no_broker or member.was_cut_off or self.options.may_end
        if status != 0 and not excused:
            self.violate(f"{member.name} ended with status {status} at SIGTERM", member)
        self._look(member)
        member.end()

    def freeze(self, member: Member) -> None:
        """SIGSTOP."""
        assert member.process is not None
        self.note_death()
        member.excused = member.frozen = True
        member.process.freeze()

    def thaw(self, member: Member) -> None:
        """SIGCONT, if it is frozen; it did not live while it was."""
        if member.process is not None and member.frozen:
            member.process.thaw()
        member.frozen = False

    # Waiting -------------------------------------------------------------------------------------

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Until it holds, restarting what ends meanwhile.

        Raises:
            TrafficError: it never did.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.traffic.check()
            self.tend()
            if time.monotonic() > deadline:
                owned = {member.name: sorted(member.owned()) for member in self.members}
                raise TrafficError(f"{self.name}: no {what} within {timeout_s:.0f} s: {owned}")
            time.sleep(0.05)

    def wait_until_stable(self) -> None:
        """Every partition has one owner, and every member one at least."""
        self.wait("stable group", self._stable)

    def _stable(self) -> bool:
        owned = [member.owned() for member in self.members]
        return all(owned) and sum(map(len, owned)) == PARTITIONS == len(set().union(*owned))

    def wait_for_takeover(self, dead: Member) -> None:
        """The other members have all partitions."""
        others = [member for member in self.members if member is not dead]
        self.wait(
            "takeover",
            lambda: len(set().union(*(member.owned() for member in others))) == PARTITIONS,
        )

    def tend(self) -> None:
        """Start again what ended by itself, and note it; look at what the members have logged."""
        for member in self.members:
            self._look(member)
            process = member.process
            if process is None or process.running:
                continue
            if not member.found_no_broker:
                self.ended_by_themselves += 1
                why = f"{member.name} ended by itself: {member.last_words}"
                say(self.name, why)
                self.cut_off += member.was_cut_off
                if not (member.was_cut_off or (self.options.may_end and member.was_fenced)):
                    self.violate(why, member)
                self.note_death()
            member.end()
            member.start()
        self.arena.tend()

    def _look(self, member: Member) -> None:
        """Take in what it has logged since: deaths that only the log tells of, and bugs."""
        lines = member.lines[member.seen :]
        member.seen += len(lines)
        for line in lines:
            event = line.get("event")
            unfinished = event in {"revoke deadline", "stopped"} and line.get("abandoned")
            if unfinished or (event == "partitions lost" and not member.excused):
                self.evictions += 1
                self.note_death()
                say(self.name, f"{member.name}: {event} {line.get('abandoned', '')}")
            if event == "bug" or "Traceback" in str(line.get("text")):
                self.violate(f"{member.name} has a bug", member)

    def catch_up(self, timeout_s: float = WAIT_S) -> Period:
        """Nothing is outstanding; see `Traffic.catch_up`."""
        period = self.traffic.catch_up(self.tend, timeout_s)
        for member in self.members:
            member.excused = False
        return period

    def violate(self, what: str, member: Member | None = None) -> None:
        """Note something that must not be, with the end of the member's log."""
        tail = "" if member is None else "\n    ".join(map(str, ["", *member.lines[-15:]]))
        self.violations.append(f"{self.name}: {what}{tail}")

    # The end -------------------------------------------------------------------------------------

    def judge(self) -> list[str]:
        """Everything that is wrong, once caught up."""
        with self.traffic.ledger.lock:
            return self.violations + [f"{self.name}: {what}" for what in self.accounts.judge()]

    def counts(self) -> dict[str, Any]:
        """For the line of JSON."""
        with self.traffic.ledger.lock:
            counts = self.accounts.counts()
        counts["evictions"] = self.evictions
        counts["ended_by_themselves"] = self.ended_by_themselves
        counts["cut_off"] = self.cut_off
        counts["snapshots_failed"] = self.traffic.outages
        return counts

    def close(self) -> None:
        """End the processes, then the threads."""
        for member in self.members:
            member.end()
        self.traffic.stop()


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
