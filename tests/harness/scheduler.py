"""A scheduler with everything around it played by hand: the shell's part in a few lines.

Keeps what was said to whom, and fails at once where an input is answered twice, a pass starts while
another runs, a pass exceeds a limit, or an exclusive pass is merged or starts unannounced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from model_server.core import effects as ef
from model_server.core import events as ev
from model_server.core.failures import Failure
from model_server.core.following import FollowOptions
from model_server.core.limits import Limits
from model_server.core.scheduler import Scheduler, SchedulerOptions

MS = 1_000_000
LIMITS = Limits(
    batch_tokens_target=100,
    batch_tokens_max=400,
    input_tokens_max=150,
    inputs_max=16,
    request_bytes_max=131_072,
)

E = TypeVar("E", bound=ef.Effect)


@dataclass(slots=True)
class Sent:
    """What is known of a request that arrived."""

    event: ev.RequestArrived
    outcomes: dict[int, str] = field(default_factory=dict)
    """By input: "vector", or the reason of its failure."""
    last: bool = False
    cancelled: bool = False


class SchedulerWorld:
    """Drives a scheduler; time stands still unless moved."""

    def __init__(
        self,
        limits: Limits = LIMITS,
        *,
        ready: bool = True,
        follow: FollowOptions | None = None,
    ) -> None:
        self.scheduler = Scheduler(
            SchedulerOptions(
                limits=limits, pass_timeout_ns=60_000 * MS, drain_deadline_ns=20_000 * MS
            )
        )
        self.limits = limits
        self.now_ns = 1_000 * MS
        self.requests: dict[int, Sent] = {}
        self.streams: set[int] = set()
        self.running: ef.RunPass | None = None
        self.awaited: tuple[int, int] | None = None
        """(pass, stream) whose announcement is to be written."""
        self.announced: set[int] = set()
        self.effects: list[ef.Effect] = []
        """Of the last event."""
        self.history: list[ef.Effect] = []
        self.wake_ns = 0
        if ready:
            self.feed(ev.EngineReady(limits=limits, follow=follow))

    def feed(self, event: ev.Event) -> list[ef.Effect]:
        """One event; checks and keeps what comes of it."""
        if isinstance(event, ev.PassDone | ev.PassRaised):
            self.running = None
        self.effects = self.scheduler.handle(event, self.now_ns)
        self.history += self.effects
        for effect in self.effects:
            self._carry_out(effect)
        return self.effects

    def of(self, kind: type[E]) -> list[E]:
        """Effects of this kind that the last event had."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def ever(self, kind: type[E]) -> list[E]:
        """Effects of this kind since the beginning."""
        return [effect for effect in self.history if isinstance(effect, kind)]

    # Events

    def open(self, stream: int) -> None:
        self.streams.add(stream)
        self.feed(ev.StreamOpened(stream=stream))

    def close(self, stream: int) -> None:
        self._gone(stream)
        self.feed(ev.StreamClosed(stream=stream))

    def _gone(self, stream: int) -> None:
        self.streams.discard(stream)
        for sent in self.requests.values():
            sent.cancelled |= sent.event.stream == stream

    def send(
        self,
        tokens: Sequence[int],
        *,
        stream: int = 1,
        timeouts_ms: Sequence[int] | None = None,
        text_bytes: Sequence[int] | None = None,
        failures: Sequence[tuple[int, Failure]] = (),
        exclusive: bool = False,
        bulk: bool = False,
    ) -> int:
        """A request arrives; returns its key, which is also its `request_id`."""
        key = len(self.requests) + 1
        deadlines = None
        if timeouts_ms is not None:
            deadlines = [self.now_ns + ms * MS if ms else 0 for ms in timeouts_ms]
        event = ev.RequestArrived(
            request=key,
            stream=stream,
            request_id=key,
            tokens=list(tokens),
            text_bytes=list(text_bytes) if text_bytes is not None else [1] * len(tokens),
            deadlines_ns=deadlines,
            failures=failures,
            exclusive=exclusive,
            bulk=bulk,
        )
        self.requests[key] = Sent(event)
        self.feed(event)
        return key

    def cancel(self, key: int) -> None:
        self.requests[key].cancelled = True
        self.feed(ev.RequestCancelled(request=key))

    def written(self) -> None:
        """The awaited announcement is written."""
        assert self.awaited is not None
        pass_id, _ = self.awaited
        self.awaited = None
        self.announced.add(pass_id)
        self.feed(ev.AnnouncementWritten(pass_id=pass_id))

    def done(self, duration_ms: float = 15, *, finite: bool = True) -> ef.RunPass:
        """The running pass ends well; returns it."""
        return self.done_at(self.now_ns, self.now_ns + int(duration_ms * MS), finite=finite)

    def done_at(self, started_ns: int, ended_ns: int, *, finite: bool = True) -> ef.RunPass:
        """The same at given times."""
        running = self.started()
        self.now_ns = ended_ns
        self.feed(
            ev.PassDone(
                pass_id=running.pass_id, started_ns=started_ns, ended_ns=ended_ns, finite=finite
            )
        )
        return running

    def raised(self, message: str = "boom", *, out_of_memory: bool = False) -> ef.RunPass:
        """The running pass raises; returns it."""
        running = self.started()
        self.feed(
            ev.PassRaised(pass_id=running.pass_id, message=message, out_of_memory=out_of_memory)
        )
        return running

    def died(self) -> ef.RunPass | None:
        running, self.running = self.running, None
        self.feed(ev.EngineDied(message="gone"))
        return running

    def later(self, ms: float) -> None:
        """Time passes, and the timer rings."""
        self.now_ns += int(ms * MS)
        self.feed(ev.Tick())

    # What is known

    def started(self) -> ef.RunPass:
        """The running pass."""
        assert self.running is not None, "no pass runs"
        return self.running

    def inputs(self, part_of: ef.RunPass | None = None) -> list[tuple[int, int]]:
        """(request, index) of a pass, in order."""
        run = part_of or self.started()
        return [(part.request, index) for part in run.parts for index in part.indexes]

    def outcome(self, key: int) -> list[str | None]:
        """Of each input of a request, in order."""
        sent = self.requests[key]
        return [sent.outcomes.get(index) for index in range(len(sent.event.tokens))]

    def idle(self) -> bool:
        """Nothing runs and nothing is held."""
        return self.running is None and self.scheduler.queued_tokens == 0

    # Effects

    def _carry_out(self, effect: ef.Effect) -> None:
        if isinstance(effect, ef.RunPass):
            self._check_pass(effect)
            self.running = effect
        elif isinstance(effect, ef.Announce):
            if effect.awaited is not None:
                assert effect.pass_id is not None
                self.awaited = (effect.pass_id, effect.awaited)
        elif isinstance(effect, ef.Answer):
            for part in effect.parts:
                self._answered(part.request, [(i, "vector") for i in part.indexes], part.last)
        elif isinstance(effect, ef.Fail):
            failures = [(index, str(failure.reason)) for index, failure in effect.failures]
            self._answered(effect.request, failures, effect.last)
        elif isinstance(effect, ef.Refuse):
            sent = self.requests[effect.request]
            reasons = [(i, str(effect.failure.reason)) for i in range(len(sent.event.tokens))]
            self._answered(effect.request, reasons, last=True)
        elif isinstance(effect, ef.SayState):
            assert set(effect.streams) <= self.streams
        elif isinstance(effect, ef.CutStream):
            assert self.awaited is not None
            assert self.awaited[1] == effect.stream
            self.awaited = None
            self._gone(effect.stream)
        elif isinstance(effect, ef.WakeAt):
            self.wake_ns = effect.at_ns
        elif isinstance(effect, ef.RestartEngine | ef.Halt):
            self.running = self.awaited = None

    def _answered(self, key: int, outcomes: list[tuple[int, str]], last: bool) -> None:
        sent = self.requests[key]
        assert not sent.cancelled, "a request that nobody waits for was answered"
        assert not sent.last, "a request was answered after its last message"
        for index, outcome in outcomes:
            assert index not in sent.outcomes, "an input was answered twice"
            sent.outcomes[index] = outcome
        sent.last = last
        assert last == (len(sent.outcomes) == len(sent.event.tokens))

    def _check_pass(self, run: ef.RunPass) -> None:
        assert self.running is None, "two passes at once"
        if run.kind is ef.PassKind.CANARY:
            assert not run.parts
            return
        inputs = self.inputs(run)
        assert inputs
        assert len(set(inputs)) == len(inputs)
        limits = self.scheduler.limits
        assert len(inputs) <= limits.inputs_max
        assert run.tokens == sum(self._tokens(inputs))
        if run.kind is ef.PassKind.PROBE:
            assert limits.batch_tokens_target < run.tokens <= 1.5 * limits.batch_tokens_target
        elif run.kind is not ef.PassKind.ISOLATION:
            assert run.tokens <= limits.batch_tokens_target or len(inputs) == 1
        assert run.tokens <= limits.batch_tokens_max
        exclusive = {key for key, _ in inputs if self.requests[key].event.exclusive}
        if exclusive:
            assert len({key for key, _ in inputs}) == 1, "an exclusive pass was merged"
            assert run.pass_id in self.announced, "an exclusive pass started unannounced"

    def _tokens(self, inputs: Sequence[tuple[int, int]]) -> Iterator[int]:
        return (self.requests[key].event.tokens[index] for key, index in inputs)
