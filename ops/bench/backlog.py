"""A topic with a very large backlog: is everything answered, and does memory stay bounded?

A real broker, one aggregator as users run it, a model server with the simulated engine answering at
once. The queries are on the topic before the aggregator starts, so it reads as fast as it may for
the whole run. Every result is read back and counted by the offset of its query. Resident memory of
the aggregator is sampled ten times a second and its peak held against a bound made of its settings
(`bound_mib`), in which the number of records does not occur.

    make bench-backlog [RECORDS=2000000]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from rich.console import Console

from aggregator.adapters.kafka_config import PREFETCH_BYTES_MAX
from aggregator.settings import AggregatorSettings
from ops.bench.common import (
    BenchError,
    Child,
    aggregator,
    metric,
    model_server,
    read_queries,
    report,
    show,
)
from ops.bench.rss import RssWatch
from ops.kafka.node import KafkaNode, KafkaUnavailableError
from protos.embedding.v1 import query_pb2

MEBIBYTE = 1024 * 1024
PARTITIONS = 32
"""Many, so that the windows of all hold more than the buffer may: it is the harder case."""
TOPICS = {"queries": PARTITIONS, "results": 4, "queries.dlq": 1}
PROTOBUF: list[tuple[str, str | bytes | None]] = [("content-type", b"application/protobuf")]
POLLED_BYTES = 2 * 1024
"""A record of the demo's queries, decoded."""
ALLOCATED = 1.25
"""What is taken from the system for each byte that is counted: the client's own structures (its
prefetch of 64 MiB took 85 of records of 60 bytes), and what allocators keep for the next time."""
STALL_S = 120.0
"""Without any progress for so long, the run has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run has shown."""

    records: int
    answered: int
    duplicates: int
    failed: int
    idle_mib: float
    peak_mib: float
    bound_mib: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every record has its result and memory stayed below its bound."""
        all_answered = self.answered == self.records and not self.failed
        return all_answered and self.peak_mib <= self.bound_mib


def bound_mib(idle_mib: float) -> float:
    """What the aggregator may have resident, by its settings' defaults.

    At rest; the client's prefetch; decoded queries and unconfirmed results, one poll above their
    maximum; `ALLOCATED` times as much. Neither the number of records nor that of partitions occurs.
    """
    fields = AggregatorSettings.model_fields
    poll: int = fields["poll_records_max"].default * POLLED_BYTES
    counted: int = PREFETCH_BYTES_MAX + fields["buffer_bytes_max"].default + poll
    return idle_mib + ALLOCATED * counted / MEBIBYTE


def create_topics(bootstrap: str) -> None:
    """The three topics."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for made in admin.create_topics(
        [NewTopic(n, count, 1) for n, count in TOPICS.items()]
    ).values():
        made.result(30)


def produce(bootstrap: str, texts: list[str], records: int) -> None:
    """Put them on the topic, evenly over its partitions."""
    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 500_000}
    )
    values = [query_pb2.Query(text=text).SerializeToString() for text in texts]
    partitions = itertools.cycle(range(PARTITIONS))
    for value, partition in zip(
        itertools.islice(itertools.cycle(values), records), partitions, strict=False
    ):
        while True:
            try:
                producer.produce("queries", value, partition=partition, headers=PROTOBUF)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    if producer.flush(120):
        raise BenchError("the queries could not be produced")


class Counted:
    """Which queries have a result, by partition and offset."""

    def __init__(self, bootstrap: str, records: int) -> None:
        """Read the results from their beginning."""
        per_partition = -(-records // PARTITIONS)
        self._seen = [bytearray(per_partition) for _ in range(PARTITIONS)]
        self.answered = 0
        self.duplicates = 0
        self.failed = 0
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "counted",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 50,
                "queued.max.messages.kbytes": 65_536,
            }
        )
        self._consumer.assign([TopicPartition("results", n, 0) for n in range(TOPICS["results"])])

    def read(self, seconds: float) -> int:
        """Take in what has come; returns how many."""
        records = self._consumer.consume(10_000, seconds)
        for record in records:
            error = record.error()
            if error is not None:
                raise KafkaException(error)
            headers = dict(record.headers() or [])
            # The default id: topic-partition-offset.
            _, partition, offset = text_of(headers["embedding-id"]).rsplit("-", 2)
            seen = self._seen[int(partition)]
            self.failed += headers["embedding-status"] != b"OK"
            self.duplicates += seen[int(offset)]
            self.answered += not seen[int(offset)]
            seen[int(offset)] = 1
        return len(records)

    def close(self) -> None:
        """Let go of the consumer."""
        self._consumer.close()


def text_of(header: str | bytes | None) -> str:
    """A header that is there."""
    if not isinstance(header, bytes):
        raise BenchError(f"a result without its id: {header!r}")
    return header.decode()


@contextmanager
def watched(child: Child) -> Iterator[RssWatch]:
    """Sample its memory."""
    process = child.process
    if process is None:
        raise BenchError(f"{child.name} does not run")
    watch = RssWatch(lambda: {child.name: process.pid}, time.monotonic, every_s=0.1)
    try:
        yield watch
    finally:
        watch.stop()


def run(bootstrap: str, texts: list[str], records: int, console: Console) -> Verdict:
    """Make the backlog, let one aggregator work it off, count."""
    create_topics(bootstrap)
    server, address, server_url = model_server(
        {"MODEL_SERVER_SIMULATED__FIXED_MS": "0", "MODEL_SERVER_SIMULATED__SLOPE_US_PER_TOKEN": "0"}
    )
    counted = Counted(bootstrap, records)
    options = {"AGGREGATOR_TTL_MS": "0", "AGGREGATOR_LOG_LEVEL": "warning"}
    try:
        with server:
            server.wait_ready(f"{server_url}/readyz")
            idle_mib = at_rest_mib(bootstrap, address, options)
            console.print(f"at rest: {idle_mib:.0f} MiB; producing {records:,} queries")
            produce(bootstrap, texts, records)
            started = time.monotonic()
            child, url = aggregator(bootstrap, address, options)
            with child, watched(child) as watch:
                wait(child, url, records, console)
                seconds = time.monotonic() - started
                peak_mib = watch.series[child.name].peak_bytes / MEBIBYTE
            while counted.read(1.0):
                pass
    finally:
        counted.close()
    return Verdict(
        records=records,
        answered=counted.answered,
        duplicates=counted.duplicates,
        failed=counted.failed,
        idle_mib=round(idle_mib, 1),
        peak_mib=round(peak_mib, 1),
        bound_mib=round(bound_mib(idle_mib), 1),
        seconds=round(seconds, 1),
    )


def at_rest_mib(bootstrap: str, address: str, options: dict[str, str]) -> float:
    """What an aggregator with partitions and without queries has resident."""
    child, url = aggregator(bootstrap, address, options)
    with child, watched(child) as watch:
        child.wait_ready(f"{url}/readyz")
        while child.name not in watch.series:
            time.sleep(0.05)
        return watch.series[child.name].last_bytes / MEBIBYTE


def wait(child: Child, url: str, records: int, console: Console) -> None:
    """Until as many results are confirmed as there are records."""
    child.wait_ready(f"{url}/livez")
    done, moved_at, told = 0.0, time.monotonic(), 0.0
    while done < records:
        child.check()
        time.sleep(0.5)
        now = metric(url, "aggregator_results_total")
        if now > done:
            done, moved_at = now, time.monotonic()
        elif time.monotonic() - moved_at > STALL_S:
            raise BenchError(f"{done:,.0f} of {records:,} results, and none in {STALL_S:.0f} s")
        if done - told >= records / 10:
            told = done
            console.print(f"{done:,.0f} results")


def main() -> int:
    """Measure, print, report."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.backlog", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--records", type=int, default=2_000_000)
    options = parser.parse_args()
    console = Console(stderr=True)
    try:
        with KafkaNode() as node:
            texts = read_queries(None, min(options.records, 4_000))
            verdict = run(node.bootstrap_servers, texts, options.records, console)
    except (BenchError, KafkaUnavailableError) as error:
        print(error, file=sys.stderr)
        return 1
    show(
        f"a backlog of {verdict.records:,} queries",
        ("", "MiB"),
        [
            ("at rest", f"{verdict.idle_mib:.0f}"),
            ("peak", f"{verdict.peak_mib:.0f}"),
            ("bound", f"{verdict.bound_mib:.0f}"),
        ],
    )
    figures = {name: getattr(verdict, name) for name in Verdict.__slots__}
    rate = round(verdict.records / verdict.seconds)
    report({"bench": "backlog", "ok": verdict.ok, **figures, "queries_per_s": rate})
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
