"""A world in virtual time: real dispatchers and real schedulers, with a network and engines faked.

Deterministic: one heap of timed callbacks, a seeded generator, no clock. Beside it the yardstick,
`shared_queue`: one queue that every server pops from, without network or estimates.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aggregator.core.dispatch import Dispatcher, DispatchOptions
from aggregator.core.effects import Dispatch
from aggregator.core.events import ClaimAnswered, ServerChanged, ServerLimits, ServerPhase
from aggregator.core.query import Answer, Query, VectorGroup
from model_server.core import effects as server_effects
from model_server.core.events import (
    EngineReady,
    PassDone,
    RequestArrived,
    StreamOpened,
)
from model_server.core.events import Tick as ServerTick
from model_server.core.following import FollowOptions
from model_server.core.limits import Limits
from model_server.core.scheduler import Scheduler, SchedulerOptions

MS = 1_000_000
TARGET = 600
INPUT_TOKENS_MAX = 256
START_NS = 10 * MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One configuration of the world."""

    aggregators: int = 1
    servers: int = 1
    load: float = 0.5
    """Tokens that arrive, as a part of what the servers can run in full passes."""
    queries: int = 6000
    pass_ns: int = 15 * MS
    one_way_ns: int = MS // 2
    jitter: float = 0.0
    """Pass times vary evenly by this part of themselves."""
    shares: Sequence[float] = ()
    """Parts of the traffic; empty: all aggregators get the same."""
    estimate_noise: bool = False
    """Estimates are off by about one token a query, as another vocabulary's are."""
    seed: int = 1
    lead_ns: int = 3 * MS
    warm_up_ns: int = 0
    """Latencies of what arrives earlier are not counted."""
    follow: FollowOptions | None = None
    """Servers let their target follow the machine."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One query to come."""

    at_ns: int
    aggregator: int
    tokens: int


def arrivals(setup: Setup) -> list[Arrival]:
    """Poisson arrivals of short texts, lengths skewed to the right (median 9 tokens)."""
    rng = random.Random(setup.seed)
    shares = list(setup.shares) or [1.0] * setup.aggregators
    tokens = [
        min(INPUT_TOKENS_MAX, 2 + max(1, round(rng.lognormvariate(1.95, 0.5))))
        for _ in range(setup.queries)
    ]
    per_ns = setup.load * setup.servers * TARGET / setup.pass_ns / (sum(tokens) / len(tokens))
    at = 0.0
    coming = []
    for count in tokens:
        at += rng.expovariate(per_ns)
        sender = rng.choices(range(setup.aggregators), shares)[0]
        coming.append(Arrival(int(at), sender, count))
    return coming


@dataclass(slots=True)
class Outcome:
    """What a run measured; latencies in milliseconds, by aggregator."""

    latencies: dict[int, list[float]] = field(default_factory=dict)
    passes: int = 0
    pass_tokens: int = 0
    pass_tokens_max: int = 0
    claims: int = 0
    pass_sizes: list[int] = field(default_factory=list)
    """Tokens of each pass, in order."""
    targets: list[int] = field(default_factory=list)
    """Those that servers moved to."""

    def quantile(self, q: float, aggregator: int | None = None) -> float:
        """A quantile of the latency, over one aggregator's queries or all."""
        chosen = (
            itertools.chain.from_iterable(self.latencies.values())
            if aggregator is None
            else self.latencies[aggregator]
        )
        ordered = sorted(chosen)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def shared_queue(setup: Setup) -> Outcome:
    """Every server pops up to the target from one queue whenever it is free."""
    rng = random.Random(setup.seed + 1)
    outcome = Outcome()
    coming = deque(arrivals(setup))
    waiting: deque[Arrival] = deque()
    free: list[tuple[int, int]] = [(0, server) for server in range(setup.servers)]
    heapq.heapify(free)
    while coming or waiting:
        free_ns, server = heapq.heappop(free)
        start_ns = free_ns if waiting else max(free_ns, coming[0].at_ns)
        while coming and coming[0].at_ns <= start_ns:
            waiting.append(coming.popleft())
        tokens = 0
        batch: list[Arrival] = []
        while waiting and (not batch or tokens + waiting[0].tokens <= TARGET):
            batch.append(waiting.popleft())
            tokens += batch[-1].tokens
        end_ns = start_ns + pass_time_ns(setup, tokens, rng)
        for each in batch:
            if each.at_ns >= setup.warm_up_ns:
                latency_ms = (end_ns - each.at_ns) / MS
                outcome.latencies.setdefault(each.aggregator, []).append(latency_ms)
        outcome.passes += 1
        outcome.pass_tokens += tokens
        heapq.heappush(free, (end_ns, server))
    return outcome


def pass_time_ns(setup: Setup, tokens: int, rng: random.Random) -> int:
    """Flat up to the target, then in proportion."""
    base = setup.pass_ns * max(1.0, tokens / TARGET)
    return int(base * (1.0 + setup.jitter * (2.0 * rng.random() - 1.0)))


class World:
    """Runs one configuration with the real rule."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now_ns = 0
        self.outcome = Outcome()
        self.answered = 0
        self._rng = random.Random(setup.seed + 1)
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.aggregators = [AggregatorSide(self, i) for i in range(setup.aggregators)]
        self.servers = [ServerSide(self, i) for i in range(setup.servers)]

    def at(self, at_ns: int, call: Callable[[], None]) -> None:
        """Call back then."""
        heapq.heappush(self._heap, (at_ns, next(self._order), call))

    def send(self, call: Callable[[], None]) -> None:
        """Deliver a message over the network."""
        self.at(self.now_ns + self.setup.one_way_ns, call)

    def pass_time_ns(self, tokens: int) -> int:
        """How long the next pass takes."""
        return pass_time_ns(self.setup, tokens, self._rng)

    def run(self) -> Outcome:
        """Until every query is answered."""
        for server in self.servers:
            server.open()
        for number, each in enumerate(arrivals(self.setup)):
            query = make_query(each, number, self._rng if self.setup.estimate_noise else None)
            query.arrived_ns = START_NS + each.at_ns
            aggregator = self.aggregators[each.aggregator]
            self.at(query.arrived_ns, lambda a=aggregator, q=query: a.arrive(q))  # type: ignore[misc]
        while self.answered < self.setup.queries:
            self.now_ns, _, call = heapq.heappop(self._heap)
            call()
        return self.outcome


def make_query(arrival: Arrival, number: int, noise: random.Random | None) -> Query:
    """A query whose exact count is kept in `size_bytes`."""
    query = Query()
    query.offset = number
    query.size_bytes = arrival.tokens
    raw = arrival.tokens - 2
    query.estimate_raw = max(1, raw + (noise.randint(-1, 1) if noise else 0))
    query.text_bytes = 4 * raw
    query.input_type = query.script = query.deadline_ns = 0
    query.truncate = False
    return query


class AggregatorSide:
    """One dispatcher and its shell."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        options = DispatchOptions(
            model="m",
            exact_estimates=not world.setup.estimate_noise,
            lead_ns=world.setup.lead_ns,
        )
        self.dispatcher = Dispatcher(options, itertools.count(1))
        self._wake_ns: int | None = None

    def arrive(self, query: Query) -> None:
        self.dispatcher.admit([query], self.world.now_ns)
        self._act()

    def changed(self, event: ServerChanged) -> None:
        self.dispatcher.server_changed(event, self.world.now_ns)
        self._act()

    def answered(self, event: ClaimAnswered, state: ServerChanged) -> None:
        self.dispatcher.server_changed(state, self.world.now_ns)
        answered = self.dispatcher.claim_answered(event, self.world.now_ns)
        if answered.ended:
            raise AssertionError("a query ended without a vector")
        latencies = self.world.outcome.latencies.setdefault(self.index, [])
        for rows in answered.vectors:
            self.world.answered += len(rows.queries)
            latencies.extend(
                (self.world.now_ns - q.arrived_ns) / MS
                for q in rows.queries
                if q.arrived_ns >= START_NS + self.world.setup.warm_up_ns
            )
        self._act()

    def _act(self) -> None:
        now_ns = self.world.now_ns
        self.dispatcher.expire(now_ns)
        for effect in self.dispatcher.dispatch(now_ns):
            if not isinstance(effect, Dispatch):
                raise AssertionError("a stream was cancelled")  # noqa: TRY004 (no type is at fault)
            self.world.outcome.claims += 1
            server = self.world.servers[int(effect.server)]
            self.world.send(lambda s=server, e=effect: s.arrive(self.index, e))  # type: ignore[misc]
        wake_ns = self.dispatcher.wake_at(now_ns)
        if wake_ns is not None and wake_ns != self._wake_ns:
            self._wake_ns = wake_ns
            self.world.at(max(wake_ns, now_ns), lambda: self._woken(wake_ns))

    def _woken(self, wake_ns: int) -> None:
        if self._wake_ns == wake_ns:
            self._wake_ns = None
            self._act()


class ServerSide:
    """One scheduler, its engine and its shell; stream i + 1 is aggregator i's."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.limits = Limits(
            batch_tokens_target=TARGET,
            batch_tokens_max=4 * TARGET,
            input_tokens_max=INPUT_TOKENS_MAX,
            inputs_max=1024,
            request_bytes_max=16 << 20,
        )
        self.scheduler = Scheduler(
            SchedulerOptions(limits=self.limits, pass_timeout_ns=60_000 * MS, drain_deadline_ns=MS)
        )
        self._requests: dict[int, tuple[int, Dispatch, int]] = {}
        self._keys = itertools.count(1)

    def open(self) -> None:
        samples = ((10, self.world.setup.pass_ns), (TARGET, self.world.setup.pass_ns))
        follow = self.world.setup.follow
        self._handle(EngineReady(limits=self.limits, pass_samples=samples, follow=follow))
        for stream in range(1, self.world.setup.aggregators + 1):
            self._handle(StreamOpened(stream=stream))

    def arrive(self, aggregator: int, claim: Dispatch) -> None:
        key = next(self._keys)
        self._requests[key] = (aggregator, claim, self.world.now_ns)
        self._handle(
            RequestArrived(
                request=key,
                stream=aggregator + 1,
                request_id=claim.claim_id,
                tokens=[query.size_bytes for query in claim.queries],
                text_bytes=[query.text_bytes for query in claim.queries],
            )
        )

    def _handle(self, event: object) -> None:
        now_ns = self.world.now_ns
        for effect in self.scheduler.handle(event, now_ns):  # type: ignore[arg-type]
            match effect:
                case server_effects.RunPass():
                    self._run(effect)
                case server_effects.Answer():
                    for part in effect.parts:
                        self._answer(part, effect)
                case server_effects.Announce():
                    for stream in range(1, self.world.setup.aggregators + 1):
                        self._say(stream - 1, effect.running.get(stream, ()))
                case server_effects.SayState():
                    for stream in effect.streams:
                        self._say(stream - 1, ())
                case server_effects.WakeAt():
                    at_ns = max(effect.at_ns, now_ns)
                    self.world.at(at_ns, lambda: self._handle(ServerTick()))
                case server_effects.TargetMoved():
                    self.world.outcome.targets.append(effect.batch_tokens_target)
                case _:
                    raise AssertionError(f"not in this world: {effect}")

    def _run(self, effect: server_effects.RunPass) -> None:
        started_ns = self.world.now_ns
        ended_ns = started_ns + self.world.pass_time_ns(effect.tokens)
        self.world.outcome.passes += 1
        self.world.outcome.pass_tokens += effect.tokens
        self.world.outcome.pass_sizes.append(effect.tokens)
        self.world.outcome.pass_tokens_max = max(self.world.outcome.pass_tokens_max, effect.tokens)
        done = PassDone(pass_id=effect.pass_id, started_ns=started_ns, ended_ns=ended_ns)
        self.world.at(ended_ns, lambda: self._handle(done))

    def _state(self, aggregator: int, running: Sequence[int]) -> ServerChanged:
        scheduler = self.scheduler
        return ServerChanged(
            model="m",
            server=str(self.index),
            phase=ServerPhase.READY,
            limits=ServerLimits(
                batch_tokens_target=scheduler.limits.batch_tokens_target,
                batch_tokens_max=scheduler.limits.batch_tokens_max,
                window_tokens=scheduler.window_tokens(aggregator + 1),
                inputs_max=1024,
                request_bytes_max=16 << 20,
                busy_ms=scheduler.busy_ms(self.world.now_ns),
                queued_tokens=scheduler.queued_tokens,
                draining=False,
            ),
            running=running,
            model_revision="r",
            dimensions=4,
        )

    def _say(self, aggregator: int, running: Sequence[int]) -> None:
        side, state = self.world.aggregators[aggregator], self._state(aggregator, running)
        self.world.send(lambda: side.changed(state))

    def _answer(self, part: server_effects.AnsweredPart, whole: server_effects.Answer) -> None:
        aggregator, claim, arrived_ns = self._requests[part.request]
        if part.last:
            del self._requests[part.request]
        group = VectorGroup(
            encoding=1,
            dimensions=4,
            indexes=list(part.indexes),
            tokens=[claim.queries[i].size_bytes for i in part.indexes],
            embeddings=b"",
            stride=16,
        )
        answer = Answer(
            claim_id=claim.claim_id,
            groups=[group],
            last=part.last,
            queue_us=(whole.started_ns - arrived_ns) // 1000,
            inference_us=(whole.ended_ns - whole.started_ns) // 1000,
        )
        event = ClaimAnswered(model="m", server=str(self.index), answer=answer)
        side, state = self.world.aggregators[aggregator], self._state(aggregator, ())
        self.world.send(lambda: side.answered(event, state))
