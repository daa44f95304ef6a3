"""The core by hand: builds queries and server states, sorts the effects that come back.

`Bench` feeds an `Aggregator` and keeps what it asked for; nothing is answered unless the test says
so. Time stands still unless the test moves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from aggregator.core import effects as fx
from aggregator.core import events as ev
from aggregator.core.dispatch import DispatchOptions
from aggregator.core.failures import Code, Failure, Reason
from aggregator.core.machine import Aggregator, AggregatorOptions
from aggregator.core.query import Answer, Query, TopicPartition, VectorGroup

E = TypeVar("E")

MS = 1_000_000
FLOAT32 = 1
MODEL = "model"
SERVER = "127.0.0.1:1"
TP: TopicPartition = ("queries", 0)

REFUSED = Failure(
    code=Code.INVALID_ARGUMENT,
    reason=Reason.UNDECODABLE,
    message="the value is not valid JSON",
    dead_letter=True,
)
TEXT_MISSING = Failure(
    code=Code.INVALID_ARGUMENT,
    reason=Reason.INVALID_FIELD,
    message="text is required",
    field="text",
)


def make_query(
    offset: int,
    *,
    tp: TopicPartition = TP,
    epoch: int = 1,
    tokens: int = 10,
    failure: Failure | None = None,
    deadline_ns: int = 0,
    arrived_ns: int = 0,
) -> Query:
    """A decoded record, as the wire layer hands it over."""
    query = Query()
    query.tp = tp
    query.offset = offset
    query.epoch = epoch
    query.key = None
    query.value = b"value"
    query.headers = ()
    query.timestamp_ms = None
    query.arrived_ns = arrived_ns
    query.deadline_ns = deadline_ns
    query.size_bytes = 100
    query.id = f"{tp[0]}-{tp[1]}-{offset}"
    query.model = MODEL
    query.text = "word " * tokens
    query.text_bytes = 5 * tokens
    query.input_type = 0
    query.dimensions = 0
    query.encoding = FLOAT32
    query.truncate = False
    query.protobuf = True
    query.base64 = False
    query.estimate_raw = tokens
    query.script = 0
    query.failure = failure
    return query


def limits(
    *, target: int = 600, window: int = 1200, busy_ms: float = 0.0, draining: bool = False
) -> ev.ServerLimits:
    """A server's word about itself."""
    return ev.ServerLimits(
        batch_tokens_target=target,
        batch_tokens_max=4 * target,
        window_tokens=window,
        inputs_max=1024,
        request_bytes_max=16 << 20,
        busy_ms=busy_ms,
        queued_tokens=0,
        draining=draining,
    )


class Bench:
    """An aggregator on the bench."""

    def __init__(self, **options: Any) -> None:
        """`options` override those of `AggregatorOptions`."""
        dispatch = DispatchOptions(
            model=MODEL,
            lead_ns=3 * MS,
            attempts_max=5,
            answer_grace_ns=2000 * MS,
            stream_silence_ns_max=15_000 * MS,
        )
        self.core = Aggregator(AggregatorOptions(models={MODEL: dispatch}, **options))
        self.now_ns = 1_000_000 * MS
        self.effects: list[fx.Effect] = []
        self.claims: dict[int, fx.Dispatch] = {}
        self.positions: dict[TopicPartition, int] = {}

    def feed(self, event: ev.Event) -> list[fx.Effect]:
        """Hand one event in; return and remember what came out."""
        effects = self.core.handle(event, self.now_ns)
        self.effects.extend(effects)
        for effect in effects:
            if isinstance(effect, fx.Dispatch):
                self.claims[effect.claim_id] = effect
        return effects

    def assign(self, *tps: TopicPartition, epoch: int = 1) -> list[fx.Effect]:
        """Partitions come."""
        return self.feed(ev.PartitionsAssigned(epoch=epoch, partitions=tps))

    def poll(
        self, *queries: Query, positions: Iterable[ev.Position] | None = None
    ) -> list[fx.Effect]:
        """Records come, and the positions behind them unless others are given."""
        if positions is None:
            last = {query.tp: query for query in queries}
            positions = [
                ev.Position(tp=tp, epoch=query.epoch, offset_next=query.offset + 1)
                for tp, query in last.items()
            ]
        return self.feed(ev.RecordsPolled(records=queries, positions=list(positions)))

    def server(
        self,
        name: str = SERVER,
        *,
        says: ev.ServerLimits | None = None,
        running: Sequence[int] = (),
    ) -> list[fx.Effect]:
        """A server speaks."""
        return self.feed(
            ev.ServerChanged(
                model=MODEL,
                server=name,
                phase=ev.ServerPhase.READY,
                limits=says or limits(),
                running=running,
                model_revision="r1",
                dimensions=4,
            )
        )

    def answer(
        self,
        claim: fx.Dispatch,
        *,
        indexes: Sequence[int] | None = None,
        last: bool | None = None,
    ) -> list[fx.Effect]:
        """The server answers a claim with vectors (all of it unless `indexes` are given).

        `last`: whether it is the last answer; not given: if it answers the whole claim.
        """
        every = range(len(claim.queries))
        indexes = list(every) if indexes is None else indexes
        group = VectorGroup(
            encoding=FLOAT32,
            dimensions=4,
            indexes=indexes,
            tokens=[claim.queries[i].estimate_raw + 2 for i in indexes],
            embeddings=bytes(16 * len(indexes)),
            stride=16,
        )
        answer = Answer(
            claim_id=claim.claim_id,
            groups=[group],
            last=len(indexes) == len(claim.queries) if last is None else last,
            inference_us=1000,
        )
        return self.feed(ev.ClaimAnswered(model=MODEL, server=claim.server, answer=answer))

    def durable(
        self, results: Iterable[Query] = (), letters: Iterable[Query] = ()
    ) -> list[fx.Effect]:
        """The broker acknowledges."""
        return self.feed(ev.WritesDurable(results=list(results), letters=list(letters)))

    def tick(self, ms: float = 0) -> list[fx.Effect]:
        """Time passes."""
        self.now_ns += int(ms * MS)
        return self.feed(ev.Tick())


def of(effects: Iterable[fx.Effect], kind: type[E]) -> list[E]:
    """The effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]
