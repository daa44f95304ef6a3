"""Run one Apache Kafka node in the foreground: `python -m ops.kafka` (from the checkout)."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from ops.kafka.node import CACHE_DIR, KafkaNode, KafkaUnavailableError, NodeOptions


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.kafka",
        description="Run one Apache Kafka node on the loopback interface until Ctrl-C.",
        epilog="Example: python -m ops.kafka --port 9092 --fresh",
    )
    parser.add_argument("--port", type=int, default=9092, help="0: a free one (default 9092)")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=CACHE_DIR / "node",
        help="where topics and records are kept (default %(default)s); one for each node that runs",
    )
    parser.add_argument("--fresh", action="store_true", help="forget topics and records first")
    return parser.parse_args()


def main() -> int:
    """Start, say where, wait, stop; 0 when a signal ended it.

    Signals are noted and nothing else: one that came as the node's process is made, or a second one
    while it stops, would leave the process behind.
    """
    arguments = parse_arguments()
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: stopping.set())
    node = KafkaNode(
        NodeOptions(
            data_dir=arguments.data_dir.resolve(), fresh=arguments.fresh, port=arguments.port
        )
    )
    trouble = None
    try:
        node.start(stopping.is_set)
        if not stopping.is_set():
            print(f"Kafka listens on {node.bootstrap_servers}, log in {node.log_path}", flush=True)
        status = node.wait(stopping.is_set)
        trouble = f"Kafka ended by itself with status {status}"
    except KafkaUnavailableError as error:
        trouble = str(error)
    finally:
        node.stop()
    if stopping.is_set():
        return 0
    print(trouble, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
