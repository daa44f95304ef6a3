"""How this very program is called, for hints that people paste into a shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def own_command() -> str:
    """The bare name where the shell finds this program by it, else the way it was started.

    A path stays as it was typed, so a relative one works from the same folder only.
    """
    started = Path(sys.argv[0])
    if started.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m {started.parent.name}"
    found = shutil.which(started.name)
    if found is not None and Path(found).samefile(started):
        return started.name
    return shlex.quote(sys.argv[0])
