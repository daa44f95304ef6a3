"""The canary: a text whose vector is known, to tell a bad input from a broken engine.

Invariant: it is good only where the engine still computes what it computed at its start, within the
bounds of the golden vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_server.engines.base import Engine, EngineError, Tokens, Vectors
from model_server.engines.golden import cosine
from model_server.server.jobs import Ran, embed


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The first golden text, and its vector by the engine that it is to judge."""

    tokens: Tokens
    vectors: Vectors
    """Shape [1, dimensions], finite."""
    cosine_min: float

    def run(self, engine: Engine) -> Ran:
        """A pass of it alone.

        Raises:
            EngineError: its vector is not finite, or not the one of the start.
            Exception: what the engine raised.
        """
        ran = embed(engine, [self.tokens])
        if not ran.finite:
            raise EngineError("its vector is not finite")
        near = float(cosine(ran.vectors, self.vectors)[0])
        if not near >= self.cosine_min:
            raise EngineError(
                f"its vector has cosine {near:.6f} to that of the start, below {self.cosine_min}"
            )
        return ran


def make_canary(tokens: Tokens, ran: Ran, cosine_min: float) -> Canary:
    """Of a pass of it alone by an engine that is sound.

    Raises:
        EngineError: its vector is not finite.
    """
    if not ran.finite:
        raise EngineError("the vector of a text of our own is not finite")
    return Canary(tokens=tokens, vectors=ran.vectors, cosine_min=cosine_min)
