"""The command line: one group; each command is in a module of its own, imported when it is used.

Every command ends with status 0, or with one clear line on standard error and another status, never
with a traceback for what a user can cause.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

COMMANDS = {
    "run": "Claim queries from Kafka by token count and publish their vectors.",
    "demo": "Bring the whole stack up on this machine and show what it does.",
    "send": "Send queries and print their results.",
    "tail": "Print results as they come.",
    "topics": "Create the topics.",
    "dlq": "List dead letters and send them again.",
}
"""Commands and what they are for: `aggregator.commands.<name>` holds a click command <name>."""

UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


class LazyGroup(click.Group):
    """Imports a command's module when the command is asked for."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command. What can't be written, such as to a full disk, is said in one line."""
        open_standard_streams()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in UNWRITABLE:
                raise
            click.echo(f"Error: the output can't be written: {error.strerror}", err=True)
            sys.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names, in the order of COMMANDS."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None if there is no such."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"aggregator.commands.{cmd_name}"), cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"aggregator.commands.{cmd_name}.{cmd_name} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing any."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def open_standard_streams() -> None:
    """Give closed ones the null device, or a socket gets their number and what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    null = Path(os.devnull)
    sys.stdin = sys.stdin or null.open(encoding="utf-8")
    sys.stdout = sys.stdout or null.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or null.open("w", encoding="utf-8")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: AGGREGATOR_MODELS=minilm=localhost:50051 aggregator run",
)
@click.version_option(importlib.metadata.version("token-batching"), prog_name="aggregator")
def group() -> None:
    """Embedding queries from Kafka, batched by token count for padding-free inference.

    Settings are AGGREGATOR_* variables or a TOML file; `aggregator run --print-config` shows them
    all.
    """


def main() -> None:
    """Entry point of the console script."""
    # Commands that can be ended in order have handlers of their own, seconds later. As the first
    # process of a container this one would ignore the signal until then.
    signal.signal(signal.SIGTERM, _end)
    group.main(prog_name="aggregator")


def _end(number: int, _frame: object) -> NoReturn:
    """Nothing has been started: for `run` that is the orderly end.

    At once, since an exception may come up inside an import, which makes another one of it.
    """
    os._exit(0 if sys.argv[1:2] == ["run"] else 128 + number)
