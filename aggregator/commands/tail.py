"""`aggregator tail`: the results topic, as it grows."""

from __future__ import annotations

from pathlib import Path

import click

from aggregator.commands.kafka_client import KafkaClientError, ResultReader
from aggregator.commands.options import topic_options, topics_of
from aggregator.commands.received import NotAResultError, read_result

_POLL_S = 0.2
_READS_BEFORE_HINT = 5


@click.command(
    epilog="""\b
Examples:
  aggregator tail
  aggregator tail --from-beginning --count 10 --json"""
)
@click.option("--from-beginning", is_flag=True, help="Start with what is there already.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many results.")
@click.option("--json", "as_json", is_flag=True, help="Print whole results, one JSON a line.")
@topic_options
def tail(
    *,
    from_beginning: bool,
    count: int | None,
    as_json: bool,
    config: Path | None,
    bootstrap_servers: str | None,
    queries_topic: str | None,
    results_topic: str | None,
) -> None:
    """Print results as they come, until Ctrl-C."""
    topics = topics_of(
        config=config,
        bootstrap_servers=bootstrap_servers,
        queries_topic=queries_topic,
        results_topic=results_topic,
    )
    try:
        with ResultReader(topics, from_beginning=from_beginning) as reader:
            place = f"results on {topics.results!r} at {topics.bootstrap_servers}"
            hint = "" if from_beginning else " (--from-beginning shows those there already)"
            waiting = f"waiting for {place}{hint}; Ctrl-C ends"
            _follow(reader, count=count, as_json=as_json, waiting=waiting)
    except KafkaClientError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        # The way to end it, not a failure.
        return


def _follow(reader: ResultReader, *, count: int | None, as_json: bool, waiting: str) -> None:
    """Print until there are `count`; what is waited for is said once, if nothing comes at first."""
    printed = reads = 0
    while True:
        records = reader.read(_POLL_S)
        reads += 1
        if reads == _READS_BEFORE_HINT and not printed:
            click.echo(waiting, err=True)
        for record in records:
            try:
                result = read_result(record)
                line = result.as_json() if as_json else result.as_line()
            except NotAResultError as error:
                place = f"partition {record.partition()}, offset {record.offset()}"
                click.echo(f"not a result ({place}): {error}", err=True)
                continue
            click.echo(line)
            printed += 1
            if printed == count:
                return
