"""Floating-point operations of a forward pass, from the model's files, and what the machine can do.

Counted is what matrix products need: 2 operations a weight and token for every weight matrix of the
transformer but its embedding tables (which are looked up, not multiplied), and 4 x layers x width x
length^2 a text for attention's two products. Norms, activations and the modules after pooling are
left out: together under a hundredth. Sliding windows are not subtracted; texts of the mix are
shorter. Source of the count: Kaplan et al. 2020, section 2.1.
"""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOOKED_UP = ("embed", "wte", "wpe", "lm_head", "pooler")
"""In the names of weights that no token is multiplied with: tables, and heads that are not used."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PRECISIONS = ("float32", "bfloat16", "float16")
"""Of which torch has products of matrices; a quantised engine has kernels of its own."""
_HEADER_BYTES_MAX = 100_000_000
"""The format's own limit: https://huggingface.co/docs/safetensors."""


class FlopsUnknownError(Exception):
    """The operations can't be told from the files; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsModel:
    """`weights`: entries of all weight matrices; `attention`: layers x heads x head size."""

    weights: int
    attention: int

    def pass_flops(self, lengths: Sequence[int]) -> float:
        """Operations of one padding-free pass over texts of these lengths."""
        squares = sum(length * length for length in lengths)
        return 2.0 * self.weights * sum(lengths) + 4.0 * self.attention * squares


def read_flops_model(folder: Path) -> FlopsModel:
    """Of a transformer's folder: `config.json` and its safetensors' headers.

    Raises:
        FlopsUnknownError: a file is missing or says something else, or the model has experts, of
            which only some run.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        shapes = dict(_shapes(folder))
    except (OSError, ValueError, struct.error) as error:
        raise FlopsUnknownError(f"{folder}: {error}") from error
    if not isinstance(config, dict) or not shapes:
        raise FlopsUnknownError(f"{folder} holds no config.json with safetensors")
    return flops_model(config, shapes)


def flops_model(config: dict[str, Any], shapes: Mapping[str, Sequence[int]]) -> FlopsModel:
    """Of a configuration and the shapes of all weights by name.

    Raises:
        FlopsUnknownError: the configuration lacks a size, or the model has experts.
    """
    experts = [name for name in _EXPERTS if config.get(name)]
    if experts:
        raise FlopsUnknownError(f"a model with {experts[0]} runs a part of its weights only")
    layers = _number(config, "num_hidden_layers", "n_layers", "n_layer")
    heads = _number(config, "num_attention_heads", "n_heads", "n_head")
    head_size = config.get("head_dim") or _number(config, "hidden_size", "dim", "n_embd") // heads
    weights = sum(
        shape[0] * shape[1]
        for name, shape in shapes.items()
        if len(shape) == 2 and not any(part in name for part in _LOOKED_UP)
    )
    return FlopsModel(weights=weights, attention=layers * heads * int(head_size))


def _number(config: dict[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and value > 0:
            return value
    raise FlopsUnknownError(f"config.json declares no {names[0]}")


def _shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of all tensors."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _HEADER_BYTES_MAX:
                raise ValueError(f"{path.name} has a header of {size} bytes")
            header = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, entry["shape"]


def peak_device(device: str) -> str:
    """The device on which an engine's peak is measured, as torch calls it.

    `device` is that of its `ModelInfo`.

    Raises:
        FlopsUnknownError: it is neither a CPU nor a CUDA device.
    """
    name = device.partition(": ")[0]
    kind = re.match(r"cpu|cuda", name)
    if kind is None:
        raise FlopsUnknownError(f"no peak is measured on {device}: give it with --peak-tflops")
    return "cpu" if kind[0] == "cpu" else name


def measured_peak_flops(device: str, precision: str, *, seconds: float = 3.0) -> float:
    """Operations a second of this machine: the best of square matrix products, by torch.

    `device` as torch names it. The best of several sizes counts, since small ones do not fill a
    GPU and large ones do not fit a cache. They take turns, so that other work on the machine does
    not fall on one of them alone.

    Raises:
        FlopsUnknownError: there is no such product in this precision.
    """
    import torch  # noqa: PLC0415 - an extra

    if precision not in _PRECISIONS:
        raise FlopsUnknownError(f"no peak is measured in {precision}: give it with --peak-tflops")
    dtype = getattr(torch, precision)
    sizes = (4_096, 8_192) if device.startswith("cuda") else (768, 1_536, 2_304)
    pairs = {
        size: [torch.randn(size, size, device=device).to(dtype) for _ in range(2)] for size in sizes
    }
    for pair in pairs.values():  # libraries set themselves up
        _product_s(*pair)
    ends_at = time.perf_counter() + seconds
    best = 0.0
    while not best or time.perf_counter() < ends_at:
        for size, pair in pairs.items():
            best = max(best, 2.0 * size**3 / _product_s(*pair))
    return best


def _product_s(left: Any, right: Any) -> float:
    import torch  # noqa: PLC0415

    started = time.perf_counter()
    torch.matmul(left, right)
    if left.is_cuda:
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - started
