"""A model's local folder: as given, or fetched from the hub before serving."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model_server.settings import ModelServerSettings

# Weights in the one format that the engines read, and all small files; nothing that is code.
_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "tokenizer*")
_MODEL_FILES = ("modules.json", "config.json")
"""One of them is in every model's folder."""


class HubError(Exception):
    """The model is neither a folder nor to be had from the hub; the message is one line."""


def model_folder(settings: ModelServerSettings) -> Path | None:
    """The folder of the model that the settings name; None for an engine without a model.

    Raises:
        HubError: it can't be had, or there is no model in it.
    """
    if settings.model is None or settings.engine == "simulated":
        return None
    folder = Path(settings.model)
    if folder.is_dir():
        if not any((folder / name).is_file() for name in _MODEL_FILES):
            raise HubError(
                f"model {settings.model}: there is no model in this folder, neither "
                f"{' nor '.join(_MODEL_FILES)}"
            )
        if settings.model_revision is not None:
            raise HubError(
                f"model_revision {settings.model_revision!r} is for models of the hub, and "
                f"{settings.model} is a folder: leave it out"
            )
        return folder
    if folder.is_absolute() or settings.model.startswith(".") or settings.model.count("/") > 1:
        raise HubError(f"model {settings.model}: no such folder")
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - an extra's package
    except ImportError as error:
        raise HubError("a model of the hub needs the package huggingface_hub") from error
    token = settings.hub_token.get_secret_value() if settings.hub_token is not None else None
    try:
        return Path(
            snapshot_download(
                settings.model,
                revision=settings.model_revision,
                token=token,
                allow_patterns=list(_FILES),
            )
        )
    except Exception as error:  # whatever the hub's client raises, in one line
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise HubError(
            f"model {settings.model}: no such folder, and not from the hub: {lines[0]}"
        ) from error
