"""A profile for people: a table and the sentences that follow from it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from model_server.core.curve import KNEE_POINTS_MIN, KNEE_SPAN_MIN
from model_server.core.saturation import Saturation, TargetRule
from model_server.profiling.profile import Profile, flops_text, formula

_FLAT_RATIO = 1.1
"""A curve that rises by less over its whole range is flat."""


def show_profile(profile: Profile, console: Console) -> None:
    """Print the table and what it says."""
    curve = profile.read()
    key = profile.key
    console.print(
        f"{profile.model} · engine {key.engine} · {key.precision} · {key.device} · {key.machine}",
        highlight=False,
        markup=False,
    )
    console.print(_table(profile, curve))
    for line in sentences(profile, curve):
        console.print(line, highlight=False, markup=False)


def _table(profile: Profile, curve: Saturation) -> Table:
    table = Table()
    for column in ("tokens", "texts", "pass ms", "fastest", "slowest", "tokens/s", "MFU", ""):
        table.add_column(column, justify="left" if column == "" else "right")
    pass_ms = [point.pass_ms for point in curve.points]
    mfu = profile.mfu(pass_ms)
    evened = _evened(curve)
    times = list(zip(*profile.measured.rounds_ms, strict=True))
    for index, point in enumerate(curve.points):
        is_target = point.tokens == curve.target.tokens
        table.add_row(
            f"{point.tokens:.0f}",
            str(profile.texts[index]),
            f"{curve.medians[index].pass_ms:.2f}{'*' if index in evened else ' '}",
            f"{min(times[index]):.2f}",
            f"{max(times[index]):.2f}",
            f"{point.tokens_per_ms * 1e3:,.0f}",
            f"{mfu[index]:.1%}" if mfu is not None else "-",
            "target" if is_target else "",
            style="bold" if is_target else None,
        )
    return table


def _evened(curve: Saturation) -> set[int]:
    """Which sizes' times differ from their medians, since a larger pass took less."""
    pairs = zip(curve.medians, curve.points, strict=True)
    return {index for index, (median, even) in enumerate(pairs) if median != even}


def sentences(profile: Profile, curve: Saturation) -> list[str]:
    """What the table says, a line each."""
    rounds, sizes = len(profile.measured.rounds_ms), len(curve.points)
    times = f"{rounds} times" if rounds > 1 else "once"
    lines = [f"Each of {sizes} sizes ran {times}, in mixed order; pass ms is the median."]
    if _evened(curve):
        lines.append(
            "* A larger pass took less time. Tokens/s, MFU and the target go by times evened out "
            "over such neighbours, so that they never fall as passes grow."
        )
    lines += [f"Fit: {formula(curve.fit)}.", _knee(curve)]
    interval = f"95% interval {curve.target_low} to {curve.target_high}"
    lines.append(f"Target: {curve.target.tokens} tokens ({interval}): {_why(profile, curve)}.")
    largest = int(curve.points[-1].tokens)
    if curve.points[-1].tokens_per_ms == max(p.tokens_per_ms for p in curve.points):
        lines.append(
            f"Throughput is best at the largest size measured ({largest} tokens): passes beyond it "
            "may do better."
        )
    if unknown := profile.mfu_unknown([point.pass_ms for point in curve.points]):
        lines.append(f"MFU is not known: {unknown}.")
    elif profile.peak_flops is not None:
        lines.append(f"Peak: {flops_text(profile.peak_flops)}, {profile.peak_source}.")
    return lines


def _knee(curve: Saturation) -> str:
    first, last = curve.points[0].tokens, curve.points[-1].tokens
    if curve.fit.pass_ms(last) <= _FLAT_RATIO * curve.fit.pass_ms(first):
        return "Flat as far as was measured: the saturation knee lies beyond."
    if curve.knee_tokens is None:
        return (
            f"No saturation knee: this machine has no flat part of at least {KNEE_POINTS_MIN} "
            f"measured sizes and a factor of {KNEE_SPAN_MIN:g} in tokens."
        )
    return f"Saturation knee: {curve.knee_tokens:.0f} tokens."


def _why(profile: Profile, curve: Saturation) -> str:
    if curve.target.rule is TargetRule.THROUGHPUT:
        return "the smallest with at least 90% of the best throughput"
    limit = f"{profile.options.pass_ms_max:g} ms"
    if curve.target.rule is TargetRule.LATENCY_SLACK:
        slack = profile.options.latency_slack_ratio or 0.0
        return f"the largest whose pass takes at most {1 + slack:.3g} times the flat latency"
    if curve.points[0].pass_ms > profile.options.pass_ms_max:
        return f"the smallest measured, since all passes take more than {limit}"
    return f"the largest whose pass takes at most {limit}"
