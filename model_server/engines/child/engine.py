"""The engine protocol on a child process: texts are tokenized here, passes run there.

Owns the child and the description of its model. Invariants: one list is in flight at a time; what
the child answers is believed only if it counted every sequence and token that was sent; after its
death every pass raises EngineDiedError at once. It knows no engine by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from model_server.engines.base import (
    EngineDiedError,
    EngineError,
    EngineOutOfMemoryError,
    EnginePass,
    ModelInfo,
    Text,
    TextRefused,
    Tokens,
    Vectors,
)
from model_server.engines.child.frames import (
    Fault,
    FrameError,
    Kind,
    pack_inputs,
    pack_object,
    unpack_failed,
    unpack_object,
    unpack_vectors,
)
from model_server.engines.child.process import ChildGoneError, ChildProcess, Says
from model_server.engines.model_folder import ModelRefusedError
from model_server.engines.tokenization import Tokenization

_SAID_CHARACTERS_MAX: Final = 500
REFERENCE: Final = "model_server.engines.child.reference_runner"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """What to run in a child."""

    runner: str
    """A module with `start`; see `model_server.engines.child.__main__`."""
    options: Mapping[str, Any]
    """JSON values for its `start`."""
    environment: Mapping[str, str] = field(repr=False)
    says: Says
    timeout_s: float
    """Of its start, and of any pass that nobody else times."""


class StartedChild:
    """A child that is ready, and what it says of itself."""

    def __init__(self, spec: ChildSpec) -> None:
        """Start it.

        Raises:
            ModelRefusedError: it can't serve the model.
            EngineDiedError: it did not come up.
        """
        self._spec = spec
        self.process = ChildProcess(spec.runner, environment=spec.environment, says=spec.says)
        try:
            self.ready = unpack_object(self._ask(Kind.START, Kind.READY, pack_object(spec.options)))
        except BaseException:
            self.process.close()
            raise

    def embed(self, inputs: Sequence[Tokens]) -> tuple[Vectors, list[EnginePass]]:
        """Run one list.

        Raises:
            EngineOutOfMemoryError: it did not fit the memory.
            EngineError: the pass failed.
            EngineDiedError: the process is gone.
        """
        payload = self._ask(Kind.EMBED, Kind.VECTORS, pack_inputs(inputs))
        try:
            return unpack_vectors(payload)
        except FrameError as error:
            self.process.kill()
            raise EngineDiedError(str(error)) from error

    def _ask(self, kind: Kind, expected: Kind, payload: bytes) -> bytes:
        """One frame for another; what else it may answer is raised."""
        try:
            answered, answer = self.process.request(kind, payload, self._spec.timeout_s)
            failed = unpack_failed(answer) if answered is Kind.FAILED else None
        except (ChildGoneError, FrameError) as error:
            raise EngineDiedError(self._told(str(error))) from error
        if answered is expected:
            return answer
        if failed is None:
            self.process.kill()
            raise EngineDiedError(f"{answered.name} came where {expected.name} was expected")
        if failed.fault is Fault.DIED:
            self.process.kill()
            raise EngineDiedError(failed.message)
        if failed.fault is Fault.REFUSED:
            raise ModelRefusedError(failed.message)
        if failed.fault is Fault.OUT_OF_MEMORY:
            raise EngineOutOfMemoryError(failed.message)
        raise EngineError(failed.message)

    def _told(self, message: str) -> str:
        """With what it printed last, which often says why."""
        lines = list(self.process.last_lines)
        telling = [line for line in lines if "Error: " in line] or lines
        return f"{message}; it said: {telling[-1][:_SAID_CHARACTERS_MAX]}" if telling else message


class ChildEngine:
    """See the module; implements `SeparateEngine`."""

    def __init__(
        self,
        child: StartedChild,
        *,
        info: ModelInfo,
        tokenization: Tokenization,
        pass_tokens_max: int,
        reference: ChildSpec,
    ) -> None:
        """`pass_tokens_max`: the most that the child runs in one pass."""
        self._child = child
        self._info = info
        self._tokenization = tokenization
        self._pass_tokens_max = pass_tokens_max
        self._reference = reference
        self._passes: Sequence[EnginePass] = ()

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self._info

    @property
    def pid(self) -> int:
        """Of the child, which is the number of its process group too."""
        return self._child.process.pid

    @property
    def passes(self) -> Sequence[EnginePass]:
        """The forward passes that the last `embed` took, as the engine counted them."""
        return self._passes

    def tokenize(self, texts: Sequence[Text]) -> list[Tokens | TextRefused]:
        """Count and encode, one answer a text, in order."""
        return self._tokenization.encode(texts)

    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        """One forward pass; float32 [inputs, dimensions].

        Raises:
            EngineOutOfMemoryError: the pass was too large for the memory.
            EngineError: it failed, or did not run what was sent.
            EngineDiedError: the child is gone.
        """
        self._passes = ()
        if not inputs:
            return np.empty((0, self._info.dimensions), dtype=np.float32)
        tokens = sum(len(one.ids) for one in inputs)
        if tokens > self._pass_tokens_max:
            raise EngineOutOfMemoryError(
                f"{tokens} tokens; the engine has room for {self._pass_tokens_max} in a pass"
            )
        vectors, passes = self._child.embed(inputs)
        self._passes = passes
        ran = sum(one.sequences for one in passes), sum(one.tokens for one in passes)
        if ran != (len(inputs), tokens):
            raise EngineError(
                f"the engine ran {ran[0]} sequences of {ran[1]} tokens, not the {len(inputs)} of "
                f"{tokens} that were sent"
            )
        return vectors

    def reference(self, inputs: Sequence[Tokens]) -> Vectors:
        """Plain transformers' vectors, from a child of their own that is gone afterwards."""
        child = StartedChild(self._reference)
        try:
            return np.concatenate([child.embed([one])[0] for one in inputs])
        finally:
            child.process.close()

    def watch(self, died: Callable[[str], None]) -> None:
        """Have it called once when the child ends by itself."""
        self._child.process.watch(died)

    def kill(self) -> None:
        """End the child now; an `embed` that runs raises EngineDiedError."""
        self._child.process.kill()

    def close(self) -> None:
        """End the child. Idempotent."""
        self._child.process.close()
