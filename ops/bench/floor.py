"""The floor under the aggregator's cost: its library calls in a bare loop, without its logic.

Consume, decode, estimate, stream, encode, produce, as few lines as it takes: no deadlines, no
checks, no retries, no order, nothing kept. It runs against the same broker and model server as the
aggregator does, and prints one JSON line with its CPU per query and its throughput. Started by
`ops/bench/hotpath.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from typing import Any

import grpc
import orjson
from confluent_kafka import Consumer, Producer

from aggregator.adapters.estimator import TiktokenEstimator
from aggregator.adapters.kafka_config import KafkaOptions, consumer_config, producer_config
from protos.embedding.v1 import embedding_service_pb2 as pb
from protos.embedding.v1 import embedding_service_pb2_grpc as rpc
from protos.embedding.v1 import query_pb2

CLAIM_TOKENS = 600
IN_FLIGHT_MAX = 4
STRIDE = 4 * 384


class Floor:
    """The loop: a consuming thread, a stream, a producer with a poll thread."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Connect nothing yet."""
        self.count: int = arguments.count
        self.json: bool = arguments.json
        self.server: str = arguments.server
        self.results: str = arguments.results
        options = KafkaOptions(
            bootstrap_servers=arguments.bootstrap, group_id=f"floor-{time.time_ns()}"
        )
        self.consumer = Consumer(consumer_config(options))
        self.consumer.subscribe([arguments.queries], on_assign=self.assign, on_revoke=self.revoke)
        self.producer = Producer(
            producer_config(options, message_bytes_max=1_048_588, batch_bytes_max=1_000_000)
        )
        self.estimator = TiktokenEstimator()
        self.loop = asyncio.new_event_loop()
        self.claims: asyncio.Queue[list[tuple[Any, Any]]] = asyncio.Queue()
        self.sent: dict[int, list[tuple[Any, Any]]] = {}
        self.delivered = 0
        self.started: tuple[float, float] | None = None
        self.ended: tuple[float, float] | None = None
        self.slots = asyncio.Semaphore(IN_FLIGHT_MAX)

    def assign(self, consumer: Any, partitions: Any) -> None:
        """Take what comes."""
        consumer.incremental_assign(partitions)

    def revoke(self, consumer: Any, partitions: Any) -> None:
        """Give it back."""
        consumer.incremental_unassign(partitions)

    def consume(self) -> None:
        """Poll one, then what else is there; hand over whole lists."""
        left = self.count
        while left > 0:
            first = self.consumer.poll(0.02)
            if first is None:
                continue
            if self.started is None:
                self.started = (time.process_time(), time.perf_counter())
            messages = [first, *self.consumer.consume(999, 0)]
            left -= len(messages)
            self.loop.call_soon_threadsafe(self.decode, messages)

    def decode(self, messages: list[Any]) -> None:
        """Parse, estimate, cut into claims."""
        claim: list[tuple[Any, Any]] = []
        tokens = 0
        for message in messages:
            if self.json:
                query = orjson.loads(message.value())
                text = query["text"]
            else:
                query = query_pb2.Query.FromString(message.value())
                text = query.text
            claim.append((message, query))
            tokens += self.estimator.estimate(text)
            if tokens >= CLAIM_TOKENS:
                self.claims.put_nowait(claim)
                claim, tokens = [], 0
        if claim:
            self.claims.put_nowait(claim)

    async def send(self, stream: Any) -> None:
        """One request a claim, a few unanswered."""
        number = 0
        while True:
            claim = await self.claims.get()
            await self.slots.acquire()
            number += 1
            self.sent[number] = claim
            request = pb.EmbedStreamRequest(request_id=number)
            add = request.inputs.add
            for _, query in claim:
                one = add()
                one.text = query["text"] if self.json else query.text
            await stream.write(request)

    async def receive(self, stream: Any) -> None:
        """Encode and produce a result per vector."""
        while True:
            answer = await stream.read()
            claim = self.sent.get(answer.request_id)
            if claim is None:
                continue
            for group in answer.groups:
                data, tokens = group.embeddings, group.tokens
                for row, index in enumerate(group.indexes):
                    vector = data[row * STRIDE : (row + 1) * STRIDE]
                    message, query = claim[index]
                    self.produce(message, query, vector, tokens[row])
            if answer.last:
                del self.sent[answer.request_id]
                self.slots.release()

    def produce(self, message: Any, query: Any, vector: bytes, tokens: int) -> None:
        """One flat result."""
        if self.json:
            import numpy as np  # noqa: PLC0415

            value = orjson.dumps(
                {
                    "id": query["id"],
                    "model": "bench",
                    "tokens": tokens,
                    "embedding": np.frombuffer(vector, "<f4"),
                    "dimensions": 384,
                    "encoding": "float32",
                    "source": {
                        "topic": message.topic(),
                        "partition": message.partition(),
                        "offset": message.offset(),
                    },
                },
                option=orjson.OPT_SERIALIZE_NUMPY,
            )
            name = query["id"]
        else:
            result = query_pb2.Result()
            result.id = name = query.id
            result.model = "bench"
            result.tokens = tokens
            result.embedding = vector
            result.dimensions = 384
            result.encoding = query_pb2.ENCODING_FLOAT32
            source = result.source
            source.topic = message.topic()
            source.partition = message.partition()
            source.offset = message.offset()
            value = result.SerializeToString()
        headers = [
            ("content-type", b"application/protobuf"),
            ("embedding-status", b"OK"),
            ("embedding-id", name.encode()),
        ]
        # A result has its query's key, else its id.
        key = message.key() or name.encode()
        self.producer.produce(self.results, value, key, headers=headers, on_delivery=self.delivery)

    def delivery(self, error: Any, _message: Any) -> None:
        """Count."""
        if error is not None:
            raise SystemExit(f"a delivery failed: {error}")
        self.delivered += 1
        if self.delivered == self.count:
            self.ended = (time.process_time(), time.perf_counter())
            self.loop.call_soon_threadsafe(self.loop.stop)

    def poll(self) -> None:
        """Serve delivery reports."""
        while self.ended is None:
            self.producer.poll(0.02)

    async def stream(self) -> None:
        """Open the stream and run both of its directions."""
        options = [
            ("grpc.max_send_message_length", 64 << 20),
            ("grpc.max_receive_message_length", 64 << 20),
        ]
        async with grpc.aio.insecure_channel(self.server, options=options) as channel:
            call = rpc.EmbeddingServiceStub(channel).EmbedStream()
            await asyncio.gather(self.send(call), self.receive(call))

    def run(self) -> dict[str, float]:
        """Run until every delivery is confirmed."""
        asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(self.stream())
        threads = [threading.Thread(target=self.consume), threading.Thread(target=self.poll)]
        for thread in threads:
            thread.start()
        self.loop.run_forever()
        task.cancel()
        for thread in threads:
            thread.join()
        if self.started is None or self.ended is None:
            raise SystemExit("nothing was consumed")
        cpu_s = self.ended[0] - self.started[0]
        wall_s = self.ended[1] - self.started[1]
        return {
            "cpu_us_per_query": 1e6 * cpu_s / self.count,
            "queries_per_s": self.count / wall_s,
        }


def main() -> None:
    """Parse, run, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("bootstrap", "server", "queries", "results"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--json", action="store_true")
    print(json.dumps(Floor(parser.parse_args()).run()), flush=True)


if __name__ == "__main__":
    main()
