"""What SGLang's processes are told of our model class.

It travels in an environment variable, since SGLang starts those processes itself.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

MODEL_VARIABLE: Final = "TOKEN_BATCHING_SGLANG_MODEL"


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledModel:
    """What `sglang_models.pooled` is to make."""

    architecture: str
    """The class in SGLang, as `config.json` names it."""
    path: str
    """The model's root folder."""
    pooling: str | None
    """The pooling option."""


def pack_model(model: PooledModel) -> str:
    """For the environment."""
    return json.dumps(asdict(model))


def unpack_model(text: str) -> PooledModel:
    """From the environment."""
    return PooledModel(**json.loads(text))
