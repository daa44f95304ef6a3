"""`aggregator run`: settings in, the process, its exit status out."""

from __future__ import annotations

from pathlib import Path

import click

from aggregator.settings import SettingsError, load_settings, printable


@click.command(
    epilog="""\b
Examples:
  AGGREGATOR_MODELS=minilm=localhost:50051 aggregator run
  aggregator run --config aggregator.toml --print-config"""
)
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with settings; AGGREGATOR_* variables override it.",
)
@click.option(
    "--print-config", is_flag=True, help="Show the settings that result, secrets hidden, and end."
)
def run(*, config: Path | None, print_config: bool) -> None:
    """Claim queries from Kafka by token count and publish their vectors, until SIGTERM.

    SIGTERM and Ctrl-C finish what is in flight, commit, and end with status 0.
    """
    try:
        settings = load_settings(config)
    except SettingsError as error:
        raise click.ClickException(str(error)) from error
    if print_config:
        click.echo(printable(settings))
        return
    # Not before it is needed: it brings gRPC, Kafka's client and the tokenizers along.
    from aggregator.runtime.process import StartError, run_aggregator  # noqa: PLC0415

    try:
        halt = run_aggregator(settings)
    except StartError as error:
        raise click.ClickException(str(error)) from error
    if halt.exit_code:
        raise click.ClickException(halt.message)
