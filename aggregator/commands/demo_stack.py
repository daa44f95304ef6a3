"""The demo's stack on this machine: a broker, a model server and an aggregator as processes.

Owns starting them in an order, waiting until each is ready, and what they tell about themselves
(health, logs). A context manager: leaving it ends what was started, in reverse. Everything
listens on free ports of the loopback interface. Knows nothing of queries.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from aggregator.adapters.mock_broker import MockBroker, MockBrokerError
from aggregator.commands.demo_children import Child, environment, free_ports
from aggregator.commands.kafka_client import Topics
from protos.embedding.v1 import embedding_service_pb2, embedding_service_pb2_grpc

READY_TIMEOUT_S = 300.0
"""A cold start computes golden vectors and warms up at the maximum; slow machines exist."""
PARTITIONS = 12
"""Of queries and of results: enough that the embedded broker's 5 MB each are never filled."""
TOPICS = ("aggregator-demo.queries", "aggregator-demo.results", "aggregator-demo.dlq")
"""On a broker that others use too the demo keeps to itself; the embedded one has plain names."""
PLAIN_TOPICS = ("queries", "results", "queries.dlq")
_POLL_S = 0.05
_CALL_TIMEOUT_S = 30.0

Step = Callable[[str], None]


class StackError(Exception):
    """The stack did not come up: the message is for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """`broker` None: the embedded one. `model`: a folder or hub id; None with the simulated engine.

    `folder` gets the children's logs.
    """

    folder: Path
    engine: str
    model: str | None
    model_name: str
    broker: str | None = None


class Stack:
    """The running processes."""

    def __init__(self, options: StackOptions, step: Step) -> None:
        """Start nothing yet; `step` is told what happens, a line each."""
        self._options = options
        self._step = step
        self._exit = ExitStack()
        server, server_metrics, aggregator_metrics = free_ports(3)
        self.server = f"127.0.0.1:{server}"
        self._server_metrics = f"127.0.0.1:{server_metrics}"
        self._aggregator_metrics = f"127.0.0.1:{aggregator_metrics}"
        self._children: list[Child] = []
        self.bootstrap_servers = options.broker or ""
        topics = PLAIN_TOPICS if options.broker is None else TOPICS
        self.queries_topic, self.results_topic, self.dlq_topic = topics

    def __enter__(self) -> Self:
        """Start all and wait until all are ready.

        Raises:
            StackError: something did not start.
            ChildError: a child ended.
        """
        with self._exit:
            self._start()
            self._exit = self._exit.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End all, the aggregator first, so that it can finish what it has."""
        self._exit.close()

    def _start(self) -> None:
        self._start_broker()
        server = self._start_server()
        aggregator = self._start_aggregator()
        self._wait(server, self._server_ready)
        self._wait(aggregator, self._aggregator_ready)

    def _start_broker(self) -> None:
        partitions = dict.fromkeys((self.queries_topic, self.results_topic), PARTITIONS)
        if self.embedded:
            try:
                broker = self._exit.enter_context(MockBroker({**partitions, self.dlq_topic: 1}))
            except MockBrokerError as error:
                raise StackError(f"the embedded broker did not start: {error}") from error
            self.bootstrap_servers = broker.bootstrap_servers
            self._step(
                f"embedded Kafka broker at {self.bootstrap_servers}: librdkafka's mock cluster, in "
                "memory only, keeps about 5 MB a partition and drops older records silently; to "
                "try things out, nothing else"
            )
            return
        # In a process of its own, as a user would do it.
        made = subprocess.run(
            [sys.executable, "-m", "aggregator", "topics", "create", "--partitions", "12"],
            env=environment(self._aggregator_settings()),
            capture_output=True,
            text=True,
            timeout=_CALL_TIMEOUT_S,
            check=False,
        )
        if made.returncode != 0:
            raise StackError(made.stderr.strip().removeprefix("Error: "))
        self._step(f"Kafka at {self.bootstrap_servers}, topics {', '.join(TOPICS)}")

    def _start_server(self) -> Child:
        options = self._options
        command = [sys.executable, "-m", "model_server", "serve", "--engine", options.engine]
        if options.model is not None:
            command += ["--model", options.model]
        command += ["--served-model-name", options.model_name]
        command += ["--grpc-listen", self.server, "--metrics-listen", self._server_metrics]
        self._step(f"model server at {self.server}: loading {options.model_name}")
        return self._child("model server", command, {})

    def _start_aggregator(self) -> Child:
        command = [sys.executable, "-m", "aggregator", "run"]
        return self._child("aggregator", command, self._aggregator_settings())

    def _aggregator_settings(self) -> dict[str, str]:
        return {
            "AGGREGATOR_BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "AGGREGATOR_GROUP_ID": "aggregator-demo",
            "AGGREGATOR_QUERIES_TOPIC": self.queries_topic,
            "AGGREGATOR_RESULTS_TOPIC": self.results_topic,
            "AGGREGATOR_DLQ_TOPIC": self.dlq_topic,
            "AGGREGATOR_MODELS": f"{self._options.model_name}={self.server}",
            "AGGREGATOR_METRICS_LISTEN": self._aggregator_metrics,
        }

    def _child(self, name: str, command: list[str], settings: dict[str, str]) -> Child:
        log = self._options.folder / f"{name.replace(' ', '-')}.log"
        child = self._exit.enter_context(Child(name, command, log, settings=settings))
        self._children.append(child)
        return child

    def _wait(self, child: Child, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not ready():
            self.check()
            if time.monotonic() > deadline_s:
                raise child.error(f"was not ready within {READY_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        self._step(f"{child.name} ready")

    def _server_ready(self) -> bool:
        with grpc.insecure_channel(self.server) as channel:
            try:
                reply = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=1.0
                )
            except grpc.RpcError:
                return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    def _aggregator_ready(self) -> bool:
        url = f"http://{self._aggregator_metrics}/readyz"
        try:
            urllib.request.urlopen(url, timeout=_CALL_TIMEOUT_S).close()
        except OSError:  # not there yet, or a status other than 200
            return False
        return True

    def check(self) -> None:
        """Raise `ChildError` if a child has ended."""
        for child in self._children:
            child.check()

    @property
    def embedded(self) -> bool:
        """Whether the broker is the demo's own."""
        return self._options.broker is None

    @property
    def topics(self) -> Topics:
        """Where queries go and results come."""
        return Topics(
            client={"bootstrap.servers": self.bootstrap_servers},
            queries=self.queries_topic,
            results=self.results_topic,
        )

    def channel(self) -> grpc.Channel:
        """A channel to the model server; the caller closes it."""
        return grpc.insecure_channel(self.server)

    def model_info(self) -> embedding_service_pb2.GetModelInfoResponse:
        """What the model server says about itself."""
        with self.channel() as channel:
            stub = embedding_service_pb2_grpc.EmbeddingServiceStub(channel)
            return stub.GetModelInfo(
                embedding_service_pb2.GetModelInfoRequest(), timeout=_CALL_TIMEOUT_S
            )

    def aggregator_log(self, start: int = 0) -> bytes:
        """The aggregator's log from byte `start` on."""
        return self._log("aggregator", start)

    def server_log(self, start: int = 0) -> bytes:
        """The model server's log from byte `start` on."""
        return self._log("model-server", start)

    def _log(self, name: str, start: int) -> bytes:
        with (self._options.folder / f"{name}.log").open("rb") as log:
            log.seek(start)
            return log.read()
