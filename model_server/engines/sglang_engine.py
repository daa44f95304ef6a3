"""SGLang as an engine: in a process of its own, which the server starts and may lose.

Nothing of SGLang is imported here: in our process it would take over SIGTERM, and its scheduler's
death would kill us. `model_server.engines.child.sglang_runner` runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from typing import Any, Final

from model_server.engines.child.engine import ChildEngine
from model_server.engines.child.loading import Facts, config_overrides, load_child_engine
from model_server.engines.child.options import ChildOptions
from model_server.engines.sglang_arguments import RunnerOptions

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
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise ImportError("SGLang is not installed") from error
    if found != VERSION:
        raise ImportError(f"SGLang {found} is installed, {VERSION} is needed")
    return load_child_engine(options, name="sglang", runner=RUNNER, runner_options=sglang_options)


def sglang_options(options: ChildOptions, facts: Facts) -> Mapping[str, Any]:
    """What the runner is told."""
    return asdict(
        RunnerOptions(
            model=str(facts.folder.path),
            transformer=str(facts.folder.transformer.path),
            architecture=facts.architecture,
            pooling=options.pooling,
            device=options.device,
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
