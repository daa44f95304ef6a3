"""What exactly once costs against at least once, on real Apache Kafka, in one run.

Rounds in pairs, the order turned each time: a paced phase of the same arrivals for each mode
(latency from the intended send time to the result's arrival at a reader of committed results), then
a backlog that was on the topic before the aggregator started (queries per second and CPU of the
aggregator, from the moment that it has joined its group to the last result that a reader sees). The
model server's engine is simulated and answers at once, so that the delivery is what is measured.
The run fails unless every query has one result.

    make bench-delivery [QUERIES=FILE] [ARRIVALS=FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Producer
from rich.console import Console

from ops.bench.common import (
    BenchError,
    aggregator,
    model_server,
    percentile,
    read_queries,
    report,
    show,
)
from ops.bench.latency import (
    PARTITIONS,
    WARM_UP,
    Client,
    Receiver,
    create_topics,
    read_arrivals,
)
from ops.kafka.node import KafkaNode, KafkaUnavailableError, NodeOptions
from protos.embedding.v1 import query_pb2

MODES = ("at_least_once", "exactly_once")
QUANTILES = (50, 99)
BACKLOG_TIMEOUT_S = 120.0


@dataclass
class Figures:
    """Of one mode, a value for each round."""

    percentiles_ms: dict[int, list[float]] = field(
        default_factory=lambda: {q: [] for q in QUANTILES}
    )
    queries_per_s: list[float] = field(default_factory=list)
    cpu_us_per_query: list[float] = field(default_factory=list)


class Rounds:
    """The rounds of a run, on one broker and one model server."""

    def __init__(self, bootstrap: str, grpc: str, options: argparse.Namespace) -> None:
        """Read texts and arrivals once."""
        self._bootstrap = bootstrap
        self._grpc = grpc
        count = options.count + WARM_UP
        self._texts = read_queries(options.queries, count)
        self._arrivals = read_arrivals(options.arrivals, count, options.rate)
        self._backlog = read_queries(options.queries, options.backlog)
        self._console = Console(stderr=True)
        self.figures = {mode: Figures() for mode in MODES}

    def run(self, number: int) -> None:
        """One round of both modes."""
        for mode in MODES if number % 2 == 0 else reversed(MODES):
            self._console.print(f"round {number + 1}: {mode}")
            self._pace(mode, phase_name(mode, number, "paced"))
            self._drain(mode, phase_name(mode, number, "backlog"))

    def _settings(self, mode: str, name: str) -> dict[str, str]:
        return {
            "AGGREGATOR_DELIVERY": mode,
            "AGGREGATOR_INSTANCE_NAME": name,
            "AGGREGATOR_GROUP_ID": name,
            "AGGREGATOR_GROUP_PROTOCOL": "consumer",
            "AGGREGATOR_QUERIES_TOPIC": f"queries-{name}",
            "AGGREGATOR_RESULTS_TOPIC": f"results-{name}",
            "AGGREGATOR_TTL_MS": "0",
        }

    def _pace(self, mode: str, name: str) -> None:
        """Latency at the rate."""
        child, url = aggregator(self._bootstrap, self._grpc, self._settings(mode, name))
        with child:
            child.wait_ready(f"{url}/readyz")
            latencies, _ = Client(self._bootstrap).run(
                self._texts, self._arrivals, queries=f"queries-{name}", results=f"results-{name}"
            )
            child.check()
        for q, values in self.figures[mode].percentiles_ms.items():
            values.append(percentile(latencies[WARM_UP:], q))

    def _drain(self, mode: str, name: str) -> None:
        """Throughput from a backlog."""
        count = len(self._backlog)
        produce(self._bootstrap, f"queries-{name}", self._backlog)
        receiver = Receiver(self._bootstrap, f"results-{name}", count)
        receiver.start()
        child, url = aggregator(self._bootstrap, self._grpc, self._settings(mode, name))
        with child:
            child.wait_ready(f"{url}/readyz")  # it has joined: the first records are on their way
            began_s, began_cpu_s = time.perf_counter(), child.cpu_s()
            receiver.done.wait(BACKLOG_TIMEOUT_S)
            cpu_s = child.cpu_s() - began_cpu_s
            receiver.done.set()
            child.check()
        receiver.join()
        arrived = receiver.arrived
        if len(arrived) != count or receiver.doubled:
            raise BenchError(
                f"{mode}: {count} queries, but {len(arrived)} with a result, "
                f"{receiver.doubled} with more than one"
            )
        figures = self.figures[mode]
        figures.queries_per_s.append(count / (max(arrived.values()) - began_s))
        figures.cpu_us_per_query.append(1e6 * cpu_s / count)


def phase_name(mode: str, number: int, phase: str) -> str:
    """Of its group and, with a prefix, of its topics."""
    return f"{mode}-{number}-{phase}"


def produce(bootstrap: str, topic: str, texts: Sequence[str]) -> None:
    """Put the backlog on the topic, keyed by number."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "log_level": 0})
    for number, text in enumerate(texts):
        while True:
            try:
                producer.produce(
                    topic,
                    query_pb2.Query(text=text).SerializeToString(),
                    str(number).encode(),
                    partition=number % PARTITIONS,
                    headers=[("content-type", b"application/protobuf")],
                )
            except BufferError:
                producer.poll(0.1)
                continue
            break
        producer.poll(0)
    if producer.flush(60):
        raise BenchError("the queries could not be produced")


def main() -> int:
    """Run the rounds, print, report."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.delivery", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--queries", type=Path, help="id TAB text, or plain lines")
    parser.add_argument("--arrivals", type=Path, help="CSV with a column arrival_s")
    parser.add_argument("--rate", type=float, default=100.0, help="queries per second, paced")
    parser.add_argument("--count", type=int, default=1_500, help="queries of a paced phase")
    parser.add_argument("--backlog", type=int, default=40_000, help="queries of a backlog")
    parser.add_argument("--rounds", type=int, default=3, help="of both modes")
    options = parser.parse_args()
    server, grpc, url = model_server(
        {
            "MODEL_SERVER_SIMULATED__FIXED_MS": "0",
            "MODEL_SERVER_SIMULATED__SLOPE_US_PER_TOKEN": "0",
            "MODEL_SERVER_BATCH_TOKENS_TARGET": "600",
        }
    )
    try:
        with KafkaNode(NodeOptions()) as node, server:
            server.wait_ready(f"{url}/readyz")
            names = [
                phase_name(mode, number, phase)
                for mode in MODES
                for number in range(options.rounds)
                for phase in ("paced", "backlog")
            ]
            create_topics(node.bootstrap_servers, names)
            rounds = Rounds(node.bootstrap_servers, grpc, options)
            for number in range(options.rounds):
                rounds.run(number)
    except (BenchError, KafkaUnavailableError) as error:
        print(error, file=sys.stderr)
        return 1
    print_and_report(options, rounds.figures)
    return 0


def print_and_report(options: argparse.Namespace, figures: dict[str, Figures]) -> None:
    """The table and the JSON line."""
    rows: dict[str, dict[str, float]] = {
        mode: {
            **{f"p{q}_ms": statistics.median(each.percentiles_ms[q]) for q in QUANTILES},
            "queries_per_s": statistics.median(each.queries_per_s),
            "cpu_us_per_query": statistics.median(each.cpu_us_per_query),
        }
        for mode, each in figures.items()
    }
    plain, exact = rows["at_least_once"], rows["exactly_once"]
    show(
        f"{options.count:,} queries at {options.rate:.0f}/s, then a backlog of "
        f"{options.backlog:,}; median of {options.rounds} rounds",
        ("", *(f"p{q} ms" for q in QUANTILES), "queries/s", "CPU us/query"),
        [
            (mode, *(f"{value:,.1f}" for value in row.values()))
            for mode, row in {
                **rows,
                "difference": {name: exact[name] - plain[name] for name in exact},
            }.items()
        ],
    )
    for mode, each in figures.items():
        medians = ", ".join(f"{value:.1f}" for value in each.percentiles_ms[50])
        spread = ", ".join(f"{value:,.0f}" for value in each.queries_per_s)
        print(f"{mode}: rounds at a median of {medians} ms, {spread} queries/s")
    report(
        {"bench": "delivery", "rate_per_s": options.rate, "rounds": options.rounds}
        | {"queries": options.count, "backlog": options.backlog}
        | {
            f"{mode}_{name}": round(value, 2)
            for mode, row in rows.items()
            for name, value in row.items()
        }
    )


if __name__ == "__main__":
    sys.exit(main())
