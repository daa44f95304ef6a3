"""The command-line options that every client of the topics has."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from aggregator.adapters.kafka_config import Config, KafkaConfigError, KafkaOptions, admin_config
from aggregator.commands.kafka_client import DeadLetterTopics, Topics
from aggregator.settings import AggregatorSettings, SettingsError, load_settings

Command = TypeVar("Command", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """A range without `nan`, which compares with no bound, and without infinities."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Give the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no number", param, ctx)
        return number


class _Name(click.ParamType[str]):
    """Text that Kafka's client takes. An empty one is a mistake, not the absence of one."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Give the text."""
        text = str(value)
        if not text:
            self.fail("it is empty", param, ctx)
        try:
            text.encode()
        except UnicodeEncodeError:
            self.fail(f"{text!r} is not UTF-8", param, ctx)
        return text


_CONFIG = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with the aggregator's settings; AGGREGATOR_* variables override it.",
)
_BROKER = click.option(
    "--bootstrap-servers",
    "-b",
    type=_Name(),
    metavar="HOST:PORT,...",
    help="Instead of the setting AGGREGATOR_BOOTSTRAP_SERVERS.",
)
_QUERIES = click.option(
    "--queries-topic", type=_Name(), help="Instead of the setting AGGREGATOR_QUERIES_TOPIC."
)
_RESULTS = click.option(
    "--results-topic", type=_Name(), help="Instead of the setting AGGREGATOR_RESULTS_TOPIC."
)
_LETTERS = click.option(
    "--dlq-topic", type=_Name(), help="Instead of the setting AGGREGATOR_DLQ_TOPIC."
)


def topic_options(command: Command) -> Command:
    """Where the topics are; the command passes them to `topics_of`."""
    return _CONFIG(_BROKER(_QUERIES(_RESULTS(command))))


def letter_options(command: Command) -> Command:
    """Where dead letters are; the command passes them to `letter_topics_of`."""
    return _CONFIG(_BROKER(_LETTERS(command)))


def queries_option(command: Command) -> Command:
    """Where queries go."""
    return _QUERIES(command)


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
    settings, client = _load(config, bootstrap_servers)
    return Topics(
        client=client,
        queries=queries_topic or settings.queries_topic,
        results=results_topic or settings.results_topic,
    )


def letter_topics_of(
    *,
    config: Path | None,
    bootstrap_servers: str | None,
    dlq_topic: str | None,
    queries_topic: str | None = None,
) -> tuple[DeadLetterTopics, AggregatorSettings]:
    """The topics, the options over the settings; and the settings.

    Raises:
        click.ClickException: the settings are wrong, or the two topics are one.
    """
    settings, client = _load(config, bootstrap_servers)
    topics = DeadLetterTopics(
        client=client,
        queries=queries_topic or settings.queries_topic,
        letters=dlq_topic or settings.dlq_topic,
    )
    if topics.queries == topics.letters:
        raise click.ClickException(f"queries and dead letters can't share topic {topics.queries!r}")
    return topics, settings


def _load(config: Path | None, bootstrap_servers: str | None) -> tuple[AggregatorSettings, Config]:
    """The settings, and what clients of ours need to connect."""
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
    return settings, client
