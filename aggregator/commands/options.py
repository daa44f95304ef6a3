"""The command-line options that every client of the topics has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from aggregator.commands.kafka_client import KafkaOptions

Command = TypeVar("Command", bound=Callable[..., Any])


def topic_options(command: Command) -> Command:
    """Where the topics are; the command passes them to `kafka_options`."""
    for option in reversed(
        (
            click.option(
                "--bootstrap-servers",
                "-b",
                metavar="HOST:PORT,...",
                default="localhost:9092",
                show_default=True,
                envvar="AGGREGATOR_BOOTSTRAP_SERVERS",
                show_envvar=True,
            ),
            click.option(
                "--queries-topic",
                default="queries",
                show_default=True,
                envvar="AGGREGATOR_QUERIES_TOPIC",
                show_envvar=True,
            ),
            click.option(
                "--results-topic",
                default="results",
                show_default=True,
                envvar="AGGREGATOR_RESULTS_TOPIC",
                show_envvar=True,
            ),
            click.option(
                "--kafka",
                multiple=True,
                metavar="KEY=VALUE",
                help="A setting of librdkafka, such as security.protocol=SSL; may be repeated.",
            ),
        )
    ):
        command = option(command)
    return command


def kafka_options(
    *, bootstrap_servers: str, queries_topic: str, results_topic: str, kafka: tuple[str, ...]
) -> KafkaOptions:
    """The options as one object.

    Raises:
        click.BadParameter: a `--kafka` is not KEY=VALUE.
    """
    overrides = {}
    for pair in kafka:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--kafka")
        overrides[key] = value
    return KafkaOptions(
        bootstrap_servers=bootstrap_servers,
        queries_topic=queries_topic,
        results_topic=results_topic,
        overrides=overrides,
    )
