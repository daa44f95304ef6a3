"""Any script of events: each input is answered exactly once, and no rule of a pass is broken.

The harness checks every effect as it comes (twice answered, merged, unannounced, over a limit, two
passes at once); here events are drawn freely, and in the end everything must be answered.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model_server.core import effects as ef
from model_server.core import events as ev
from model_server.core.failures import invalid
from model_server.core.lifecycle import Phase
from model_server.core.limits import Limits
from tests.harness.scheduler import LIMITS, SchedulerWorld

SHORT_INPUTS = replace(LIMITS, batch_tokens_max=100, input_tokens_max=40)
"""Running out of memory lowers this maximum at once."""
REFUSED = invalid("text", "The text is empty.")

counts = st.lists(
    st.one_of(st.just(0), st.integers(1, 12), st.integers(1, 150)), min_size=1, max_size=16
)


class Scheduling(RuleBasedStateMachine):
    """Streams come and go, requests of all kinds arrive, the engine does what it likes."""

    @initialize(limits=st.sampled_from([LIMITS, SHORT_INPUTS]))
    def start(self, limits: Limits) -> None:
        self.world = SchedulerWorld(limits)
        self.next_stream = 0
        self.world_open()

    def world_open(self) -> None:
        self.next_stream += 1
        self.world.open(self.next_stream)

    @property
    def alive(self) -> bool:
        return self.world.scheduler.phase is not Phase.STOPPED

    @property
    def running(self) -> bool:
        return self.world.running is not None

    @precondition(lambda self: len(self.world.streams) < 4 and self.alive)
    @rule()
    def open(self) -> None:
        self.world_open()

    @precondition(lambda self: self.world.streams)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(data.draw(st.sampled_from(sorted(self.world.streams))))

    @rule(
        data=st.data(),
        tokens=counts,
        exclusive=st.sampled_from([False, False, False, True]),
        bulk=st.booleans(),
        timeout_ms=st.sampled_from([None, 0, 20, 60_000]),
    )
    def send(
        self,
        data: st.DataObject,
        tokens: list[int],
        exclusive: bool,
        bulk: bool,
        timeout_ms: int | None,
    ) -> None:
        tokens = [min(count, self.world.limits.input_tokens_max) for count in tokens]
        stream = data.draw(st.sampled_from([ev.UNARY, *sorted(self.world.streams)]))
        timeouts = None
        if timeout_ms is not None:
            timeouts = [timeout_ms if index % 3 else 0 for index in range(len(tokens))]
        self.world.send(
            tokens,
            stream=stream,
            timeouts_ms=timeouts,
            text_bytes=[max(1, 600 * count) for count in tokens],
            failures=[(index, REFUSED) for index, count in enumerate(tokens) if count == 0],
            exclusive=exclusive and stream != ev.UNARY,
            bulk=bulk,
        )

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        open_calls = [
            key
            for key, sent in self.world.requests.items()
            if sent.event.stream == ev.UNARY and not sent.last and not sent.cancelled
        ]
        if open_calls:
            self.world.cancel(data.draw(st.sampled_from(open_calls)))

    @precondition(lambda self: self.running)
    @rule(ms=st.sampled_from([0.1, 15, 30]), finite=st.sampled_from([True, True, False]))
    def pass_done(self, ms: float, finite: bool) -> None:
        canary = self.world.started().kind is ef.PassKind.CANARY
        self.world.done(duration_ms=ms, finite=finite or canary)

    @precondition(lambda self: self.running)
    @rule(out_of_memory=st.sampled_from([False, False, True]))
    def pass_raised(self, out_of_memory: bool) -> None:
        self.world.raised(out_of_memory=out_of_memory)

    @precondition(lambda self: self.running)
    @rule()
    def engine_died(self) -> None:
        self.world.died()

    @precondition(lambda self: self.world.scheduler.phase is Phase.RESTARTING)
    @rule()
    def engine_ready(self) -> None:
        self.world.feed(ev.EngineReady(limits=self.world.limits))

    @precondition(lambda self: self.world.awaited is not None)
    @rule()
    def announcement_written(self) -> None:
        self.world.written()

    @rule(ms=st.sampled_from([1, 25, 1_000, 3_000]))
    def time_passes(self, ms: int) -> None:
        self.world.later(ms)

    @precondition(lambda self: self.alive)
    @rule(really=st.sampled_from([False] * 9 + [True]))
    def drain(self, really: bool) -> None:
        if really:
            self.world.feed(ev.DrainRequested())

    @invariant()
    def the_engine_is_not_idle_while_something_waits(self) -> None:
        world = self.world
        serves = world.scheduler.phase in (Phase.SERVING, Phase.DRAINING)
        if serves and world.scheduler.queued_tokens:
            assert world.running is not None or world.awaited is not None

    @invariant()
    def held_tokens_are_those_of_unanswered_inputs(self) -> None:
        world = self.world
        held = sum(
            count
            for sent in world.requests.values()
            if not sent.cancelled
            for index, count in enumerate(sent.event.tokens)
            if index not in sent.outcomes
        )
        assert world.scheduler.held_tokens == held

    @invariant()
    def a_server_that_stopped_said_so_once(self) -> None:
        assert len(self.world.ever(ef.Halt)) == (not self.alive)

    def teardown(self) -> None:
        """Heal, then require progress: everything that can be answered is."""
        world = self.world
        for _ in range(2_000):
            if world.scheduler.phase is Phase.RESTARTING:
                world.feed(ev.EngineReady(limits=world.limits))
            elif world.awaited is not None and world.awaited[1] in world.streams:
                world.written()
            elif world.running is not None:
                world.done()
            else:
                break
        for sent in world.requests.values():
            assert sent.cancelled or sent.last, "an input was never answered"
        assert world.scheduler.held_tokens == 0


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
