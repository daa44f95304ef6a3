"""A model folder and an engine's runner to a `ChildEngine`: what SGLang and vLLM have in common.

Everything that can be known without the engine is read and refused here, before a process starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from model_server.engines.base import EngineDiedError
from model_server.engines.child.engine import REFERENCE, ChildEngine, ChildSpec, StartedChild
from model_server.engines.child.options import ChildOptions
from model_server.engines.description import (
    Running,
    describe,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a model before its engine starts."""

    folder: ModelFolder
    config: Any
    """Of the transformer, by transformers."""
    architecture: str
    """The first of `architectures` in its `config.json`."""
    dimensions: int
    input_tokens_max: int
    pass_tokens_max: int


def load_child_engine(
    options: ChildOptions,
    *,
    name: str,
    runner: str,
    runner_options: Callable[[ChildOptions, Facts], Mapping[str, Any]],
) -> ChildEngine:
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
    facts = Facts(
        folder=folder,
        config=config,
        architecture=_architecture(config),
        dimensions=vector_dimensions(folder, int(config.hidden_size)),
        input_tokens_max=maximum,
        pass_tokens_max=options.pass_tokens_max or max(PASS_TOKENS_MIN, 2 * maximum),
    )
    environment = child_environment(os.environ, options.threads)
    child = StartedChild(
        ChildSpec(
            runner=runner,
            options=runner_options(options, facts),
            environment=environment,
            says=options.says,
            timeout_s=options.start_timeout_s,
        )
    )
    running = Running(
        engine=name,
        versions={**installed_versions("transformers", "tokenizers"), **child.ready["versions"]},
        device=child.ready["device"],
        dtype=options.dtype,
        quantization=options.quantization,
    )
    reference = ChildSpec(
        runner=REFERENCE,
        options={
            "model": str(folder.path),
            "pooling": options.pooling,
            "device": _torch_device(options.device, child.ready),
        },
        environment=environment,
        says=options.says,
        timeout_s=options.start_timeout_s,
    )
    try:
        return ChildEngine(
            child,
            info=describe(
                folder,
                running,
                dimensions=facts.dimensions,
                input_tokens_max=maximum,
                cache_dir=options.cache_dir,
            ),
            tokenization=tokenization,
            pass_tokens_max=_room(child, facts),
            reference=reference,
        )
    except BaseException:
        child.process.close()
        raise


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


def _room(child: StartedChild, facts: Facts) -> int:
    room = int(child.ready["pass_tokens_max"])
    if room < facts.input_tokens_max:
        raise EngineDiedError(
            f"its memory has room for {room} tokens, and one input may have "
            f"{facts.input_tokens_max}: raise memory_fraction, or lower input_tokens_max"
        )
    return room
