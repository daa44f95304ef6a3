"""A whole profile: a measured curve with what it was measured on, and what follows from it.

Owns the JSON form, which holds every measured time, so that tables and plots can be made of it on
another machine. Invariant: reading what was written gives the same profile.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from model_server.core.curve import Fit
from model_server.core.saturation import (
    Measured,
    Saturation,
    TargetOptions,
    saturation,
    splitmix,
)
from model_server.profiling.store import ProfileKey, measured_of

_FORMAT: Final = 1
_SEED: Final = 20_261_130


class ProfileError(Exception):
    """What was read is no profile; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was measured, on what, and what it is held against.

    `texts` and `pass_flops` have one entry a size; `pass_flops` and `peak_flops` (a second) are
    None where they are not known, with the reason in `flops_unknown`.
    """

    model: str
    key: ProfileKey
    measured: Measured
    options: TargetOptions
    texts: tuple[int, ...]
    pass_flops: tuple[float, ...] | None = None
    peak_flops: float | None = None
    peak_source: str = ""
    flops_unknown: str = ""

    def read(self) -> Saturation:
        """The curve, the target and its interval; the same each time."""
        return saturation(self.measured, self.options, splitmix(_SEED))

    def mfu(self, pass_ms: Sequence[float]) -> list[float] | None:
        """Model FLOPs utilisation: what passes of these times did, over what the machine can do.

        None: operations or peak are not known, or the peak is not one (`mfu_unknown` says which).
        """
        done = self._flops_per_s(pass_ms)
        if done is None or self.peak_flops is None or max(done) > self.peak_flops:
            return None
        return [flops / self.peak_flops for flops in done]

    def mfu_unknown(self, pass_ms: Sequence[float]) -> str:
        """Why there is no MFU, for people; empty: there is one."""
        done = self._flops_per_s(pass_ms)
        if done is None or self.peak_flops is None:
            return self.flops_unknown
        if (best := max(done)) <= self.peak_flops:
            return ""
        return (
            f"passes did up to {flops_text(best)}, so the peak of {flops_text(self.peak_flops)} "
            f"({self.peak_source}) is too low"
        )

    def _flops_per_s(self, pass_ms: Sequence[float]) -> list[float] | None:
        if self.pass_flops is None:
            return None
        return [
            flops / (time_ms / 1e3) for flops, time_ms in zip(self.pass_flops, pass_ms, strict=True)
        ]


_HELD_AGAINST: Final = ("texts", "pass_flops", "peak_flops", "peak_source", "flops_unknown")


def as_json(profile: Profile) -> str:
    """For `--json`: what was measured, and what was read out of it."""
    curve = profile.read()
    pass_ms = [point.pass_ms for point in curve.points]
    mfu = profile.mfu(pass_ms)
    kept: dict[str, Any] = {
        "format": _FORMAT,
        "model": profile.model,
        "key": asdict(profile.key),
        "options": asdict(profile.options),
        "target_tokens": curve.target.tokens,
        "target_rule": str(curve.target.rule),
        "target_interval_tokens": [curve.target_low, curve.target_high],
        "knee_tokens": curve.knee_tokens,
        "fit": asdict(curve.fit),
        "line": asdict(curve.line),
        "peak_flops": profile.peak_flops,
        "peak_source": profile.peak_source,
        "flops_unknown": profile.flops_unknown,
        "points": [
            {
                "tokens": point.tokens,
                "pass_ms": point.pass_ms,
                "tokens_per_s": point.tokens_per_ms * 1e3,
                "mfu": mfu[index] if mfu is not None else None,
            }
            for index, point in enumerate(curve.points)
        ],
        "texts": profile.texts,
        "pass_flops": profile.pass_flops,
        "tokens": profile.measured.tokens,
        "rounds_ms": profile.measured.rounds_ms,
    }
    return json.dumps(kept, indent=1)


def from_json(text: str) -> Profile:
    """What `as_json` wrote; figures that follow from the measured ones are made anew.

    Raises:
        ProfileError: it is not that.
    """
    # Here, since machines that only measure may not have it.
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415

    try:
        kept = json.loads(text)
        if not isinstance(kept, dict) or kept.get("format") != _FORMAT:
            raise ProfileError(f"not a profile of format {_FORMAT}")
        measured = measured_of(kept)
        if measured is None:
            raise ProfileError("it holds no whole curve")
        names = ("model", "key", "options", *_HELD_AGAINST)
        profile = TypeAdapter(Profile).validate_python(
            {name: kept[name] for name in names} | {"measured": measured}
        )
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise ProfileError(f"not a profile: {where}: {fault['msg']}") from error
    except KeyError as error:
        raise ProfileError(f"not a profile: {error} is missing") from error
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"not a profile: {error}") from error
    sizes = len(measured.tokens)
    if len(profile.texts) != sizes or len(profile.pass_flops or profile.texts) != sizes:
        raise ProfileError("its columns are of different lengths")
    return profile


def formula(fit: Fit) -> str:
    """The curve as people write it."""
    sign = "-" if fit.fixed_ms < 0 else ""
    line = f"{sign}{abs(fit.fixed_ms):.2f} ms + {fit.slope_ms * 1e3:.2f} us x tokens"
    return line if fit.flat_ms is None else f"max({fit.flat_ms:.2f} ms, {line})"


def flops_text(flops: float) -> str:
    """Operations a second, for people."""
    return f"{flops / 1e9:.0f} GFLOP/s" if flops < 1e12 else f"{flops / 1e12:.3g} TFLOP/s"
