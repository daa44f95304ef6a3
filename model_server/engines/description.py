"""What a served model is, from its folder and its configuration: the `ModelInfo` of any engine.

Owns the size of the vectors, the maximum of tokens and the revision's settings, so that two engines
with the same model say the same of it. Reads no weights and needs no torch: an engine that runs in
a process of its own is described here, in its parent.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from model_server.engines.base import ModelInfo
from model_server.engines.model_folder import (
    DenseSpec,
    LayerNormSpec,
    ModelFolder,
    ModelRefusedError,
    NormalizeSpec,
    TailSpec,
)
from model_server.engines.revision import model_revision


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """How an engine runs a model."""

    engine: str
    versions: Mapping[str, str]
    device: str
    dtype: str
    quantization: str | None = None


def describe(
    folder: ModelFolder,
    running: Running,
    *,
    dimensions: int,
    input_tokens_max: int,
    cache_dir: Path | None,
) -> ModelInfo:
    """What is served; `dimensions` are those of `vector_dimensions`.

    A quantised model's precision is called by its quantisation, for which no agreement with the
    golden vectors is known: it must be set.
    """
    folders = [folder.path, folder.transformer.path]
    folders += [spec.path for spec in folder.tail if not isinstance(spec, NormalizeSpec)]
    settings: dict[str, object] = {
        "pooling": [*folder.pooling.modes, folder.pooling.include_prompt],
        "modules": [repr(type(spec).__name__) for spec in folder.tail],
        "prompts": dict(folder.prompts),
        "default_prompt_name": folder.default_prompt_name,
        "truncate_dim": folder.truncate_dim,
        "input_tokens_max": input_tokens_max,
        "dtype": running.dtype,
        "quantization": running.quantization,
    }
    default = folder.default_prompt_name
    return ModelInfo(
        revision=model_revision(folders, settings, cache_dir),
        dimensions=dimensions,
        matryoshka_dimensions=tuple(
            size for size in folder.matryoshka_dimensions if size < dimensions
        ),
        normalized=is_normalized(folder.tail),
        input_tokens_max=input_tokens_max,
        prompts=folder.prompts,
        default_prompt=folder.prompts.get(default) if default is not None else None,
        engine=running.engine,
        versions={"python": platform.python_version(), **running.versions},
        device=running.device,
        precision=running.quantization or running.dtype,
    )


def installed_versions(*distributions: str) -> dict[str, str]:
    """Versions of installed distributions, by name."""
    return {name: metadata.version(name) for name in distributions}


def first_installed(distributions: Sequence[str]) -> dict[str, str]:
    """The version of the first of these that is installed, by its name; empty: none is."""
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return {name: metadata.version(name)}
    return {}


def is_normalized(tail: Sequence[TailSpec]) -> bool:
    """Whether the model's vectors have length 1: its last module normalises."""
    return bool(tail) and isinstance(tail[-1], NormalizeSpec)


def vector_dimensions(folder: ModelFolder, hidden_size: int) -> int:
    """The size of the model's vectors, given that of its token vectors.

    Raises:
        ModelRefusedError: its modules do not fit each other.
    """
    if folder.pooling.dimension not in (None, hidden_size):
        raise ModelRefusedError(
            f"the pooling is for vectors of {folder.pooling.dimension}, the model's are of "
            f"{hidden_size}"
        )
    pooled = hidden_size * len(folder.pooling.modes)
    return output_dimension(pooled, folder.tail, folder.truncate_dim)


def output_dimension(pooled: int, specs: Sequence[TailSpec], truncate_dim: int | None) -> int:
    """The size of the model's vectors, given that of its pooled ones.

    Raises:
        ModelRefusedError: a module is made for vectors of another size.
    """
    size = pooled
    for spec in specs:
        if isinstance(spec, DenseSpec):
            taken, made = spec.in_features, spec.out_features
        elif isinstance(spec, LayerNormSpec):
            taken = made = spec.dimension
        else:
            continue
        if taken != size:
            raise ModelRefusedError(f"{spec.path.name} takes vectors of {taken}, gets {size}")
        size = made
    return size if truncate_dim is None else min(size, truncate_dim)


def least_maximum(wanted: int | None, *limits: int | None) -> int:
    """The most tokens of an input: the least of the model's own limits, or less if that is wanted.

    Raises:
        ModelRefusedError: there is no limit at all, or what is wanted is above it.
    """
    known = [limit for limit in limits if limit is not None]
    if not known:
        if wanted is None:
            raise ModelRefusedError(
                "the model declares no maximum of tokens: set the option input_tokens_max"
            )
        return wanted
    if wanted is not None and not 0 < wanted <= min(known):
        raise ModelRefusedError(
            f"input_tokens_max = {wanted}: it may only lower the model's maximum of {min(known)}"
        )
    return wanted or min(known)
