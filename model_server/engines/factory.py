"""Settings to an engine; each engine's packages are imported only where it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from model_server.engines.base import Engine
from model_server.engines.child.options import ChildOptions
from model_server.engines.simulated import SimulatedEngine, SimulatedOptions
from model_server.settings import SEPARATE_ENGINES

if TYPE_CHECKING:
    from model_server.settings import ModelServerSettings


class EngineUnavailableError(Exception):
    """The engine can't be made here; the message is one line."""


def create_engine(
    settings: ModelServerSettings,
    model_folder: Path | None,
    cache_dir: Path | None = None,
    says: Callable[[str], None] = lambda _: None,
) -> Engine:
    """Load the engine that the settings name, with the model of a local folder.

    `cache_dir`: a folder that can be written to, if there is one. `says` is given each line that an
    engine's own process prints, from a thread.

    Raises:
        EngineUnavailableError: its packages are not installed.
        Exception: what loading raised.
    """
    if settings.engine == "simulated":
        return SimulatedEngine(_simulated_options(settings))
    if model_folder is None:
        raise EngineUnavailableError(f"engine {settings.engine} needs a model")
    if settings.engine in SEPARATE_ENGINES:
        return _separate(settings.engine, _child_options(settings, model_folder, cache_dir, says))
    # Torch's threads wait for each other by spinning, which on cores shared with other processes
    # triples the CPU time of a pass and makes it several times as long. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from model_server.engines.padded_engine import (  # noqa: PLC0415 - an extra
            ENGINE_NAME,
            load_padded,
        )
        from model_server.engines.torch_engine import TorchEngine, TorchOptions  # noqa: PLC0415
    except ImportError as error:
        raise EngineUnavailableError(
            f"engine {settings.engine} needs the extra 'torch' "
            f"(`make env` where the project is checked out): {error}"
        ) from error
    options = TorchOptions(
        model_path=model_folder,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        pooling=settings.pooling,
        input_tokens_max=settings.input_tokens_max,
        cache_dir=cache_dir,
    )
    return load_padded(options) if settings.engine == ENGINE_NAME else TorchEngine.load(options)


def _separate(engine: str, options: ChildOptions) -> Engine:
    try:
        if engine == "sglang":
            from model_server.engines.sglang_engine import load_sglang  # noqa: PLC0415 - an extra

            return load_sglang(options)
        from model_server.engines.vllm_engine import load_vllm  # noqa: PLC0415 - an extra

        return load_vllm(options)
    except ImportError as error:
        raise EngineUnavailableError(
            f"engine {engine} needs the extra {engine!r} (`make env-{engine}` where the project is "
            f"checked out, for a machine without a GPU): {error}"
        ) from error


def _child_options(
    settings: ModelServerSettings,
    model_folder: Path,
    cache_dir: Path | None,
    says: Callable[[str], None],
) -> ChildOptions:
    return ChildOptions(
        model_path=model_folder,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        pooling=settings.pooling,
        input_tokens_max=settings.input_tokens_max,
        pass_tokens_max=settings.batch_tokens_max,
        inputs_max=settings.inputs_max,
        quantization=settings.quantization,
        tensor_parallel=settings.tensor_parallel,
        memory_fraction=settings.memory_fraction,
        attention_backend=settings.attention_backend,
        start_timeout_s=settings.engine_start_timeout_ms / 1_000,
        verbose=settings.log_level == "debug",
        cache_dir=cache_dir,
        says=says,
    )


def _simulated_options(settings: ModelServerSettings) -> SimulatedOptions:
    given = settings.simulated
    own_maximum = settings.input_tokens_max or given.input_tokens_max
    return SimulatedOptions(
        fixed_ms=given.fixed_ms,
        slope_us_per_token=given.slope_us_per_token,
        knee_tokens=given.knee_tokens,
        dimensions=given.dimensions,
        matryoshka_dimensions=given.matryoshka_dimensions,
        input_tokens_max=min(own_maximum, given.input_tokens_max),
        prompts=given.prompts,
        tokenizer=given.tokenizer,
        faults=given.faults,
        slow_ms=given.slow_ms,
        out_of_memory_above_tokens=given.out_of_memory_above_tokens,
        broken_after_passes=given.broken_after_passes,
        wrong_reference=given.wrong_reference,
    )
