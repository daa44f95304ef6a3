"""The end of a run: violations for people, counts as one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def finish(what: str, violations: Sequence[str], figures: Mapping[str, Any]) -> bool:
    """Print both; returns whether nothing was wrong."""
    for violation in violations:
        print(f"VIOLATION {violation}", flush=True)
    line = {"chaos": what, "ok": not violations, **figures}
    print(json.dumps(line), flush=True)
    return not violations
