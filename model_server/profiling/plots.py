"""The three plots that a profile is read from: latency, throughput and MFU against tokens a pass.

Drawn by matplotlib (the extra `plots`). The same things look the same in all of them: what was
measured, the fitted curve, the target with its interval, and the knee where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from model_server.core.saturation import Saturation
from model_server.profiling.profile import Profile, flops_text, formula

_MEASURED: Final = "#1f5fa8"
_FIT: Final = "#8a8a8a"
_TARGET: Final = "#c8501e"
_KNEE: Final = "#3b7d3b"
_CURVE_POINTS: Final = 200


class PlotsUnavailableError(Exception):
    """There is nothing to draw with; the message is one line."""


def check_plots() -> None:
    """Raise PlotsUnavailableError where there is nothing to draw with: ask before measuring."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415 - an extra
    except ImportError as error:
        raise PlotsUnavailableError(
            "plots need matplotlib, the extra 'plots' (`make env` where the project is checked "
            f"out): {error}"
        ) from error


def draw_plots(profile: Profile, folder: Path) -> list[Path]:
    """Draw what is known into PNG files of a folder, made if need be; returns them.

    Without known FLOPs there is no plot of MFU.

    Raises:
        PlotsUnavailableError: matplotlib is not installed.
        OSError: the folder can't be written.
    """
    check_plots()
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    folder.mkdir(parents=True, exist_ok=True)
    curve = profile.read()
    drawn = []
    for name, draw in (("latency", _latency), ("throughput", _throughput), ("mfu", _mfu)):
        figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        if not draw(axes, profile, curve):
            continue
        _finish(axes, profile, curve)
        path = folder / f"{name}.png"
        figure.savefig(path)
        drawn.append(path)
    return drawn


def _latency(axes: Any, profile: Profile, curve: Saturation) -> bool:
    tokens = [point.tokens for point in curve.medians]
    times = list(zip(*profile.measured.rounds_ms, strict=True))
    medians = [point.pass_ms for point in curve.medians]
    spread = [
        [median - min(of) for median, of in zip(medians, times, strict=True)],
        [max(of) - median for median, of in zip(medians, times, strict=True)],
    ]
    axes.errorbar(
        tokens, medians, yerr=spread, fmt="o", ms=4, lw=1, color=_MEASURED, capsize=2,
        label="measured: median, fastest, slowest",
    )  # fmt: skip
    xs = _spaced(tokens[0], tokens[-1])
    ys = [curve.fit.pass_ms(x) for x in xs]
    axes.plot(xs, ys, color=_FIT, lw=1.5, label=formula(curve.fit), zorder=1)
    limit = profile.options.pass_ms_max
    if min(medians) <= limit <= 2 * max(medians):
        axes.axhline(limit, color=_TARGET, lw=1, ls=":", label=f"longest pass: {limit:g} ms")
    axes.set_yscale("log")
    axes.yaxis.get_major_locator().set_params(subs=(1.0, 2.0, 5.0))
    axes.yaxis.set_major_formatter(_plain)
    axes.yaxis.set_minor_formatter(lambda *_: "")
    axes.set_ylabel("pass, ms")
    axes.set_title("Latency of a pass", loc="left")
    return True


def _throughput(axes: Any, profile: Profile, curve: Saturation) -> bool:
    del profile
    tokens = [point.tokens for point in curve.points]
    per_s = [point.tokens_per_ms * 1e3 for point in curve.points]
    axes.plot(tokens, per_s, "o-", ms=4, lw=1, color=_MEASURED, label="measured, latency monotone")
    xs = _spaced(tokens[0], tokens[-1])
    fitted = [1e3 * x / curve.fit.pass_ms(x) for x in xs]
    axes.plot(xs, fitted, color=_FIT, lw=1.5, label=formula(curve.fit), zorder=1)
    axes.axhline(0.9 * max(per_s), color=_FIT, lw=1, ls=":", label="90% of the best")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylabel("tokens a second")
    axes.set_title("Throughput", loc="left")
    return True


def _mfu(axes: Any, profile: Profile, curve: Saturation) -> bool:
    tokens = [point.tokens for point in curve.points]
    mfu = profile.mfu([point.pass_ms for point in curve.points])
    if mfu is None or profile.peak_flops is None:
        return False
    peak = f"of {flops_text(profile.peak_flops)}, {profile.peak_source}"
    axes.plot(tokens, mfu, "o-", ms=4, lw=1, color=_MEASURED, label=peak)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("model FLOPs utilisation")
    axes.set_title("Model FLOPs utilisation (MFU)", loc="left")
    return True


def _finish(axes: Any, profile: Profile, curve: Saturation) -> None:
    """The axis of tokens, the marks and the legend."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_plain)
    axes.set_xlabel("tokens a pass")
    axes.axvspan(curve.target_low, curve.target_high, color=_TARGET, alpha=0.12, lw=0)
    axes.axvline(
        curve.target.tokens, color=_TARGET, lw=1.5,
        label=f"target: {curve.target.tokens} tokens "
        f"(95%: {curve.target_low} to {curve.target_high})",
    )  # fmt: skip
    if curve.knee_tokens is not None:
        axes.axvline(
            curve.knee_tokens, color=_KNEE, lw=1.5, ls="--",
            label=f"saturation knee: {curve.knee_tokens:.0f} tokens",
        )  # fmt: skip
    axes.grid(visible=True, which="major", lw=0.4, alpha=0.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    key = profile.key
    axes.set_title(
        f"{profile.model}, {key.engine}, {key.precision}\n{key.device}", loc="right", fontsize=8
    )
    axes.legend(fontsize=8, frameon=False)


def _plain(value: float, _: object) -> str:
    """1,024 and not 10^3; fractions only below 10."""
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def _spaced(first: float, last: float) -> Sequence[float]:
    """Evenly on a logarithmic axis."""
    step = (last / first) ** (1 / (_CURVE_POINTS - 1))
    return [first * step**index for index in range(_CURVE_POINTS)]
