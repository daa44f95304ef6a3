"""From settings to an engine that may serve: the model's folder, the golden check, the warm-up."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import structlog
from structlog.testing import LogCapture

from model_server.engines import golden
from model_server.engines.base import Tokens, Vectors
from model_server.engines.factory import EngineUnavailableError, create_engine
from model_server.engines.golden import GoldenMismatchError
from model_server.engines.hub import HubError, model_folder
from model_server.engines.simulated import SimulatedEngine, SimulatedOptions
from model_server.server.startup import Started, StartError, StartOptions, start_engine
from model_server.settings import MESSAGE_BYTES_MAX, load_settings
from protos.embedding.v1 import embedding_service_pb2 as pb


class CountingEngine(SimulatedEngine):
    """Remembers the tokens of each pass, and whether it was closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SimulatedOptions(**{"fixed_ms": 0, "slope_us_per_token": 0, **options}))
        self.pass_tokens: list[int] = []
        self.pass_inputs: list[int] = []
        self.closed = False

    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        self.pass_tokens.append(sum(len(one.ids) for one in inputs))
        self.pass_inputs.append(len(inputs))
        return super().embed(inputs)

    def close(self) -> None:
        self.closed = True


def options(**changes: Any) -> StartOptions:
    fields: dict[str, Any] = {
        "batch_tokens_target": 100,
        "batch_tokens_max": None,
        "inputs_max": 1_000,
        "request_bytes_max": 1_000_000,
        "cache_dir": None,
        "golden_cosine_min": None,
    }
    return StartOptions(**{**fields, **changes})


def start(engine: SimulatedEngine, **changes: Any) -> Started:
    log = structlog.wrap_logger(structlog.ReturnLogger(), processors=[lambda *_: ""])
    return start_engine(lambda: engine, options(**changes), log)


@pytest.mark.parametrize(("input_tokens_max", "maximum"), [(40, 400), (1_000, 1_000)])
def test_the_warm_up_pass_has_the_maximum(input_tokens_max: int, maximum: int) -> None:
    engine = CountingEngine(input_tokens_max=input_tokens_max)
    started = start(engine)
    assert started.limits.batch_tokens_max == maximum
    warm_up = [tokens for tokens, _ in started.pass_samples]
    assert warm_up == engine.pass_tokens[-3:]
    assert maximum - len(started.canary.tokens.ids) < warm_up[0] <= maximum


def test_the_warm_up_keeps_to_the_maximum_of_inputs() -> None:
    started = start(CountingEngine(input_tokens_max=10), inputs_max=3)
    assert started.pass_samples[0][0] == 30


def test_out_of_memory_lowers_the_maximum_until_a_pass_fits() -> None:
    started = start(CountingEngine(input_tokens_max=30, out_of_memory_above_tokens=190))
    # 400 and 200 did not fit.
    assert started.limits.batch_tokens_max == 100
    assert started.limits.batch_tokens_target == 100


@pytest.mark.parametrize("room", [700, 560, 512])
def test_a_model_of_which_one_input_fits_is_served(room: int) -> None:
    engine = CountingEngine(input_tokens_max=512, out_of_memory_above_tokens=room)
    started = start(engine, batch_tokens_target=256)
    assert started.limits.batch_tokens_max == 512


def test_the_golden_check_keeps_to_the_smallest_maximum_there_can_be() -> None:
    engine = CountingEngine(input_tokens_max=512, out_of_memory_above_tokens=512)
    started = start(engine, batch_tokens_max=512, inputs_max=2)
    assert started.limits.batch_tokens_max == 512
    assert max(engine.pass_inputs) == 2


def test_a_model_of_which_no_input_fits_is_refused() -> None:
    class Small(CountingEngine):
        """Has memory for golden texts, and for nothing after the first larger pass."""

        def embed(self, inputs: Sequence[Tokens]) -> Vectors:
            if sum(len(one.ids) for one in inputs) > self.info.input_tokens_max:
                self._options = SimulatedOptions(out_of_memory_above_tokens=1, fixed_ms=0)
            return super().embed(inputs)

    engine = Small(input_tokens_max=30)
    with pytest.raises(StartError, match="does not fit"):
        start(engine)
    assert engine.closed


def test_an_engine_that_disagrees_with_its_reference_is_closed_and_refused() -> None:
    engine = CountingEngine(wrong_reference=True)
    with pytest.raises(GoldenMismatchError, match="cosine"):
        start(engine)
    assert engine.closed


def test_a_maximum_below_one_input_is_refused() -> None:
    engine = CountingEngine(input_tokens_max=600)
    with pytest.raises(StartError, match="below the model's maximum for one input"):
        start(engine, batch_tokens_max=500)
    assert engine.closed


@pytest.mark.parametrize(("dimensions", "most"), [(384, 1_000), (65_536, 255)])
def test_a_request_has_no_more_inputs_than_one_message_can_answer(
    dimensions: int, most: int
) -> None:
    logged = LogCapture()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[logged])
    engine = CountingEngine(dimensions=dimensions)
    started = start_engine(lambda: engine, options(inputs_max=1_000), log)
    assert started.limits.inputs_max == most
    lowered = [line for line in logged.entries if line["event"] == "inputs_max lowered"]
    assert len(lowered) == (most < 1_000)
    output = pb.Output(tokens=1 << 20, dimensions=dimensions, embedding=bytes(4 * dimensions))
    output.encoding, output.scale = 3, 1.0  # type: ignore[assignment]
    assert pb.EmbedResponse(outputs=[output]).ByteSize() * most < MESSAGE_BYTES_MAX


def test_a_cache_that_can_not_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(golden, "write_atomically", full)
    logged = LogCapture()
    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[logged])
    engine = CountingEngine()
    assert start_engine(lambda: engine, options(cache_dir=tmp_path), log).engine is engine
    told = [line for line in logged.entries if line["event"] == "golden vectors not kept"]
    assert [line["reason"] for line in told] == ["[Errno 28] No space left on device"]


# The model's folder


def settings(**given: Any) -> Any:
    return load_settings(options={"engine": "torch", **given}, environment={})


@pytest.mark.parametrize("name", ["modules.json", "config.json"])
def test_a_folder_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert model_folder(settings(model=str(tmp_path))) == tmp_path


def test_a_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").touch()
    with pytest.raises(HubError, match=r"model_revision 'v2' .* folder"):
        model_folder(settings(model=str(tmp_path), model_revision="v2"))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(HubError, match="there is no model in this folder"):
        model_folder(settings(model=str(tmp_path)))


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "a/b/c"])
def test_a_path_that_is_no_folder_is_not_looked_for_on_the_hub(model: str) -> None:
    with pytest.raises(HubError, match="no such folder"):
        model_folder(settings(model=model))


def fetching(monkeypatch: pytest.MonkeyPatch, fetch: Callable[..., str]) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)


def test_a_hub_id_is_fetched_before_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(repo: str, **given: Any) -> str:
        asked.update(given, repo=repo)
        return "/cache/snapshot"

    fetching(monkeypatch, fetch)
    chosen = settings(model="org/name", model_revision="abc", hub_token="secret")
    assert model_folder(chosen) == Path("/cache/snapshot")
    assert (asked["repo"], asked["revision"], asked["token"]) == ("org/name", "abc", "secret")
    assert not any(".bin" in pattern or ".py" in pattern for pattern in asked["allow_patterns"])


def test_what_the_hub_says_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repo: str, **_: Any) -> str:
        raise OSError("no network\nwith a long explanation")

    fetching(monkeypatch, fetch)
    with pytest.raises(HubError, match=r"org/name: .*no network$"):
        model_folder(settings(model="org/name"))


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("found", [None, "0.0.1"])
def test_an_engine_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, found: str | None, engine: str
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(EngineUnavailableError, match=rf"the extra .{engine}.") as raised:
        create_engine(settings(engine=engine, model="m"), Path("m"))
    assert (found or "not installed") in str(raised.value)


def test_the_simulated_engine_needs_no_model() -> None:
    simulated = load_settings(
        options={"engine": "simulated", "input_tokens_max": 99}, environment={}
    )
    assert model_folder(simulated) is None
    engine = create_engine(simulated, None)
    assert engine.info.engine == "simulated"
    assert engine.info.input_tokens_max == 99
    with pytest.raises(EngineUnavailableError, match="needs a model"):
        create_engine(settings(model="x"), None)
