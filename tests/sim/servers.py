"""Model servers: the real scheduler with an engine, a process and a network that fail and lie.

What was done to which query (the deaths, lies and odd statuses it met) is told to the `Truth`, so
that the checkers can say who was rightly blamed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aggregator.core.effects import Dispatch
from model_server.core import effects as fx
from model_server.core import events as ev
from model_server.core.failures import NOT_FINITE as NOT_FINITE_FAILURE
from model_server.core.failures import Failure, Reason, invalid, not_started, too_much_held
from model_server.core.lifecycle import Phase
from model_server.core.limits import Limits
from model_server.core.scheduler import Scheduler, SchedulerOptions
from model_server.server.statuses import status_of
from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1.query_pb2 import ENCODING_FLOAT32 as FLOAT32
from tests.sim import lies
from tests.sim.doses import Doses
from tests.sim.kernel import MS, SECOND, Kernel, Owner
from tests.sim.network import Client, Connection, Truth
from tests.sim.texts import (
    DIMENSIONS,
    KILLS,
    NOT_FINITE,
    RAISES,
    STRIDE,
    mark_of,
    tokens_of,
    vector_of,
)

KEEPALIVE_NS = 30 * SECOND
"""When a client's pings find out that nobody is there any more."""


@dataclass(slots=True)
class _Request:
    connection: Connection
    dispatch: Dispatch
    inputs: Sequence[Any]
    tokens: list[int]
    arrived_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """One server's sizes and times."""

    limits: Limits
    pass_ns: int
    load_ns: int
    pass_timeout_ns: int
    in_process: bool
    """Its engine dies with the process, else it is a child that is started anew."""


class ModelServer:
    """One address."""

    def __init__(
        self,
        kernel: Kernel,
        doses: Doses,
        truth: Truth,
        *,
        address: str,
        revision: str,
        options: ServerOptions,
    ) -> None:
        self.address = address
        self.revision = revision
        self.options = options
        self.kernel = kernel
        self.owner = Owner(kernel, address)
        self.connections: dict[int, Connection] = {}
        self.up = False
        self.waiting: list[Callable[[], None]] = []
        """Clients that watch its health."""
        self._doses = doses
        self._truth = truth
        self._ids = itertools.count(1)
        self._requests: dict[int, _Request] = {}
        self._scheduler: Scheduler | None = None
        self._broken = False
        self._running: fx.RunPass | None = None

    # Life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process, which loads its model."""
        self.owner = Owner(self.kernel, self.address)
        self.up = True
        self._scheduler = Scheduler(
            SchedulerOptions(
                limits=self.options.limits,
                pass_timeout_ns=self.options.pass_timeout_ns,
                drain_deadline_ns=5 * SECOND,
            )
        )
        self._load()

    def _load(self) -> None:
        load_ns = self.options.load_ns + self.kernel.delay_ns(0, self.options.load_ns)
        self.kernel.after(load_ns, self.owner, "engine ready", self._loaded)

    def _loaded(self) -> None:
        self._broken = False
        self._running = None
        samples = ((10, self.options.pass_ns),)
        self._handle(ev.EngineReady(limits=self.options.limits, pass_samples=samples))
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()

    @property
    def serving(self) -> bool:
        scheduler = self._scheduler
        return self.up and scheduler is not None and scheduler.phase is Phase.SERVING

    def stop(self, *, restart_ns: int | None) -> None:
        """The process is gone, at once; with a time it is started again."""
        if not self.up:
            return
        self.up = False
        self.owner.kill()
        self._scheduler = None
        self._requests.clear()
        self._running = None
        connections, self.connections = self.connections, {}
        for connection in connections.values():
            if self.kernel.chance(self._doses.chance("server vanishes without a word")):
                self.kernel.fire("server vanishes without a word")
                cut = partial(connection.cut, "no answer to a ping")
                self.kernel.after(KEEPALIVE_NS, connection.client.owner, "keepalive", cut)
                continue
            self.note_lost(connection)
            connection.end("the server is gone", by_server=False)
        if restart_ns is not None:
            self.kernel.after(restart_ns, None, "server restarts", self._restart)

    def _restart(self) -> None:
        if not self.up:
            self.start()

    def drain(self) -> None:
        """SIGTERM."""
        if self.serving:
            self._handle(ev.DrainRequested())

    def engine_dies(self, message: str) -> None:
        """From outside, or by poison."""
        if not self.serving:
            return
        if self.options.in_process:
            self.stop(restart_ns=self.options.load_ns)
        else:
            self._running = None
            self._handle(ev.EngineDied(message=message))

    def change_limits(self) -> None:
        """A rolling change: it drains, and comes back with other sizes."""
        rng = self.kernel.rng
        target = rng.choice([32, 64, 128, 256])
        limits = self.options.limits
        largest = max(target * rng.choice([1, 2, 4]), limits.input_tokens_max)
        inputs_max = rng.choice([2, 8, 64, 512])
        changed = replace(
            limits, batch_tokens_target=target, batch_tokens_max=largest, inputs_max=inputs_max
        )
        self.options = replace(self.options, limits=changed)
        self.drain()

    # Streams -------------------------------------------------------------------------------------

    def accept(self, client: Client) -> Connection:
        connection = Connection(self.kernel, self._doses, client, next(self._ids))
        connection.server = self
        self.connections[connection.stream] = connection
        if self.kernel.chance(self._doses.chance("first message is no state")):
            self.kernel.fire("first message is no state")
            connection.to_client(pb.EmbedStreamResponse())
        self._handle(ev.StreamOpened(stream=connection.stream))
        return connection

    def noticed_closed(self, connection: Connection) -> None:
        self.note_lost(connection)
        delay_ns = self.kernel.delay_ns(MS // 5, 50 * MS)
        self.kernel.after(delay_ns, self.owner, "stream closed", lambda: self._closed(connection))

    def _closed(self, connection: Connection) -> None:
        if self.connections.pop(connection.stream, None) is None:
            return
        for key in [k for k, r in self._requests.items() if r.connection is connection]:
            del self._requests[key]
        self._handle(ev.StreamClosed(stream=connection.stream))

    def note_lost(self, connection: Connection, *, answers_arrive: bool = False) -> None:
        """The claims that are unanswered on it are lost with it."""
        for claim_id, dispatch in connection.claims.items():
            if answers_arrive and claim_id in connection.answered:
                continue
            self.note_unsent(dispatch)

    def note_unsent(self, dispatch: Dispatch) -> None:
        """It is lost: to its client it may have been in a pass."""
        self._truth.hit(dispatch.queries, "lost")
        if dispatch.exclusive and len(dispatch.queries) == 1:
            self._truth.alone_hit(dispatch.queries[0])

    def arrived(self, connection: Connection, request: pb.EmbedStreamRequest) -> None:
        """A request was read: check, tokenize, schedule."""
        if connection.stream not in self.connections:
            return
        key = next(self._ids)
        dispatch = connection.claims[request.request_id]
        inputs = list(request.inputs)
        limits = self.options.limits
        tokens, failures = [], []
        for index, each in enumerate(inputs):
            count = tokens_of(each.text)
            if count > limits.input_tokens_max and each.truncate:
                count = limits.input_tokens_max
            if count > limits.input_tokens_max:
                failures.append((index, invalid("text", f"{count} tokens")))
                count = 0
            elif each.dimensions and each.dimensions != DIMENSIONS:
                failures.append((index, invalid("dimensions", f"{each.dimensions}")))
                count = 0
            tokens.append(count)
        taken = _Request(connection, dispatch, inputs, tokens, self.owner.monotonic_ns())
        self._requests[key] = taken
        size = sum(len(each.text) for each in inputs)
        failure = limits.check_request(inputs=len(inputs), request_bytes=size)
        failure = failure or self._whim(dispatch)
        if failure is not None:
            self._refuse(key, failure)
            return
        delay_ns = self.kernel.delay_ns(50_000, 2 * MS)
        self.kernel.after(
            delay_ns, self.owner, "tokenized", lambda: self._tokenized(key, request, failures)
        )

    def _whim(self, dispatch: Dispatch) -> Failure | None:
        """A refusal that nobody deserved."""
        if self._happens("claim refused as too much held"):
            return too_much_held("too much", self.kernel.rng.choice([1, 30, 300]))
        if self._happens("claim refused as not started"):
            return not_started("not now")
        del dispatch
        return None

    def _happens(self, name: str) -> bool:
        if self.kernel.chance(self._doses.chance(name)):
            self.kernel.fire(name)
            return True
        return False

    def _tokenized(
        self, key: int, request: pb.EmbedStreamRequest, failures: list[tuple[int, Failure]]
    ) -> None:
        taken = self._requests.get(key)
        if taken is None:
            return
        now_ns = self.owner.monotonic_ns()
        deadlines = [
            taken.arrived_ns + i.timeout_ms * MS if i.timeout_ms else 0 for i in taken.inputs
        ]
        if now_ns < taken.arrived_ns:
            raise RuntimeError("time went backwards")
        self._handle(
            ev.RequestArrived(
                request=key,
                stream=taken.connection.stream,
                request_id=request.request_id,
                tokens=taken.tokens,
                text_bytes=[len(each.text) for each in taken.inputs],
                deadlines_ns=deadlines if any(deadlines) else None,
                failures=failures,
                exclusive=request.exclusive,
            )
        )

    # The scheduler's effects ---------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        scheduler = self._scheduler
        if scheduler is None:
            return
        for effect in scheduler.handle(event, self.owner.monotonic_ns()):
            if self._scheduler is not scheduler:
                return
            self._carry_out(effect)

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.RunPass():
                self._run(effect)
            case fx.Answer():
                for part in effect.parts:
                    self._answer(part, effect)
            case fx.Fail():
                self._fail(effect)
            case fx.Refuse():
                self._refuse(effect.request, effect.failure)
            case fx.Announce():
                self._announce(effect)
            case fx.SayState():
                for stream in effect.streams:
                    self._say(stream, ())
            case fx.WakeAt():
                at_ns = max(effect.at_ns, self.kernel.now_ns)
                self.kernel.at(at_ns, self.owner, "server tick", lambda: self._handle(ev.Tick()))
            case fx.CloseStreams():
                self._close_streams(effect.failure)
            case fx.RestartEngine():
                self._running = None
                self._load()
            case fx.Halt():
                self.stop(restart_ns=self.options.load_ns)
            case fx.MaximumLowered():
                self.kernel.fire("server: maximum lowered")
            case fx.MaximumRaised():
                self.kernel.fire("server: maximum raised")

    def _close_streams(self, failure: Failure | None) -> None:
        connections, self.connections = self.connections, {}
        for connection in connections.values():
            self.note_lost(connection, answers_arrive=True)
            connection.end("closed" if failure is None else failure.message, by_server=True)
            self.kernel.after(
                0,
                self.owner,
                "stream closed",
                partial(self._handle, ev.StreamClosed(stream=connection.stream)),
            )
        self._requests.clear()

    def _announce(self, effect: fx.Announce) -> None:
        for stream in list(self.connections):
            self._say(stream, effect.running.get(stream, ()))
        if effect.awaited is not None and effect.pass_id is not None:
            written = ev.AnnouncementWritten(pass_id=effect.pass_id)
            self.kernel.after(
                self.kernel.delay_ns(20_000, MS),
                self.owner,
                "announced",
                lambda: self._handle(written),
            )

    # Passes --------------------------------------------------------------------------------------

    def _inputs(self, parts: Sequence[fx.Part]) -> list[tuple[_Request, int]]:
        found = []
        for part in parts:
            request = self._requests.get(part.request)
            if request is not None:
                found += [(request, index) for index in part.indexes]
        return found

    def _run(self, effect: fx.RunPass) -> None:
        kernel, options = self.kernel, self.options
        inputs = self._inputs(effect.parts)
        self._running = effect
        self._check_pass(effect, inputs)
        marks = {mark_of(request.inputs[index].text) for request, index in inputs}
        busy_ns = int(
            options.pass_ns * max(1.0, effect.tokens / options.limits.batch_tokens_target)
        )
        if self._happens("pass slow"):
            busy_ns *= 20
        started_ns = self.owner.monotonic_ns()
        several = len(inputs) > 1
        if KILLS in marks:
            kernel.fire("engine dies of poison")
            kernel.after(busy_ns // 2, self.owner, "engine dies", lambda: self._poisoned(effect))
        elif self._broken or RAISES in marks:
            self._raise(effect, busy_ns)
        elif several and self._happens("pass out of memory"):
            self._raise(effect, busy_ns, out_of_memory=True)
        elif several and self._happens("pass raised for no reason"):
            self._broken = kernel.chance(0.3)
            self._raise(effect, busy_ns)
        elif effect.parts and self._happens("pass stuck"):
            return
        else:
            finite = marks != {NOT_FINITE}
            done = partial(self._done, effect, started_ns, finite=finite)
            kernel.after(busy_ns, self.owner, "pass done", done)

    def _done(self, effect: fx.RunPass, started_ns: int, *, finite: bool) -> None:
        self._running = None
        event = ev.PassDone(
            pass_id=effect.pass_id,
            started_ns=started_ns,
            ended_ns=self.owner.monotonic_ns(),
            finite=finite,
        )
        self._handle(event)

    def _raise(self, effect: fx.RunPass, busy_ns: int, *, out_of_memory: bool = False) -> None:
        event = ev.PassRaised(pass_id=effect.pass_id, message="boom", out_of_memory=out_of_memory)

        def raised() -> None:
            self._running = None
            self._handle(event)

        self.kernel.after(busy_ns, self.owner, "pass raised", raised)

    def _poisoned(self, effect: fx.RunPass) -> None:
        if self._running is effect:
            self.engine_dies("killed by an input")

    def _check_pass(self, effect: fx.RunPass, inputs: list[tuple[_Request, int]]) -> None:
        scheduler = self._scheduler
        if scheduler is None:
            return
        limits = scheduler.limits
        tokens = sum(request.tokens[index] for request, index in inputs)
        size = sum(len(request.inputs[index].text) for request, index in inputs)
        if tokens > limits.batch_tokens_max:
            self._truth.violated(5, f"a pass of {tokens} tokens, {limits.batch_tokens_max} at most")
        if len(inputs) > limits.inputs_max or size > limits.request_bytes_max:
            self._truth.violated(5, f"a pass of {len(inputs)} inputs and {size} bytes")
        exclusive = {id(request) for request, _ in inputs if request.dispatch.exclusive}
        if exclusive and len({id(request) for request, _ in inputs}) > 1:
            self._truth.violated(6, "a suspect's pass was merged with others")

    # Messages ------------------------------------------------------------------------------------

    def _state(self, connection: Connection, running: Sequence[int]) -> pb.ServerState:
        scheduler = self._scheduler
        if scheduler is None:
            raise RuntimeError("a dead server speaks")
        limits = scheduler.limits
        state = pb.ServerState(
            batch_tokens_target=limits.batch_tokens_target,
            batch_tokens_max=limits.batch_tokens_max,
            window_tokens=scheduler.window_tokens(connection.stream),
            inputs_max=limits.inputs_max,
            request_bytes_max=limits.request_bytes_max,
            busy_ms=scheduler.busy_ms(self.owner.monotonic_ns()),
            queued_tokens=scheduler.queued_tokens,
            draining=scheduler.phase is not Phase.SERVING,
        )
        if running:
            state.running.extend(running)
        if self._happens("state that lies"):
            lies.about_state(self.kernel.rng, state)
        return state

    def _say(self, stream: int, running: Sequence[int]) -> None:
        connection = self.connections.get(stream)
        if connection is not None:
            state = self._state(connection, running)
            connection.to_client(pb.EmbedStreamResponse(state=state))

    def _answer(self, part: fx.AnsweredPart, whole: fx.Answer) -> None:
        request = self._requests.get(part.request)
        if request is None:
            return
        response = pb.EmbedStreamResponse(
            request_id=request.dispatch.claim_id,
            last=part.last,
            queue_us=max(whole.started_ns - request.arrived_ns, 0) // 1000,
            inference_us=(whole.ended_ns - whole.started_ns) // 1000,
        )
        inputs = request.inputs
        sound = []
        for index in part.indexes:
            if mark_of(inputs[index].text) == NOT_FINITE:
                response.errors.add(index=index, status=status_of(NOT_FINITE_FAILURE))
            else:
                sound.append(index)
        if sound:
            group = response.groups.add()
            group.encoding = FLOAT32
            group.dimensions = DIMENSIONS
            group.indexes.extend(sound)
            group.tokens.extend([request.tokens[index] for index in sound])
            revision = self.revision
            group.embeddings = b"".join(vector_of(inputs[i].text, revision) for i in sound)
        self._send(request, part.request, response)

    def _fail(self, effect: fx.Fail) -> None:
        request = self._requests.get(effect.request)
        if request is None:
            return
        dispatch = request.dispatch
        response = pb.EmbedStreamResponse(request_id=dispatch.claim_id, last=effect.last)
        died = [i for i, failure in effect.failures if failure.reason is Reason.ENGINE_DIED]
        self._truth.hit([dispatch.queries[index] for index in died], "died")
        if died and dispatch.exclusive and len(dispatch.queries) == 1:
            self._truth.alone_hit(dispatch.queries[0])
        for index, failure in effect.failures:
            response.errors.add(index=index, status=status_of(failure))
        self._send(request, effect.request, response)

    def _refuse(self, key: int, failure: Failure) -> None:
        request = self._requests.get(key)
        if request is None:
            return
        response = pb.EmbedStreamResponse(
            request_id=request.dispatch.claim_id, last=True, status=status_of(failure)
        )
        self._send(request, key, response)

    def _send(self, request: _Request, key: int, response: pb.EmbedStreamResponse) -> None:
        """Send it, or what a liar makes of it."""
        connection = request.connection
        if response.last:
            del self._requests[key]
            connection.answered.add(request.dispatch.claim_id)
        if connection.stream not in self.connections:
            return
        response.state.CopyFrom(self._state(connection, ()))
        if self._doses.healthy:
            connection.to_client(response)
            return
        told = lies.about_answer(
            self.kernel, self._doses, response, stride=STRIDE, inputs=len(request.inputs)
        )
        if told.what is not None:
            self._truth.hit(request.dispatch.queries, told.what)
        for each in told.responses:
            connection.to_client(each)
