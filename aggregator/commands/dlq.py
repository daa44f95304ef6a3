"""`aggregator dlq list` and `replay`: what needs a person's eye, and sending it again.

Owns the options, how letters are chosen, and what a run says in the end. Letters pass through as
they come: none is kept.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from aggregator.commands.dlq_replay import (
    RATE_DEFAULT,
    KafkaPort,
    Outcome,
    Replay,
    ReplayOptions,
    SendError,
)
from aggregator.commands.dlq_show import json_lines, named, table
from aggregator.commands.dlq_topic import LetterReader, StoredLetter
from aggregator.commands.dlq_turn import ReplayTurn
from aggregator.commands.kafka_client import DeadLetterTopics, KafkaClientError
from aggregator.commands.options import (
    FiniteRange,
    letter_options,
    letter_topics_of,
    queries_option,
)
from aggregator.commands.wording import counted, shown
from aggregator.core.failures import Reason

_AGE = re.compile(r"([0-9]{1,6})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class _Since(click.ParamType[int]):
    """An age such as 90m, or a time of day in ISO 8601 (UTC unless it says otherwise)."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Give Unix milliseconds."""
        del param, ctx
        try:
            if age := _AGE.fullmatch(value):
                then = datetime.now(UTC) - timedelta(**{_UNITS[age[2]]: int(age[1])})
            else:
                then = datetime.fromisoformat(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither an age (90m, 2h, 3d) nor a time in ISO 8601")
        return max(int((then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp() * 1000), 0)


_REASON = click.option(
    "--reason",
    "reasons",
    type=click.Choice([reason.value for reason in Reason], case_sensitive=False),
    metavar="REASON",
    multiple=True,
    help="Those with this reason, such as BAD_ANSWER; again for more.",
)
_ID = click.option(
    "--id", "ids", metavar="ID", multiple=True, help="The query with this id; again for more."
)
_SINCE = click.option(
    "--since",
    "since_ms",
    type=_Since(),
    metavar="TIME",
    help="Written no longer ago than 90m, 2h, 3d, or since 2026-11-30T12:00 (UTC).",
)


class Choice:
    """Which letters; nothing given: all."""

    def __init__(self, reasons: Iterable[str], ids: Iterable[str]) -> None:
        """`reasons` and `ids` as asked for."""
        self._reasons = frozenset(reasons)
        self._ids = frozenset(ids)
        self._found: set[str] = set()

    @property
    def missing(self) -> list[str]:
        """Ids asked for that no letter had so far."""
        return sorted(self._ids - self._found)

    def of(self, letters: Iterable[StoredLetter]) -> Iterator[StoredLetter]:
        """Those chosen."""
        for stored in letters:
            letter = stored.letter
            if self._reasons and letter.reason not in self._reasons:
                continue
            if self._ids:
                if letter.id not in self._ids:
                    continue
                self._found.add(letter.id)
            yield stored


@click.group()
def dlq() -> None:
    """Look at dead letters and send them again.

    \b
    Example:
      aggregator dlq list --since 2h
    """


@dlq.command(
    "list",
    epilog="""\b
Examples:
  aggregator dlq list
  aggregator dlq list --reason UNDECODABLE --since 2h
  aggregator dlq list --json | jq -r .id""",
)
@_REASON
@_ID
@_SINCE
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@letter_options
def list_letters(
    *,
    reasons: tuple[str, ...],
    ids: tuple[str, ...],
    since_ms: int | None,
    as_json: bool,
    **places: Any,
) -> None:
    """Print dead letters that were not replayed: when, where the query lay, why, its id.

    The topic is read to its end first, as it was at the start.
    """
    topics, settings = letter_topics_of(**places)
    choice = Choice(reasons, ids)
    limit = settings.replay_attempts_max
    with _reading(topics, since_ms, prints=True) as reader:
        letters = _Counted(choice.of(reader.letters()))
        for line in json_lines(letters, limit) if as_json else table(letters, limit):
            click.echo(line)
        click.echo(_summary(letters.count, reader), err=True)


@dlq.command(
    epilog="""\b
Examples:
  aggregator dlq replay --all --dry-run
  aggregator dlq replay --reason ENGINE_DIED_ALONE --rate 10
  aggregator dlq replay --id queries-3-41"""
)
@click.option("--all", "everything", is_flag=True, help="Every letter, whatever its reason.")
@_REASON
@_ID
@_SINCE
@click.option(
    "--rate",
    type=FiniteRange(min=0.01, max=100_000),
    default=RATE_DEFAULT,
    show_default=True,
    metavar="LETTERS",
    help="At most so many a second.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and send nothing.")
@letter_options
@queries_option
def replay(
    *,
    everything: bool,
    reasons: tuple[str, ...],
    ids: tuple[str, ...],
    since_ms: int | None,
    rate: float,
    dry_run: bool,
    **places: Any,
) -> None:
    """Send dead letters to the queries topic again, each once.

    A letter that was sent is marked on its topic, and neither listed nor sent again; one that
    fails again becomes a new letter, which this run leaves alone. Results have the id they had
    before. One replay of a topic runs at a time: a second one says so and ends. Ctrl-C and SIGTERM
    let it mark what it has sent; after a kill, or if the brokers have taken a run for dead, the
    next one may repeat at most 100 letters.

    Exits with 1 if a letter that was asked for was not sent.
    """
    if not everything and not reasons and not ids:
        raise click.UsageError("say which letters: --all, --reason or --id")
    if everything and (reasons or ids):
        raise click.UsageError("--all and --reason or --id exclude each other")
    topics, settings = letter_topics_of(**places)
    choice = Choice(reasons, ids)
    options = ReplayOptions(
        queries_topic=topics.queries,
        replay_attempts_max=settings.replay_attempts_max,
        rate=rate,
    )
    lost = False
    with _Signals() as signals:
        turn = ReplayTurn(topics, signals.came)
        in_turn = nullcontext() if dry_run else turn
        with _reading(topics, since_ms, prints=dry_run, within=in_turn) as reader:
            letters = choice.of(reader.letters())
            if dry_run:
                outcome = _rehearse(letters, options)
            else:
                stopping = lambda: signals.came() or turn.lost  # noqa: E731 - said once
                outcome = _send(Replay(KafkaPort(topics), options, stopping=stopping), letters)
                lost = turn.lost
    _report(outcome, dry_run=dry_run)
    if signals.number:
        raise SystemExit(128 + signals.number)
    if lost:
        raise click.ClickException("this run was taken for dead: another may have begun")
    for identity in choice.missing:
        click.echo(f"no dead letter to replay has the id {shown(identity)}", err=True)
    if outcome.hindered_count or choice.missing:
        raise SystemExit(1)


class _Signals:
    """SIGINT and SIGTERM ask for an end between two batches; a second one ends at once."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def came(self) -> bool:
        """Whether one came."""
        return self.number != 0

    def _take(self, number: int, _frame: object) -> None:
        if self.number:
            raise SystemExit(128 + number)
        self.number = number


@contextmanager
def _reading(
    topics: DeadLetterTopics,
    since_ms: int | None,
    *,
    prints: bool,
    within: AbstractContextManager[object] | None = None,
) -> Iterator[LetterReader]:
    """The topic, with a bar on standard error if that is a terminal; `within` is entered before.

    `prints`: letters are printed as they come. On a terminal the bar then makes room for them when
    the first of the two passes is over.
    """
    shares_terminal = prints and sys.stdout.isatty()
    bar = Progress(
        TextColumn(f"reading {topics.letters}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task = bar.add_task("", total=None)

    def progress(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if shares_terminal and 2 * done >= total:
            bar.stop()

    try:
        with within or nullcontext(), bar:
            yield LetterReader(topics, since_ms=since_ms, progress=progress)
    except KafkaClientError as error:
        raise click.ClickException(str(error)) from error


def _send(replay: Replay, letters: Iterable[StoredLetter]) -> Outcome:
    """Raises SendError after saying what was done."""
    try:
        return replay.run(letters)
    except SendError:
        _report(replay.outcome, dry_run=False)
        raise


def _rehearse(letters: Iterable[StoredLetter], options: ReplayOptions) -> Outcome:
    """Print what would be sent."""
    outcome = Outcome()

    def sendable() -> Iterator[StoredLetter]:
        for stored in letters:
            why = options.hindrance(stored)
            if why is None:
                yield stored
            else:
                outcome.hinder(stored, why)

    chosen = _Counted(sendable())
    for line in table(chosen, options.replay_attempts_max):
        click.echo(line)
    outcome.sent = chosen.count
    return outcome


def _report(outcome: Outcome, *, dry_run: bool) -> None:
    for stored, why in outcome.hindered:
        click.echo(f"not sent: {named(stored)}: {shown(why)}", err=True)
    if more := outcome.hindered_count - len(outcome.hindered):
        click.echo(f"not sent: {more} more", err=True)
    verb = "would be sent" if dry_run else "sent again"
    stopped = ", stopped before the end" if outcome.stopped else ""
    click.echo(f"{outcome.sent} {verb}, {outcome.hindered_count} not sent{stopped}", err=True)


class _Counted:
    """Letters passed on."""

    def __init__(self, letters: Iterator[StoredLetter]) -> None:
        self._letters = letters
        self.count = 0

    def __iter__(self) -> Iterator[StoredLetter]:
        for stored in self._letters:
            self.count += 1
            yield stored


def _summary(count: int, reader: LetterReader) -> str:
    counts = reader.counts
    replayed = f", {counts.replayed} replayed before and not shown" if counts.replayed else ""
    foreign = f", {counted(counts.foreign, 'other record')}" if counts.foreign else ""
    return f"{counted(count, 'dead letter')}{replayed}{foreign}"
