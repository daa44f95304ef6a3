"""Engines with the fake runner's process instead of a real engine's."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from model_server.engines.base import ModelInfo, Text, TextRefused, Tokens, Vectors
from model_server.engines.child.engine import ChildEngine, ChildSpec, StartedChild
from model_server.engines.child.options import RunnerOptions
from tests.harness.child_runner import DIMENSIONS

RUNNER = "tests.harness.child_runner"
INPUT_TOKENS_MAX = 40
RUNNER_OPTIONS = RunnerOptions(
    model="/models/m",
    transformer="/models/m/0_Transformer",
    architecture="BertModel",
    pooling=None,
    device="auto",
    dtype="float32",
    quantization=None,
    tensor_parallel=1,
    memory_fraction=None,
    attention_backend=None,
    dimensions=2,
    input_tokens_max=256,
    pass_tokens_max=4_096,
    inputs_max=512,
    log_level="warning",
    config_overrides={},
)
"""What a real engine's runner may be told."""


class WordTokenization:
    """A number is a token of that id, any other word one of id 100 + its length."""

    def encode(self, texts: list[Text]) -> list[Tokens | TextRefused]:
        """One answer a text."""
        return [Tokens(ids=self._ids(text.text)[:INPUT_TOKENS_MAX]) for text in texts]

    def _ids(self, text: str) -> list[int]:
        words = text.split()[:INPUT_TOKENS_MAX] or ["x"]
        return [int(word) if word.isdigit() else 100 + len(word) for word in words]


class FakeChildEngine(ChildEngine):
    """Without a reference, so that nothing has to agree with it."""

    def reference(self, inputs: Any) -> Vectors:
        return None  # type: ignore[return-value]


def spec(
    *, timeout_s: float = 60.0, says: Callable[[str], None] | None = None, **options: Any
) -> ChildSpec:
    """The fake runner with these options."""
    return ChildSpec(
        runner=RUNNER,
        options=options,
        environment=dict(os.environ) | {"PYTHONPATH": os.pathsep.join(sys.path)},
        says=says or (lambda line: print(line, file=sys.stderr)),
        timeout_s=timeout_s,
    )


def fake_engine(**options: Any) -> FakeChildEngine:
    """A started one."""
    chosen = spec(**options)
    return FakeChildEngine(
        StartedChild(chosen),
        info=ModelInfo(
            revision="fake",
            dimensions=DIMENSIONS,
            normalized=False,
            input_tokens_max=INPUT_TOKENS_MAX,
            engine="fake",
            device="cpu",
            precision="float32",
        ),
        tokenization=WordTokenization(),  # type: ignore[arg-type]
        pass_tokens_max=1_000,
        reference=chosen,
    )


@contextlib.contextmanager
def running(**options: Any) -> Iterator[FakeChildEngine]:
    """A started one, closed whatever happens."""
    engine = fake_engine(**options)
    try:
        yield engine
    finally:
        engine.close()


def group_members(group: int) -> list[int]:
    """Living processes of a process group; zombies don't count."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(entry.name))
    return found
