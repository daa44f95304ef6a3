"""The command-line options that every client of the topics has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from aggregator.adapters.kafka_config import KafkaConfigError, KafkaOptions, admin_config
from aggregator.commands.kafka_client import Topics
from aggregator.settings import SettingsError, load_settings

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="A TOML file with the aggregator's settings; AGGREGATOR_* variables override it.",
    ),
    click.option(
        "--bootstrap-servers",
        "-b",
        metavar="HOST:PORT,...",
        help="Instead of the setting AGGREGATOR_BOOTSTRAP_SERVERS.",
    ),
    click.option("--queries-topic", help="Instead of the setting AGGREGATOR_QUERIES_TOPIC."),
    click.option("--results-topic", help="Instead of the setting AGGREGATOR_RESULTS_TOPIC."),
)


def topic_options(command: Command) -> Command:
    """Where the topics are; the command passes them to `topics_of`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def topics_of(
    *,
    config: Path | None,
    bootstrap_servers: str | None,
    queries_topic: str | None,
    results_topic: str | None,
) -> Topics:
    """The aggregator's settings, with the options over them.

    Raises:
        click.ClickException: the settings are wrong.
    """
    try:
        settings = load_settings(config, models_required=False)
        client = admin_config(
            KafkaOptions(
                bootstrap_servers=bootstrap_servers or settings.bootstrap_servers,
                # None is joined.
                group_id=settings.group_id,
                client_id="aggregator-client",
                overrides=settings.kafka,
            )
        )
    except (SettingsError, KafkaConfigError) as error:
        raise click.ClickException(str(error)) from error
    return Topics(
        client=client,
        queries=queries_topic or settings.queries_topic,
        results=results_topic or settings.results_topic,
    )
