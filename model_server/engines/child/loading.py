"""A model folder and an engine's runner to a `ChildEngine`: what SGLang and vLLM have in common.

Everything that can be known without the engine is read and refused here, before a process starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from model_server.engines.base import EngineDiedError
from model_server.engines.child.engine import REFERENCE, ChildEngine, ChildSpec, StartedChild
from model_server.engines.child.options import ChildOptions, RunnerOptions
from model_server.engines.description import (
    Running,
    describe,
    first_installed,
    installed_versions,
    least_maximum,
    vector_dimensions,
)
from model_server.engines.model_folder import ModelFolder, ModelRefusedError, read_model_folder
from model_server.engines.tokenization import Tokenization, load_tokenizer

PASS_TOKENS_MIN: Final = 16_384
"""A pass may have at least so many tokens where no setting says less: a target that is found later
must not need another start of the engine."""

_PADDED_POSITIONS: Final = frozenset({"camembert", "roberta", "xlm-roberta", "xlm-roberta-xl"})
"""Model types that count positions from the padding token's + 1, in a table with room for it."""


def require_version(engine: str, version: str, distributions: Sequence[str]) -> None:
    """Make sure that the first installed of these distributions is of this version.

    Raises:
        ImportError: none is installed, or another version.
    """
    found = first_installed(distributions)
    if not found:
        raise ImportError(f"{engine} is not installed")
    if version not in found.values():
        raise ImportError(f"{engine} {', '.join(found.values())} is installed, {version} is needed")


def load_child_engine(options: ChildOptions, *, name: str, runner: str) -> ChildEngine:
    """Read the folder, start the child, describe what it serves.

    Raises:
        ModelRefusedError: the model can't be served exactly, or an option contradicts it.
        EngineDiedError: the engine did not come up.
    """
    folder = read_model_folder(options.model_path, options.pooling)
    config = _configuration(folder)
    parts = load_tokenizer(folder.transformer)
    maximum = least_maximum(
        options.input_tokens_max,
        folder.transformer.max_seq_length,
        parts.model_max_length,
        positions_max(config),
    )
    tokenization = Tokenization(
        parts, input_tokens_max=maximum, include_prompt=folder.pooling.include_prompt
    )
    told = runner_options(options, folder, config, input_tokens_max=maximum)
    child = StartedChild(_spec(options, runner, asdict(told)))
    try:
        ready = child.ready
        running = Running(
            engine=name,
            versions={**installed_versions("transformers", "tokenizers"), **ready["versions"]},
            device=ready["device"],
            dtype=options.dtype,
            quantization=options.quantization,
        )
        reference = {
            "model": told.model,
            "pooling": told.pooling,
            "device": _torch_device(options.device, ready),
        }
        return ChildEngine(
            child,
            info=describe(
                folder,
                running,
                dimensions=told.dimensions,
                input_tokens_max=maximum,
                cache_dir=options.cache_dir,
            ),
            tokenization=tokenization,
            pass_tokens_max=_room(ready, told),
            reference=_spec(options, REFERENCE, reference),
        )
    except BaseException:
        child.process.close()
        raise


def runner_options(
    options: ChildOptions, folder: ModelFolder, config: Any, *, input_tokens_max: int
) -> RunnerOptions:
    """What the runner is told; `config` is the transformer's, by transformers.

    Raises:
        ModelRefusedError: `config` names no architecture, or the model's modules don't fit.
    """
    return RunnerOptions(
        model=str(folder.path),
        transformer=str(folder.transformer.path),
        architecture=_architecture(config),
        pooling=options.pooling,
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        tensor_parallel=options.tensor_parallel,
        memory_fraction=options.memory_fraction,
        attention_backend=options.attention_backend,
        dimensions=vector_dimensions(folder, int(config.hidden_size)),
        input_tokens_max=input_tokens_max,
        pass_tokens_max=options.pass_tokens_max or max(PASS_TOKENS_MIN, 2 * input_tokens_max),
        inputs_max=options.inputs_max,
        log_level="info" if options.verbose else "warning",
        config_overrides=config_overrides(config),
    )


def _spec(options: ChildOptions, runner: str, told: Mapping[str, Any]) -> ChildSpec:
    return ChildSpec(
        runner=runner,
        options=told,
        environment=child_environment(os.environ, options.threads),
        says=options.says,
        timeout_s=options.start_timeout_s,
    )


def child_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """What the engine's processes get: ours, without our settings, and nothing of the network."""
    ours = {k: v for k, v in environment.items() if not k.startswith("MODEL_SERVER_")}
    chosen = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    fixed = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {"OMP_WAIT_POLICY": "PASSIVE", **ours, **chosen, **fixed}


def positions_max(config: Any) -> int | None:
    """How many positions a text may have, by the model's configuration; None: no bound is known."""
    declared = getattr(config, "max_position_embeddings", None)
    if not isinstance(declared, int) or declared <= 0:
        return None
    if config.model_type in _PADDED_POSITIONS:
        return declared - int(config.pad_token_id) - 1
    return declared


def config_overrides(config: Any) -> dict[str, str]:
    """What engines read in a `config.json` of an encoder, and transformers 5 no longer writes.

    It knows no position embeddings but absolute ones.
    """
    absent = not hasattr(config, "position_embedding_type")
    return {"position_embedding_type": "absolute"} if absent else {}


def _configuration(folder: ModelFolder) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import

    path = str(folder.transformer.path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelRefusedError(f"no configuration can be read from {path}: {error}") from error
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise ModelRefusedError(f"{path}: config.json declares no hidden_size")
    return config


def _architecture(config: Any) -> str:
    architectures = getattr(config, "architectures", None) or []
    if not architectures:
        raise ModelRefusedError("config.json: architectures names no class")
    return str(architectures[0])


def _torch_device(asked: str, ready: Mapping[str, Any]) -> str:
    if asked != "auto":
        return asked
    return "cpu" if ready["device"] == "cpu" else "cuda"


def _room(ready: Mapping[str, Any], told: RunnerOptions) -> int:
    room = int(ready["pass_tokens_max"])
    if room < told.input_tokens_max:
        raise EngineDiedError(
            f"its memory has room for {room} tokens, and one input may have "
            f"{told.input_tokens_max}: raise memory_fraction, or lower input_tokens_max"
        )
    return room
