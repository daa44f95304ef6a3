"""One serving process: listens, loads, serves, drains on SIGTERM or SIGINT, ends with a code.

Invariants: the port is open before the model is loaded, with health NOT_SERVING; health says
SERVING exactly while the driver does; a drain ends with code 0, whatever was left at its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from model_server.core.lifecycle import Phase
from model_server.core.saturation import TargetOptions
from model_server.core.scheduler import SchedulerOptions
from model_server.profiling.targeting import TargetFinder, TargetingOptions
from model_server.server.driver import Driver, DriverOptions
from model_server.server.service import SERVICE_NAME, EmbeddingService
from model_server.server.startup import StartOptions, start_engine
from model_server.settings import MESSAGE_BYTES_MAX
from model_server.telemetry.http import ListenError, TelemetryServer, why_not
from model_server.telemetry.metrics import Metrics
from protos.embedding.v1 import embedding_service_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from pathlib import Path

    from model_server.engines.base import Engine
    from model_server.settings import ModelServerSettings
    from model_server.telemetry.logs import Logger

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Else a second server on the same port starts too, and gets part of the connections.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients ping every 20 s; the default would answer too_many_pings below 5 minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)
STOP_GRACE_S = 0.5
CLOSE_TIMEOUT_S = 5.0
FLUSH_S = 1.0
_SERVICES = ("", SERVICE_NAME)


class ServeError(Exception):
    """The server can't serve; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a serving process ended. `hangs`: a thread is stuck in a pass, so exit without joins."""

    message: str | None
    hangs: bool


class ModelServer:
    """A server in this process; `start`, then `serving`, then `drain` or `ended`."""

    def __init__(
        self,
        settings: ModelServerSettings,
        load: Callable[[], Engine],
        *,
        log: Logger,
        cache_dir: Path | None = None,
    ) -> None:
        self._settings = settings
        self._log = log
        self._metrics = Metrics()
        start = StartOptions(
            batch_tokens_target=settings.target,
            batch_tokens_max=settings.batch_tokens_max,
            inputs_max=settings.inputs_max,
            request_bytes_max=settings.request_bytes_max,
            cache_dir=cache_dir,
            golden_cosine_min=settings.golden_cosine_min,
            target_source=settings.target_source,
            finder=_finder(settings, cache_dir, log),
        )
        self.driver = Driver(
            DriverOptions(
                model=settings.served_name,
                scheduler=SchedulerOptions(
                    limits=start.limits(1),
                    pass_timeout_ns=settings.pass_timeout_ms * 1_000_000,
                    drain_deadline_ns=settings.drain_deadline_ms * 1_000_000,
                ),
                start=lambda: start_engine(load, start, log),
            ),
            log=log,
            metrics=self._metrics,
        )
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._telemetry = TelemetryServer(self._metrics.registry, self._missing)
        self._health_task: asyncio.Task[None] | None = None
        self.port = 0
        self.metrics_port = 0

    def _missing(self) -> str | None:
        phase = self.driver.phase
        return None if phase is Phase.SERVING else f"the server is {phase}"

    async def start(self) -> None:
        """Listen and begin to load.

        Raises:
            ServeError: an address can't be listened on.
        """
        settings = self._settings
        pb_grpc.add_EmbeddingServiceServicer_to_server(EmbeddingService(self.driver), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        await self._set_health(serving=False)
        try:
            self.port = self._server.add_insecure_port(settings.grpc_listen)
        except RuntimeError as error:
            why = await _why_not_bound(settings.grpc_listen)
            raise ServeError(f"grpc_listen {settings.grpc_listen}: {why}") from error
        try:
            if settings.metrics_listen:
                self.metrics_port = await self._telemetry.listen(settings.metrics_listen)
        except ListenError as error:
            raise ServeError(str(error)) from error
        await self._server.start()
        self._health_task = asyncio.create_task(self._follow_phase())
        self._log.info(
            "listening",
            grpc_listen=settings.grpc_listen,
            port=self.port,
            metrics_port=self.metrics_port,
            model=settings.served_name,
            engine=settings.engine,
        )
        self.driver.start()

    async def _set_health(self, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for service in _SERVICES:
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def _follow_phase(self) -> None:
        """Health and gauges say what the driver's phase is."""
        while True:
            await self.driver.phase_changed.wait()
            self.driver.phase_changed.clear()
            serving = self.driver.phase is Phase.SERVING
            await self._set_health(serving=serving)
            self._metrics.serving.set(serving)
            if serving:
                # What is loaded stays: no collection needs to look at it again.
                gc.collect()
                gc.freeze()
                gc.set_threshold(50_000, 20, 50)

    def drain(self) -> None:
        """Answer what is held, refuse the rest; `ended` returns then."""
        self.driver.drain()

    async def ended(self) -> Ended:
        """Wait for the end, then free everything."""
        message = await asyncio.shield(self.driver.halted)
        await self._flush()
        await self._server.stop(STOP_GRACE_S)
        await self.close_telemetry()
        closed = await asyncio.to_thread(
            self.driver.close, CLOSE_TIMEOUT_S if message is None else FLUSH_S
        )
        return Ended(message=message, hangs=not closed)

    async def close_telemetry(self) -> None:
        """Stop following the phase and serving metrics."""
        if self._health_task is not None:
            self._health_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._health_task
        await self._telemetry.close()

    async def _flush(self) -> None:
        """Let streams write what was ordered; a client that does not read is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self.driver.no_streams.wait()


def _finder(
    settings: ModelServerSettings, cache_dir: Path | None, log: Logger
) -> TargetFinder | None:
    """What finds the target; None: the settings say it."""
    if settings.batch_tokens_target is not None:
        return None
    options = TargetingOptions(
        target=TargetOptions(
            pass_ms_max=settings.pass_ms_max, latency_slack_ratio=settings.latency_slack_ratio
        ),
        follow=settings.target_follow,
        quick_ms_max=settings.quick_profile_ms_max,
        tokens_max=settings.batch_tokens_max,
        inputs_max=settings.inputs_max,
        cache_dir=cache_dir,
    )
    return TargetFinder(options, log)


async def _why_not_bound(address: str) -> str:
    """What gRPC does not tell: the system's word for why an address can't be listened on."""
    host, _, port = address.rpartition(":")
    try:
        server = await asyncio.start_server(lambda _reader, _writer: None, host.strip("[]"), port)
    except OSError as error:
        return why_not(error)
    server.close()
    return "gRPC can't listen there"


async def serve_until_ended(
    settings: ModelServerSettings,
    load: Callable[[], Engine],
    *,
    log: Logger,
    cache_dir: Path | None = None,
) -> Ended:
    """Serve until a signal has drained the server, or it can't go on.

    Raises:
        ServeError: an address can't be listened on.
    """
    server = ModelServer(settings, load, log=log, cache_dir=cache_dir)
    await server.start()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.drain)
    return await server.ended()
