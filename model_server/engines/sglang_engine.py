"""SGLang as an engine: in a process of its own, which the server starts and may lose.

Nothing of SGLang is imported here: in our process it would take over SIGTERM, and its scheduler's
death would kill us. `model_server.engines.child.sglang_runner` runs it.
"""

from __future__ import annotations

from typing import Final

from model_server.engines.child.engine import ChildEngine
from model_server.engines.child.loading import load_child_engine, require_version
from model_server.engines.child.options import ChildOptions

VERSION: Final = "0.5.23"
"""The adapter uses what is not public in it."""
RUNNER: Final = "model_server.engines.child.sglang_runner"


def load_sglang(options: ChildOptions) -> ChildEngine:
    """Start SGLang with a model of a local folder; nothing is downloaded.

    Raises:
        ImportError: SGLang is not installed, or not in the one version that this is made for.
        ModelRefusedError: the model can't be served exactly.
        EngineDiedError: SGLang did not come up.
    """
    require_version("SGLang", VERSION, ("sglang",))
    return load_child_engine(options, name="sglang", runner=RUNNER)
