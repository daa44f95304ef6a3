"""What the aggregator adds to a query's latency, on real Apache Kafka.

The same arrivals (a real trace, its time axis scaled to the rate) are sent three times in one run:
to a bare echo, to an aggregator whose engine answers at once, and to one whose engine needs 15 ms a
pass. Latency runs from the intended send time to the result's arrival at a consumer.

(a) answers at once: percentiles less the bare echo's: what the aggregator and one gRPC hop add.
(b) 15 ms a pass: percentiles less those of an ideal work-conserving batcher (one queue, the same
    target, no network) replayed on the same send times, with each query's echo latency added.

    make bench-latency [QUERIES=FILE] [ARRIVALS=FILE]
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console

from ops.bench.common import (
    BenchError,
    Child,
    aggregator,
    model_server,
    percentile,
    read_queries,
    report,
    show,
)
from ops.kafka.node import KafkaNode, KafkaUnavailableError, NodeOptions
from protos.embedding.v1 import query_pb2

PARTITIONS = 4
PASS_MS = 15.0
TARGET_TOKENS = 600
WARM_UP = 200
QUANTILES = (50, 90, 99)
ANSWER_TIMEOUT_S = 20.0


def read_arrivals(path: Path | None, count: int, rate_per_s: float) -> list[float]:
    """Send times in seconds from the start, scaled to the mean rate.

    From the column `arrival_s` of a trace, else from a seeded process with the same kind of bursts:
    a Poisson process whose rate itself is redrawn every second.

    Raises:
        BenchError: the trace can't be read, or is too short.
    """
    if path is not None:
        times = _trace(path)[: count + 1]
        if len(times) <= count:
            raise BenchError(f"{path} has fewer than {count + 1} arrivals")
    else:
        draw = random.Random(7)
        times, now = [0.0], 0.0
        while len(times) <= count:
            now += draw.expovariate(1.0) / draw.choice((0.3, 0.7, 1.0, 1.0, 1.3, 2.5))
            times.append(now)
    scale = count / rate_per_s / (times[count] - times[0])
    return [(moment - times[0]) * scale for moment in times[:count]]


def _trace(path: Path) -> list[float]:
    try:
        with path.open(encoding="utf-8") as lines:
            return [float(row["arrival_s"]) for row in csv.DictReader(lines)]
    except OSError as error:
        raise BenchError(f"arrivals {path}: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise BenchError(f"arrivals {path}: a column arrival_s of numbers is expected") from error


class Receiver(threading.Thread):
    """Takes down when each result arrives on a topic, from its present end on."""

    def __init__(self, bootstrap: str, topic: str, count: int) -> None:
        """Read the topic's end; `start` begins to read behind it."""
        super().__init__(daemon=True)
        self.arrived: dict[int, float] = {}
        self.tokens = [0] * count
        self.doubled = 0
        self.done = threading.Event()
        self._count = count
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "bench-latency-client",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
                "log_level": 0,
            }
        )
        ends = []
        for number in range(PARTITIONS):
            partition = TopicPartition(topic, number)
            partition.offset = self._consumer.get_watermark_offsets(partition, 10)[1]
            ends.append(partition)
        self._consumer.assign(ends)

    def run(self) -> None:
        """Read until every query has its result, or `done` is set from outside."""
        while len(self.arrived) < self._count and not self.done.is_set():
            message = self._consumer.poll(0.1)
            if message is None or message.error():
                continue
            now_s = time.perf_counter()
            number = int(message.key() or b"-1")
            self.doubled += number in self.arrived
            self.arrived[number] = now_s
            if ("embedding-status", b"OK") in (message.headers() or []):
                self.tokens[number] = query_pb2.Result.FromString(message.value() or b"").tokens
        self.done.set()
        self._consumer.close()


class Client:
    """Sends on schedule and takes down when each result arrives."""

    def __init__(self, bootstrap: str) -> None:
        """One producer for all phases, with the settings of an eager producer."""
        self._bootstrap = bootstrap
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "linger.ms": 0, "acks": "all", "log_level": 0}
        )

    def run(
        self, texts: Sequence[str], arrivals: Sequence[float], *, queries: str, results: str
    ) -> tuple[list[float], list[int]]:
        """Send all, wait for all; return latencies in ms from the intended send, and tokens."""
        receiver = Receiver(self._bootstrap, results, len(texts))
        receiver.start()
        start_s = time.perf_counter() + 0.1
        for i, (text, arrival_s) in enumerate(zip(texts, arrivals, strict=True)):
            wait_until(start_s + arrival_s)
            self._producer.produce(
                queries,
                query_pb2.Query(text=text).SerializeToString(),
                str(i).encode(),
                partition=i % PARTITIONS,
                headers=[("content-type", b"application/protobuf")],
            )
            self._producer.poll(0)
        self._producer.flush(10)
        receiver.done.wait(ANSWER_TIMEOUT_S)
        receiver.done.set()
        receiver.join()
        arrived = receiver.arrived
        if len(arrived) != len(texts) or receiver.doubled:
            raise BenchError(
                f"{len(texts)} queries, but {len(arrived)} with a result on {results}, "
                f"{receiver.doubled} with more than one"
            )
        latencies = [1e3 * (arrived[i] - start_s - arrivals[i]) for i in range(len(texts))]
        return latencies, receiver.tokens


def wait_until(moment_s: float) -> None:
    """Sleep until then; the last half millisecond in a loop, for precision."""
    while (left_s := moment_s - time.perf_counter()) > 0:
        if left_s > 0.0005:
            time.sleep(min(left_s - 0.0004, 0.005))


def ideal_batcher_ms(
    arrivals: Sequence[float], tokens: Sequence[int], *, pass_ms: float, target: int
) -> list[float]:
    """Latencies of one queue and one server, oldest first up to the target, no network.

    Whenever the server is free and something waits, a pass starts. Arrivals in seconds.
    """
    latencies = [0.0] * len(arrivals)
    waiting: deque[int] = deque()
    free_s, coming = 0.0, 0
    while coming < len(arrivals) or waiting:
        if not waiting:
            free_s = max(free_s, arrivals[coming])
        while coming < len(arrivals) and arrivals[coming] <= free_s:
            waiting.append(coming)
            coming += 1
        batch = [waiting.popleft()]
        total = tokens[batch[0]]
        while waiting and total + tokens[waiting[0]] <= target:
            batch.append(waiting.popleft())
            total += tokens[batch[-1]]
        free_s += pass_ms / 1e3
        for number in batch:
            latencies[number] = 1e3 * (free_s - arrivals[number])
    return latencies


class Phases:
    """The three phases of a run, on one broker."""

    def __init__(self, bootstrap: str, options: argparse.Namespace) -> None:
        """Read texts and arrivals; the first `WARM_UP` of each phase are not counted."""
        self._bootstrap = bootstrap
        self._client = Client(bootstrap)
        count = options.count + WARM_UP
        self._texts = read_queries(options.queries, count)
        self.arrivals = read_arrivals(options.arrivals, count, options.rate)
        self._console = Console(stderr=True)

    def echo(self) -> list[float]:
        """The bare hop."""
        arguments = [
            *(sys.executable, "-m", "ops.bench.echo", "--bootstrap", self._bootstrap),
            *("--group", "echo", "--queries", "queries-echo", "--results", "results-echo"),
        ]
        return self._measure("echo", Child("echo", arguments, {}))[0]

    def aggregator(self, name: str, *, pass_ms: float) -> tuple[list[float], list[int]]:
        """An aggregator and one simulated server of `pass_ms` a pass."""
        server, grpc, url = model_server(
            {
                "MODEL_SERVER_SIMULATED__FIXED_MS": str(pass_ms),
                "MODEL_SERVER_SIMULATED__SLOPE_US_PER_TOKEN": "0",
                "MODEL_SERVER_BATCH_TOKENS_TARGET": str(TARGET_TOKENS),
            }
        )
        with server:
            server.wait_ready(f"{url}/readyz")
            child, metrics = aggregator(
                self._bootstrap,
                grpc,
                {
                    "AGGREGATOR_GROUP_ID": name,
                    "AGGREGATOR_GROUP_PROTOCOL": "consumer",
                    "AGGREGATOR_QUERIES_TOPIC": f"queries-{name}",
                    "AGGREGATOR_RESULTS_TOPIC": f"results-{name}",
                },
            )
            return self._measure(name, child, f"{metrics}/readyz")

    def _measure(
        self, name: str, child: AbstractContextManager[Child], ready_url: str = ""
    ) -> tuple[list[float], list[int]]:
        with child as process:
            if ready_url:
                process.wait_ready(ready_url)
            else:
                time.sleep(3)  # the echo has no health endpoint; its first answers are warm-up
            self._console.print(f"{name}: {len(self._texts)} queries, {self.arrivals[-1]:.0f} s")
            latencies, tokens = self._client.run(
                self._texts, self.arrivals, queries=f"queries-{name}", results=f"results-{name}"
            )
            process.check()
        return latencies, tokens


def create_topics(bootstrap: str, names: Sequence[str]) -> None:
    """A pair of topics for each phase, and the dead letter topic."""
    topics = [
        NewTopic(f"{kind}-{name}", num_partitions=PARTITIONS, replication_factor=1)
        for name in names
        for kind in ("queries", "results")
    ]
    topics.append(NewTopic("queries.dlq", num_partitions=1, replication_factor=1))
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.create_topics(topics).values():
        future.result(30)


def main() -> int:
    """Run the phases, print, report."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.latency", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--queries", type=Path, help="id TAB text, or plain lines")
    parser.add_argument("--arrivals", type=Path, help="CSV with a column arrival_s")
    parser.add_argument("--rate", type=float, default=100.0, help="queries per second")
    parser.add_argument("--count", type=int, default=4000, help="queries per phase")
    options = parser.parse_args()
    try:
        with KafkaNode(NodeOptions()) as node:
            create_topics(node.bootstrap_servers, ("echo", "at-once", "pass"))
            phases = Phases(node.bootstrap_servers, options)
            echo = phases.echo()
            at_once, _ = phases.aggregator("at-once", pass_ms=0.0)
            paced, tokens = phases.aggregator("pass", pass_ms=PASS_MS)
    except (BenchError, KafkaUnavailableError) as error:
        print(error, file=sys.stderr)
        return 1
    ideal = ideal_batcher_ms(phases.arrivals, tokens, pass_ms=PASS_MS, target=TARGET_TOKENS)
    expected = [a + b for a, b in zip(ideal, echo, strict=True)]
    print_and_report(options, echo=echo, at_once=at_once, expected=expected, paced=paced)
    return 0


def print_and_report(options: argparse.Namespace, **measured: Sequence[float]) -> None:
    """The table and the JSON line."""
    figures = {
        name: {q: percentile(latencies[WARM_UP:], q) for q in QUANTILES}
        for name, latencies in measured.items()
    }
    echo, at_once = figures["echo"], figures["at_once"]
    expected, paced = figures["expected"], figures["paced"]
    rows = {
        "bare echo": echo,
        "engine at once": at_once,
        "(a) added to the echo": {q: at_once[q] - echo[q] for q in QUANTILES},
        "ideal batcher + echo": expected,
        f"engine of {PASS_MS:.0f} ms a pass": paced,
        "(b) added to the ideal": {q: paced[q] - expected[q] for q in QUANTILES},
    }
    show(
        f"{options.count:,} queries at {options.rate:.0f}/s, latency in ms",
        ("", *(f"p{q}" for q in QUANTILES)),
        [(name, *(f"{row[q]:.2f}" for q in QUANTILES)) for name, row in rows.items()],
    )
    names = ("echo", "at_once", "at_once_added", "ideal", "pass", "pass_added")
    report(
        {"bench": "latency", "queries": options.count, "rate_per_s": options.rate}
        | {
            f"{name}_p{q}_ms": round(row[q], 3)
            for name, row in zip(names, rows.values(), strict=True)
            for q in QUANTILES
        }
    )


if __name__ == "__main__":
    sys.exit(main())
