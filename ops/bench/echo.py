"""The bare hop: one consumer that produces each record to the results topic at once.

The aggregator's own client settings (`aggregator.adapters.kafka_config`), nothing else: what Kafka
itself costs there and back. Started by `ops/bench/latency.py`; ends on SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import threading

from confluent_kafka import Consumer, Producer

from aggregator.adapters.kafka_config import KafkaOptions, consumer_config, producer_config


def main() -> None:
    """Consume, produce, until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("bootstrap", "group", "queries", "results"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    options = KafkaOptions(
        bootstrap_servers=arguments.bootstrap, group_id=arguments.group, group_protocol="consumer"
    )
    consumer = Consumer(consumer_config(options))
    producer = Producer(
        producer_config(options, message_bytes_max=1_048_588, batch_bytes_max=1_000_000)
    )
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    poller = threading.Thread(target=lambda: [producer.poll(0.02) for _ in iter(stop.is_set, True)])
    poller.start()
    consumer.subscribe([arguments.queries])
    while not stop.is_set():
        first = consumer.poll(0.02)
        if first is None:
            continue
        for message in [first, *consumer.consume(999, 0)]:
            producer.produce(
                arguments.results, message.value(), message.key(), headers=message.headers()
            )
    poller.join()
    producer.flush(5)
    consumer.close()


if __name__ == "__main__":
    main()
