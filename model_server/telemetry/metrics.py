"""The one declared table of the model server's metrics, with why each matters.

Labels take values of declared, bounded sets only: kinds and outcomes of passes, reasons of
failures. They are filled per pass and per request, never per input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.metrics import MetricWrapperBase

SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0, 1.25, 2.0, 4.0)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000)
TOKENS = (16, 32, 64, 128, 256, 384, 512, 600, 768, 1_024, 1_536, 2_048, 4_096, 8_192, 16_384)

M = TypeVar("M", bound=MetricWrapperBase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """One row of the table."""

    kind: type[MetricWrapperBase]
    why: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


TABLE: dict[str, Declared] = {
    "model_server_passes_total": Declared(
        kind=Counter,
        why="Forward passes by kind and outcome: anything but normal and done is trouble.",
        labels=("kind", "outcome"),
    ),
    "model_server_pass_seconds": Declared(
        kind=Histogram, why="Duration of a pass: the engine's latency.", buckets=SECONDS
    ),
    "model_server_pass_tokens": Declared(
        kind=Histogram, why="Exact tokens of a pass: the work done at once.", buckets=TOKENS
    ),
    "model_server_pass_fill_ratio": Declared(
        kind=Histogram,
        why="Tokens over the target: low under load means that claims are too small.",
        buckets=RATIOS,
    ),
    "model_server_pass_inputs": Declared(
        kind=Histogram, why="Inputs of a pass: how much traffic shares one.", buckets=COUNTS
    ),
    "model_server_queue_seconds": Declared(
        kind=Histogram,
        why="Arrival of a request to the start of a pass with inputs of it: time lost to waiting.",
        buckets=SECONDS,
    ),
    "model_server_inputs_total": Declared(kind=Counter, why="Inputs that went through a pass."),
    "model_server_tokens_total": Declared(kind=Counter, why="Tokens that went through a pass."),
    "model_server_input_failures_total": Declared(
        kind=Counter, why="Inputs answered without a vector, by reason.", labels=("reason",)
    ),
    "model_server_requests_refused_total": Declared(
        kind=Counter, why="Requests refused as a whole, by reason.", labels=("reason",)
    ),
    "model_server_queued_tokens": Declared(
        kind=Gauge, why="Tokens held beyond the running pass: the backlog here."
    ),
    "model_server_streams": Declared(
        kind=Gauge, why="Open streams: one for each aggregator that found this server."
    ),
    "model_server_streams_cut_total": Declared(
        kind=Counter, why="Streams cut because their clients did not read: a client is at fault."
    ),
    "model_server_serving": Declared(
        kind=Gauge, why="1 while requests are taken: what health says."
    ),
    "model_server_engine_passes_total": Declared(
        kind=Counter,
        why="Forward passes that an engine with a process of its own counted: more than passes of "
        "ours means that it splits them.",
    ),
    "model_server_engine_restarts_total": Declared(
        kind=Counter, why="Times the engine died or broke."
    ),
    "model_server_batch_tokens_target": Declared(
        kind=Gauge, why="The size aimed at for a pass: a wrong one costs throughput or latency."
    ),
    "model_server_batch_tokens_target_implied": Declared(
        kind=Gauge,
        why="The target that the last passes imply: far from the one in force, it will move.",
    ),
    "model_server_target_moves_total": Declared(
        kind=Counter, why="Steps of the target after the machine: many mean that it is not alone."
    ),
    "model_server_batch_tokens_max": Declared(
        kind=Gauge, why="The most a pass may have; falls when memory runs out, and comes back."
    ),
    "model_server_maximum_lowered_total": Declared(
        kind=Counter, why="Times that a pass did not fit the memory and those after it got smaller."
    ),
}


class Metrics:
    """The table's metrics in a registry of their own, beside the process's."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.passes = self._make(Counter, "model_server_passes_total")
        self._pass_seconds = self._make(Histogram, "model_server_pass_seconds")
        self._pass_tokens = self._make(Histogram, "model_server_pass_tokens")
        self._pass_fill = self._make(Histogram, "model_server_pass_fill_ratio")
        self._pass_inputs = self._make(Histogram, "model_server_pass_inputs")
        self.queue_seconds = self._make(Histogram, "model_server_queue_seconds")
        self._inputs = self._make(Counter, "model_server_inputs_total")
        self._tokens = self._make(Counter, "model_server_tokens_total")
        self.input_failures = self._make(Counter, "model_server_input_failures_total")
        self.requests_refused = self._make(Counter, "model_server_requests_refused_total")
        self.queued_tokens = self._make(Gauge, "model_server_queued_tokens")
        self.streams = self._make(Gauge, "model_server_streams")
        self.streams_cut = self._make(Counter, "model_server_streams_cut_total")
        self.serving = self._make(Gauge, "model_server_serving")
        self.engine_passes = self._make(Counter, "model_server_engine_passes_total")
        self.engine_restarts = self._make(Counter, "model_server_engine_restarts_total")
        self.batch_tokens_target = self._make(Gauge, "model_server_batch_tokens_target")
        self.implied_target = self._make(Gauge, "model_server_batch_tokens_target_implied")
        self.target_moves = self._make(Counter, "model_server_target_moves_total")
        self.batch_tokens_max = self._make(Gauge, "model_server_batch_tokens_max")
        self.maximum_lowered = self._make(Counter, "model_server_maximum_lowered_total")

    def _make(self, kind: type[M], name: str) -> M:
        declared = TABLE[name]
        if declared.kind is not kind:
            raise TypeError(f"{name} is declared as {declared.kind.__name__}")
        buckets: Any = {"buckets": declared.buckets} if declared.buckets else {}
        return kind(name, declared.why, declared.labels, registry=self.registry, **buckets)

    def observe_pass(self, inputs: int, tokens: int, fill_ratio: float, seconds: float) -> None:
        """A pass ended well."""
        self._pass_seconds.observe(seconds)
        self._pass_tokens.observe(tokens)
        self._pass_fill.observe(fill_ratio)
        self._pass_inputs.observe(inputs)
        self._inputs.inc(inputs)
        self._tokens.inc(tokens)
