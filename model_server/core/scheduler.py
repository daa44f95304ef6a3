"""The scheduler: what runs in the next pass, who is answered what, and what streams are told.

One way in (`handle(event, now_ns) -> effects`), one way out. Owns every request that was taken in
until its last input is answered, the one pass that runs, and the server's phase. Invariants:

- each input that arrived is answered exactly once, unless its stream or call is gone;
- one pass at a time, never above the maxima (DESIGN 4.5), and none outside SERVING and DRAINING;
- an exclusive pass starts only after the write of its announcement has returned;
- nobody is blamed for a broken engine (DESIGN 4.6).

It must not know messages, vectors, threads or clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from model_server.core.effects import (
    Announce,
    Answer,
    AnsweredPart,
    CloseStreams,
    CutStream,
    Effect,
    Fail,
    Halt,
    MaximumLowered,
    MaximumRaised,
    Part,
    PassKind,
    Refuse,
    RestartEngine,
    RunPass,
    SayState,
    TargetMoved,
    WakeAt,
)
from model_server.core.events import (
    AnnouncementWritten,
    DrainRequested,
    EngineDied,
    EngineReady,
    Event,
    PassDone,
    PassRaised,
    RequestArrived,
    RequestCancelled,
    RequestRead,
    StreamClosed,
    StreamOpened,
    Tick,
)
from model_server.core.failures import (
    EXPIRED,
    Failure,
    engine_died,
    failed_alone,
    not_started,
    too_much_held,
)
from model_server.core.held import HeldRequests
from model_server.core.lifecycle import Lifecycle, Phase
from model_server.core.limits import Limits
from model_server.core.memory import MemoryRoom
from model_server.core.pass_times import PassTimes
from model_server.core.passes import Doubted, Passes, RunningPass
from model_server.core.requests import Request
from model_server.core.restarts import IN_A_ROW_MAX, Restarts
from model_server.core.steering import Steering
from model_server.core.streams import Streams

_SECOND_NS = 1_000_000_000
ANNOUNCE_TIMEOUT_NS = 2 * _SECOND_NS
"""A client that does not read an announcement for so long is cut, so that it holds the engine for
no other request of its."""
_LOST = not_started("The engine was lost before this input's pass.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """What is fixed for the life of the process."""

    limits: Limits
    """Until `EngineReady` brings those of the loaded model."""
    pass_timeout_ns: int
    drain_deadline_ns: int


class Scheduler:
    """See the module. Not thread-safe: one caller."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._options = options
        self._lifecycle = Lifecycle()
        self._memory = MemoryRoom(options.limits)
        self._streams = Streams()
        self._held = HeldRequests(self._streams)
        self._requests = self._held.requests
        self._passes = Passes(self._requests)
        self._times = PassTimes()
        self._steering = Steering()
        self._restarts = Restarts()
        self._killable = False
        self._pass: RunningPass | None = None
        self._pass_id = 0
        self._idle_said = True
        self._drain_by_ns = 0
        self._armed_ns = 0
        self._first: list[Effect] = []
        self._out: list[Effect] = []
        self._after: list[Effect] = []
        self._handlers: dict[type[Any], Callable[[Any, int], None]] = {
            StreamOpened: self._stream_opened,
            StreamClosed: self._stream_closed,
            RequestRead: lambda event, _: self._streams.read(event.request, event.stream),
            RequestArrived: self._request_arrived,
            RequestCancelled: self._request_cancelled,
            AnnouncementWritten: self._announcement_written,
            PassDone: self._pass_done,
            PassRaised: self._pass_raised,
            EngineDied: self._engine_died,
            EngineReady: self._engine_ready,
            Tick: lambda _, __: None,  # the checks of `handle` do it
            DrainRequested: self._drain_requested,
        }

    @property
    def phase(self) -> Phase:
        """Where the server stands."""
        return self._lifecycle.phase

    @property
    def limits(self) -> Limits:
        """The sizes in force."""
        return self._memory.limits

    @property
    def implied_target(self) -> int | None:
        """The target that the last passes imply; None: it does not follow the machine."""
        return self._steering.implied_tokens

    @property
    def queued_tokens(self) -> int:
        """Tokens held beyond those of the running pass."""
        running = self._pass.held_tokens if self._pass is not None else 0
        return self._streams.held_tokens - running

    @property
    def held_tokens(self) -> int:
        """Exact tokens of all unanswered inputs."""
        return self._streams.held_tokens

    def window_tokens(self, stream: int) -> int:
        """What a stream may have unanswered."""
        return self._streams.window_tokens(stream)

    def busy_ms(self, now_ns: int) -> float:
        """The rest of the running pass plus all that is queued; 0 only when idle."""
        queued = self._times.queue_ms(self.queued_tokens, self.limits.batch_tokens_target)
        if self._pass is None:
            return queued
        expected = self._times.pass_ms(self._pass.tokens)
        rest = expected - (now_ns - self._pass.since_ns) / 1e6 if self._pass.started else expected
        # A pass that overruns is not over: a twentieth of it is always left.
        return queued + max(rest, 0.05 * expected, 0.01)

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Take one event in; the effects are to be carried out in order."""
        self._first, self._out, self._after = [], [], []
        self._handlers[type(event)](event, now_ns)
        if now_ns >= self._armed_ns:
            self._check_times(now_ns)
        if self._pass is None and self._lifecycle.running:
            self._advance(now_ns)
        self._arm(now_ns)
        return self._first + self._out + self._after

    # Streams and requests

    def _stream_opened(self, event: StreamOpened, now_ns: int) -> None:
        self._streams.open(event.stream, now_ns)
        self._share_windows(now_ns, always=(event.stream,))

    def _stream_closed(self, event: StreamClosed, now_ns: int) -> None:
        for key in self._streams.close(event.stream):
            request = self._requests[key]
            self._held.drop(request)
            self._dropped(request)
        self._share_windows(now_ns)

    def _request_arrived(self, event: RequestArrived, now_ns: int) -> None:
        self._streams.tokenized(event.request)
        stream = self._streams.get(event.stream)
        if stream is None:
            return
        if not self._lifecycle.serving:
            self._refuse(event, not_started(f"The server is {self._lifecycle.phase}."), now_ns)
            return
        if stream.held_tokens > max(self.limits.held_tokens_max, stream.window_tokens):
            message = f"{stream.held_tokens} tokens are already held unanswered."
            retry_ms = int(self.busy_ms(now_ns)) + 1
            self._refuse(event, too_much_held(message, retry_ms), now_ns)
            return
        request = Request(event)
        if request.unanswered:
            self._held.take(request, now_ns)
            self._passes.queue.push(request)
        if event.failures:
            last = not request.unanswered
            self._out.append(Fail(request=request.key, failures=event.failures, last=last))
            self._streams.said(event.stream, now_ns)
        if self._streams.windows_due(now_ns):
            self._share_windows(now_ns)

    def _refuse(self, event: RequestArrived, failure: Failure, now_ns: int) -> None:
        self._out.append(Refuse(request=event.request, failure=failure))
        self._streams.said(event.stream, now_ns)

    def _request_cancelled(self, event: RequestCancelled, now_ns: int) -> None:
        del now_ns
        self._streams.tokenized(event.request)
        request = self._requests.get(event.request)
        if request is not None:
            self._held.cancel(request)
            self._dropped(request)

    def _dropped(self, request: Request) -> None:
        """Nobody waits for it any more, nor for a pass that only it waited for."""
        running = self._pass
        if running is None:
            return
        for part in running.parts:
            if part.request == request.key:
                running.held_tokens -= sum(request.tokens[index] for index in part.indexes)
        if running.started:
            return
        if not any(part.request in self._requests for part in running.parts):
            self._pass = None

    def _fail(self, key: int, indexes: Sequence[int], failure: Failure, now_ns: int) -> None:
        self._out += self._held.fail(key, indexes, failure, now_ns)

    # Passes

    def _advance(self, now_ns: int) -> None:
        """The engine is free: start the next pass, or say that it is idle."""
        self._out += self._held.expire(now_ns)
        limits = self._memory.limits
        room = limits.batch_tokens_target
        if not self._memory.short:
            room = self._steering.pass_tokens(limits, self._streams.held_tokens)
        chosen = self._passes.next(limits, now_ns, room)
        for part in chosen.expired:
            self._fail(part.request, part.indexes, EXPIRED, now_ns)
        if chosen.kind is not None:
            probe = self._steering.is_probe(chosen, limits)
            kind = PassKind.PROBE if probe else chosen.kind
            self._start(kind, chosen.parts, chosen.tokens, now_ns)
            return
        if not self._idle_said:
            self._idle_said = True
            self._after.append(Announce(pass_id=None, running={}))
            self._streams.said_to_all(now_ns)
        if self._lifecycle.phase is Phase.DRAINING and not self._requests:
            self._stop(None)

    def _start(self, kind: PassKind, parts: Sequence[Part], tokens: int, now_ns: int) -> None:
        self._pass_id += 1
        running, awaited = self._passes.announced(parts)
        self._pass = RunningPass(
            pass_id=self._pass_id,
            kind=kind,
            parts=parts,
            tokens=tokens,
            batch_tokens_target=self.limits.batch_tokens_target,
            since_ns=now_ns,
            awaited=awaited,
            held_tokens=tokens,
        )
        if self._pass.cut:
            self._memory.pass_cut()
        if awaited is None:
            self._run()
        self._idle_said = False
        if self._steering.started(kind, tokens, self.limits):
            self._streams.share(self.limits, now_ns, self._steering.window_targets)
        self._after.append(Announce(pass_id=self._pass_id, running=running, awaited=awaited))
        self._streams.said_to_all(now_ns)

    def _run(self) -> None:
        running = self._pass
        if running is not None:
            self._first.append(
                RunPass(
                    pass_id=running.pass_id,
                    kind=running.kind,
                    parts=running.parts,
                    tokens=running.tokens,
                    batch_tokens_target=running.batch_tokens_target,
                )
            )

    def _announcement_written(self, event: AnnouncementWritten, now_ns: int) -> None:
        running = self._pass
        if running is not None and running.pass_id == event.pass_id and not running.started:
            running.awaited = None
            running.since_ns = now_ns
            self._run()

    def _ended(self, pass_id: int) -> RunningPass | None:
        """The pass that this id names, no longer running; None for one that was given up."""
        running = self._pass
        if running is None or running.pass_id != pass_id:
            return None
        self._pass = None
        return running

    def _pass_done(self, event: PassDone, now_ns: int) -> None:
        ended = self._ended(event.pass_id)
        if ended is None:
            return
        doubted = self._passes.doubted
        if ended.kind is PassKind.CANARY and doubted is not None:
            self._passes.doubted = None
            self._answer(doubted.ended, doubted.event, now_ns)
        elif ended.kind is PassKind.CANARY:
            self._convict(now_ns)
        elif event.finite:
            self._answer(ended, event, now_ns)
        else:
            # A broken engine's vectors are no fault of the inputs: the canary is to say.
            self._passes.doubted = Doubted(ended=ended, event=event)

    def _answer(self, ended: RunningPass, event: PassDone, now_ns: int) -> None:
        self._restarts.good_pass()
        if ended.cut and self._memory.good_pass():
            self._raised_maximum(now_ns)
        duration_ns = event.ended_ns - event.started_ns
        self._times.observe(ended.tokens, duration_ns)
        self._steer(ended, duration_ns, now_ns)
        answered: list[AnsweredPart] = []
        row = 0
        for part in ended.parts:
            request = self._requests.get(part.request)
            if request is not None:
                last = self._held.answered(request, part.indexes, now_ns)
                answered.append(
                    AnsweredPart(request=part.request, indexes=part.indexes, row=row, last=last)
                )
            row += len(part.indexes)
        self._out.append(
            Answer(
                pass_id=event.pass_id,
                parts=answered,
                started_ns=event.started_ns,
                ended_ns=event.ended_ns,
            )
        )

    def _convict(self, now_ns: int) -> None:
        suspect = self._passes.isolation.convicted()
        failure = failed_alone(suspect.message)
        self._fail(suspect.part.request, suspect.part.indexes, failure, now_ns)
        if suspect.out_of_memory and self._memory.explained():
            self._raised_maximum(now_ns)

    def _raised_maximum(self, now_ns: int) -> None:
        self._out.append(MaximumRaised(batch_tokens_max=self.limits.batch_tokens_max))
        self._share_windows(now_ns, always=self._streams.open_streams())

    def _steer(self, ended: RunningPass, duration_ns: int, now_ns: int) -> None:
        """Let the target follow what passes take."""
        target = self._steering.ended(ended.kind, ended.tokens, duration_ns, self._memory.asked)
        if target is None:
            return
        self._memory.move_target(target)
        implied = self._steering.implied_tokens or target
        self._out.append(TargetMoved(batch_tokens_target=target, implied_tokens=implied))
        self._share_windows(now_ns, always=self._streams.open_streams())

    def _pass_raised(self, event: PassRaised, now_ns: int) -> None:
        ended = self._ended(event.pass_id)
        if ended is None:
            return
        if ended.kind is PassKind.CANARY:
            self._lose_engine(f"the canary failed too: {event.message}", now_ns)
            return
        inputs = sum(len(part.indexes) for part in ended.parts)
        if event.out_of_memory and inputs > 1 and ended.cut:
            # Passes of the target fitted before a probe: only what goes beyond it did not.
            fitted = self.limits.batch_tokens_target if ended.kind is PassKind.PROBE else 1
            if self._memory.ran_out(ended.tokens, fitted=fitted):
                self._out.append(MaximumLowered(batch_tokens_max=self.limits.batch_tokens_max))
                self._share_windows(now_ns, always=self._streams.open_streams())
        live, expired = self._passes.live(ended.parts, now_ns)
        for part in expired:
            self._fail(part.request, part.indexes, EXPIRED, now_ns)
        if live:
            self._passes.isolation.raised(
                live, event.message, alone=inputs == 1, out_of_memory=event.out_of_memory
            )

    # The engine's life

    def _engine_ready(self, event: EngineReady, now_ns: int) -> None:
        del now_ns
        if self._lifecycle.phase is Phase.STOPPED:
            return
        self._lifecycle.to(Phase.SERVING)
        self._memory = MemoryRoom(event.limits)
        self._steering.follow(event.follow)
        self._killable = event.killable
        for tokens, duration_ns in event.pass_samples:
            self._times.observe(tokens, duration_ns)

    def _engine_died(self, event: EngineDied, now_ns: int) -> None:
        if self._lifecycle.running:
            self._lose_engine(event.message, now_ns)

    def _lose_engine(self, message: str, now_ns: int) -> None:
        """Answer everything held: what was in the pass may be the cause, the rest is not."""
        died = engine_died(f"The engine died in this pass: {message}")
        self._answer_all(died, _LOST, now_ns)
        if self._lifecycle.phase is Phase.DRAINING:
            self._stop(None)
            return
        delay_ns = self._restarts.lost(now_ns)
        if delay_ns is None:
            self._stop(f"{IN_A_ROW_MAX} engines died without a good pass; the last: {message}")
            return
        self._lifecycle.to(Phase.RESTARTING)
        self._after.append(CloseStreams(failure=not_started("The engine is restarting.")))
        self._after.append(RestartEngine(message=message, delay_ns=delay_ns))

    def _answer_all(self, in_pass: Failure, rest: Failure, now_ns: int) -> None:
        """Inputs of the pass that runs get `in_pass`, all others `rest`.

        A pass that waits for the write of its announcement does not run.
        """
        running = self._pass
        if running is not None:
            failure = in_pass if running.started else rest
            for part in running.parts:
                self._fail(part.request, part.indexes, failure, now_ns)
        for part in self._passes.undecided():
            self._fail(part.request, part.indexes, rest, now_ns)
        self._out += self._held.fail_waiting(rest, now_ns)
        self._passes.clear()
        self._pass = None
        self._idle_said = True

    def _drain_requested(self, event: DrainRequested, now_ns: int) -> None:
        del event
        if not self._lifecycle.running:
            if self._lifecycle.phase is not Phase.STOPPED:
                self._stop(None)
            return
        if self._lifecycle.phase is Phase.SERVING:
            self._lifecycle.to(Phase.DRAINING)
            self._drain_by_ns = now_ns + self._options.drain_deadline_ns
            self._say(self._streams.open_streams(), now_ns)

    def _stop(self, message: str | None) -> None:
        self._lifecycle.to(Phase.STOPPED)
        failure = not_started("The server is going away.") if message is not None else None
        self._after.append(CloseStreams(failure=failure))
        self._after.append(Halt(message=message))

    # Time

    def _check_times(self, now_ns: int) -> None:
        self._out += self._held.expire(now_ns)
        self._say(self._streams.silent(now_ns), now_ns)
        running = self._pass
        if running is not None:
            age_ns = now_ns - running.since_ns
            if running.started and age_ns >= self._options.pass_timeout_ns:
                message = f"a pass ran longer than {self._options.pass_timeout_ns // 1_000_000} ms"
                if self._killable:
                    self._lose_engine(message, now_ns)
                    return
                self._answer_all(engine_died(message), _LOST, now_ns)
                self._stop(message)
                return
            if running.awaited is not None and age_ns >= ANNOUNCE_TIMEOUT_NS:
                self._cut(running.awaited, now_ns)
        if self._lifecycle.phase is Phase.DRAINING and now_ns >= self._drain_by_ns:
            # Those of the running pass may have run, but no drain counts against a query.
            ran_out = not_started("The server's time to drain ran out.")
            self._answer_all(ran_out, ran_out, now_ns)
            self._stop(None)

    def _cut(self, stream: int, now_ns: int) -> None:
        """Its client does not read: whatever it sent would hold the engine once more."""
        unread = not_started("The stream's client did not read the announcement of a pass.")
        self._after.append(CutStream(stream=stream, failure=unread))
        self._stream_closed(StreamClosed(stream=stream), now_ns)

    def _arm(self, now_ns: int) -> None:
        """Ask for the next `Tick`, if it must come sooner than asked for, or none is due."""
        expires_ns = self._held.expires_ns()
        times = [expires_ns] if expires_ns is not None else []
        if self._pass is not None:
            limit = self._options.pass_timeout_ns if self._pass.started else ANNOUNCE_TIMEOUT_NS
            times.append(self._pass.since_ns + limit)
        if self._requests or self._streams.untokenized:
            times.append(now_ns + _SECOND_NS)
        if self._lifecycle.phase is Phase.DRAINING:
            times.append(self._drain_by_ns)
        if not times:
            return
        earliest = min(times)
        if earliest < self._armed_ns or self._armed_ns <= now_ns:
            self._armed_ns = earliest
            self._after.append(WakeAt(at_ns=earliest))

    # What streams are told

    def _share_windows(self, now_ns: int, always: Sequence[int] = ()) -> None:
        changed = self._streams.share(self.limits, now_ns, self._steering.window_targets)
        self._say([*always, *(s for s in changed if s not in always)], now_ns)

    def _say(self, streams: Sequence[int], now_ns: int) -> None:
        if streams:
            self._after.append(SayState(streams=streams))
            for stream in streams:
                self._streams.said(stream, now_ns)
