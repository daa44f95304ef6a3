"""A revision is made of what decides the vectors, and of nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from model_server.engines.files import read_cached_object, write_atomically
from model_server.engines.revision import model_revision

SETTINGS: dict[str, object] = {"dtype": "float32", "prompts": {"query": "q: "}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "2_Dense").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_bytes(b"{}")
    (folder / "2_Dense" / "model.safetensors").write_bytes(b"more weights")
    return folder


def revision(
    folder: Path, settings: dict[str, object] = SETTINGS, cache: Path | None = None
) -> str:
    return model_revision([folder, folder / "2_Dense"], settings, cache)


def test_place_and_time_have_no_part(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / "README.md").write_text("words", encoding="utf-8")
    (copy / "config_sentence_transformers.json").write_text("{}", encoding="utf-8")
    assert revision(copy) == revision(model) == revision(model)
    assert len(revision(model)) == 32


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "2_Dense/model.safetensors", "vocab.txt"]
)
def test_every_file_of_the_model_counts(model: Path, name: str) -> None:
    before = revision(model)
    (model / name).write_bytes(b"other")
    assert revision(model) != before


def test_files_may_not_trade_places(model: Path) -> None:
    before = revision(model)
    (model / "model.safetensors").write_bytes(b"more weights")
    (model / "2_Dense" / "model.safetensors").write_bytes(b"weights")
    assert revision(model) != before


def test_settings_count_and_their_order_does_not(model: Path) -> None:
    turned = dict(reversed(SETTINGS.items()))
    assert revision(model, turned) == revision(model)
    other = SETTINGS | {"dtype": "bfloat16"}
    assert revision(model, other) != revision(model)


def test_hashes_of_unchanged_files_are_remembered(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = revision(model, cache=cache)
    kept = json.loads((cache / "file-hashes.json").read_bytes())
    assert len(kept) == 3
    # A remembered hash is believed: turning one changes the revision without a file changing.
    turned = {key: value[::-1] for key, value in kept.items()}
    (cache / "file-hashes.json").write_text(json.dumps(turned), encoding="utf-8")
    assert revision(model, cache=cache) != before
    # A changed file is read again, whatever was remembered of it.
    for path in (model / "model.safetensors", model / "tokenizer.json"):
        os.utime(path, (1, 1))
    os.utime(model / "2_Dense" / "model.safetensors", (1, 1))
    assert revision(model, cache=cache) == before


@pytest.mark.parametrize("replaced", [False, True])
def test_other_weights_of_the_same_size_and_time_are_seen(
    model: Path, tmp_path: Path, replaced: bool
) -> None:
    """As `rsync --times` and archives leave them: written over, or put in the old one's place."""
    weights = model / "model.safetensors"
    before = revision(model, cache=tmp_path)
    status = weights.stat()
    written = tmp_path / "new" if replaced else weights
    written.write_bytes(b"WEIGHTS")
    while (now := written.stat()).st_mtime_ns != status.st_mtime_ns or (
        now.st_ctime_ns == status.st_ctime_ns
    ):  # its clock may tick slowly
        os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))
    written.replace(weights)
    assert weights.stat().st_size == status.st_size
    assert revision(model, cache=tmp_path) == revision(model) != before
    kept = json.loads((tmp_path / "file-hashes.json").read_bytes())
    assert len(kept) == 3, "what is known of a file that is gone is forgotten"


def test_a_cache_that_can_not_be_written_is_done_without(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert revision(model, cache=tmp_path / "file" / "cache") == revision(model)


def test_a_damaged_cache_is_remade(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file-hashes.json").write_bytes(b'{"half')
    assert revision(model, cache=tmp_path) == revision(model)
    assert len(json.loads((tmp_path / "file-hashes.json").read_bytes())) == 3


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_atomically(path, b'{"a": 1}')
    with pytest.raises(TypeError):
        write_atomically(path, "not bytes")  # type: ignore[arg-type]
    assert read_cached_object(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
