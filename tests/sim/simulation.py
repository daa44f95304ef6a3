"""One seed: a world is drawn, lives through its faults, is healed, and must come to rest.

Two phases. In the first everything that the seed's doses hold may happen at any instant, while
records keep coming; whatever a checker sees wrong ends the run. Then nothing goes wrong any more
and nothing new comes: within `HEAL_NS` (and `POISON_NS`) of virtual time the lag must be zero,
nothing paused, and nothing held.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TextIO

from confluent_kafka import TIMESTAMP_CREATE_TIME, Message

from aggregator.core.dispatch import DispatchOptions
from aggregator.core.machine import AggregatorOptions
from aggregator.core.query import TopicPartition
from aggregator.core.transactions import TransactionOptions
from aggregator.wire.headers import HeaderRules
from aggregator.wire.query import DecodeOptions
from model_server.core.limits import Limits
from tests.sim.books import Violation
from tests.sim.broker import LETTERS, RESULTS, Broker
from tests.sim.checks import Checks
from tests.sim.doses import FAULTS, Doses
from tests.sim.kernel import MS, SECOND, START_NS, Kernel
from tests.sim.monkey import Monkey
from tests.sim.process import Process, ProcessOptions
from tests.sim.records import DEFAULT_TTL_MS, Record, Sizes, make
from tests.sim.servers import ModelServer, ServerOptions
from tests.sim.shims import installed
from tests.sim.transactions import TransactionLog

MODEL = "model"
HEAL_NS = 150 * SECOND
POISON_NS = 10 * SECOND
"""As much longer for each query that kills engines: it is tried again until it has done so alone,
and each time an engine has to come back, or a breaker to try it."""
SLICE_NS = 50 * MS
LOOK_UP_NS = SECOND // 2
PLAIN = "plain"
EXACTLY_ONCE = 0.35
"""Part of the seeds that deliver so; the others deliver at least once."""


@dataclass(slots=True)
class Outcome:
    """What came of one seed."""

    seed: str
    violation: str | None = None
    guarantee: int | None = None
    trace_hash: str = ""
    events: int = 0
    virtual_ns: int = 0
    heal_ns: int = 0
    records: int = 0
    duplicates: int = 0
    fired: Counter[str] = field(default_factory=Counter)


def never_fired(fired: Mapping[str, int]) -> list[str]:
    """The faults of the table that a run did without."""
    return [name for name in FAULTS if not fired.get(name)]


class Simulation:
    """The world of one seed."""

    def __init__(self, seed: str, *, trace: TextIO | None = None) -> None:
        self.seed = seed
        self.kernel = kernel = Kernel(seed, trace=trace)
        rng = kernel.rng
        self.doses = Doses(rng)
        self.sizes = _sizes(rng)
        partitions = rng.choice([1, 2, 3, 5])
        limits = {RESULTS: self.sizes.results_bytes_max, LETTERS: self.sizes.letters_bytes_max}
        self.broker = Broker(kernel, partitions, limits)
        self.options = _options(rng, self.sizes)
        core = self.options.core
        self.checks = Checks(
            kernel,
            self.broker,
            window_max=core.window_records_max,
            poll_max=self.options.poll_records_max,
            buffer_max=core.buffer_bytes_max,
        )
        self.broker.observer = self.checks
        self.broker.transactions = TransactionLog(kernel, self.broker, self.checks)
        self.checks.exactly_once = core.transactions is not None
        if core.models[MODEL].revision is not None:
            self.checks.revision_pinned = core.models[MODEL].revision
        self.servers = self._make_servers(rng)
        self.found: dict[str, ModelServer] = dict(self.servers)
        """What a look-up of their names gives."""
        self.processes: list[Process] = []
        self._names = 0
        self.healing = False
        self.feeding_until_ns = 0
        self.numbers = 0
        self.monkey = Monkey(self)

    def _make_servers(self, rng: random.Random) -> dict[str, ModelServer]:
        count = rng.choice([1, 1, 2, 3])
        target = rng.choice([32, 64, 256])
        servers = {}
        for number in range(count):
            limits = Limits(
                batch_tokens_target=target,
                batch_tokens_max=max(target * rng.choice([1, 4]), self.sizes.input_tokens_max),
                input_tokens_max=self.sizes.input_tokens_max,
                inputs_max=rng.choice([4, 16, 512]),
                request_bytes_max=131_072,
            )
            address = f"10.0.0.{number + 1}:50051"
            servers[address] = ModelServer(
                self.kernel,
                self.doses,
                self.checks,
                address=address,
                revision="r1",
                options=ServerOptions(
                    limits=limits,
                    pass_ns=rng.choice([3, 15, 60]) * MS,
                    load_ns=rng.choice([50, 400]) * MS,
                    pass_timeout_ns=2 * SECOND,
                    in_process=rng.random() < 0.4,
                ),
            )
        return servers

    # Processes -----------------------------------------------------------------------------------

    def living(self) -> list[Process]:
        return [process for process in self.processes if not process.ended]

    def start_process(self) -> None:
        self._names += 1
        process = Process(
            f"A{self._names}",
            self._free_name(),
            kernel=self.kernel,
            broker=self.broker,
            doses=self.doses,
            options=self.options,
            watcher=self.checks,
        )
        self.processes.append(process)
        process.found(MODEL, self.found)

    def _free_name(self) -> str:
        """An instance name that no living process has: a restart gets its predecessor's."""
        taken = {process.instance_name for process in self.living()}
        return next(name for number in count(1) if (name := f"instance-{number}") not in taken)

    def look_up(self) -> None:
        for process in self.living():
            process.found(MODEL, self.found)
        self.kernel.after(LOOK_UP_NS, None, "look-up", self.look_up)

    def _bury(self) -> None:
        """Processes that have ended by themselves are started anew."""
        for process in [p for p in self.processes if p.ended]:
            self.processes.remove(process)
            process.owner.kill()
            if not process.leaves or not self.living():
                delay_ns = self.kernel.delay_ns(MS, 500 * MS)
                self.kernel.after(delay_ns, None, "restart", self.start_process)

    # Records -------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """Put records on the topic, in bursts."""
        kernel, rng = self.kernel, self.kernel.rng
        if kernel.now_ns >= self.feeding_until_ns:
            return
        burst = 1 + int(rng.expovariate(1.0) * self._burst)
        tp = rng.choice(self.broker.tps)
        for _ in range(burst):
            if rng.random() < 0.1:
                tp = rng.choice(self.broker.tps)
            self._append(tp)
        kernel.after(int(rng.expovariate(1.0) * self._feed_every_ns), None, "feed", self._feed)

    def _append(self, tp: TopicPartition) -> None:
        kernel, rng, doses = self.kernel, self.kernel.rng, self.doses
        log = self.broker.logs[tp]
        if kernel.chance(doses.chance("offsets compacted away")):
            kernel.fire("offsets compacted away")
            self.broker.skip(tp, rng.randrange(1, 20))
        kind = PLAIN
        if doses.kinds and rng.random() < doses.odd_queries:
            kinds = list(doses.kinds)
            kind = rng.choices(kinds, list(doses.kinds.values()))[0]
            kernel.fire(f"query: {kind}")
        self.numbers += 1
        made = make(
            rng, kind, self.numbers, sizes=self.sizes, wall_ms=kernel.wall_ms(), ttl_ms=self._ttl_ms
        )
        record = Record(tp, log.end, kind, made.text, made.ttl_ms, kernel.now_ns)
        self.checks.added(record)
        headers: Any = made.headers or None
        self.broker.append(
            tp,
            Message(
                topic=tp[0],
                partition=tp[1],
                offset=log.end,
                key=made.key,
                value=made.value,
                headers=headers,
                timestamp=(TIMESTAMP_CREATE_TIME, made.timestamp_ms),
            ),
        )
        if kernel.chance(doses.chance("transaction marker")):
            kernel.fire("transaction marker")
            self.broker.append(tp, None)

    # The run -------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        outcome = Outcome(self.seed)
        kernel = self.kernel

        def process_of() -> Process:
            owner = kernel.owner
            if owner is None or not isinstance(owner.process, Process):
                raise RuntimeError("no process is being built")
            return owner.process

        with installed(
            kernel,
            consumer=lambda config: process_of().make_consumer(config),
            producer=lambda config: process_of().make_producer(config),
            loop_of=lambda: process_of().loop,
        ):
            try:
                self._live()
                self._heal(outcome)
            except Violation as violation:
                outcome.violation = str(violation)
                outcome.guarantee = violation.guarantee
            except Exception:  # noqa: BLE001 - of this seed; the others are run all the same
                outcome.violation = f"the run broke: {traceback.format_exc(limit=-4)}"
                outcome.guarantee = 0
            finally:
                kernel.close([p.owner for p in self.processes])
        outcome.trace_hash = kernel.trace_hash
        outcome.events = kernel.events
        outcome.virtual_ns = kernel.now_ns - START_NS
        outcome.records = self.numbers
        outcome.duplicates = self.checks.duplicates
        outcome.fired = kernel.fired
        return outcome

    def _live(self) -> None:
        """Everything that may go wrong does."""
        kernel, rng = self.kernel, self.kernel.rng
        length_ns = int(rng.choice([2, 4, 8]) * SECOND)
        self.feeding_until_ns = kernel.now_ns + length_ns
        self._burst = rng.choice([1, 5, 40])
        total = rng.choice([50, 200, 500])
        self._feed_every_ns = int(length_ns * (self._burst + 1) / total)
        self._ttl_ms = self.options.decode.ttl_ms
        for server in self.servers.values():
            kernel.after(kernel.delay_ns(0, SECOND), None, "server starts", server.start)
        for _ in range(rng.choice([1, 1, 2, 3])):
            kernel.after(kernel.delay_ns(0, 200 * MS), None, "start", self.start_process)
        kernel.after(0, None, "feed", self._feed)
        kernel.after(LOOK_UP_NS, None, "look-up", self.look_up)
        self.monkey.start()
        until_ns = kernel.now_ns + length_ns + rng.choice([0, SECOND])
        while kernel.now_ns < until_ns:
            kernel.run(kernel.now_ns + SLICE_NS)
            self._bury()

    def _heal(self, outcome: Outcome) -> None:
        """Nothing goes wrong any more, and all must be done in bounded time."""
        kernel = self.kernel
        self.healing = self.doses.healthy = True
        self.monkey.heal()
        started_ns = kernel.now_ns
        heal_ns = HEAL_NS + POISON_NS * self.checks.poison_left()
        unfinished: str | None = "not looked at yet"
        while kernel.now_ns < started_ns + heal_ns:
            kernel.run(kernel.now_ns + 10 * SLICE_NS)
            self._bury()
            self.monkey.restart_misled()
            unfinished = self.checks.unfinished(self.living())
            if unfinished is None and self.living():
                break
        outcome.heal_ns = kernel.now_ns - started_ns
        if unfinished is not None:
            self.checks.violated(0, f"{heal_ns / 1e9} s after healing: {unfinished}")
        self.checks.at_end(self.living())


def _sizes(rng: random.Random) -> Sizes:
    results, letters = rng.choice([(3000, 4500), (5000, 4000)])
    return Sizes(
        text_bytes_max=1500,
        headers_bytes_max=7000,
        results_bytes_max=results,
        letters_bytes_max=letters,
        client_bytes_max=max(results, letters),
        input_tokens_max=100,
    )


def _options(rng: random.Random, sizes: Sizes) -> ProcessOptions:
    window = rng.choice([15, 60, 400])
    pinned = rng.random() < 0.5
    dispatch = DispatchOptions(
        model=MODEL,
        revision="r1" if pinned else None,
        exact_estimates=rng.random() < 0.3,
        answer_grace_ns=rng.choice([100, 500]) * MS,
        stream_silence_ns_max=7 * SECOND,
    )
    exactly_once = None
    if rng.random() < EXACTLY_ONCE:
        exactly_once = TransactionOptions(
            timeout_ns=rng.choice([800, 2500]) * MS, records_max=rng.choice([5, 60, 1000])
        )
    core = AggregatorOptions(
        models={MODEL: dispatch},
        window_records_max=window,
        buffer_bytes_max=rng.choice([30_000, 200_000, 256 << 20]),
        commit_interval_ns=rng.choice([20, 100, 500]) * MS,
        revoke_deadline_ns=rng.choice([50, 300, 1500]) * MS,
        drain_deadline_ns=rng.choice([200, 1000, 4000]) * MS,
        sink_outage_ns_max=6 * SECOND,
        transactions=exactly_once,
    )
    decode = DecodeOptions(
        models=frozenset({MODEL}),
        default_model=MODEL,
        text_bytes_max=sizes.text_bytes_max,
        ttl_ms=rng.choice([0, 2000, DEFAULT_TTL_MS, DEFAULT_TTL_MS]),
        headers=HeaderRules(bytes_max=sizes.headers_bytes_max),
    )
    return ProcessOptions(
        core=core,
        decode=decode,
        poll_records_max=rng.choice([5, min(window, 50), window]),
        revoke_deadline_ms=core.revoke_deadline_ns // MS,
        max_poll_interval_ms=max(4 * core.revoke_deadline_ns // MS, 2500),
        session_timeout_ms=rng.choice([500, 1500]),
        message_timeout_ms=rng.choice([400, 2000]),
        commit_timeout_ms=1000,
        results_bytes_max=sizes.results_bytes_max,
        letters_bytes_max=sizes.letters_bytes_max,
        loop_lag_ns=rng.choice([80_000, 80_000, 2 * MS, 20 * MS]),
        estimates=rng.choice(["exact", "low", "high", "noisy"]),
    )


def run_seed(seed: str, *, trace: TextIO | None = None) -> Outcome:
    """Live through one seed."""
    return Simulation(seed, trace=trace).run()
