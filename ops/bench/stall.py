"""How long readers of committed results wait when an exactly-once aggregator dies.

Two aggregators share a group under a steady load on real Apache Kafka; one is killed (`kill -9`)
with its transaction open. Readers can't go past an open transaction, so on the results partitions
that it had written to nothing more is seen until it is aborted: by the brokers, after
transaction_timeout_ms and their own next look, where the dead one does not come back; at once, by
its successor, where it is started again under the same instance_name. The stall is the longest time
without a result on any results partition, from the end of the victim on. The run fails unless every
query has one result.

    make bench-stall
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from confluent_kafka import Consumer, Producer, TopicPartition
from rich.console import Console

from ops.bench.common import BenchError, Child, aggregator, model_server, report, show
from ops.bench.latency import PARTITIONS, create_topics
from ops.kafka.node import KafkaNode, KafkaUnavailableError, NodeOptions
from protos.embedding.v1 import query_pb2

BROKERS_LOOK_MS = 10_000
"""transaction.abort.timed.out.transaction.cleanup.interval.ms, the brokers' default."""
SETTLE_S = 3.0
"""Of load before the kill."""
GIVE_UP_S = 90.0
OPEN_TRIES = 50
LOOK_S = 0.7
"""Between two looks at a stopped victim: the other commits many times meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What happens after the kill."""

    name: str
    timeout_ms: int
    restarted: bool


class Load(threading.Thread):
    """Sends queries at a steady rate until it is told to stop."""

    def __init__(self, bootstrap: str, topic: str, rate: float) -> None:
        """Send nothing yet."""
        super().__init__(daemon=True)
        self.sent = 0
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "log_level": 0})
        self._topic = topic
        self._pause_s = 1.0 / rate
        self._stop_sending = threading.Event()

    def run(self) -> None:
        """Send on all partitions in turn, under a key that spreads the results."""
        while not self._stop_sending.wait(self._pause_s):
            self._producer.produce(
                self._topic,
                query_pb2.Query(text=f"query {self.sent}").SerializeToString(),
                str(self.sent).encode(),
                partition=self.sent % PARTITIONS,
                headers=[("content-type", b"application/protobuf")],
            )
            self._producer.poll(0)
            self.sent += 1

    def finish(self) -> int:
        """Stop; return how many were sent."""
        self._stop_sending.set()
        self.join()
        if self._producer.flush(60):
            raise BenchError("the queries could not be produced")
        return self.sent


class Reader(threading.Thread):
    """Takes down when results can be seen, by partition."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        """Read from the beginning, once started."""
        super().__init__(daemon=True)
        self.keys: set[bytes] = set()
        self.doubled = 0
        self.seen_s: list[list[float]] = [[] for _ in range(PARTITIONS)]
        self.done = threading.Event()
        self._consumer = reader(bootstrap, "read_committed")
        self._consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])

    def run(self) -> None:
        """Read until `done`."""
        while not self.done.is_set():
            message = self._consumer.poll(0.05)
            if message is None or message.error():
                continue
            self.seen_s[message.partition() or 0].append(time.monotonic())
            key = message.key() or b""
            assert isinstance(key, bytes)
            self.doubled += key in self.keys
            self.keys.add(key)
        self._consumer.close()

    def longest_gap_s(self, since_s: float) -> float:
        """The longest time without a result on any partition, from a moment on."""
        return max(
            (
                later - max(earlier, since_s)
                for times in self.seen_s
                for earlier, later in itertools.pairwise(times)
                if later > since_s
            ),
            default=0.0,
        )


def reader(bootstrap: str, isolation: str) -> Consumer:
    """A consumer outside the group."""
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "bench-stall-client",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
    )


class Stage:
    """A broker, a model server, and what a run needs of them."""

    def __init__(self, bootstrap: str, grpc: str, rate: float) -> None:
        """Start nothing yet."""
        self._bootstrap = bootstrap
        self._grpc = grpc
        self._rate = rate

    def run(self, scenario: Scenario, name: str) -> float:
        """One kill; return the stall in seconds."""
        load = Load(self._bootstrap, f"queries-{name}", self._rate)
        results = Reader(self._bootstrap, f"results-{name}")
        first, _ = self._member(scenario, name, "first")
        second, ready = self._member(scenario, name, "second")
        with first, second:
            second.wait_ready(ready)
            load.start()
            results.start()
            time.sleep(SETTLE_S)
            killed_s = self._kill_in_transaction(first, name)
            successor = self._member(scenario, name, "first")[0]
            if scenario.restarted:
                successor.__enter__()
            try:
                self._wait_until_moving(results, killed_s)
                sent = load.finish()
                self._wait_for_all(results, sent)
                second.check()
            finally:
                if scenario.restarted:
                    successor.__exit__(None, None, None)
        results.done.set()
        results.join()
        if results.doubled:
            raise BenchError(f"{results.doubled} results were seen twice")
        return results.longest_gap_s(killed_s)

    def _member(self, scenario: Scenario, name: str, instance: str) -> tuple[Child, str]:
        child, url = aggregator(
            self._bootstrap,
            self._grpc,
            {
                "AGGREGATOR_DELIVERY": "exactly_once",
                "AGGREGATOR_INSTANCE_NAME": instance,
                "AGGREGATOR_TRANSACTION_TIMEOUT_MS": str(scenario.timeout_ms),
                "AGGREGATOR_GROUP_ID": name,
                "AGGREGATOR_GROUP_PROTOCOL": "consumer",
                "AGGREGATOR_QUERIES_TOPIC": f"queries-{name}",
                "AGGREGATOR_RESULTS_TOPIC": f"results-{name}",
                "AGGREGATOR_TTL_MS": "0",
            },
        )
        return child, f"{url}/readyz"

    def _kill_in_transaction(self, child: Child, name: str) -> float:
        """Stop it, look whether it has results in an open transaction, kill it; again if not."""
        if child.process is None:
            raise BenchError("the aggregator was not started")
        for _ in range(OPEN_TRIES):
            stopped_s = time.monotonic()
            child.process.send_signal(signal.SIGSTOP)
            if self._stuck(f"results-{name}"):
                child.process.kill()
                return stopped_s
            child.process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        raise BenchError("no transaction was open at any try")

    def _stuck(self, topic: str) -> bool:
        """Whether somewhere nothing more can be seen, though there is more and the other works."""
        seen, written = self._ends(topic, "read_committed"), self._ends(topic, "read_uncommitted")
        time.sleep(LOOK_S)
        later = self._ends(topic, "read_committed")
        places = zip(seen, written, later, strict=True)
        return any(before == after < end for before, end, after in places)

    def _ends(self, topic: str, isolation: str) -> list[int]:
        """The end of each partition as far as a reader can see."""
        consumer = reader(self._bootstrap, isolation)
        places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        ends = [consumer.get_watermark_offsets(place, 10)[1] for place in places]
        consumer.close()
        return ends

    def _wait_until_moving(self, results: Reader, killed_s: float) -> None:
        """Every results partition has moved since the kill."""
        deadline = time.monotonic() + GIVE_UP_S
        while not all(times and times[-1] > killed_s + 1.0 for times in results.seen_s):
            if time.monotonic() > deadline:
                raise BenchError(f"no results for {GIVE_UP_S:.0f} s after the kill")
            time.sleep(0.1)

    def _wait_for_all(self, results: Reader, sent: int) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while len(results.keys) < sent:
            if time.monotonic() > deadline:
                raise BenchError(f"{sent} queries, but {len(results.keys)} with a result")
            time.sleep(0.1)


def scenarios(timeouts_ms: Sequence[int]) -> list[Scenario]:
    """Not restarted, for each timeout; restarted, with the first of them."""
    found = [
        Scenario(name=f"not restarted, {timeout_ms:,} ms", timeout_ms=timeout_ms, restarted=False)
        for timeout_ms in timeouts_ms
    ]
    first = timeouts_ms[0]
    name = f"restarted under its name, {first:,} ms"
    return [*found, Scenario(name=name, timeout_ms=first, restarted=True)]


def main() -> int:
    """Run all, print, report."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.bench.stall", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rate", type=float, default=100.0, help="queries per second")
    parser.add_argument("--runs", type=int, default=2, help="of each scenario")
    parser.add_argument(
        "--timeouts-ms", type=int, nargs="+", default=[10_000, 3_000], help="of transactions"
    )
    options = parser.parse_args()
    server, grpc, url = model_server({"MODEL_SERVER_SIMULATED__FIXED_MS": "5"})
    chosen = scenarios(options.timeouts_ms)
    names = [[f"s{i}-{run}" for run in range(options.runs)] for i in range(len(chosen))]
    stalls: dict[str, list[float]] = {}
    try:
        with KafkaNode(NodeOptions()) as node, server:
            server.wait_ready(f"{url}/readyz")
            create_topics(node.bootstrap_servers, [name for each in names for name in each])
            stage = Stage(node.bootstrap_servers, grpc, options.rate)
            for scenario, each in zip(chosen, names, strict=True):
                Console(stderr=True).print(scenario.name)
                stalls[scenario.name] = [stage.run(scenario, name) for name in each]
    except (BenchError, KafkaUnavailableError) as error:
        print(error, file=sys.stderr)
        return 1
    show(
        f"Longest time without a result on a partition, s; the brokers look every "
        f"{BROKERS_LOOK_MS // 1000} s; {options.runs} runs",
        ("an instance dies", "median", "longest"),
        [
            (name, f"{statistics.median(values):.1f}", f"{max(values):.1f}")
            for name, values in stalls.items()
        ],
    )
    report(
        {"bench": "stall", "rate_per_s": options.rate, "runs": options.runs}
        | {
            f"stall_{'restarted' if scenario.restarted else 'dead'}_{scenario.timeout_ms}_ms_s": [
                round(value, 2) for value in stalls[scenario.name]
            ]
            for scenario in chosen
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
