"""vLLM as an engine: in a process of its own, which the server starts and may lose.

Nothing of vLLM is imported here. `model_server.engines.child.vllm_runner` runs it.
"""

from __future__ import annotations

from typing import Final

from model_server.engines.child.engine import ChildEngine
from model_server.engines.child.loading import load_child_engine, require_version
from model_server.engines.child.options import ChildOptions
from model_server.engines.vllm_arguments import DISTRIBUTIONS

VERSION: Final = "0.32.0"
"""The adapter uses what is not public in it."""
RUNNER: Final = "model_server.engines.child.vllm_runner"


def load_vllm(options: ChildOptions) -> ChildEngine:
    """Start vLLM with a model of a local folder; nothing is downloaded.

    Raises:
        ImportError: vLLM is not installed, or not in the one version that this is made for.
        ModelRefusedError: the model can't be served exactly.
        EngineDiedError: vLLM did not come up.
    """
    require_version("vLLM", VERSION, DISTRIBUTIONS)
    return load_child_engine(options, name="vllm", runner=RUNNER)
