"""Passes as the scheduler orders them: inputs to the engine's thread, vectors to their callers.

Knows a pass from its order until its answers are sent, or until it is given up with its engine.
Invariants: what the engine returns for a pass that was given up goes nowhere; vectors that are not
of the shape they must have make their pass one that raised; those of a pass wait here while the
scheduler has the canary say whether they are the engine's fault. What runs, and who is answered, is
the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from model_server.core.effects import Answer, Part, PassKind, RunPass
from model_server.core.events import EngineDied, Event, PassDone, PassRaised
from model_server.engines.base import EngineDiedError, EngineOutOfMemoryError, Tokens
from model_server.server.answers import group_answers
from model_server.server.calls import Held, Timing
from model_server.server.jobs import Ran, embed

if TYPE_CHECKING:
    from model_server.server.engine_host import EngineHost
    from model_server.server.telling import Telling


@dataclass(slots=True, kw_only=True)
class _Running:
    """A pass that the engine has, or whose answers are being sent."""

    effect: RunPass
    inputs: int
    ran: Ran | None = None


class PassRunner:
    """See the module; `held` is the driver's table of unanswered requests. All on the loop."""

    def __init__(
        self,
        engine: EngineHost,
        held: dict[int, Held],
        *,
        feed: Callable[[Event], None],
        telling: Telling,
    ) -> None:
        self._engine = engine
        self._held = held
        self._feed = feed
        self._telling = telling
        self._passes: dict[int, _Running] = {}

    def give_up(self) -> None:
        """The engine was lost: nothing that it still returns counts."""
        for running in self._passes.values():
            if running.ran is None:
                message = "given up with its engine"
                self._telling.pass_failed(running.effect, message, died=True)
        self._passes.clear()

    def run(self, effect: RunPass) -> None:
        """Start a pass; an event follows."""
        started = self._engine.current
        if started is None:
            raise RuntimeError("a pass without an engine")
        inputs = [tokens for part in effect.parts for tokens in self._tokens_of(part)]
        self._passes[effect.pass_id] = _Running(effect=effect, inputs=len(inputs))
        engine, canary = started.engine, started.canary
        self._engine.submit(
            lambda: canary.run(engine) if effect.kind is PassKind.CANARY else embed(engine, inputs),
            lambda result, error: self._ran(effect.pass_id, result, error),
        )

    def _tokens_of(self, part: Part) -> list[Tokens]:
        tokens = self._held[part.request].columns.tokens
        # Refused inputs, which have None, are in no pass.
        return [tokens[index] for index in part.indexes]  # type: ignore[misc]

    def _ran(self, pass_id: int, result: Ran, error: BaseException | None) -> None:
        running = self._passes.get(pass_id)
        if running is None:
            return  # given up
        if error is not None or running.effect.kind is PassKind.CANARY:
            del self._passes[pass_id]  # no answer follows
        if error is None:
            self._telling.pass_done(running.effect)
            running.ran = result
            self._feed(
                PassDone(
                    pass_id=pass_id,
                    started_ns=result.started_ns,
                    ended_ns=result.ended_ns,
                    finite=result.finite,
                )
            )
        else:
            message = f"{type(error).__name__}: {error}"
            died = isinstance(error, EngineDiedError)
            self._telling.pass_failed(running.effect, message, died=died)
            self._feed(
                EngineDied(message=message)
                if died
                else PassRaised(
                    pass_id=pass_id,
                    message=message,
                    out_of_memory=isinstance(error, EngineOutOfMemoryError),
                )
            )

    def answer(self, effect: Answer) -> None:
        """Send the vectors of a pass that has run."""
        running, started = self._passes.pop(effect.pass_id), self._engine.current
        ran = running.ran
        if ran is None or started is None:
            raise RuntimeError("an answer without vectors")
        inference_us = (effect.ended_ns - effect.started_ns) // 1_000
        for part in effect.parts:
            held = self._held[part.request]
            groups, failures = group_answers(
                held.columns,
                part.indexes,
                ran.vectors[part.row : part.row + len(part.indexes)],
                normalized=started.engine.info.normalized,
            )
            queue_us = (effect.started_ns - held.arrived_ns) // 1_000
            timing = Timing(queue_us=queue_us, inference_us=inference_us)
            held.caller.answer(held, groups, failures, last=part.last, timing=timing)
            self._telling.answered(failures, queue_us)
            if part.last:
                del self._held[part.request]
        self._telling.pass_answered(effect, running.effect, ran, inputs=running.inputs)
