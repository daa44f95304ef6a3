"""What the aggregator costs per query, beside the floor of its library calls alone.

One aggregator process as users run it, a model server with the simulated engine answering at once
in another, librdkafka's mock cluster in a third, on as many partitions as keep each under 3 MB;
real clients, 384 float32 dimensions, Protobuf (`JSON=1`: JSON with arrays). The queries
are on the topic before the aggregator starts. The bare loop (`ops/bench/floor.py`) runs in turn
with it, against the same broker and model server; the median of the rounds is what counts.

CPU is the aggregator process's own, librdkafka's and gRPC's threads included, from its first
assignment to its last result, read from the operating system. The run fails unless the delivery
reports of results equal the queries.

    make bench-hotpath [QUERIES=FILE] [JSON=1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import orjson
from confluent_kafka import Producer
from rich.console import Console

from aggregator.adapters.mock_broker import MockBroker
from ops.bench.common import (
    MODEL,
    BenchError,
    Child,
    aggregator,
    metric,
    model_server,
    read_queries,
    report,
    show,
)
from protos.embedding.v1 import query_pb2

PARTITION_BYTES_MAX = 3_000_000
"""The mock cluster drops what is over about 5 MB of a partition."""
QUERY_PARTITIONS = 8
SCRAPE_S = 1.0
"""How often its metrics are read: each time costs it milliseconds."""
RESULT_BYTES = {False: 1_750, True: 8_500}
"""A result's record, generously: 384 float32 as bytes, or as a JSON array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One run's figures."""

    cpu_us_per_query: float
    queries_per_s: float


class CpuClock:
    """Samples a child's CPU every 10 ms, so that it can be read at a moment that is over."""

    def __init__(self, child: Child) -> None:
        """Start sampling."""
        self._child = child
        self._samples: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            self._samples.append((time.time(), self._child.cpu_s()))

    def stop(self) -> None:
        """Take no more samples."""
        self._stop.set()
        self._thread.join()

    def at(self, moment_s: float) -> float:
        """CPU seconds at a wall-clock time, between the samples around it."""
        before = [sample for sample in self._samples if sample[0] <= moment_s]
        after = [sample for sample in self._samples if sample[0] > moment_s]
        if not before or not after:
            raise BenchError("the CPU clock has no sample around that moment")
        (t0, c0), (t1, c1) = before[-1], after[0]
        return c0 + (c1 - c0) * (moment_s - t0) / (t1 - t0)


def encode(texts: Sequence[str], *, as_json: bool) -> list[bytes]:
    """The queries' values."""
    if as_json:
        return [orjson.dumps({"id": f"q{i}", "text": text}) for i, text in enumerate(texts)]
    return [
        query_pb2.Query(id=f"q{i}", text=text).SerializeToString() for i, text in enumerate(texts)
    ]


def produce(bootstrap: str, values: Sequence[bytes], *, as_json: bool) -> None:
    """Put them on the topic, evenly over its partitions, and wait for the broker."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
    )
    kind = b"application/json" if as_json else b"application/protobuf"
    for i, value in enumerate(values):
        producer.produce(
            "queries", value, partition=i % QUERY_PARTITIONS, headers=[("content-type", kind)]
        )
        if i % 1000 == 0:
            producer.poll(0)
    if producer.flush(60):
        raise BenchError("the queries could not be produced")


def run_aggregator(bootstrap: str, server: str, count: int) -> Cost:
    """Start it, let it answer everything, read its clocks."""
    options = {"AGGREGATOR_GROUP_ID": f"bench-{time.time_ns()}", "AGGREGATOR_TTL_MS": "0"}
    child, url = aggregator(bootstrap, server, options)
    with child:
        clock = CpuClock(child)
        child.wait_ready(f"{url}/livez")
        done, deadline = 0.0, time.monotonic() + 120
        while done < count:
            child.check()
            if time.monotonic() > deadline:
                raise BenchError(f"{done:.0f} of {count} results were confirmed after 120 s")
            time.sleep(SCRAPE_S)
            done = metric(url, "aggregator_results_total")
        time.sleep(0.2)
        clock.stop()
        done = metric(url, "aggregator_results_total")
        good = metric(url, "aggregator_results_total", 'code="OK"')
    if done != count or good != count:
        raise BenchError(f"{count} queries, but {done:.0f} results, {good:.0f} of them vectors")
    start_s, end_s = working_time(child.log_path)
    return Cost(
        cpu_us_per_query=1e6 * (clock.at(end_s) - clock.at(start_s)) / count,
        queries_per_s=count / (end_s - start_s),
    )


def working_time(log: Path) -> tuple[float, float]:
    """Wall-clock seconds of the first assignment and of the last claim, from the log."""
    start_s, end_s = 0.0, 0.0
    for line in log.read_text(encoding="utf-8").splitlines():
        if not line.startswith("{"):
            continue
        entry = json.loads(line)
        moment_s = datetime.fromisoformat(entry["timestamp"]).timestamp()
        if entry["event"] == "partitions assigned" and not start_s:
            start_s = moment_s
        elif entry["event"] == "claim":
            end_s = moment_s
    if not start_s or not end_s:
        raise BenchError(f"{log} tells of no assignment or no claim")
    return start_s, end_s


def run_floor(bootstrap: str, server: str, count: int, *, as_json: bool) -> Cost:
    """Run the bare loop in a process of its own."""
    arguments = [
        *(sys.executable, "-m", "ops.bench.floor", "--bootstrap", bootstrap, "--server", server),
        *("--queries", "queries", "--results", "floor", "--count", str(count)),
        *(["--json"] if as_json else []),
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode:
        raise BenchError("the bare loop failed:\n" + done.stderr[-1000:])
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def measure(options: argparse.Namespace) -> list[tuple[Cost, Cost]]:
    """The rounds: the aggregator, then the floor, on a fresh broker each."""
    values = encode(read_queries(options.queries, options.count), as_json=options.json_arrays)
    partitions = 1 + options.count * RESULT_BYTES[options.json_arrays] // PARTITION_BYTES_MAX
    if sum(map(len, values)) > QUERY_PARTITIONS * PARTITION_BYTES_MAX // 2:
        raise BenchError("too many queries for the mock cluster's partitions: lower --count")
    topics = {"queries": QUERY_PARTITIONS, "queries.dlq": 1}
    topics |= {"results": partitions, "floor": partitions}
    console = Console(stderr=True)
    child, server, url = model_server(
        {"MODEL_SERVER_SIMULATED__FIXED_MS": "0", "MODEL_SERVER_SIMULATED__SLOPE_US_PER_TOKEN": "0"}
    )
    rounds: list[tuple[Cost, Cost]] = []
    with child:
        child.wait_ready(f"{url}/readyz")
        for number in range(options.rounds):
            with MockBroker(topics) as broker:
                produce(broker.bootstrap_servers, values, as_json=options.json_arrays)
                ours = run_aggregator(broker.bootstrap_servers, server, options.count)
                floor = run_floor(
                    broker.bootstrap_servers, server, options.count, as_json=options.json_arrays
                )
            rounds.append((ours, floor))
            console.print(
                f"round {number + 1}: aggregator {ours.cpu_us_per_query:.1f} us, "
                f"{ours.queries_per_s:,.0f}/s; bare loop {floor.cpu_us_per_query:.1f} us, "
                f"{floor.queries_per_s:,.0f}/s"
            )
    return rounds


def main() -> int:
    """Measure, print, report."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.hotpath", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--queries", type=Path, help="id TAB text, or plain lines")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json-arrays", action="store_true", help="instead of Protobuf")
    options = parser.parse_args()
    try:
        rounds = measure(options)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    ours = statistics.median(cost.cpu_us_per_query for cost, _ in rounds)
    ours_rate = statistics.median(cost.queries_per_s for cost, _ in rounds)
    floor = statistics.median(cost.cpu_us_per_query for _, cost in rounds)
    floor_rate = statistics.median(cost.queries_per_s for _, cost in rounds)
    ratio = statistics.median(a.cpu_us_per_query / b.cpu_us_per_query for a, b in rounds)
    show(
        f"{options.count:,} queries, {'JSON arrays' if options.json_arrays else 'Protobuf'}, "
        f"median of {options.rounds}",
        ("", "CPU us per query", "queries per second"),
        [
            ("aggregator", f"{ours:.1f}", f"{ours_rate:,.0f}"),
            ("bare loop", f"{floor:.1f}", f"{floor_rate:,.0f}"),
            ("ratio", f"{ratio:.2f}", f"{ours_rate / floor_rate:.2f}"),
        ],
    )
    report(
        {
            "bench": "hotpath",
            "format": "json" if options.json_arrays else "protobuf",
            "model": MODEL,
            "queries": options.count,
            "rounds": options.rounds,
            "aggregator_cpu_us_per_query": round(ours, 2),
            "aggregator_queries_per_s": round(ours_rate),
            "floor_cpu_us_per_query": round(floor, 2),
            "floor_queries_per_s": round(floor_rate),
            "cpu_ratio": round(ratio, 3),
            "aggregator_cpu_us_per_query_rounds": [
                round(cost.cpu_us_per_query, 2) for cost, _ in rounds
            ],
            "floor_cpu_us_per_query_rounds": [
                round(cost.cpu_us_per_query, 2) for _, cost in rounds
            ],
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
