"""`aggregator send`: texts to the queries topic, and their results back.

Owns how people are shown results: in the order of the lines, whatever order they came in. A window
of unprinted queries bounds memory, so that any number of lines may be piped in.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from aggregator.commands.exchange import JSON, PROTOBUF, Arrival, Exchange, QueryFields
from aggregator.commands.kafka_client import KafkaClientError
from aggregator.commands.options import FiniteRange, topic_options, topics_of
from aggregator.commands.received import NotAResultError, read_result
from aggregator.commands.wording import counted

WINDOW_QUERIES_MAX = 1_000
"""Sent and not yet printed."""
_POLL_S = 0.02
_LINE_BYTES_MAX = 4 << 20


@click.command(
    epilog="""\b
Examples:
  aggregator send "how do you make sourdough bread"
  aggregator send --json --dimensions 384 "hello" | jq .tokens
  aggregator send --timeout 120 < queries.txt"""
)
@click.argument("text", required=False)
@click.option("--model", help="A served name; absent: the aggregator's default model.")
@click.option("--input-type", type=click.Choice(["query", "document"]))
@click.option("--dimensions", type=click.IntRange(0, 2**32 - 1))
@click.option("--encoding", type=click.Choice(["float32", "float16", "int8", "ubinary"]))
@click.option("--truncate", is_flag=True, default=None, help="Cut at the model's maximum.")
@click.option("--ttl-ms", type=int, help="Time to live; 0: none.")
@click.option("--id", "identity", help="The query's id; with lines: ID-1, ID-2, ...")
@click.option(
    "--content-type",
    type=click.Choice([PROTOBUF, JSON]),
    default=PROTOBUF,
    show_default=True,
    help="Of the records; results have the same.",
)
@click.option("--json", "as_json", is_flag=True, help="Print whole results, one JSON a line.")
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0, min_open=True),
    # Longer than a query lives by default, so that what became of it is heard.
    default=65.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for each result.",
)
@topic_options
def send(
    *,
    text: str | None,
    identity: str | None,
    content_type: str,
    as_json: bool,
    timeout_s: float,
    config: Path | None,
    bootstrap_servers: str | None,
    queries_topic: str | None,
    results_topic: str | None,
    **fields: Any,
) -> None:
    """Embed TEXT, or each line of standard input, through Kafka and print the results.

    Exits with 1 if any result is an error or does not come.
    """
    topics = topics_of(
        config=config,
        bootstrap_servers=bootstrap_servers,
        queries_topic=queries_topic,
        results_topic=results_topic,
    )
    if text is None and sys.stdin.isatty():
        click.echo("One text a line; Ctrl-D ends.", err=True)
    source = _one(text) if text is not None else _Lines(sys.stdin.buffer).take()
    try:
        with Exchange(topics, content_type=content_type, fields=QueryFields(**fields)) as exchange:
            conversation = _Conversation(
                exchange,
                identity=identity,
                numbered=text is None,
                as_json=as_json,
                timeout_s=timeout_s,
            )
            with _Progress() as progress:
                conversation.run(source, progress)
    except KafkaClientError as error:
        raise click.ClickException(str(error)) from error
    if text is None:
        click.echo(conversation.summary(), err=True)
    if conversation.failed:
        raise SystemExit(1)


class _Progress:
    """A counter on standard error, when that is a terminal and standard output is not."""

    def __init__(self) -> None:
        shown = sys.stderr.isatty() and not sys.stdout.isatty()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.completed} results, {task.fields[waiting]} waiting"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not shown,
        )
        self._task = self._progress.add_task("", total=None, waiting=0)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, printed: int, waiting: int) -> None:
        self._progress.update(self._task, completed=printed, waiting=waiting)


def _one(text: str) -> Iterator[bytes | None]:
    yield text.encode("utf-8", "surrogateescape")


class _Lines:
    """Lines of a stream, read by a thread, so that waiting for input doesn't hold results up."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._queue: queue.Queue[bytes | None] = queue.Queue(WINDOW_QUERIES_MAX)
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def _read(self) -> None:
        while line := self._stream.readline(_LINE_BYTES_MAX):
            if line.strip():
                self._queue.put(line.rstrip(b"\r\n"))
        self._queue.put(None)

    def take(self) -> Iterator[bytes | None]:
        """Give lines, and None where there is none yet; ends with the stream."""
        while True:
            try:
                line = self._queue.get_nowait()
            except queue.Empty:
                yield None
                continue
            if line is None:
                return
            yield line


@dataclass(slots=True)
class _Waiting:
    """A query that is sent and not printed."""

    deadline_s: float
    line: str | None = None
    """What to print, once known."""


@dataclass(slots=True)
class _Counts:
    sent: int = 0
    ok: int = 0
    errors: int = 0
    missing: int = 0


class _Conversation:
    """Sends what the source gives and prints one line for each, in its order."""

    def __init__(
        self,
        exchange: Exchange,
        *,
        identity: str | None,
        numbered: bool,
        as_json: bool,
        timeout_s: float,
    ) -> None:
        self._exchange = exchange
        self._identity = identity
        self._numbered = numbered
        self._as_json = as_json
        self._timeout_s = timeout_s
        self._window: dict[int, _Waiting] = {}
        self._counts = _Counts()

    @property
    def failed(self) -> bool:
        return self._counts.ok < self._counts.sent

    def summary(self) -> str:
        counts = self._counts
        text = f"{counts.sent:,} sent, {counts.ok:,} OK, {counted(counts.errors, 'error')}"
        if counts.missing:
            text += f", {counts.missing:,} without a result in {self._timeout_s:g} s"
        if self._exchange.duplicates:
            text += f", {counted(self._exchange.duplicates, 'duplicate')}"
        return text

    def run(self, source: Iterator[bytes | None], progress: _Progress) -> None:
        """Until the source has ended and all is printed."""
        open_source = True
        while open_source or self._window:
            if open_source:
                open_source = self._send_from(source)
            for arrival in self._exchange.collect(_POLL_S):
                self._arrived(arrival)
            self._expire()
            self._print()
            progress.update(self._counts.sent - len(self._window), len(self._window))

    def _send_from(self, source: Iterator[bytes | None]) -> bool:
        """Send as much as there is and the window allows; False: the source has ended."""
        while len(self._window) < WINDOW_QUERIES_MAX:
            try:
                line = next(source)
            except StopIteration:
                return False
            if line is None:
                return True
            self._send(line)
        return True

    def _send(self, line: bytes) -> None:
        self._counts.sent += 1
        number = self._counts.sent
        self._window[number] = _Waiting(time.monotonic() + self._timeout_s)
        identity = self._identity
        if identity is not None and self._numbered:
            identity = f"{identity}-{number}"
        try:
            self._exchange.send(number, line.decode(), identity=identity)
        except (ValueError, KafkaClientError) as error:
            self._exchange.forget(number)
            self._error(number, "NOT_SENT", str(error))

    def _arrived(self, arrival: Arrival) -> None:
        if arrival.record is None:
            self._error(arrival.number, "NOT_SENT", arrival.not_sent)
            return
        try:
            result = read_result(arrival.record)
        except NotAResultError as error:
            self._error(arrival.number, "UNREADABLE", str(error))
            return
        self._window[arrival.number].line = result.as_json() if self._as_json else result.as_line()
        if result.ok:
            self._counts.ok += 1
        else:
            self._counts.errors += 1

    def _error(self, number: int, status: str, message: str) -> None:
        """An error of our own making: there is no result to show."""
        self._counts.errors += 1
        self._window[number].line = self._own_line(number, status, message)

    def _own_line(self, number: int, status: str, message: str) -> str:
        if self._as_json:
            line = {"line": number} if self._numbered else {}
            fields = line | {"error": {"code": status, "message": message}}
            return json.dumps(fields, ensure_ascii=False)
        return f"line {number}  {status}  {message}" if self._numbered else f"{status}  {message}"

    def _expire(self) -> None:
        now = time.monotonic()
        for number, waiting in self._window.items():
            if waiting.deadline_s > now:
                return
            if waiting.line is None:
                self._exchange.forget(number)
                self._counts.missing += 1
                message = f"no result within {self._timeout_s:g} s: is an aggregator running?"
                waiting.line = self._own_line(number, "MISSING", message)

    def _print(self) -> None:
        while self._window:
            number, waiting = next(iter(self._window.items()))
            if waiting.line is None:
                return
            click.echo(waiting.line)
            del self._window[number]
