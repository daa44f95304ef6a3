"""A dispatcher on the bench: terse ways to say what servers said and to read what was sent."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from aggregator.core.dispatch import Answered, Dispatcher, DispatchOptions
from aggregator.core.effects import Cancel, Dispatch
from aggregator.core.events import (
    ClaimAnswered,
    ClaimLost,
    Loss,
    ServerChanged,
    ServerLimits,
    ServerPhase,
)
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.query import WAITING, Answer, InputFailure, Query, VectorGroup

MS = 1_000_000
MODEL = "m"
TARGET = 100


def make_query(
    offset: int = 0, *, tokens: int = 10, ttl_ms: int = 0, arrived_ns: int | None = None
) -> Query:
    """A query of exactly so many tokens, two of them special."""
    query = Query()
    query.tp, query.epoch, query.offset = ("queries", 0), 1, offset
    query.id, query.model = str(offset), MODEL
    query.estimate_raw, query.text_bytes = tokens - 2, 4 * tokens
    query.script = query.input_type = 0
    query.truncate = False
    query.arrived_ns = offset if arrived_ns is None else arrived_ns
    query.deadline_ns = ttl_ms * MS
    return query


def make_queries(count: int, *, start: int = 0, tokens: int = 10, ttl_ms: int = 0) -> list[Query]:
    """Queries in order of arrival."""
    return [make_query(start + i, tokens=tokens, ttl_ms=ttl_ms) for i in range(count)]


def make_limits(
    *,
    target: int = TARGET,
    window: int | None = None,
    busy_ms: float = 0.0,
    queued: int = 0,
    draining: bool = False,
    inputs_max: int = 1024,
) -> ServerLimits:
    """What a server says of itself; a lone stream's window unless another is given."""
    return ServerLimits(
        batch_tokens_target=target,
        batch_tokens_max=4 * target,
        window_tokens=2 * target if window is None else window,
        inputs_max=inputs_max,
        request_bytes_max=16 << 20,
        busy_ms=busy_ms,
        queued_tokens=queued,
        draining=draining,
    )


def failure(
    code: Code, reason: Reason, *, field: str | None = None, retry_after_ms: int | None = None
) -> Failure:
    """A status that a server answered with."""
    return Failure(
        code=code, reason=reason, message="told so", field=field, retry_after_ms=retry_after_ms
    )


DIED = failure(Code.UNAVAILABLE, Reason.ENGINE_DIED)
NOT_STARTED = failure(Code.UNAVAILABLE, Reason.NOT_STARTED)
ODD = failure(Code.UNKNOWN, Reason.SERVER_ERROR)


class Bench:
    """One dispatcher whose calibration is already exact, so that sizes are what they say."""

    def __init__(self, **options: int | str | bool | None) -> None:
        """`options` override those of `DispatchOptions`."""
        settings: dict[str, object] = {"model": MODEL, "exact_estimates": True, **options}
        self.core = Dispatcher(DispatchOptions(**settings), itertools.count(1))  # type: ignore[arg-type]
        self.now_ns = 1000 * MS
        self.claims: dict[int, Dispatch] = {}
        self.ended: list[Query] = []
        for _ in range(40):
            known = make_queries(60, tokens=12)
            self.core.calibration.learn(known, [12] * 60)

    # What happens.

    def admit(self, *queries: Query) -> list[Dispatch]:
        """Queries arrive, with deadlines counted from now."""
        for query in queries:
            if query.deadline_ns:
                query.deadline_ns += self.now_ns
        self.core.admit(queries, self.now_ns)
        return self.step()

    def says(
        self,
        server: str = "a",
        *,
        running: Sequence[int] = (),
        revision: str = "r",
        limits: ServerLimits | None = None,
        busy_ms: float = 0.0,
        **kwargs: int | bool,
    ) -> list[Dispatch]:
        """A server speaks."""
        self.core.server_changed(
            ServerChanged(
                model=MODEL,
                server=server,
                phase=ServerPhase.READY,
                limits=limits or make_limits(busy_ms=busy_ms, **kwargs),  # type: ignore[arg-type]
                running=running,
                model_revision=revision,
                dimensions=4,
            ),
            self.now_ns,
        )
        return self.step()

    def down(self, server: str = "a") -> list[Dispatch]:
        """Its stream ended."""
        event = ServerChanged(model=MODEL, server=server, phase=ServerPhase.DOWN)
        self.core.server_changed(event, self.now_ns)
        return self.step()

    def answer(
        self,
        claim: Dispatch,
        indexes: Iterable[int] | None = None,
        *,
        errors: Sequence[tuple[int, Failure]] = (),
        last: bool = True,
        fault: str | None = None,
        refused: Failure | None = None,
    ) -> Answered:
        """A message about a claim: vectors for `indexes` (all without errors), and errors."""
        failed = {index for index, _ in errors}
        if indexes is None:
            indexes = [i for i in range(len(claim.queries)) if i not in failed]
        indexes = [] if fault or refused else list(indexes)
        group = VectorGroup(
            encoding=1,
            dimensions=4,
            indexes=indexes,
            tokens=[claim.queries[i % len(claim.queries)].estimate_raw + 2 for i in indexes],
            embeddings=bytes(16 * len(indexes)),
            stride=16,
        )
        answered = self.core.claim_answered(
            ClaimAnswered(
                model=MODEL,
                server=claim.server,
                answer=Answer(
                    claim_id=claim.claim_id,
                    groups=[group] if indexes else [],
                    errors=[InputFailure(index=i, failure=f) for i, f in errors],
                    last=last,
                    fault=fault,
                    refused=refused,
                ),
            ),
            self.now_ns,
        )
        self.ended += answered.ended
        return answered

    def lose(self, claim: Dispatch, loss: Loss = Loss.UNKNOWN) -> list[Query]:
        """It gets no further answer."""
        event = ClaimLost(
            model=MODEL, server=claim.server, claim_id=claim.claim_id, loss=loss, message="lost"
        )
        ended = self.core.claim_lost(event, self.now_ns)
        self.ended += ended
        return ended

    def tick(self, ms: float = 0.0) -> list[Dispatch]:
        """Time passes."""
        self.now_ns += int(ms * MS)
        return self.step()

    def step(self) -> list[Dispatch]:
        """Let it act; returns what was sent."""
        self.ended += self.core.expire(self.now_ns)
        self.cancels: list[Cancel] = []
        sent = []
        for effect in self.core.dispatch(self.now_ns):
            if isinstance(effect, Dispatch):
                self.claims[effect.claim_id] = effect
                sent.append(effect)
            else:
                self.cancels.append(effect)
        return sent

    def wake_ms(self) -> float | None:
        """When it wants to be woken, from now."""
        wake_ns = self.core.wake_at(self.now_ns)
        return None if wake_ns is None else (wake_ns - self.now_ns) / MS


def offsets(claim: Dispatch) -> list[int]:
    """Which queries it holds."""
    return [query.offset for query in claim.queries]


def one(sent: list[Dispatch]) -> Dispatch:
    """The only claim."""
    assert len(sent) == 1, [offsets(claim) for claim in sent]
    return sent[0]


def waiting_phases(queries: Iterable[Query]) -> bool:
    """Whether all of them wait."""
    return all(query.phase == WAITING for query in queries)
