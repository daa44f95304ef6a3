"""Feeds events to the scheduler and carries out its effects; owns engine, requests and sessions.

No policy: what runs, who is answered and what is refused is the scheduler's. Invariants: events are
fed from the loop only, one after the other; a request is known here from its arrival until its last
answer was ordered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_server.core.effects import (
    Announce,
    Answer,
    CloseStreams,
    CutStream,
    Effect,
    Fail,
    Halt,
    MaximumLowered,
    MaximumRaised,
    Refuse,
    RestartEngine,
    RunPass,
    SayState,
    TargetMoved,
    WakeAt,
)
from model_server.core.events import (
    UNARY,
    AnnouncementWritten,
    DrainRequested,
    EngineDied,
    EngineReady,
    Event,
    RequestArrived,
    RequestCancelled,
    RequestRead,
    StreamClosed,
    StreamOpened,
    Tick,
)
from model_server.core.failures import Failure, not_started, too_much_held
from model_server.core.lifecycle import Phase
from model_server.core.saturation import TargetSource
from model_server.core.scheduler import Scheduler, SchedulerOptions
from model_server.engines.base import ModelInfo
from model_server.server.calls import Caller, Held
from model_server.server.engine_host import EngineHost
from model_server.server.intake import Intake
from model_server.server.pass_runner import PassRunner
from model_server.server.requests import Columns
from model_server.server.sessions import Session
from model_server.server.startup import Started
from model_server.server.telling import Telling
from model_server.server.tokenizing import Tokenizing
from model_server.server.workers import Worker
from protos.embedding.v1 import embedding_service_pb2 as pb

if TYPE_CHECKING:
    from model_server.telemetry.logs import Logger
    from model_server.telemetry.metrics import Metrics

UNTOKENIZED_UNARY_MAX = 64
"""Unary calls that may wait for the tokenizer; their tokens are not known, so calls are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverOptions:
    """What the driver is given."""

    model: str
    scheduler: SchedulerOptions
    start: Callable[[], Started]
    """Blocking; run in the engine's thread, at start and at each restart."""


class Driver:
    """See the module."""

    def __init__(self, options: DriverOptions, *, log: Logger, metrics: Metrics) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._options = options
        self._log = log
        self._metrics = metrics
        self._scheduler = Scheduler(options.scheduler)
        self._telling = Telling(self._scheduler, log, metrics)
        self._engine = EngineHost(
            options.start,
            loop,
            started=self._engine_started,
            failed=self._engine_failed,
            died=lambda message: self._feed(EngineDied(message=message)),
        )
        self._token_worker = Worker("tokenizer", loop)
        self._target_has_moved = False
        self._intake: Intake | None = None
        self._sessions: dict[int, Session] = {}
        self._held: dict[int, Held] = {}
        self._tokenizing = Tokenizing(self._token_worker, self._held, has_room=self._wake_readers)
        self._runner = PassRunner(self._engine, self._held, feed=self._feed, telling=self._telling)
        self._stream_id = UNARY
        self._key = 0
        self._untokenized_unary = 0
        self._timer: asyncio.TimerHandle | None = None
        self._phase = Phase.LOADING
        self.phase_changed = asyncio.Event()
        self.no_streams = asyncio.Event()
        self.no_streams.set()
        self.halted: asyncio.Future[str | None] = loop.create_future()
        """Its result: None after a drain, else why the process must end."""
        self._carry: dict[type[Any], Callable[[Any], None]] = {
            RunPass: self._runner.run,
            Announce: self._announce,
            SayState: self._say_state,
            Answer: self._runner.answer,
            Fail: self._fail,
            Refuse: self._refuse,
            CloseStreams: self._close_streams,
            CutStream: self._cut_stream,
            RestartEngine: self._restart_engine,
            MaximumLowered: self._telling.maximum_lowered,
            MaximumRaised: self._telling.maximum_raised,
            TargetMoved: self._target_moved,
            Halt: self._halt,
            WakeAt: self._wake_at,
        }

    # What others may know

    @property
    def model(self) -> str:
        """The served name."""
        return self._options.model

    @property
    def phase(self) -> Phase:
        """Where the server stands."""
        return self._phase

    @property
    def info(self) -> ModelInfo | None:
        """Of the loaded model; None before there is one."""
        started = self._engine.current
        return started.engine.info if started is not None else None

    @property
    def started(self) -> Started | None:
        """The engine that serves, and how it came to its target; None before there is one."""
        return self._engine.current

    @property
    def target_source(self) -> TargetSource:
        """Where the target in force came from."""
        started = self._engine.current
        if started is None:
            return TargetSource.DEFAULT
        return TargetSource.FOLLOWED if self._target_has_moved else started.target_source

    @property
    def scheduler(self) -> Scheduler:
        """To read limits and figures from."""
        return self._scheduler

    @property
    def streams(self) -> int:
        """Open streams."""
        return len(self._sessions)

    def not_serving(self) -> Failure | None:
        """Why nothing can be taken now; None: it can."""
        if self._phase is Phase.SERVING:
            return None
        return not_started(f"The server is {self._phase}.")

    # Life

    def start(self) -> None:
        """Load the engine; SERVING follows, or `halted`."""
        self._engine.start()

    def drain(self) -> None:
        """Answer what is held, refuse the rest; `halted` follows."""
        self._feed(DrainRequested())

    def close(self, timeout_s: float) -> bool:
        """Free the engine and end the threads; False: the engine's thread hangs in a pass."""
        if self._timer is not None:
            self._timer.cancel()
        self._token_worker.close(timeout_s)
        return self._engine.close(timeout_s)

    def _engine_failed(self, error: BaseException) -> None:
        self._log.error("engine not started", error=str(error), kind=type(error).__name__)
        self._halt(Halt(message=str(error) or type(error).__name__))

    def _engine_started(self, result: Started) -> None:
        self._intake = Intake(self._options.model, result.engine.info)
        self._target_has_moved = False
        self._feed(
            EngineReady(
                limits=result.limits,
                pass_samples=result.pass_samples,
                follow=result.found.follow if result.found is not None else None,
                killable=self._engine.separate is not None,
            )
        )
        self._telling.limits()

    def _restart_engine(self, effect: RestartEngine) -> None:
        self._metrics.engine_restarts.inc()
        restart_in_s = round(effect.delay_ns / 1e9, 3)
        self._log.error("engine lost", reason=effect.message, restart_in_s=restart_in_s)
        self._runner.give_up()
        self._engine.restart(effect.delay_ns)

    def _halt(self, effect: Halt) -> None:
        if not self.halted.done():
            self.halted.set_result(effect.message)

    # Events

    def _feed(self, event: Event) -> None:
        effects: Sequence[Effect] = self._scheduler.handle(event, time.monotonic_ns())
        for effect in effects:
            self._carry[type(effect)](effect)
        if self._scheduler.phase is not self._phase:
            self._phase = self._scheduler.phase
            self._log.info("phase", phase=str(self._phase))
            self.phase_changed.set()

    def _wake_at(self, effect: WakeAt) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (effect.at_ns - time.monotonic_ns()) / 1e9)
        # A timer may fire a little early; the scheduler then asks again.
        self._timer = self._loop.call_later(delay_s, self._feed, Tick())

    # Streams and requests

    def open_stream(self) -> Session:
        """A client opened a stream; to be closed by `close_stream`."""
        self._stream_id += 1
        session = Session(self._stream_id, self)
        self._sessions[session.stream] = session
        self.no_streams.clear()
        self._telling.streams(len(self._sessions))
        self._feed(StreamOpened(stream=session.stream))
        return session

    def close_stream(self, session: Session) -> None:
        """A stream is over: its inputs leave the queue."""
        if session.stream not in self._sessions:
            return  # it was cut
        self._forget_stream(session.stream)
        self._feed(StreamClosed(stream=session.stream))

    def _forget_stream(self, stream: int) -> None:
        del self._sessions[stream]
        if not self._sessions:
            self.no_streams.set()
        self._telling.streams(len(self._sessions))
        for key in [key for key, held in self._held.items() if held.stream == stream]:
            del self._held[key]
        self._tokenizing.drop()

    def _wake_readers(self) -> None:
        for session in self._sessions.values():
            session.wake_reader()

    @property
    def untokenized(self) -> int:
        """Requests that wait for the tokenizer."""
        return self._tokenizing.waiting

    @property
    def tokenizer_full(self) -> bool:
        """Whether who has a request at the tokenizer must not send another."""
        return self._tokenizing.full

    def fill_state(self, stream: int, state: pb.ServerState) -> None:
        """The state as of now, for a stream."""
        scheduler = self._scheduler
        limits = scheduler.limits
        state.batch_tokens_target = limits.batch_tokens_target
        state.batch_tokens_max = limits.batch_tokens_max
        state.window_tokens = scheduler.window_tokens(stream)
        state.inputs_max = limits.inputs_max
        state.request_bytes_max = limits.request_bytes_max
        state.busy_ms = scheduler.busy_ms(time.monotonic_ns())
        # Else a server whose tokenizer is behind would call itself idle, with requests it holds.
        state.queued_tokens = scheduler.queued_tokens + self._tokenizing.waiting_tokens
        state.draining = self._phase in (Phase.DRAINING, Phase.STOPPED)

    def announcement_written(self, pass_id: int) -> None:
        """The write of an awaited announcement returned."""
        self._feed(AnnouncementWritten(pass_id=pass_id))

    def take_stream_request(self, session: Session, request: pb.EmbedStreamRequest) -> None:
        """Check, tokenize, schedule."""
        arrived_ns = time.monotonic_ns()
        columns = self._read(request, arrived_ns)
        if isinstance(columns, Failure):
            session.refuse_id(request.request_id, columns)
            return
        held = self._hold(session, columns, arrived_ns, session.stream, request.request_id)
        held.exclusive = request.exclusive
        held.bulk = request.priority == pb.PRIORITY_BULK
        session.tokenizing()
        self._feed(RequestRead(request=held.key, stream=session.stream))
        self._tokenize(held, session.tokenized)

    def take_unary(self, request: pb.EmbedRequest, caller: Caller) -> int | Failure:
        """The same for a unary call; returns the key to cancel it by, or why it is refused."""
        waiting = self._untokenized_unary
        if waiting >= UNTOKENIZED_UNARY_MAX or (waiting and self.tokenizer_full):
            failure = too_much_held("Too many unary calls wait for the tokenizer.", 100)
            self._telling.refused(failure)
            return failure
        arrived_ns = time.monotonic_ns()
        columns = self._read(request, arrived_ns)
        if isinstance(columns, Failure):
            return columns
        held = self._hold(caller, columns, arrived_ns, UNARY, 0)
        held.bulk = request.priority == pb.PRIORITY_BULK
        self._untokenized_unary += 1
        self._tokenize(held, self._unary_tokenized)
        return held.key

    def _unary_tokenized(self) -> None:
        self._untokenized_unary -= 1

    def cancel(self, key: int) -> None:
        """Nobody waits for this request any more."""
        if self._held.pop(key, None) is not None:
            self._tokenizing.drop()
            self._feed(RequestCancelled(request=key))

    def _read(
        self, request: pb.EmbedStreamRequest | pb.EmbedRequest, arrived_ns: int
    ) -> Columns | Failure:
        """A request's inputs, or why all of it is refused; a refusal is counted."""
        read: Columns | Failure | None = self.not_serving()
        if read is None and self._intake is not None:
            read = self._intake.read(request, self._scheduler.limits, arrived_ns)
        if read is None:
            raise RuntimeError("the server serves without a model")
        if isinstance(read, Failure):
            self._telling.refused(read)
        return read

    def _hold(
        self, caller: Caller, columns: Columns, arrived_ns: int, stream: int, request_id: int
    ) -> Held:
        self._key += 1
        held = Held(
            key=self._key,
            stream=stream,
            request_id=request_id,
            arrived_ns=arrived_ns,
            caller=caller,
            columns=columns,
        )
        self._held[held.key] = held
        return held

    def _tokenize(self, held: Held, left: Callable[[], None]) -> None:
        started = self._engine.current
        if started is None:
            raise RuntimeError("a request was taken before there is an engine")
        self._tokenizing.add(held, started.engine, left=left, done=self._tokenized)

    def _tokenized(self, held: Held, error: BaseException | None) -> None:
        if error is None:
            self._arrived(held)
            return
        self._log.error("tokenizer failed", error=str(error))
        self._refuse(Refuse(request=held.key, failure=not_started(f"{error}")))
        self._feed(RequestCancelled(request=held.key))

    def _arrived(self, held: Held) -> None:
        columns = held.columns
        self._feed(
            RequestArrived(
                request=held.key,
                stream=held.stream,
                request_id=held.request_id,
                tokens=columns.counts,
                text_bytes=columns.text_bytes,
                deadlines_ns=columns.deadlines_ns,
                failures=sorted(columns.failures.items(), key=lambda item: item[0]),
                exclusive=held.exclusive,
                bulk=held.bulk,
            )
        )

    # Other effects

    def _fail(self, effect: Fail) -> None:
        held = self._held[effect.request]
        self._telling.failed(failure for _, failure in effect.failures)
        held.caller.answer(held, (), effect.failures, last=effect.last, timing=None)
        if effect.last:
            del self._held[effect.request]

    def _refuse(self, effect: Refuse) -> None:
        held = self._held.pop(effect.request, None)
        if held is not None:
            self._telling.refused(effect.failure)
            held.caller.refuse(held, effect.failure)

    def _announce(self, effect: Announce) -> None:
        for stream, session in self._sessions.items():
            awaited = effect.pass_id if effect.awaited == stream else None
            session.say(effect.running.get(stream, ()), awaited)

    def _say_state(self, effect: SayState) -> None:
        for stream in effect.streams:
            self._sessions[stream].say()

    def _close_streams(self, effect: CloseStreams) -> None:
        for session in self._sessions.values():
            session.close(effect.failure)

    def _cut_stream(self, effect: CutStream) -> None:
        self._metrics.streams_cut.inc()
        self._log.warning("stream cut", stream=effect.stream, reason=effect.failure.message)
        self._sessions[effect.stream].cut(effect.failure)
        self._forget_stream(effect.stream)

    def _target_moved(self, effect: TargetMoved) -> None:
        self._target_has_moved = True
        self._telling.target_moved(effect)
