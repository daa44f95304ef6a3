"""The torch engine on a GPU: is it right, how fast, and what does batching by tokens gain?

    sh ops/bench/gpu.sh [--out FOLDER] [--seconds-max 230] [--smoke]

For a machine with torch, transformers and little else, and no network: models are made from
configurations with random weights. Three parts, each within its share of the time; what did not fit
is named. 1. *Correctness*: vectors of whole passes in float32 and 16 bits against transformers in
float64, text by text. 2. *Profiles*: latency, throughput and MFU against tokens a pass, from the
size of MiniLM to 7B; one JSON file each, which `model-server profile --from FILE --plots FOLDER`
draws anywhere (here too, where matplotlib is installed). 3. *Throughput* of the same queries in
passes of the target's size, padded, and one by one. The last line is one JSON object. `--smoke`
does all of it in small, on whatever there is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pkgutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.utils import logging

from model_server.core.saturation import TargetOptions
from model_server.engines import torch_attention
from model_server.engines.base import EngineOutOfMemoryError, ModelInfo, Tokens, Vectors
from model_server.engines.description import installed_versions
from model_server.engines.golden import COSINE_MIN, cosine
from model_server.engines.padded_engine import PaddedModel
from model_server.engines.torch_engine import PackedModel, TorchEngine, TorchOptions
from model_server.engines.torch_runtime import choose_device, device_name, free_cached_memory
from model_server.profiling.flops import flops_model, measured_peak_flops
from model_server.profiling.measure import CurveMeter, MeasureError, MeasureOptions
from model_server.profiling.mix import PassMaker
from model_server.profiling.plots import PlotsUnavailableError, draw_plots
from model_server.profiling.profile import Profile, as_json
from model_server.profiling.store import profile_key
from ops.bench import gpu_models as made

PASS_MS_MAX = 100.0
QUERIES_MIN, QUERIES_MAX = 16, 512
ROUNDS = 3
PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(slots=True)
class Budget:
    """What time is left, and what was left out for want of it."""

    seconds_max: float
    started_s: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)

    def left_s(self) -> float:
        """Until the end."""
        return self.seconds_max - (time.monotonic() - self.started_s)

    def allows(self, what: str, seconds: float) -> bool:
        """Whether there is so much left; if not, it is told in the end."""
        if self.left_s() >= seconds:
            return True
        self.left_out.append(what)
        return False


# 1. Correctness


def check_correctness(device: torch.device, *, smoke: bool, budget: Budget) -> list[dict[str, Any]]:
    """Cosines of whole passes to a float64 reference, by architecture and precision."""
    found: list[dict[str, Any]] = []
    architectures = made.SMOKE_ARCHITECTURES if smoke else made.ARCHITECTURES
    for name, config in architectures.items():
        if not budget.allows(f"correctness of {name}", 5 if smoke else 15):
            continue
        with tempfile.TemporaryDirectory() as folder:
            made.save_model(config, Path(folder))
            found += _compare(name, Path(folder), device)
    return found


def _compare(name: str, folder: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(11)
    lengths = [3, 4, 4, 9, 9, 9, 17, 33, 64, 65, 127, 200, 512]
    texts = [
        Tokens(ids=[1, *random.integers(4, 1_000, size=length - 2).tolist(), 2])
        for length in lengths
    ]
    expected = _reference(folder, texts, device)
    # Half precision is computed on a GPU only.
    for precision in PRECISIONS if device.type == "cuda" else PRECISIONS[:2]:
        options = TorchOptions(model_path=folder, device=str(device), dtype=precision)
        engine = TorchEngine.load(options)
        with _kernel_calls() as calls:
            together = engine.embed(texts)
        alone = np.concatenate([engine.embed([one]) for one in texts])
        engine.close()
        yield {
            "model": name,
            "precision": precision,
            "kernel": "variable-length attention" if calls else "runs of equal lengths",
            "cosine_min": float(cosine(together, expected).min()),
            "cosine_to_alone_min": float(cosine(together, alone).min()),
            "cosine_bound": COSINE_MIN[precision],
        }


@contextlib.contextmanager
def _kernel_calls() -> Iterator[list[int]]:
    """One entry for each call of torch's variable-length kernel: counted, not assumed."""
    calls: list[int] = []
    name = "model_server.engines.torch_attention._VARLEN"
    kernel = pkgutil.resolve_name(name.replace("._VARLEN", ":_VARLEN"))

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return kernel(*arguments, **named)

    with mock.patch(name, counted if kernel is not None else None):
        yield calls


@torch.inference_mode()
def _reference(folder: Path, texts: Sequence[Tokens], device: torch.device) -> Vectors:
    """Plain transformers in float64 with eager attention, one text at a time, mean and norm."""
    model = transformers.AutoModel.from_pretrained(
        str(folder), dtype=torch.float64, attn_implementation="eager", local_files_only=True
    )
    model = model.to(device).eval()
    rows = []
    for one in texts:
        ids = torch.tensor([list(one.ids)], device=device)
        hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        mean = hidden.mean(dim=0)
        rows.append((mean / mean.norm()).cpu().numpy())
    return np.stack(rows).astype(np.float32)


# 2. Profiles


def profile_size(
    size: made.Size, dtype: str, transformer: Any, *, smoke: bool, seconds: float
) -> Profile:
    """The curve of one model at one precision.

    Raises:
        MeasureError: the time or the memory allows no curve.
    """
    model = PackedModel(made.folder_in_memory(), transformer, transformer.device)
    maker = _maker()
    options = MeasureOptions(
        tokens_max=256 if smoke else 131_072,
        sizes_per_octave=1 if smoke else 2,
        rounds_min=2,
        rounds_max=2 if smoke else 7,
        pass_ms_stop=4 * PASS_MS_MAX,
        seconds_max=seconds,
    )
    measured = CurveMeter(
        _translating(model.embed), maker, options, clock_ns=time.perf_counter_ns
    ).measure()
    lengths = [maker.lengths(tokens) for tokens in measured.tokens]
    shapes = {name: list(weight.shape) for name, weight in transformer.named_parameters()}
    flops = flops_model(transformer.config.to_dict(), shapes)
    info = ModelInfo(
        revision="random weights",
        dimensions=model.dimensions,
        normalized=True,
        input_tokens_max=made.INPUT_TOKENS_MAX,
        engine="torch",
        versions=installed_versions("torch", "transformers"),
        device=device_name(transformer.device),
        precision=dtype,
    )
    return Profile(
        model=size.name,
        key=profile_key(info),
        measured=measured,
        options=TargetOptions(pass_ms_max=PASS_MS_MAX),
        texts=tuple(len(some) for some in lengths),
        pass_flops=tuple(flops.pass_flops(some) for some in lengths),
    )


def _maker() -> PassMaker:
    """As the tokenizer of these models makes texts; a server takes up to 1,024 a pass."""
    ids = [1, *(4 + i % 990 for i in range(made.INPUT_TOKENS_MAX - 2)), 2]
    return PassMaker(Tokens(ids=ids), inputs_max=1_024)


def _translating(embed: Callable[[Sequence[Tokens]], Vectors]) -> Callable[..., Vectors]:
    """Out of memory as the measurement knows it."""

    def run(inputs: Sequence[Tokens]) -> Vectors:
        try:
            return embed(inputs)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            raise EngineOutOfMemoryError(str(error)) from error

    return run


# 3. Throughput


def compare_throughput(
    profile: Profile, target: int, transformer: Any, *, seconds: float
) -> dict[str, Any]:
    """The same queries batched by tokens, padded in passes of as many texts, and one by one.

    As many queries as the time allows: one by one takes nearly all of it.
    """
    folder, device = made.folder_in_memory(), transformer.device
    packed = PackedModel(folder, transformer, device)
    padded = PaddedModel(folder, transformer, device)
    alone_s = profile.measured.medians()[0].pass_ms / 1e3
    afforded = int(seconds / (alone_s * 2 * (ROUNDS + 1)))
    queries = _queries(max(QUERIES_MIN, min(QUERIES_MAX, afforded)))
    passes = _by_tokens(queries, target)
    single = [[one] for one in queries]
    ways: dict[str, tuple[PackedModel | PaddedModel, list[list[Tokens]]]] = {
        "batched": (packed, passes),
        "padded": (padded, passes),
        "one_by_one": (packed, single),
        "one_by_one_padded": (padded, single),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        order = list(ways)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            model, some = ways[name]
            own = torch_attention.ATTENTION_NAME if model is packed else "sdpa"
            transformer.set_attn_implementation(own)
            started = time.perf_counter()
            for inputs in some:
                model.embed(inputs)
            if number:  # the first round only warms up
                times[name].append(time.perf_counter() - started)
    tokens = sum(len(one.ids) for one in queries)
    return {
        "model": profile.model,
        "precision": profile.key.precision,
        "target": target,
        "queries": len(queries),
        "tokens": tokens,
        "passes": len(passes),
        "queries_per_s": {name: len(queries) / median(some) for name, some in times.items()},
    }


def _queries(count: int) -> list[Tokens]:
    """Texts of the mix, in its order."""
    inputs: list[Tokens] = []
    maker, tokens = _maker(), 4_096
    while len(inputs) < count:
        inputs += maker.inputs(tokens)
    return inputs[:count]


def _by_tokens(queries: Sequence[Tokens], target: int) -> list[list[Tokens]]:
    """Filled in order, cut between texts, up to the target: what a server does."""
    passes: list[list[Tokens]] = [[]]
    room = target
    for one in queries:
        if passes[-1] and len(one.ids) > room:
            passes.append([])
            room = target
        passes[-1].append(one)
        room -= len(one.ids)
    return passes


# All of it


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The three parts; what they found."""
    budget = Budget(args.seconds_max)
    device = choose_device("auto")
    torch_attention.register()
    print(f"{device_name(device)}, torch {torch.__version__}", flush=True)
    correct = check_correctness(device, smoke=args.smoke, budget=budget)
    for row in correct:
        print(
            f"{row['model']:12} {row['precision']:9} cosine {row['cosine_min']:.6f} to float64, "
            f"{row['cosine_to_alone_min']:.6f} to alone ({row['kernel']})",
            flush=True,
        )
    profiles: list[dict[str, Any]] = []
    throughput: list[dict[str, Any]] = []
    chosen = made.SMOKE_SIZES if args.smoke else made.SIZES
    wanted = [(size, dtype) for size in chosen for dtype in size.dtypes]
    peaks: dict[str, float] = {}
    for index, (size, dtype) in enumerate(wanted):
        name = f"{size.name}, {dtype}"
        share_s = budget.left_s() / (len(wanted) - index)
        if not budget.allows(name, 2 if args.smoke else 12):
            continue
        try:
            if dtype not in peaks:
                peaks[dtype] = measured_peak_flops(device.type, dtype, seconds=1.0)
            attention = torch_attention.ATTENTION_NAME
            transformer = made.random_transformer(size.config, device, dtype, attention)
            profile = replace(
                profile_size(size, dtype, transformer, smoke=args.smoke, seconds=share_s * 0.4),
                peak_flops=peaks[dtype],
                peak_source=f"the best {dtype} matrix product measured here",
            )
            profiles.append(_keep(profile, args.out))
            target = int(profiles[-1]["target_tokens"])
            seconds = min(share_s * 0.4, budget.left_s() * 0.8)
            found = compare_throughput(profile, target, transformer, seconds=seconds)
        except (MeasureError, torch.OutOfMemoryError) as error:
            budget.left_out.append(f"{name}: {error}")
            continue
        finally:
            transformer = None
            free_cached_memory()
        throughput.append(found)
        rates = ", ".join(f"{way} {rate:.0f}" for way, rate in found["queries_per_s"].items())
        print(f"{name}: queries/s: {rates}", flush=True)
    return {
        "bench": "gpu",
        "device": device_name(device),
        "torch": torch.__version__,
        "smoke": args.smoke,
        "correctness": correct,
        "profiles": profiles,
        "throughput": throughput,
        "left_out": budget.left_out,
    }


def _keep(profile: Profile, out: Path) -> dict[str, Any]:
    """Write the profile and its plots; returns what matters of it."""
    curve = profile.read()
    name = f"{profile.model}-{profile.key.precision}"
    path = out / f"profile-{name}.json"
    path.write_text(as_json(profile) + "\n", "utf-8")
    mfu = profile.mfu([point.pass_ms for point in curve.points]) or [0.0]
    at = [int(point.tokens) for point in curve.points].index(curve.target.tokens)
    summary = {
        "model": profile.model,
        "precision": profile.key.precision,
        "target_tokens": curve.target.tokens,
        "target_interval_tokens": [curve.target_low, curve.target_high],
        "target_rule": str(curve.target.rule),
        "knee_tokens": curve.knee_tokens,
        "pass_ms_at_target": curve.points[at].pass_ms,
        "mfu_at_target": mfu[at],
        "mfu_max": max(mfu),
        "json": path.name,
        "plots": _plots(profile, out / name),
    }
    knee = f"{curve.knee_tokens:.0f}" if curve.knee_tokens is not None else "none"
    print(
        f"{name}: target {curve.target.tokens} tokens ({curve.target_low} to {curve.target_high}; "
        f"{curve.target.rule}), knee {knee}, {summary['pass_ms_at_target']:.2f} ms, "
        f"MFU {mfu[at]:.1%} there",
        flush=True,
    )
    return summary


def _plots(profile: Profile, folder: Path) -> list[str]:
    """Drawn where there is something to draw with; else the JSON file is drawn elsewhere."""
    try:
        return [str(path.relative_to(folder.parent)) for path in draw_plots(profile, folder)]
    except PlotsUnavailableError:
        return []


def wrong_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of `check_correctness` whose vectors are not near enough."""
    names = ("cosine_min", "cosine_to_alone_min")
    return [row for row in rows if not all(row[name] >= row["cosine_bound"] for name in names)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 1 where a vector is wrong."""
    parser = argparse.ArgumentParser(prog="sh ops/bench/gpu.sh", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu-bench"), help="for JSON and plots")
    parser.add_argument("--seconds-max", type=float, default=230.0)
    parser.add_argument("--smoke", action="store_true", help="in small, on a CPU too")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    found = run(args)
    (args.out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if found["left_out"]:
        print("Left out: " + "; ".join(found["left_out"]))
    print(json.dumps(found), flush=True)
    wrong = wrong_rows(found["correctness"])
    for row in wrong:
        print(f"Error: {row['model']} in {row['precision']} is wrong: {row}", file=sys.stderr)
    return 1 if wrong or not found["correctness"] else 0


if __name__ == "__main__":
    sys.exit(main())
