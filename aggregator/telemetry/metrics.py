"""The one declared table of the aggregator's metrics, and what counts them.

Every metric is a constant of this module with its type, its labels and why it matters; TABLE holds
them all. Values of labels come from declared, bounded sets: a value outside its set is counted as
"other", so no text from a record can grow the process. Base units and suffixes are Prometheus'.

Counting happens on the event loop, per batch, without locks; rendering may happen in another
thread and then sees each number whole, though not all of one instant. Knows nothing of Kafka or
gRPC.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from aggregator.core.events import ServerPhase, WriteFault
from aggregator.core.failures import Code, Reason

OTHER = "other"
SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0),
)
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 35.0, 50.0, 75.0, 100.0, 200.0, 500.0, 1000.0)
TOKENS = (16.0, 32.0, 64.0, 128.0, 256.0, 384.0, 512.0, 600.0, 768.0, 1024.0, 2048.0, 8192.0)
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.85, 0.9, 0.94, 0.96, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0)


class Kind(Enum):
    """Prometheus' types that we use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)  # hashed by identity: it is a key on the hot path
class Declared:
    """One metric: its name, why it matters, its labels and, for a histogram, its bounds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


LABEL_VALUES: Mapping[str, frozenset[str]] = {
    "code": frozenset(code.value for code in Code),
    "reason": frozenset(reason.value for reason in Reason),
    "phase": frozenset(phase.value for phase in ServerPhase),
    "fault": frozenset(fault.value for fault in WriteFault),
    "outcome": frozenset({"answered", "refused", "bad_answer", "lost", "done", "failed"}),
    "cause": frozenset({"revoke", "drain"}),
    "kind": frozenset({"assigned", "revoked", "lost"}),
}
"""What each label may be. `model` is not in here: its set is the configured names."""


def _counter(name: str, why: str, *labels: str) -> Declared:
    return Declared(name, Kind.COUNTER, why, labels)


def _gauge(name: str, why: str, *labels: str) -> Declared:
    return Declared(name, Kind.GAUGE, why, labels)


def _histogram(name: str, bounds: tuple[float, ...], why: str, *labels: str) -> Declared:
    return Declared(name, Kind.HISTOGRAM, why, labels, bounds)


RECORDS_POLLED = _counter(
    "aggregator_records_polled_total",
    "Records read from the queries topic: the load that arrives.",
)
RECORDS_LOST = _counter(
    "aggregator_records_lost_total",
    "Records that retention took before they were read: anything above 0 is lost queries.",
)
QUERIES_REFUSED = _counter(
    "aggregator_queries_refused_total",
    "Records answered with an error when they were decoded: a rise is a producer gone wrong.",
    "reason",
)
RESULTS = _counter(
    "aggregator_results_total",
    "Results durable on the results topic, by what their consumers are told.",
    "model",
    "code",
)
DEAD_LETTERS = _counter(
    "aggregator_dead_letters_total",
    "Records durable on the dead letter topic: each waits for somebody to look at it.",
    "reason",
)
WRITE_FAILURES = _counter(
    "aggregator_write_failures_total",
    "Records that could not be produced: fault topic means that results are being held.",
    "fault",
)
QUERIES_ABANDONED = _counter(
    "aggregator_queries_abandoned_total",
    "Queries that a deadline cut off: the partition's next owner does them again.",
    "cause",
)
CLAIMS = _counter(
    "aggregator_claims_total",
    "Claims by how they ended: lost and bad_answer point at a model server.",
    "model",
    "outcome",
)
CLAIM_QUERIES = _histogram(
    "aggregator_claim_queries",
    COUNTS,
    "Queries in a claim: 1 under load means that claims do not form.",
    "model",
)
CLAIM_TOKENS = _histogram(
    "aggregator_claim_tokens",
    TOKENS,
    "Exact tokens of a claim, as counted by the server.",
    "model",
)
CLAIM_FILL = _histogram(
    "aggregator_claim_fill_ratio",
    RATIOS,
    "Exact tokens of a claim over the server's target: low under load wastes the engine.",
    "model",
)
ESTIMATE_ERROR = _histogram(
    "aggregator_claim_estimate_ratio",
    RATIOS,
    "Exact tokens of a claim over its calibrated estimate: far from 1 means a poor calibration.",
    "model",
)
CLAIM_SECONDS = _histogram(
    "aggregator_claim_seconds",
    SECONDS,
    "From sending a claim to its last answer.",
    "model",
)
INFERENCE_SECONDS = _histogram(
    "aggregator_inference_seconds",
    SECONDS,
    "Forward passes, as told by the servers.",
    "model",
)
QUEUE_SECONDS = _histogram(
    "aggregator_query_queue_seconds",
    SECONDS,
    "From a query's arrival to the start of its pass: the wait that batching costs.",
    "model",
)
LATENCY_SECONDS = _histogram(
    "aggregator_query_seconds",
    SECONDS,
    "From a query's arrival at the aggregator until its result is durable.",
)
BACKLOG_QUERIES = _gauge(
    "aggregator_backlog_queries",
    "Decoded queries not yet dispatched: a steady rise asks for more servers.",
    "model",
)
BACKLOG_TOKENS = _gauge(
    "aggregator_backlog_tokens",
    "Their estimated tokens.",
    "model",
)
IN_FLIGHT_QUERIES = _gauge(
    "aggregator_in_flight_queries",
    "Queries dispatched that have neither an answer nor an end yet.",
    "model",
)
ANSWERED_TOKENS = _counter(
    "aggregator_answered_tokens_total",
    "Exact tokens of the vectors that came: the work that the servers did for us.",
    "model",
)
LATE_ANSWERS = _counter(
    "aggregator_late_answers_total",
    "Messages about claims that were given up before: work of the servers that nobody used.",
    "model",
)
SERVERS = _gauge(
    "aggregator_servers",
    "Model servers by phase: none ready means that queries expire.",
    "model",
    "phase",
)
SERVERS_WRONG_REVISION = _gauge(
    "aggregator_servers_wrong_revision",
    "Model servers not used because they serve another revision.",
    "model",
)
QUERIES_RETRIED = _counter(
    "aggregator_queries_retried_total",
    "Queries put back after a claim that failed: a rise points at a model server.",
    "model",
)
ENGINE_DEATHS = _counter(
    "aggregator_query_deaths_total",
    "Times that a query's engine or stream died with it in a pass: two make it a suspect.",
    "model",
)
ESTIMATOR_FAILURES = _counter(
    "aggregator_estimator_failures_total",
    "Texts that the tokenizer failed on and whose size was guessed instead.",
    "model",
)
STREAMS_OPENED = _counter(
    "aggregator_streams_opened_total",
    "Streams to model servers that became ready.",
    "model",
)
STREAMS_FAILED = _counter(
    "aggregator_streams_failed_total",
    "Streams to model servers that broke or could not be opened; a server that ends its streams in "
    "order, as it does when it is stopped, is none.",
    "model",
)
STREAMS_SILENT = _counter(
    "aggregator_streams_silent_total",
    "Streams cut since their server was silent with queries unanswered: its engine hangs, or the "
    "network swallows what is sent.",
    "model",
)
PARTITIONS_ASSIGNED = _gauge(
    "aggregator_partitions_assigned",
    "Partitions that this process owns: 0 for long means that it does nothing.",
)
PARTITIONS_PAUSED = _gauge(
    "aggregator_partitions_paused",
    "Partitions paused because a window or buffer is full.",
)
PARTITIONS_HELD = _gauge(
    "aggregator_partitions_held",
    "Partitions that we own and do not read yet, since the brokers have not told where the group "
    "stopped: above 0 for long means that their records wait.",
)
LAG_OFFSETS = _gauge(
    "aggregator_lag_offsets",
    "Offsets of the queries topic not yet read, over our partitions, as the last fetches told: a "
    "steady rise asks for more aggregators or servers. Stands still while partitions are paused.",
)
LAG_OFFSETS_MAX = _gauge(
    "aggregator_lag_offsets_max",
    "The same of the partition that is furthest behind: far above the mean means skewed keys.",
)
UNSETTLED_RECORDS = _gauge(
    "aggregator_unsettled_records",
    "Admitted records without a durable result.",
)
BUFFER_BYTES = _gauge(
    "aggregator_buffer_bytes",
    "Decoded records and unconfirmed results in memory, of buffer_bytes_max.",
)
COMMITS = _counter(
    "aggregator_commits_total",
    "Offset commits: failed ones mean duplicates after a restart.",
    "outcome",
)
TRANSACTION_SECONDS = _histogram(
    "aggregator_transaction_seconds",
    SECONDS,
    "From the start of a transaction to its commit: with exactly_once, what delivery adds.",
)
REBALANCES = _counter(
    "aggregator_rebalances_total",
    "Assignments that came, were revoked or were lost: lost means that we were too slow.",
    "kind",
)
BUILD = _gauge("aggregator_build_info", "1, with the version that runs.", "version")

TABLE: tuple[Declared, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Declared)
)


class _Series:
    """One label combination of a histogram."""

    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0


class Metrics(Collector):
    """Counts for the declared metrics. One per process; methods are called on the event loop."""

    def __init__(self, *, models: Iterable[str], version: str = "") -> None:
        """Start every metric without labels at 0; `models` bounds the label of that name."""
        self._allowed = dict(LABEL_VALUES) | {
            "model": frozenset(models),
            "version": frozenset({version}),
        }
        self._values: dict[Declared, dict[tuple[str, ...], float]] = {}
        self._series: dict[Declared, dict[tuple[str, ...], _Series]] = {}
        for metric in TABLE:
            if metric.kind is Kind.HISTOGRAM:
                self._series[metric] = {}
            else:
                self._values[metric] = {} if metric.labels else {(): 0.0}
        if version:
            self.set(BUILD, 1, version)

    def add(self, metric: Declared, amount: float, *labels: str) -> None:
        """Add to a counter (or a gauge).

        Raises:
            ValueError: `labels` are not as many as declared.
        """
        values = self._values[metric]
        if labels in values:
            values[labels] += amount
        else:
            labels = self._bounded(metric, labels)
            values[labels] = values.get(labels, 0.0) + amount

    def set(self, metric: Declared, value: float, *labels: str) -> None:
        """Set a gauge; raises as `add`."""
        self._values[metric][self._bounded(metric, labels)] = value

    def observe(self, metric: Declared, values: Sequence[float], *labels: str) -> None:
        """Put each value into a histogram; raises as `add`."""
        by_labels = self._series[metric]
        series = by_labels.get(labels)
        if series is None:
            labels = self._bounded(metric, labels)
            series = by_labels.setdefault(labels, _Series(len(metric.bounds) + 1))
        counts = series.counts
        bounds = metric.bounds
        if len(values) == 1:  # what is observed once a claim
            counts[bisect_left(bounds, values[0])] += 1
            series.total += values[0]
            return
        ordered = sorted(values)
        if not ordered:
            return
        # Values of one claim lie close together: few buckets are looked at, however many values.
        done, size = 0, len(ordered)
        bucket = bisect_left(bounds, ordered[0])
        while done < size:
            until = size
            if bucket < len(bounds):
                until = bisect_right(ordered, bounds[bucket], done)
            counts[bucket] += until - done
            done = until
            bucket += 1
        series.total += sum(ordered)

    def value(self, metric: Declared, *labels: str) -> float:
        """What a counter or gauge stands at; 0 where nothing was counted yet."""
        return self._values[metric].get(labels, 0.0)

    def count(self, metric: Declared, *labels: str) -> int:
        """How many values a histogram holds."""
        series = self._series[metric].get(labels)
        return sum(series.counts) if series else 0

    def _bounded(self, metric: Declared, labels: tuple[str, ...]) -> tuple[str, ...]:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has the labels {metric.labels}, got {labels}")
        return tuple(
            value if value in self._allowed[name] else OTHER
            for name, value in zip(metric.labels, labels, strict=True)
        )

    def collect(self) -> Iterator[Metric]:
        """Every declared metric, for prometheus_client's registry."""
        for metric, values in self._values.items():
            family = (
                CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
                if metric.kind is Kind.COUNTER
                else GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            )
            for labels, value in list(values.items()):
                family.add_metric(labels, value)
            yield family
        for metric, by_labels in self._series.items():
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, series in list(by_labels.items()):
                histogram.add_metric(labels, _cumulative(metric, series), series.total)
            yield histogram


def _cumulative(metric: Declared, series: _Series) -> list[tuple[str, float]]:
    """Prometheus' buckets: each counts what is at most its bound."""
    buckets: list[tuple[str, float]] = []
    running = 0
    bounds = (*(str(bound) for bound in metric.bounds), "+Inf")
    for bound, count in zip(bounds, list(series.counts), strict=True):
        running += count
        buckets.append((bound, running))
    return buckets


def registry_of(metrics: Metrics) -> CollectorRegistry:
    """Our metrics and those of the process, the interpreter and its garbage collector."""
    registry = CollectorRegistry()
    registry.register(metrics)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The text exposition format, version 0.0.4."""
    return generate_latest(registry)
