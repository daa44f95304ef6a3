"""A model's revision: one hash of everything that decides its vectors.

Owns what goes into the hash (weights, tokenizer, pooling, modules, prompts, maximum, dtype,
quantisation) and a cache of file hashes, so that restarts don't read gigabytes again. Invariant:
the same files and settings give the same revision on every machine; paths and times have no part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from model_server.engines.files import read_cached_object, write_atomically

_CHUNK_BYTES: Final = 1 << 22
_REVISION_LENGTH: Final = 32
"""Hexadecimal digits of a revision: 128 bits."""

_WEIGHT_SUFFIXES: Final = (".safetensors",)
_CONFIG_SUFFIXES: Final = (".json", ".txt", ".model", ".jinja")
_IGNORED: Final = frozenset({"config_sentence_transformers.json", "data_config.json", "README.md"})
"""Versions and training data; the prompts in the first of them are hashed by themselves."""


def model_revision(
    folders: list[Path], settings: Mapping[str, object], cache_dir: Path | None = None
) -> str:
    """The revision of a model whose files lie in `folders`, the model's root first.

    `settings`, in JSON values, are what decides the vectors besides the files: prompts, pooling,
    maximum, dtype, quantisation, ... With a `cache_dir`, hashes of files that are unchanged by all
    that their file system says of them are not made again; where it can't be written they are.
    """
    cache = _FileHashes(cache_dir)
    root = folders[0]
    digest = hashlib.sha256()
    for path in sorted({file for folder in folders for file in _model_files(folder)}):
        digest.update(f"{path.relative_to(root).as_posix()}\0{cache.sha256(path)}\n".encode())
    digest.update(json.dumps(dict(settings), sort_keys=True).encode())
    cache.save()
    return digest.hexdigest()[:_REVISION_LENGTH]


def _model_files(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.iterdir()
        if path.is_file()
        and path.suffix in (*_WEIGHT_SUFFIXES, *_CONFIG_SUFFIXES)
        and path.name not in _IGNORED
    ]


class _FileHashes:
    """SHA-256 of files, remembered by path, size, times and inode.

    The time of modification alone can be set back, and tools that copy weights do; that of the
    inode's change can't.
    """

    def __init__(self, cache_dir: Path | None) -> None:
        self._path = None if cache_dir is None else cache_dir / "file-hashes.json"
        self._known = {} if self._path is None else read_cached_object(self._path)
        self._changed = False

    def sha256(self, path: Path) -> str:
        status = path.stat()
        name = f"{path.resolve()}:"
        key = f"{name}{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"
        known = self._known.get(key)
        if isinstance(known, str):
            return known
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        self._known = {k: v for k, v in self._known.items() if not k.startswith(name)}
        self._known[key] = digest.hexdigest()
        self._changed = True
        return digest.hexdigest()

    def save(self) -> None:
        if self._path is not None and self._changed:
            with contextlib.suppress(OSError):
                write_atomically(self._path, json.dumps(self._known).encode())
