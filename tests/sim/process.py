"""One aggregator process: the real core, driver, bridge, intake, source and sink, in virtual time.

What `runtime.process` does with an event loop is done here with a `SimLoop`: building the parts,
SIGTERM, the order of the end. Between the core and the driver stands `Watched`, which shows every
step of the core to the checkers. It must not know what is right.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aggregator.adapters.kafka_config import KafkaOptions
from aggregator.adapters.kafka_sink import KafkaSink, SinkOptions
from aggregator.adapters.kafka_source import POLL_MS, KafkaSource, SourceOptions
from aggregator.adapters.kafka_transactions import (
    KafkaTransactions,
    TransactionsError,
    TransactionsOptions,
)
from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.machine import Aggregator, AggregatorOptions
from aggregator.runtime import outlet
from aggregator.runtime.bridge import Bridge, SinkPort, Token
from aggregator.runtime.driver import Driver, Ports
from aggregator.runtime.intake import TURN_NS, Intake
from aggregator.wire.headers import HeaderRules
from aggregator.wire.query import DecodeOptions
from aggregator.wire.result import ResultEncoder
from tests.sim.broker import LETTERS, QUERIES, RESULTS, Broker
from tests.sim.consumer import SimConsumer
from tests.sim.doses import Doses
from tests.sim.kernel import MS, Fiber, Kernel, Owner
from tests.sim.producer import SimProducer
from tests.sim.servers import ModelServer
from tests.sim.shims import SimLoop, SimQueue
from tests.sim.streams import SimServers
from tests.sim.texts import BREAKS_ESTIMATOR, mark_of, tokens_of
from tests.sim.transactions import TransactionalProducer

LEAVE_TIMEOUT_S = 10.0
IN_PARTS = "poll read in parts"


class Watcher(Protocol):
    """Who sees each step of each core."""

    def stepping(self, process: Process, events: Sequence[ev.Event]) -> None: ...
    def stepped(
        self, process: Process, events: Sequence[ev.Event], effects: Sequence[fx.Effect]
    ) -> None: ...
    def logged_a_bug(self, process: Process, what: str) -> None: ...
    def halted(self, process: Process, halt: fx.Halt) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """What all processes of a world share."""

    core: AggregatorOptions
    decode: DecodeOptions
    poll_records_max: int
    revoke_deadline_ms: int
    max_poll_interval_ms: int
    session_timeout_ms: int
    message_timeout_ms: int
    commit_timeout_ms: int
    results_bytes_max: int
    letters_bytes_max: int
    loop_lag_ns: int
    """How late the event loop takes things up at most."""
    estimates: str
    """"exact", "low", "high" or "noisy"."""


class Estimates:
    """An estimator that is off as the options say, and raises for some texts."""

    failures = 0
    exact = False

    def __init__(self, kind: str) -> None:
        self.exact = kind == "exact"
        self._kind = kind

    def estimate(self, text: str) -> int:
        if mark_of(text) == BREAKS_ESTIMATOR:
            raise ValueError("a text that breaks tokenizers")
        count = tokens_of(text) - 2
        match self._kind:
            case "low":
                return max(1, count // 2)
            case "high":
                return count * 2
            case "noisy":
                return max(1, count + len(text) % 5 - 2)
        return count

    def estimate_many(self, texts: Any) -> list[int]:
        return [self.estimate(text) for text in texts]


class _Log:
    """Where log lines go: those that tell of a bug are violations."""

    def __init__(self, on_bug: Callable[[str], None]) -> None:
        self._on_bug = on_bug

    def bind(self, **_: object) -> _Log:
        return self

    def info(self, *_: object, **__: object) -> None:
        return None

    warning = error = debug = info

    def exception(self, what: str, **_: object) -> None:
        self._on_bug(f"{what}: {traceback.format_exc(limit=-4)}")


class _NoMetrics:
    """Counts nothing."""

    def add(self, *_: object) -> None:
        return None

    observe = set = add


class Watched:
    """The core as the driver sees it."""

    def __init__(self, core: Aggregator, process: Process, watcher: Watcher) -> None:
        self._core = core
        self._process = process
        self._watcher = watcher

    def handle_all(self, events: Sequence[ev.Event], now_ns: int) -> list[fx.Effect]:
        self._watcher.stepping(self._process, events)
        effects = self._core.handle_all(events, now_ns)
        self._watcher.stepped(self._process, events, effects)
        return effects


class Process:
    """From its start to its exit or death; a restart is another one."""

    def __init__(
        self,
        name: str,
        instance_name: str,
        *,
        kernel: Kernel,
        broker: Broker,
        doses: Doses,
        options: ProcessOptions,
        watcher: Any,
    ) -> None:
        self.kernel = kernel
        self.owner = Owner(kernel, name)
        self.instance_name = instance_name
        self.owner.process = self
        self.options = options
        self.halt: fx.Halt | None = None
        self.ended = False
        self.stopping = False
        self.leaves = False
        """Its successor is there already: nobody starts another when it ends."""
        self.consumer: SimConsumer
        self._broker = broker
        self._doses = doses
        self._watcher = watcher
        self._producers: list[SimProducer] = []
        self._turns = 0
        self.loop = SimLoop(kernel, self.owner, lag_ns=options.loop_lag_ns)
        self.loop.on_halt = self._halted
        self.core = Aggregator(options.core)
        log: Any = _Log(lambda what: watcher.logged_a_bug(self, what))
        metrics: Any = _NoMetrics()
        loop: Any = self.loop
        estimates = Estimates(options.estimates)
        intake = Intake(
            options=options.decode,
            estimators=dict.fromkeys(options.core.models, estimates),
            on_bug=lambda _: kernel.fire("intake: a record broke it"),
            clock_ns=self._turn_clock_ns,
        )
        kernel.owner = self.owner
        self._bridge = Bridge(intake, loop=loop, metrics=metrics, log=log)
        self._sink: KafkaSink[Token] | None = None
        self._transactions: KafkaTransactions[Token] | None = None
        sink, transactions = self._outlet(instance_name)
        self.source = KafkaSource(
            SourceOptions(
                kafka=self._kafka(),
                topic=QUERIES,
                poll_records_max=options.poll_records_max,
                revoke_deadline_ms=options.revoke_deadline_ms,
                commit_timeout_ms=options.commit_timeout_ms,
                poll_ms=POLL_MS if transactions is None else outlet.POLL_MS,
                revoke_slack_ms=1_000 + self._abort_ms(),
            ),
            self._bridge,
        )
        commands: Any = self.source._commands
        self.consumer.quiet = lambda: self._quiet(commands)
        self.consumer.on_stop = self.stop
        commands.on_put = self.consumer.poke_soon
        self.servers = {
            model: SimServers(
                kernel, doses, self.owner, self.loop, model=model, emit=self._feed, log=log
            )
            for model in options.core.models
        }
        ports = Ports(
            source=self.source,
            sink=sink,
            transactions=transactions,
            servers=self.servers,
            encoder=ResultEncoder(HeaderRules(bytes_max=options.decode.headers.bytes_max)),
            clock_ns=self.owner.monotonic_ns,
        )
        self.driver = Driver(
            Watched(self.core, self, watcher), ports, loop=loop, metrics=metrics, log=log
        )
        self._bridge.attach(self.driver, self.source.taken)
        Fiber(kernel, self.owner, self._begin, "begins")

    def _outlet(self, instance_name: str) -> tuple[Any, Any]:
        """What `runtime.outlet` builds: a sink, or transactions that stand for it too."""
        options = self.options
        sizes = (options.results_bytes_max, options.letters_bytes_max)
        if options.core.transactions is None:
            self._sink = KafkaSink(
                SinkOptions(
                    kafka=self._kafka(), message_bytes_max=max(sizes), batch_bytes_max=min(sizes)
                ),
                self._bridge,
            )
            return SinkPort(self._sink, results=RESULTS, letters=LETTERS), None
        self._transactions = KafkaTransactions(
            TransactionsOptions(
                kafka=self._kafka(),
                instance_name=instance_name,
                timeout_ms=options.core.transactions.timeout_ns // MS,
                message_bytes_max=max(sizes),
                batch_bytes_max=min(sizes),
            ),
            self._bridge,
        )
        port = outlet._Port(
            self._transactions, results=(RESULTS, sizes[0]), letters=(LETTERS, sizes[1])
        )
        return port, port

    def _abort_ms(self) -> int:
        """How much longer a rebalance callback waits: for an abort that does not end."""
        transactions = self.options.core.transactions
        return 0 if transactions is None else transactions.timeout_ns // MS

    def _begin(self) -> None:
        """As the runtime does: the transactional id is had before the group is joined."""
        if self._transactions is not None:
            try:
                self._transactions.init()
            except TransactionsError:
                self.kernel.fire("start: the transactional id could not be had")
                self.loop.closed = self.ended = True
                return
            self._transactions.start(self.source)
        self.source.start()

    def _kafka(self) -> KafkaOptions:
        options = self.options
        return KafkaOptions(
            bootstrap_servers="simulated:1",
            group_id="aggregator",
            client_id=self.owner.name,
            max_poll_interval_ms=options.max_poll_interval_ms,
            session_timeout_ms=options.session_timeout_ms,
            message_timeout_ms=options.message_timeout_ms,
        )

    def _turn_clock_ns(self) -> int:
        """The intake's clock: at a look now and then its turn is over."""
        if self.kernel.chance(self._doses.chance(IN_PARTS)):
            self.kernel.fire(IN_PARTS)
            self._turns += 1
        return self._turns * TURN_NS

    def _quiet(self, commands: SimQueue) -> bool:
        commits = self.source._commits
        waits = commits._waiting or commits._in_flight or commits._answer_by_s is not None
        return not commands and not waits

    def make_consumer(self, config: Mapping[str, Any]) -> SimConsumer:
        self.consumer = SimConsumer(self._broker, self.owner, self._doses, config)
        return self.consumer

    def make_producer(self, config: Mapping[str, Any]) -> SimProducer:
        kind = TransactionalProducer if "transactional.id" in config else SimProducer
        producer = kind(self._broker, self.owner, self._doses, self._watcher, config)
        self._producers.append(producer)
        return producer

    def found(self, model: str, servers: Mapping[str, ModelServer]) -> None:
        """The names of its model servers were looked up."""
        if not self.ended:
            self.servers[model].found(servers)

    def _feed(self, events: list[ev.Event]) -> None:
        self.driver.feed(events)

    # Its end -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """SIGTERM."""
        if self.stopping or self.ended or self.halt is not None:
            return
        self.stopping = True
        self.loop.call_soon(self._feed, [ev.StopRequested()])

    def kill(self) -> None:
        """SIGKILL."""
        self.ended = True
        self.loop.closed = True
        consumer = self.consumer
        self.owner.kill()
        for servers in self.servers.values():
            servers.close()
        member = consumer.member
        if member is not None:
            session_ns = self.options.session_timeout_ms * MS
            self.kernel.after(
                session_ns, None, "session ends", lambda: self._broker.group.leave(member)
            )

    def _halted(self, halt: fx.Halt) -> None:
        self.halt = halt
        self._watcher.halted(self, halt)
        if halt.at_once:
            self.kernel.fire("halt: at once")
            self.kernel.after(0, None, "ends at once", self.kill)
            return
        Fiber(self.kernel, self.owner, self._close, "closing")

    def _close(self) -> None:
        if self._transactions is not None:
            self._transactions.close(LEAVE_TIMEOUT_S)
        self.source.close(LEAVE_TIMEOUT_S)
        if self._sink is not None:
            for producer in self._producers:
                producer.wake_to_close()
            self._sink.close()
        for servers in self.servers.values():
            servers.close()
        self.loop.closed = True
        self.ended = True
