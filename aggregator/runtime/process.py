"""One aggregator process: everything built from the settings, watched, and taken down in order.

Whatever thread or task ends before its time becomes one clear line and a status other than 0. The
order of the end: the group is left first (the core has committed by then), then the producer,
the streams and the health endpoints are closed. One deadline bounds all of it: `drain_deadline_ms`
from the signal on, and `STOP_GRACE_S` for the last commit and for closing what does not answer.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib.metadata
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from aggregator.adapters.estimator import Estimator, load_estimator
from aggregator.adapters.kafka_config import KafkaConfigError, KafkaOptions, check_overrides
from aggregator.adapters.kafka_source import KafkaSource, SourceOptions
from aggregator.adapters.kafka_topics import TIMEOUT_S, Topics, TopicsError, check_topics
from aggregator.adapters.kafka_transactions import TransactionsError
from aggregator.adapters.model_servers import ModelServers
from aggregator.adapters.server_stream import StreamOptions
from aggregator.core.dispatch import DispatchOptions
from aggregator.core.effects import Halt
from aggregator.core.events import Event, ServerChanged, ServerPhase, StopRequested
from aggregator.core.machine import Aggregator, AggregatorOptions
from aggregator.runtime.bridge import Bridge
from aggregator.runtime.driver import Driver, Ports
from aggregator.runtime.intake import Intake
from aggregator.runtime.outlet import POLL_MS, build_outlet, exactly_once
from aggregator.runtime.threads import in_daemon_thread
from aggregator.telemetry import metrics as m
from aggregator.telemetry.health import HealthError, HealthServer
from aggregator.telemetry.logs import configure_logs, librdkafka_logger
from aggregator.wire.headers import HeaderRules
from aggregator.wire.query import DecodeOptions
from aggregator.wire.result import ResultEncoder
from protos.embedding.v1 import embedding_service_pb2 as pb

if TYPE_CHECKING:
    from aggregator.settings import AggregatorSettings
    from aggregator.telemetry.logs import Logger

MS = 1_000_000
GC_THRESHOLDS = (100_000, 50, 1_000)
"""Queries have no cycles: the collector finds nothing and costs more the more are held."""
STOP_GRACE_S = 3.0
"""After `drain_deadline_ms`: the last commit has one second of it, leaving the group half of what
is left then."""
CLOSE_S_MIN = 0.25
"""What each thing to be closed is given however late it is."""
HANG_S = 5.0
"""A process that has not ended so long after its grace shows where its threads are, and is ended.
"""
MESSAGE_TIMEOUT_MS_MIN, MESSAGE_TIMEOUT_MS_MAX = 1_000, 30_000
"""How long the client itself tries to write a record before an outage begins for the core: a
quarter of `sink_outage_ms_max`, which is overshot by as much, within these."""
BROKERS_SAID_AFTER_S = 1.0
"""So long after the start the log says that it is waited for the brokers."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StartError(Exception):
    """The process can't start; the message is one line."""


def run_aggregator(settings: AggregatorSettings) -> Halt:
    """Run until SIGTERM, SIGINT or a failure; return how it ended.

    Raises:
        StartError: Something that must be there at start is not.
    """
    log = configure_logs(settings.log_format, settings.log_level)
    with asyncio.Runner() as runner:
        return runner.run(_run(settings, log))


async def _run(settings: AggregatorSettings, log: Logger) -> Halt:
    """Build and run; a signal during the checks at start is obeyed too (as process 1 of a container
    the default is to ignore it).
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    building = asyncio.create_task(_Process.build(settings, log))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({building, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not building.done():
        building.cancel()
        return Halt(exit_code=0, message="stopped before it had started")
    try:
        process = await building
    except (KafkaConfigError, TopicsError, TransactionsError, HealthError, ValueError) as error:
        raise StartError(str(error)) from error
    return await process.run(stop_at_once=stop.is_set())


def kafka_options(settings: AggregatorSettings) -> KafkaOptions:
    """What both Kafka clients are made of."""
    return KafkaOptions(
        bootstrap_servers=settings.bootstrap_servers,
        group_id=settings.group_id,
        client_id=settings.instance_name or "aggregator",
        group_protocol=settings.group_protocol,
        max_poll_interval_ms=settings.max_poll_interval_ms,
        session_timeout_ms=settings.session_timeout_ms,
        message_timeout_ms=min(
            max(settings.sink_outage_ms_max // 4, MESSAGE_TIMEOUT_MS_MIN), MESSAGE_TIMEOUT_MS_MAX
        ),
        overrides=settings.kafka,
    )


def core_options(
    settings: AggregatorSettings, estimators: Mapping[str, Estimator]
) -> AggregatorOptions:
    """The core's options; its times are nanoseconds."""
    return AggregatorOptions(
        models={
            name: DispatchOptions(
                model=name,
                revision=model.revision,
                exact_estimates=estimators[name].exact,
                lead_ns=int(settings.lead_ms * MS),
                attempts_max=settings.attempts_max,
                answer_grace_ns=settings.answer_grace_ms * MS,
                stream_silence_ns_max=settings.stream_silence_ms_max * MS,
            )
            for name, model in settings.models.items()
        },
        window_records_max=settings.window_records_max,
        buffer_bytes_max=settings.buffer_bytes_max,
        commit_interval_ns=settings.commit_interval_ms * MS,
        revoke_deadline_ns=settings.revoke_deadline_ms * MS,
        drain_deadline_ns=settings.drain_deadline_ms * MS,
        sink_outage_ns_max=settings.sink_outage_ms_max * MS,
        transactions=exactly_once(settings),
    )


def decode_options(settings: AggregatorSettings) -> DecodeOptions:
    """What the settings say about reading queries."""
    return DecodeOptions(
        models=frozenset(settings.models),
        default_model=settings.model_default,
        text_bytes_max=settings.text_bytes_max,
        ttl_ms=settings.ttl_ms,
        ttl_from=settings.ttl_from,
        headers=_header_rules(settings),
    )


def _header_rules(settings: AggregatorSettings) -> HeaderRules:
    return HeaderRules(bytes_max=settings.headers_bytes_max, drop=settings.headers_drop)


def load_estimators(settings: AggregatorSettings) -> dict[str, Estimator]:
    """By served name; models without a tokenizer of their own share one. Raises ValueError."""
    by_path: dict[object, Estimator] = {}
    for model in settings.models.values():
        if model.tokenizer not in by_path:
            by_path[model.tokenizer] = load_estimator(model.tokenizer)
    return {name: by_path[model.tokenizer] for name, model in settings.models.items()}


class _Process:
    """The parts, built and not yet started."""

    def __init__(
        self,
        settings: AggregatorSettings,
        log: Logger,
        *,
        estimators: Mapping[str, Estimator],
        topics: Topics,
    ) -> None:
        """Build the parts.

        Raises:
            KafkaConfigError: A setting of the clients is wrong.
            TopicsError: The brokers are not what `delivery` needs.
            HealthError: The address of the endpoints can't be bound.
        """
        loop = asyncio.get_running_loop()
        self._log = log
        self._settings = settings
        self._estimators = estimators
        self._revisions_seen: set[tuple[str, str, str]] = set()
        version = importlib.metadata.version("token-batching")
        self._metrics = m.Metrics(models=settings.models, version=version)
        self._core = Aggregator(core_options(settings, estimators))
        self._servers = {
            name: ModelServers(
                model.servers,
                options=StreamOptions(model=name, priority=_priority(settings)),
                emit=self._feed,
                clock_ns=time.monotonic_ns,
                log=log,
                resolve_interval_s=settings.resolve_interval_ms / 1000,
            )
            for name, model in settings.models.items()
        }
        intake = Intake(
            options=decode_options(settings), estimators=estimators, on_bug=self._decoding_bug
        )
        self._bridge = Bridge(intake, loop=loop, metrics=self._metrics, log=log)
        self._outlet = build_outlet(settings, kafka_options(settings), topics, self._bridge, log)
        self._source = self._build_source()
        ports = Ports(
            source=self._source,
            sink=self._outlet.sink,
            transactions=self._outlet.transactions,
            servers=self._servers,
            encoder=ResultEncoder(_header_rules(settings)),
            clock_ns=time.monotonic_ns,
        )
        self._driver = Driver(self._core, ports, loop=loop, metrics=self._metrics, log=log)
        self._bridge.attach(self._driver, self._source.taken)
        self._draining = False
        self._end_by_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._health = self._build_health(loop)

    @classmethod
    async def build(cls, settings: AggregatorSettings, log: Logger) -> _Process:
        """Check what must be there at start, and build everything."""
        kafka = kafka_options(settings)
        check_overrides(kafka)  # a wrong setting is one line, before the first of the log
        log.info("starting", bootstrap_servers=settings.bootstrap_servers)
        topics = await _topics(settings, kafka, log)
        for warning in topics.warnings:
            log.warning("topics", reason=warning)
        estimators = await in_daemon_thread(load_estimators, settings)
        for name, model in settings.models.items():
            if model.revision is None:
                log.warning(
                    "revision not pinned",
                    model=name,
                    reason="the first revision seen holds for this process; with several "
                    "aggregators, or while servers change, pin it",
                )
        process = cls(settings, log, estimators=estimators, topics=topics)
        await in_daemon_thread(process._outlet.prepare)
        return process

    def _build_source(self) -> KafkaSource:
        settings = self._settings
        options = SourceOptions(
            kafka=kafka_options(settings),
            topic=settings.queries_topic,
            poll_records_max=settings.poll_records_max,
            revoke_deadline_ms=settings.revoke_deadline_ms,
        )
        if self._outlet.transactions is not None:
            # Not before the core has halted over an abort that does not end.
            slack_ms = options.revoke_slack_ms + settings.transaction_timeout_ms
            options = replace(options, poll_ms=POLL_MS, revoke_slack_ms=slack_ms)
        return KafkaSource(options, self._bridge, logger=librdkafka_logger(self._log))

    def _build_health(self, loop: asyncio.AbstractEventLoop) -> HealthServer | None:
        if not self._settings.metrics_listen:
            return None
        registry = m.registry_of(self._metrics)
        return HealthServer(
            self._settings.metrics_listen,
            loop=loop,
            missing=self.missing,
            refresh=self._refresh,
            render=lambda: m.render(registry),
        )

    # Running -------------------------------------------------------------------------------------

    async def run(self, *, stop_at_once: bool = False) -> Halt:
        """Start everything, wait for the halt, take everything down."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._loop_exception)
        with self._signals(loop):
            for name, servers in self._servers.items():
                task = asyncio.create_task(servers.run(), name=f"model servers of {name}")
                task.add_done_callback(self._task_ended)
                self._tasks.append(task)
            self._outlet.start(self._source)
            self._source.start()
            self._log.info("started", models=list(self._settings.models))
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            if stop_at_once:
                self._stop(signal.SIGTERM)
            halt = await self._driver.halted
            if halt.at_once:
                self._end_within(0.0)
            else:
                await self._close()
        self._say_goodbye(halt)
        return halt

    def _say_goodbye(self, halt: Halt) -> None:
        say = self._log.info if halt.exit_code == 0 else self._log.error
        say("stopped", reason=halt.message, abandoned=halt.abandoned, exit_code=halt.exit_code)

    @contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        for number in SIGNALS:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        """The first signal drains, the second of Ctrl-C ends at once."""
        if self._draining:
            if number == signal.SIGINT:
                self._driver.crash("interrupted again while draining")
            return
        self._draining = True
        self._end_within(self._settings.drain_deadline_ms / 1_000)
        self._log.info("draining", signal=number.name)
        self._driver.feed([StopRequested()])

    def _end_within(self, seconds: float) -> None:
        """Set the time of the end, grace and all; later than that nothing is waited for."""
        self._end_by_s = time.monotonic() + seconds + STOP_GRACE_S
        # Kept until the process is gone: a library may hang after us. Standard error has to be one.
        if sys.stderr is not None:
            faulthandler.dump_traceback_later(seconds + STOP_GRACE_S + HANG_S, exit=True)

    def _left_s(self) -> float:
        """What is left until the end for the thing to be closed next."""
        return max(self._end_by_s - time.monotonic(), CLOSE_S_MIN)

    async def _close(self) -> None:
        if not self._draining:
            self._end_within(0.0)
        await in_daemon_thread(self._outlet.end_open, self._left_s() / 2)
        leave_s = self._left_s() / 2
        if not await in_daemon_thread(self._source.close, leave_s):
            self._log.warning("the group was not left in time", seconds=round(leave_s, 1))
        await in_daemon_thread(self._outlet.close, self._left_s())
        for task in self._tasks:
            task.cancel()
        # gRPC turns a cancellation that meets the end of a unary call into that call's error, so a
        # stream may miss it: what is left is cancelled once more when the loop is closed.
        await asyncio.wait(self._tasks, timeout=self._left_s())
        if self._health is not None:
            await in_daemon_thread(self._health.close)

    # Supervision ---------------------------------------------------------------------------------

    def _feed(self, events: list[Event]) -> None:
        """What the streams emit; the driver is built after them."""
        self._driver.feed(events)
        for event in events:
            if isinstance(event, ServerChanged) and event.limits is not None:
                self._check_revision(event)

    def _check_revision(self, event: ServerChanged) -> None:
        """Say once that a server is not used."""
        key = (event.model, event.server, event.model_revision)
        if key in self._revisions_seen:
            return
        self._revisions_seen.add(key)
        used = self._core.dispatchers[event.model].revision
        if event.model_revision != used:
            self._log.error(
                "server not used: it has another revision",
                model=event.model,
                server=event.server,
                revision=event.model_revision,
                revision_used=used,
                pinned=self._settings.models[event.model].revision is not None,
            )

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._driver.halted.done():
            return
        error = task.exception()
        self._log.error("task ended", task=task.get_name(), exc_info=error)
        self._driver.crash(f"{task.get_name()}: {error!r}")

    def _loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """A callback that raised is a bug of ours; libraries' own noise is logged only."""
        del loop
        error = context.get("exception")
        self._log.error("event loop", reason=context.get("message"), exc_info=error)
        if "handle" in context and isinstance(error, Exception):
            self._driver.crash(f"internal error: {type(error).__name__}: {error}")

    def _decoding_bug(self, error: Exception) -> None:
        self._log.error("record failed", exc_info=error)

    # What is asked from outside ------------------------------------------------------------------

    def missing(self) -> Sequence[str]:
        """What this process is not ready without."""
        if self._driver.halted.done():
            return ["stopped"]
        missing = ["draining"] if self._draining else []
        if not self._source.joined:
            missing.append(f"the group {self._settings.group_id} is not joined")
        elif not self._source.connected:
            missing.append("no connection to Kafka")
        if self._core.gauges().writing_suspended:
            missing.append("results can't be written")
        missing += filter(None, (servers.missing() for servers in self._servers.values()))
        return missing

    def _refresh(self) -> None:
        metrics = self._metrics
        gauges = self._core.gauges()
        metrics.set(m.PARTITIONS_ASSIGNED, gauges.partitions)
        metrics.set(m.PARTITIONS_PAUSED, gauges.partitions_paused)
        metrics.set(m.PARTITIONS_HELD, self._source.held)
        metrics.set(m.UNSETTLED_RECORDS, gauges.unsettled)
        metrics.set(m.LAG_OFFSETS, self._source.lag.total)
        metrics.set(m.LAG_OFFSETS_MAX, self._source.lag.largest)
        metrics.set(m.BUFFER_BYTES, gauges.buffer_bytes)
        for name, dispatcher in self._core.dispatchers.items():
            metrics.set(m.BACKLOG_QUERIES, dispatcher.waiting, name)
            metrics.set(m.BACKLOG_TOKENS, dispatcher.waiting_tokens, name)
            metrics.set(m.IN_FLIGHT_QUERIES, dispatcher.in_flight, name)
            metrics.set(m.ANSWERED_TOKENS, dispatcher.counters.answered_tokens, name)
            metrics.set(m.LATE_ANSWERS, dispatcher.counters.late_answers, name)
            metrics.set(m.QUERIES_RETRIED, dispatcher.retried, name)
            metrics.set(m.ENGINE_DEATHS, dispatcher.deaths, name)
            metrics.set(m.ESTIMATOR_FAILURES, self._estimators[name].failures, name)
            wrong = sum(
                not server.revision_ok and server.phase is not ServerPhase.DOWN
                for server in dispatcher.servers
            )
            metrics.set(m.SERVERS_WRONG_REVISION, wrong, name)
        for name, servers in self._servers.items():
            phases = list(servers.phases().values())
            for phase in ServerPhase:
                metrics.set(m.SERVERS, phases.count(phase), name, phase)
            metrics.set(m.STREAMS_OPENED, servers.opened, name)
            metrics.set(m.STREAMS_FAILED, servers.failed, name)
            silent = self._core.dispatchers[name].counters.streams_cancelled
            metrics.set(m.STREAMS_SILENT, silent, name)


async def _topics(settings: AggregatorSettings, kafka: KafkaOptions, log: Logger) -> Topics:
    """Check them. Brokers that don't answer at once are given time, which the log tells."""
    checking = asyncio.create_task(
        in_daemon_thread(
            check_topics,
            kafka,
            queries=settings.queries_topic,
            results=settings.results_topic,
            dlq=settings.dlq_topic,
            fallback_max_message_bytes=settings.max_message_bytes,
            transactions=settings.delivery == "exactly_once",
            logger=librdkafka_logger(log),
        )
    )
    done, _ = await asyncio.wait({checking}, timeout=BROKERS_SAID_AFTER_S)
    if not done:
        log.info(
            "waiting for the brokers",
            bootstrap_servers=settings.bootstrap_servers,
            seconds_max=TIMEOUT_S,
        )
    return await checking


def _priority(settings: AggregatorSettings) -> pb.Priority:
    bulk = settings.priority == "bulk"
    return pb.PRIORITY_BULK if bulk else pb.PRIORITY_INTERACTIVE
