"""`model-server profile`: measure this machine, keep the curve for `serve`, and show it.

Owns the order of things and what is printed; how passes are timed, what a curve says and how it is
drawn is `model_server.profiling`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from model_server.core.saturation import Measured, TargetOptions
from model_server.engines.base import Engine, ModelInfo
from model_server.engines.model_folder import ModelRefusedError, read_model_folder
from model_server.profiling.flops import (
    FlopsUnknownError,
    measured_peak_flops,
    peak_device,
    read_flops_model,
)
from model_server.profiling.measure import CurveMeter, MeasureOptions, Progress
from model_server.profiling.mix import PassMaker
from model_server.profiling.plots import PlotsUnavailableError, check_plots, draw_plots
from model_server.profiling.profile import Profile, ProfileError, as_json, from_json
from model_server.profiling.report import show_profile
from model_server.profiling.store import profile_key, save_profile

if TYPE_CHECKING:
    from model_server.settings import ModelServerSettings

STOP_RATIO = 4.0
"""The range ends behind a pass of so many times `pass_ms_max`: throughput has long settled."""


class ProfileCommandError(Exception):
    """No profile; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCommandOptions:
    """As on the command line; `peak_tflops` None: measured here."""

    rounds: int = 9
    sizes_per_octave: int = 4
    tokens_max: int = 65_536
    seconds_max: float = 180.0
    peak_tflops: float | None = None
    json_path: Path | None = None
    plots_folder: Path | None = None


def measure_profile(
    settings: ModelServerSettings,
    load: Callable[[], Engine],
    folder: Path | None,
    options: ProfileCommandOptions,
    console: Console,
) -> Profile:
    """Load, measure, hold against the peak; `folder` is the model's, None where there is none.

    Raises:
        ProfileCommandError: the engine can't be loaded, a pass failed, or plots are asked for and
            there is nothing to draw with.
    """
    try:
        if options.plots_folder is not None:
            check_plots()
        engine = load()
        try:
            measured, maker = _measured(engine, settings, options, console)
            info = engine.info
        finally:
            engine.close()
    except Exception as error:  # an engine may raise what it likes; people get one line
        message = " ".join(str(error).split())
        raise ProfileCommandError(message or type(error).__name__) from error
    lengths = [maker.lengths(tokens) for tokens in measured.tokens]
    flops, unknown = _flops(folder, settings.pooling, lengths)
    peak, source = None, ""
    if flops is not None:
        peak, source, unknown = _peak(info, options.peak_tflops)
    return Profile(
        model=settings.served_name,
        key=profile_key(info),
        measured=measured,
        options=target_options(settings),
        texts=tuple(len(some) for some in lengths),
        pass_flops=flops,
        peak_flops=peak,
        peak_source=source,
        flops_unknown=unknown,
    )


def target_options(settings: ModelServerSettings) -> TargetOptions:
    """What the settings say about choosing a target."""
    return TargetOptions(
        pass_ms_max=settings.pass_ms_max, latency_slack_ratio=settings.latency_slack_ratio
    )


def _measured(
    engine: Engine,
    settings: ModelServerSettings,
    options: ProfileCommandOptions,
    console: Console,
) -> tuple[Measured, PassMaker]:
    meter_options = MeasureOptions(
        tokens_max=min(options.tokens_max, settings.batch_tokens_max or options.tokens_max),
        sizes_per_octave=options.sizes_per_octave,
        rounds_min=min(3, options.rounds),
        rounds_max=options.rounds,
        pass_ms_stop=STOP_RATIO * settings.pass_ms_max,
        seconds_max=options.seconds_max,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    maker = PassMaker.of(engine, inputs_max=settings.inputs_max)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("finding the range", total=None)

        def tell(progress: Progress) -> None:
            what = "measuring" if progress.of else "finding the range"
            size = f": {progress.tokens} tokens" if progress.tokens else ""
            bar.update(
                task,
                description=f"{what}{size}",
                completed=progress.done,
                total=progress.of or None,
            )

        meter = CurveMeter(
            engine.embed, maker, meter_options, clock_ns=time.perf_counter_ns, tell=tell
        )
        return meter.measure(), maker


def _flops(
    folder: Path | None, pooling: str | None, lengths: list[list[int]]
) -> tuple[tuple[float, ...] | None, str]:
    if folder is None:
        return None, "a simulated engine has no weights"
    try:
        model = read_flops_model(read_model_folder(folder, pooling).transformer.path)
    except (FlopsUnknownError, ModelRefusedError) as error:
        return None, str(error)
    return tuple(model.pass_flops(some) for some in lengths), ""


def _peak(info: ModelInfo, given_tflops: float | None) -> tuple[float | None, str, str]:
    """The peak, where it is from, and why there is none: the curve is worth keeping without it."""
    if given_tflops is not None:
        return given_tflops * 1e12, "as given", ""
    try:
        peak = measured_peak_flops(peak_device(info.device), info.precision)
    except FlopsUnknownError as error:
        return None, "", str(error)
    except (ImportError, RuntimeError) as error:  # torch's own: no memory, no such device
        return None, "", f"no peak can be measured: {' '.join(str(error).split())}"
    return peak, f"the best {info.precision} matrix product measured here", ""


def read_profile(path: Path) -> Profile:
    """A profile that `--json` wrote.

    Raises:
        ProfileCommandError: it can't be read.
    """
    try:
        return from_json(path.read_text("utf-8"))
    except (OSError, ValueError, ProfileError) as error:
        raise ProfileCommandError(f"{path}: {error}") from error


def show(profile: Profile, options: ProfileCommandOptions, console: Console) -> None:
    """The table, and the files that were asked for.

    Raises:
        ProfileCommandError: a file can't be written, or there is nothing to draw with.
    """
    show_profile(profile, console)
    try:
        if options.json_path is not None:
            options.json_path.write_text(as_json(profile) + "\n", "utf-8")
            console.print(f"Written: {options.json_path}", highlight=False, markup=False)
        if options.plots_folder is not None:
            for path in draw_plots(profile, options.plots_folder):
                console.print(f"Drawn: {path}", highlight=False, markup=False)
    except (OSError, PlotsUnavailableError) as error:
        raise ProfileCommandError(str(error)) from error


def keep(profile: Profile, cache_dir: Path, console: Console) -> None:
    """Store the curve, so that `serve` uses it.

    Raises:
        ProfileCommandError: the folder can't be written.
    """
    try:
        path = save_profile(cache_dir, profile.key, profile.measured)
    except OSError as error:
        raise ProfileCommandError(str(error)) from error
    console.print(f"Stored for `model-server serve`: {path}", highlight=False, markup=False)
