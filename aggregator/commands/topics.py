"""`aggregator topics create`: the three topics, as the guarantees need them."""

from __future__ import annotations

from pathlib import Path

import click

from aggregator.settings import SettingsError, load_settings


@click.group()
def topics() -> None:
    """Create the topics that the aggregator reads and writes.

    \b
    Example:
      aggregator topics create --partitions 12 --replication-factor 3
    """


@topics.command(
    epilog="""\b
Examples:
  aggregator topics create
  aggregator topics create --partitions 12 --replication-factor 3"""
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with settings; AGGREGATOR_* variables override it.",
)
@click.option(
    "--bootstrap-servers",
    "-b",
    metavar="HOST:PORT,...",
    help="Instead of the setting AGGREGATOR_BOOTSTRAP_SERVERS.",
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    default=12,
    show_default=True,
    help="Of each topic; of the queries topic it bounds how many aggregators can share it.",
)
@click.option(
    "--replication-factor",
    type=click.IntRange(min=1),
    help="Of each topic; absent: the broker's default.",
)
def create(
    *,
    config: Path | None,
    bootstrap_servers: str | None,
    partitions: int,
    replication_factor: int | None,
) -> None:
    """Create what is missing of the queries, results and dead letter topics.

    The queries topic gets LogAppendTime, so that only the brokers' clock counts; the dead letter
    topic room for a query and its error. Topics that exist are left as they are.
    """
    # Not before it is needed: it brings Kafka's client along.
    from aggregator.adapters.kafka_config import KafkaConfigError  # noqa: PLC0415
    from aggregator.adapters.kafka_topics import (  # noqa: PLC0415
        TopicPlan,
        TopicsError,
        create_topics,
        outcome_lines,
    )
    from aggregator.runtime.process import kafka_options  # noqa: PLC0415
    from aggregator.telemetry.logs import silent_logger  # noqa: PLC0415

    try:
        settings = load_settings(config, models_required=False)
        if bootstrap_servers is not None:
            settings = settings.model_copy(update={"bootstrap_servers": bootstrap_servers})
        plan = TopicPlan(
            queries=settings.queries_topic,
            results=settings.results_topic,
            dlq=settings.dlq_topic,
            partitions=partitions,
            replication_factor=replication_factor or -1,
        )
        outcomes = create_topics(kafka_options(settings), plan, logger=silent_logger())
    except (SettingsError, KafkaConfigError, TopicsError) as error:
        raise click.ClickException(str(error)) from error
    for line in outcome_lines(outcomes):
        click.echo(line)
