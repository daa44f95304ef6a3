"""Run one Apache Kafka node in the foreground: `python -m ops.kafka` (from the checkout)."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

from ops.kafka.node import CACHE_DIR, KafkaNode, KafkaUnavailableError, NodeOptions


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ops.kafka",
        description="Run one Apache Kafka node on the loopback interface until Ctrl-C.",
        epilog="Example: python -m ops.kafka --port 9092 --fresh",
    )
    parser.add_argument("--port", type=int, default=9092, help="0: a free one (default 9092)")
    parser.add_argument("--data-dir", type=Path, default=CACHE_DIR / "node")
    parser.add_argument("--fresh", action="store_true", help="forget topics and records first")
    return parser.parse_args()


def stop(_signal: int, _frame: FrameType | None) -> None:
    """End the wait below; the node is then stopped in order."""
    raise KeyboardInterrupt


def main() -> int:
    """Start, say where, wait, stop."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, stop)
    if arguments.fresh:
        shutil.rmtree(arguments.data_dir, ignore_errors=True)
    node = KafkaNode(NodeOptions(data_dir=arguments.data_dir.resolve(), port=arguments.port))
    try:
        node.start()
        print(f"Kafka listens on {node.bootstrap_servers}, log in {node.log_path}", flush=True)
        status = node.wait()
        print(f"Kafka ended by itself with status {status}", file=sys.stderr)
    except KafkaUnavailableError as error:
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        print("stopping", flush=True)
        node.stop()
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
