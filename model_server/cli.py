"""The command line: `model-server serve | profile | embed`.

Commands print what was asked for on standard output, logs and errors on standard error, and end
with a code other than 0 and one clear line on failure.
"""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import click
from rich.console import Console

from model_server.settings import (
    ModelServerSettings,
    SettingsError,
    load_settings,
    printable,
)

if TYPE_CHECKING:
    from model_server.profile_command import ProfileCommandOptions
    from model_server.telemetry.logs import Logger

EXIT_FAILED = 1
ENGINES = get_args(ModelServerSettings.model_fields["engine"].annotation)
DTYPES = get_args(ModelServerSettings.model_fields["dtype"].annotation)
UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
EXAMPLES_SERVE = """\b
Examples:
  model-server serve --engine simulated
  model-server serve --model ./all-MiniLM-L6-v2 --served-model-name minilm
  model-server serve --model sentence-transformers/all-MiniLM-L6-v2 --revision c9745ed1d9f2
"""
EXAMPLES_PROFILE = """\b
Examples:
  model-server profile --model ./all-MiniLM-L6-v2
  model-server profile --model ./my-model --dtype bfloat16 --json profile.json --plots plots
  model-server profile --from profile.json --plots plots
"""
EXAMPLES_EMBED = """\b
Examples:
  model-server embed "how do I reset my password"
  cat queries.txt | model-server embed --server localhost:50051 --json
"""


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


class OneLineGroup(click.Group):
    """Ends with one line where standard output can't be written."""

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


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="token-batching", prog_name="model-server")
def main() -> None:
    """Serve an embedding model over gRPC, its forward passes filled by token count."""
    # Its core writes lines of its own to standard error, where ours says the same in one. It looks
    # once, when it is imported, which commands do later.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # `serve` has a handler of its own, seconds later. As the first process of a container this one
    # would ignore the signal until then.
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: object) -> NoReturn:
    """Nothing has been started: for `serve` that is the orderly end.

    At once, since an exception may come up inside an import, which makes another one of it.
    """
    os._exit(0 if sys.argv[1:2] == ["serve"] else 128 + number)


@main.command(epilog=EXAMPLES_SERVE)
@click.option("--model", help="A model's folder, or its id on the hub.")
@click.option("--revision", "model_revision", help="Commit, tag or branch on the hub.")
@click.option("--served-model-name", help="What clients call the model; default: its last part.")
@click.option("--engine", type=click.Choice(ENGINES), help="Default: torch.")
@click.option("--grpc-listen", metavar="HOST:PORT", help="Default: 127.0.0.1:50051.")
@click.option("--metrics-listen", metavar="HOST:PORT", help="Default: 127.0.0.1:9465; '': none.")
@click.option("--device", help="auto, cpu, cuda, ...; default: auto.")
@click.option("--dtype", type=click.Choice(DTYPES))
@click.option("--threads", type=int, help="Of the engine on a CPU; 0: as many as there are.")
@click.option("--batch-tokens-target", type=int, help="Tokens aimed at for a forward pass.")
@click.option(
    "--cache-dir", type=click.Path(path_type=Path), help="For golden vectors and profiles."
)
@click.option("--log-format", type=click.Choice(["json", "console"]))
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with the names of the settings.",
)
@click.option("--print-config", is_flag=True, help="Print the resulting settings and end.")
def serve(config: Path | None, print_config: bool, **options: Any) -> None:
    """Serve one model until SIGTERM or Ctrl-C.

    Every setting is also a variable MODEL_SERVER_<NAME> and a name in the file of --config; options
    go over variables, variables over the file.
    """
    try:
        settings = load_settings(config, options=options)
    except SettingsError as error:
        raise click.ClickException(str(error)) from error
    if print_config:
        click.echo(printable(settings))
        return
    _serve(settings)


def _serve(settings: ModelServerSettings) -> None:
    from model_server.engines.factory import create_engine  # noqa: PLC0415 - starts faster without
    from model_server.engines.hub import HubError, model_folder  # noqa: PLC0415
    from model_server.server.process import ServeError, serve_until_ended  # noqa: PLC0415
    from model_server.telemetry.logs import configure_logs  # noqa: PLC0415

    log = configure_logs(settings.log_format, settings.log_level)
    try:
        folder = model_folder(settings)
        cache_dir = _cache_dir(settings, log)
        ended = asyncio.run(
            serve_until_ended(
                settings,
                lambda: create_engine(
                    settings,
                    folder,
                    cache_dir,
                    says=lambda line: log.info("engine says", line=line),
                ),
                log=log,
                cache_dir=cache_dir,
            )
        )
    except (HubError, ServeError) as error:
        raise click.ClickException(str(error)) from error
    if ended.message is None:
        log.info("stopped")
    else:
        click.echo(f"Error: {' '.join(ended.message.split())}", err=True)
    code = 0 if ended.message is None else EXIT_FAILED
    if ended.hangs or settings.engine != "simulated":
        # Interpreter shutdown would crash in a thread that still runs, and torch's libraries report
        # leaks of their own bindings there, which drown our last line.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _cache_dir(settings: ModelServerSettings, log: Logger) -> Path | None:
    """A folder to keep what can be made again. None: there is none, and starts take longer.

    The simulated engine's reference costs nothing, and its faults must not be kept.
    """
    if settings.engine == "simulated":
        return None
    folder = settings.cache_folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        log.warning("nothing is cached", reason=f"{folder} can't be written to")
        return None
    return folder


def _writable(
    _context: click.Context, _parameter: click.Parameter, file: Path | None
) -> Path | None:
    """Find out now what would else be found out after minutes of measuring."""
    if file is None:
        return file
    new = not file.exists()
    try:
        file.open("a").close()
        if new:
            file.unlink()
    except OSError as error:
        raise click.BadParameter(f"{file} can't be written: {error.strerror}") from error
    return file


@main.command(epilog=EXAMPLES_PROFILE)
@click.option("--model", help="A model's folder, or its id on the hub.")
@click.option("--revision", "model_revision", help="Commit, tag or branch on the hub.")
@click.option("--engine", type=click.Choice(ENGINES), help="Default: torch.")
@click.option("--device", help="auto, cpu, cuda, ...; default: auto.")
@click.option("--dtype", type=click.Choice(DTYPES))
@click.option("--threads", type=int, help="Of the engine on a CPU; 0: as many as there are.")
@click.option("--pass-ms-max", type=float, help="The target is cut to such passes; default: 100.")
@click.option(
    "--latency-slack",
    "latency_slack_ratio",
    type=float,
    metavar="RATIO",
    help="Where latency has a flat part: how much longer than that a pass may take.",
)
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Where the profile is stored.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A TOML file with the names of the settings.",
)
@click.option("--rounds", type=click.IntRange(1, 1_000), default=9, show_default=True)
@click.option(
    "--sizes-per-octave", type=click.IntRange(1, 16), default=4, show_default=True, metavar="N"
)
@click.option(
    "--tokens-max",
    type=click.IntRange(min=64),
    default=65_536,
    show_default=True,
    help="The largest pass; the range ends before it behind a pass of 4 x pass-ms-max.",
)
@click.option(
    "--seconds-max",
    type=FiniteRange(min=1),
    default=180.0,
    show_default=True,
    help="Time for all passes: fewer sizes and rounds, if it is not enough.",
)
@click.option(
    "--peak-tflops",
    type=FiniteRange(min=0, min_open=True),
    help="What the machine can do, for MFU; default: measured by a matrix product.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_writable,
    help="Write it all.",
)
@click.option(
    "--plots",
    "plots_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Draw latency, throughput and MFU into this folder (needs the extra 'plots').",
)
@click.option("--no-store", is_flag=True, help="Keep nothing for serve.")
@click.option(
    "--from",
    "from_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure nothing: show what --json wrote, perhaps on another machine.",
)
def profile(config: Path | None, no_store: bool, from_path: Path | None, **options: Any) -> None:
    """Measure latency against tokens a pass on this machine, and what to aim at.

    The curve is stored for this model, engine, precision, device and machine; `serve` takes its
    target from it.
    """
    import dataclasses  # noqa: PLC0415 - starts faster without

    from model_server.profile_command import (  # noqa: PLC0415
        ProfileCommandError,
        ProfileCommandOptions,
        read_profile,
        show,
    )

    names = {field.name for field in dataclasses.fields(ProfileCommandOptions)}
    own = ProfileCommandOptions(**{k: options.pop(k) for k in list(options) if k in names})
    console = Console()
    if not console.is_terminal:  # into a file: wide enough for every column
        console = Console(width=120)
    try:
        if from_path is not None:
            show(read_profile(from_path), own, console)
            return
        settings = load_settings(config, options=options)
        _profile(settings, own, console, store=not no_store)
    except (SettingsError, ProfileCommandError) as error:
        raise click.ClickException(str(error)) from error


def _profile(
    settings: ModelServerSettings, options: ProfileCommandOptions, console: Console, *, store: bool
) -> None:
    from model_server.engines.factory import create_engine  # noqa: PLC0415
    from model_server.engines.hub import HubError, model_folder  # noqa: PLC0415
    from model_server.profile_command import keep, measure_profile, show  # noqa: PLC0415
    from model_server.telemetry.logs import configure_logs  # noqa: PLC0415

    log = configure_logs(settings.log_format, settings.log_level)
    try:
        folder = model_folder(settings)
        cache_dir = _cache_dir(settings, log)
        measured = measure_profile(
            settings,
            lambda: create_engine(settings, folder, cache_dir),
            folder,
            options,
            console,
        )
    except HubError as error:
        raise click.ClickException(str(error)) from error
    try:
        if store and cache_dir is not None:
            keep(measured, cache_dir, console)
    finally:
        show(measured, options, console)


@main.command(epilog=EXAMPLES_EMBED)
@click.argument("texts", nargs=-1)
@click.option("--server", default="localhost:50051", metavar="HOST:PORT", show_default=True)
@click.option("--model", help="A served name; default: the server's own.")
@click.option("--input-type", type=click.Choice(["query", "document"]))
@click.option("--dimensions", type=click.IntRange(min=1), help="Smaller ones the model declares.")
@click.option("--truncate", is_flag=True, help="Cut texts at the model's maximum.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a text, whole vectors.")
@click.option(
    "--timeout-s", type=FiniteRange(min=0, min_open=True), default=30.0, show_default=True
)
def embed(texts: tuple[str, ...], server: str, timeout_s: float, **options: Any) -> None:
    """Embed texts, or the lines of standard input, and print their vectors.

    Without --json a line shows tokens, dimensions and the first numbers of each vector.
    """
    from model_server.embed_client import EmbedError, EmbedOptions, embed_texts  # noqa: PLC0415

    given = [text for text in texts or _lines() if text]
    if not given:
        raise click.ClickException("no texts: give them as arguments or as lines of standard input")
    try:
        refused = embed_texts(
            server, given, EmbedOptions(timeout_s=timeout_s, **options), click.echo
        )
    except EmbedError as error:
        raise click.ClickException(str(error)) from error
    except UnicodeEncodeError as error:
        raise click.ClickException(f"{error.object[:80]!r} is not UTF-8") from error
    if refused:
        raise click.ClickException(f"{refused} of {len(given)} texts have no vector")


def _lines() -> Iterator[str]:
    """Those of standard input."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise click.ClickException(f"line {number} is not UTF-8: {error.reason}") from error
