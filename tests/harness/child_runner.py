"""A runner for `model_server.engines.child` that does what its options and its inputs say.

The first token of an input is what happens (`Act`); all other passes answer with a row an input:
its ids' sum, its length, its prompt tokens, and the runner's process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from model_server.engines.base import (
    EngineDiedError,
    EngineError,
    EngineOutOfMemoryError,
    EnginePass,
    Tokens,
    Vectors,
)
from model_server.engines.model_folder import ModelRefusedError

DIMENSIONS = 4
HANG_S = 600.0
_HELPER = f"import time; print(flush=True); time.sleep({HANG_S})"
"""Looks after nobody, as SGLang's processes do while they import."""


class Act(IntEnum):
    """What an input's first token asks for."""

    RAISE = 1
    OUT_OF_MEMORY = 2
    EXIT = 3
    DIE = 4
    HANG = 5
    MISCOUNT = 6
    SPLIT = 7
    SHORT = 8
    BIND = 9
    """Hangs in one call that does not let any other Python thread run."""
    BREAK = 99
    """An error that says itself that the engine is gone."""


class Runner:
    """See the module."""

    def __init__(self, options: Mapping[str, Any], died: Callable[[str], None]) -> None:
        self._died = died
        helper = subprocess.Popen([sys.executable, "-c", _HELPER], stdout=subprocess.PIPE)
        if helper.stdout is not None:
            helper.stdout.readline()
        self.ready = {
            "device": "cpu",
            "versions": {"fake": "1"},
            "pass_tokens_max": options.get("pass_tokens_max", 1_000),
        }

    def embed(self, inputs: Sequence[Tokens]) -> tuple[Vectors, Sequence[EnginePass]]:
        tokens = sum(len(one.ids) for one in inputs)
        passes = [EnginePass(sequences=len(inputs), tokens=tokens)]
        rows = [[sum(one.ids), len(one.ids), one.prompt_tokens, os.getpid()] for one in inputs]
        vectors = np.array(rows, dtype=np.float32)
        for one in inputs:
            act = one.ids[0]
            if act == Act.RAISE:
                raise EngineError("asked to\nraise")
            if act == Act.OUT_OF_MEMORY:
                raise EngineOutOfMemoryError("asked to run out")
            if act == Act.BREAK:
                raise EngineDiedError("asked to break")
            if act == Act.EXIT:
                print("about to exit", flush=True)
                os._exit(7)
            if act == Act.DIE:
                self._died("asked to die")
            if act == Act.HANG:
                time.sleep(HANG_S)
            if act == Act.BIND:
                sum(range(10**13))
            if act == Act.MISCOUNT:
                passes = [EnginePass(sequences=len(inputs), tokens=tokens - 1)]
            if act == Act.SPLIT:
                passes = [
                    EnginePass(sequences=1, tokens=len(inputs[0].ids)),
                    EnginePass(sequences=len(inputs) - 1, tokens=tokens - len(inputs[0].ids)),
                ]
            if act == Act.SHORT:
                vectors = vectors[:-1]
        return vectors, passes


def start(options: Mapping[str, Any], died: Callable[[str], None]) -> Runner:
    """`fail`: what the start does instead."""
    fail = options.get("fail")
    if fail == "refuse":
        raise ModelRefusedError("not a model")
    if fail == "raise":
        raise ValueError("no\nsuch luck")
    if fail == "exit":
        print("ValueError: too little of it\nand that was it", flush=True)
        os._exit(9)
    if fail == "shout":
        print("x" * 8_200, flush=True)
        os._exit(9)
    if fail == "hang":
        time.sleep(HANG_S)
    return Runner(options, died)
