"""Measured curves kept between starts, by what they depend on.

A curve is of one model revision in one engine, at one precision, on one device of one machine, with
the versions of the libraries that run the pass. Invariants: what is read is of exactly the key that
was asked for, or nothing; a damaged file is nothing. The target is not kept: it follows from the
curve and the settings of the day.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from model_server.core.saturation import Measured
from model_server.engines.base import ModelInfo
from model_server.engines.files import read_cached_object, write_atomically

_FORMAT: Final = 1
_NOT_IN_THE_PASS: Final = frozenset({"python", "tokenizers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a curve depends on."""

    revision: str
    engine: str
    precision: str
    device: str
    machine: str
    versions: Mapping[str, str]

    def path(self, cache_dir: Path) -> Path:
        """Its file."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_dir / f"profile-{digest[:32]}.json"


def profile_key(info: ModelInfo, machine: str | None = None) -> ProfileKey:
    """The key of a loaded engine on this machine."""
    return ProfileKey(
        revision=info.revision,
        engine=info.engine,
        precision=info.precision,
        device=info.device,
        machine=machine or this_machine(),
        versions={k: v for k, v in sorted(info.versions.items()) if k not in _NOT_IN_THE_PASS},
    )


def this_machine() -> str:
    """The processor's name, or what is known of it: caches may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or "unknown processor"
    return f"{platform.machine()}, {name}"


def save_profile(cache_dir: Path, key: ProfileKey, measured: Measured) -> Path:
    """Keep a curve, in place of an older one of the same key; returns its file.

    Raises:
        OSError: the folder can't be written.
    """
    path = key.path(cache_dir)
    kept = {
        "format": _FORMAT,
        "key": asdict(key),
        "tokens": measured.tokens,
        "rounds_ms": measured.rounds_ms,
    }
    write_atomically(path, json.dumps(kept, indent=1).encode())
    return path


def stored_profile(cache_dir: Path, key: ProfileKey) -> Measured | None:
    """The curve kept under this key."""
    kept = read_cached_object(key.path(cache_dir))
    if kept.get("format") != _FORMAT or kept.get("key") != asdict(key):
        return None
    return measured_of(kept)


def measured_of(kept: Mapping[str, object]) -> Measured | None:
    """The curve in a JSON object; None: there is no whole one."""
    tokens, rounds_ms = kept.get("tokens"), kept.get("rounds_ms")
    if not isinstance(tokens, list) or not isinstance(rounds_ms, list):
        return None
    try:
        return Measured(
            tokens=tuple(int(count) for count in tokens),
            rounds_ms=tuple(tuple(float(time_ms) for time_ms in one) for one in rounds_ms),
        )
    except (TypeError, ValueError, OverflowError):
        return None
