"""Groups of aggregators: each with its topics, its members and its traffic.

Invariant: a process that ends by itself is a violation, unless its client was cut off or its group
is allowed that (`FleetOptions.may_end`). Which groups there are is `fleets()`: both protocols, and
both kinds of delivery.
"""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Literal, get_args

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.chaos.members import Member
from tests.chaos.queries import PARTITIONS, RESULT_BYTES_MAX, Mix
from tests.chaos.report import say
from tests.chaos.traffic import Traffic, TrafficError
from tests.harness.accounts import Accounts, Limits, Period
from tests.harness.ledger import Ledger, Names

if TYPE_CHECKING:
    from tests.chaos.arena import Arena

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
WAIT_S = 120.0
"""Generous: a machine under load takes a minute for what takes ten seconds."""
MODEL = "minilm"


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


DELIVERIES: tuple[Delivery, ...] = get_args(Delivery)
MEMBERS: dict[Protocol, int] = {"classic": 2, "consumer": 3}


def fleets(deliveries: Sequence[Delivery], *, seed: int, rate: float) -> list[FleetOptions]:
    """Two groups a delivery: two members by the classic protocol, three by KIP-848."""
    return [
        FleetOptions(
            name=f"{protocol}-{delivery.split('_')[-1]}" if len(deliveries) > 1 else protocol,
            protocol=protocol,
            delivery=delivery,
            members=members,
            rate=rate,
            seed=seed + number,
        )
        for delivery in deliveries
        for number, (protocol, members) in enumerate(MEMBERS.items())
    ]
