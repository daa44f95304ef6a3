"""The demo's three phases on a running stack, and the figures that come of them.

A short flood finds the capacity; then queries come as independent users send them, at half of it;
then all of them as fast as they go. Last a sample goes one by one to the same model server. Knows
nothing of how the stack was started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from aggregator.adapters.estimator import load_estimator
from aggregator.commands.demo_analysis import (
    Matrix,
    Outcome,
    Passes,
    as_claims,
    cosine,
    estimate_error,
    neighbourhoods,
    outcome,
    read_claims,
    read_passes,
)
from aggregator.commands.demo_load import Load, Phase, percentile, poisson_times
from aggregator.commands.demo_report import SIMULATED, Engine, Figures, Latency
from aggregator.commands.demo_stack import Stack, StackError
from aggregator.commands.demo_steps import Steps
from aggregator.commands.exchange import Exchange
from aggregator.commands.wording import counted
from protos.embedding.v1 import embedding_service_pb2, embedding_service_pb2_grpc

ONE_BY_ONE_QUERIES = 300
NEIGHBOURHOODS = 3
WARM_UP_QUERIES_MIN = 200
WARM_UP_RATIO = 4
"""One query of so many is sent first, to learn the capacity that the pace is set by."""
LATE_S = 0.5
_PACE = 0.5
_SEED = 11
_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """What calls of one text each gave: their vectors, their latencies, the time in all."""

    vectors: list[Matrix]
    latencies_ms: list[float]
    seconds: float


@dataclass(slots=True)
class _Measured:
    """What the phases left behind."""

    warm_up: Phase
    paced: Phase
    pace: float
    flood: Phase
    passes: Passes
    flood_log: bytes
    duplicates: int


def measure(stack: Stack, texts: Sequence[str], seconds: float, steps: Steps) -> Figures:
    """Run all phases; the paced one lasts at most `seconds`.

    Raises:
        StackError: no query got a vector.
        ChildError: a process of the stack ended.
        KafkaClientError: the broker has gone.
    """
    start_seconds = steps.elapsed_s
    info = stack.model_info()
    measured = _load(stack, texts, seconds, steps)
    result = outcome([measured.warm_up, measured.paced, measured.flood], measured.duplicates)
    if not result.vectors:
        why = result.delivery.first_error or "no result came at all"
        raise StackError(f"no query got a vector: {why}")
    sample = sorted(result.vectors)[:ONE_BY_ONE_QUERIES]
    with steps.bar(f"{len(sample)} of them one by one on the same engine", len(sample)) as advance:
        alone = _one_by_one(stack, [texts[index] for index in sample], advance)
    cosines = [
        cosine(result.vectors[index], vector)
        for index, vector in zip(sample, alone.vectors, strict=True)
    ]
    flood, passes = measured.flood, measured.passes
    flood_tokens = sum(result.tokens.get(query.text_index, 0) for query in flood.answered)
    return Figures(
        engine=_engine(info),
        broker="embedded" if stack.embedded else stack.bootstrap_servers,
        start_seconds=start_seconds,
        delivery=result.delivery,
        capacity_queries_per_second=measured.warm_up.per_second,
        paced_queries_per_second=measured.pace,
        paced_latency=_latency(measured.paced.latencies_ms()),
        flood_queries=len(flood.queries),
        flood_queries_per_second=flood.per_second,
        flood_tokens_per_second=flood_tokens / max(flood.elapsed_s, 1e-9),
        passes=passes.count,
        pass_tokens_mean=passes.tokens / max(passes.count, 1),
        pass_queries_mean=passes.inputs / max(passes.count, 1),
        pass_fill_ratio=passes.fill_ratio,
        batch_tokens_target_min=passes.target_min,
        batch_tokens_target_max=passes.target_max,
        estimate_error_before_ratio=_error_of_raw_counts(result, texts, passes.target_max),
        estimate_error_after_ratio=estimate_error(read_claims(measured.flood_log)),
        one_by_one_queries=len(sample),
        one_by_one_queries_per_second=len(sample) / alone.seconds,
        one_by_one_latency=_latency(sorted(alone.latencies_ms)),
        cosine_min=min(cosines),
        neighbourhoods=(
            []
            if info.engine == SIMULATED
            else neighbourhoods(texts, result.vectors, NEIGHBOURHOODS)
        ),
    )


def _load(stack: Stack, texts: Sequence[str], seconds: float, steps: Steps) -> _Measured:
    """Run the phases."""
    everything = range(len(texts))
    first = everything[: max(len(texts) // WARM_UP_RATIO, WARM_UP_QUERIES_MIN)]
    with Exchange(stack.topics, idempotent=True) as exchange:
        load = Load(exchange, texts)
        with steps.bar(f"{len(first):,} to warm up and measure capacity", len(first)) as advance:
            warm_up = load.flood(first, _watched(advance, stack))
        pace = warm_up.per_second * _PACE
        count = min(len(texts), max(int(pace * seconds), 1))
        text = f"{count:,} at {pace:,.0f} a second, half of capacity"
        with steps.bar(text, count) as advance:
            times = poisson_times(count, pace, seed=_SEED)
            paced = load.paced(everything[:count], times, _watched(advance, stack))
        starts = len(stack.aggregator_log()), len(stack.server_log())
        with steps.bar(
            f"{counted(len(texts), 'query', 'queries')} as fast as they go", len(texts)
        ) as advance:
            flood = load.flood(everything, _watched(advance, stack))
        load.late(LATE_S)
        return _Measured(
            warm_up=warm_up,
            paced=paced,
            pace=pace,
            flood=flood,
            passes=read_passes(stack.server_log(starts[1])),
            flood_log=stack.aggregator_log(starts[0]),
            duplicates=exchange.duplicates,
        )


def _watched(advance: Callable[[int], None], stack: Stack) -> Callable[[int], None]:
    """`advance`, and a look now and then whether the children are still there."""
    looked_s = 0.0

    def told(count: int) -> None:
        nonlocal looked_s
        now_s = time.monotonic()
        if now_s - looked_s > 1.0:
            stack.check()
            looked_s = now_s
        if count:
            advance(count)

    return told


def _one_by_one(stack: Stack, texts: Sequence[str], advance: Callable[[int], None]) -> _Alone:
    """Embed each text by a call of its own, each after the one before.

    Raises:
        StackError: one has no vector.
    """
    vectors, latencies_ms = [], []
    start_s = time.monotonic()
    with stack.channel() as channel:
        stub = embedding_service_pb2_grpc.EmbeddingServiceStub(channel)
        for text in texts:
            sent_s = time.monotonic()
            request = embedding_service_pb2.EmbedRequest(
                inputs=[embedding_service_pb2.Input(text=text)]
            )
            try:
                output = stub.Embed(request, timeout=_CALL_TIMEOUT_S).outputs[0]
            except grpc.RpcError as error:
                raise StackError(f"embedding a text alone failed: {error.details()}") from error
            if output.HasField("status"):
                raise StackError(f"embedding a text alone failed: {output.status.message}")
            latencies_ms.append((time.monotonic() - sent_s) * 1e3)
            vectors.append(np.frombuffer(output.embedding, "<f4"))
            advance(1)
    return _Alone(vectors=vectors, latencies_ms=latencies_ms, seconds=time.monotonic() - start_s)


def _error_of_raw_counts(result: Outcome, texts: Sequence[str], target: int) -> float:
    """What the claims' error would be with the estimator's counts as they are."""
    indexes = sorted(result.tokens)
    raw = load_estimator(None).estimate_many(texts[index] for index in indexes)
    tokens = [result.tokens[index] for index in indexes]
    queries = max(round(target * len(tokens) / max(sum(tokens), 1)), 1)
    return estimate_error(as_claims(raw, tokens, queries))


def _latency(ordered_ms: Sequence[float]) -> Latency:
    return Latency(
        p50_ms=percentile(ordered_ms, 50),
        p90_ms=percentile(ordered_ms, 90),
        p99_ms=percentile(ordered_ms, 99),
    )


def _engine(info: embedding_service_pb2.GetModelInfoResponse) -> Engine:
    version = info.versions.get(info.engine)
    return Engine(
        model=info.model,
        name=f"{info.engine} {version}" if version else info.engine,
        device=info.device,
        precision=info.precision,
        dimensions=info.dimensions,
    )
