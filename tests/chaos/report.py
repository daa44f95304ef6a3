"""What a run prints: what happens and when; violations for people, counts as one line of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

STARTED_AT = time.monotonic()


def say(who: str, what: str) -> None:
    """Print what happens, and when."""
    print(f"{time.monotonic() - STARTED_AT:7.1f} s  {who:22} {what}", flush=True)


def finish(what: str, violations: Sequence[str], figures: Mapping[str, Any]) -> bool:
    """Print both; returns whether nothing was wrong."""
    for violation in violations:
        print(f"VIOLATION {violation}", flush=True)
    line = {"chaos": what, "ok": not violations, **figures}
    print(json.dumps(line), flush=True)
    return not violations
