"""Torch as an engine's runtime: device, threads, memory, and what its errors mean.

Shared by the engines that run torch in this process. It knows no models.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch

from model_server.engines.base import EngineDiedError, EngineOutOfMemoryError
from model_server.engines.model_folder import ModelRefusedError

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """`auto` (CUDA if there is one, else CPU) or what `torch.device` takes.

    Raises:
        ModelRefusedError: there is no such device here.
    """
    if name != "auto":
        try:
            return torch.empty(0, device=name).device
        except (RuntimeError, AssertionError) as error:
            raise ModelRefusedError(f"device {name!r}: {error}") from error
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """As `ModelInfo` tells it: what pass times depend on."""
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return (
        f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    )


def set_threads(threads: int) -> None:
    """Torch's threads on a CPU; 0: as many as this process may use."""
    if threads < 0:
        raise ModelRefusedError(f"threads = {threads}")
    torch.set_num_threads(threads or _cpus())


def _cpus() -> int:
    """CPUs that this process may use; a container's quota counts, which torch does not look at."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity is not None else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        limit = max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        limit = cpus
    # Torch's own default leaves out hyperthreads, which matrix products gain nothing from.
    return max(1, min(cpus, limit, torch.get_num_threads()))


def free_cached_memory() -> None:
    """Give a GPU's freed blocks back, so that a smaller pass finds whole ones."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def after_failed_pass(error: Exception) -> Exception:
    """What an error of torch means for the scheduler; a full memory's cache is given back."""
    text = str(error)
    full = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if isinstance(error, RuntimeError):
        full = full or "can't allocate memory" in text or "out of memory" in text
        if not full and ("CUDA error" in text or "device-side assert" in text):
            return EngineDiedError(text)
    if not full:
        return error
    free_cached_memory()
    return EngineOutOfMemoryError(text)
