"""What a measured pass holds: a fixed mix of text lengths that adds up to a size exactly.

Invariant: the same size always has the same lengths, so that two measurements differ by the machine
only. Ids are those of a real text of the model's own tokenizer; what they say does not matter to
the time a pass takes. Knows nothing of clocks or curves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from model_server.engines.base import Engine, Text, Tokens

LENGTHS: Final = (
    *(5, 5, 6, 6, 6, 7, 7, 7, 8, 8, 8, 9),
    *(9, 10, 10, 11, 11, 12, 13, 14, 14, 16, 19, 35),
)
"""Lengths of search queries in tokens, one in 24 each: those of the demo's 4,000 queries
(`aggregator.commands.demo_queries`) in the vocabulary of all-MiniLM-L6-v2."""
_STRIDE: Final = 7
"""Coprime to their number: walks through all of them, short ones and long ones in turn."""
_SMALLEST: Final = 4
"""What is left at the end of a pass is a text of its own from here on."""
_TEXT: Final = (
    "The night train to the coast leaves at nine, and nobody on it has ever seen the sea. "
)


class MixError(Exception):
    """No pass can be made for this engine; the message is one line."""


def lengths_of(tokens: int, *, inputs_max: int, input_tokens_max: int) -> list[int]:
    """Lengths that add up to `tokens`, in the mix's proportions.

    Where that would be more than `inputs_max` texts, all of them are longer by one factor, up to
    `input_tokens_max`.

    Raises:
        MixError: not even the longest texts fill it.
    """
    if tokens > inputs_max * input_tokens_max:
        raise MixError(f"{inputs_max} texts of {input_tokens_max} tokens do not make {tokens}")
    factor = 1
    while True:
        lengths = _filled(tokens, factor, input_tokens_max)
        if len(lengths) <= inputs_max:
            return lengths
        factor += 1


def _filled(tokens: int, factor: int, input_tokens_max: int) -> list[int]:
    lengths: list[int] = []
    left = tokens
    for step in itertools.count():
        length = min(LENGTHS[step * _STRIDE % len(LENGTHS)] * factor, input_tokens_max, left)
        left -= length
        if 0 < left < _SMALLEST and length + left <= input_tokens_max:
            length, left = length + left, 0
        lengths.append(length)
        if left == 0:
            return lengths
    raise AssertionError("unreachable")


class PassMaker:
    """Makes the inputs of passes for one engine."""

    def __init__(self, longest: Tokens, *, inputs_max: int) -> None:
        """`longest`: a text of the model's maximum of tokens."""
        self._ids = list(longest.ids)
        self._inputs_max = inputs_max

    @classmethod
    def of(cls, engine: Engine, *, inputs_max: int) -> PassMaker:
        """For the engine's own tokenizer.

        Raises:
            MixError: it refuses a text of ours.
        """
        (answer,) = engine.tokenize(
            [Text(text=_TEXT * (engine.info.input_tokens_max // 8 + 1), truncate=True)]
        )
        if not isinstance(answer, Tokens):
            raise MixError(f"the tokenizer refuses a text of our own: {answer.message}")
        return cls(answer, inputs_max=inputs_max)

    @property
    def tokens_max(self) -> int:
        """No larger pass can be made."""
        return self._inputs_max * len(self._ids)

    def lengths(self, tokens: int) -> list[int]:
        """The lengths of the texts of such a pass."""
        return lengths_of(tokens, inputs_max=self._inputs_max, input_tokens_max=len(self._ids))

    def inputs(self, tokens: int) -> list[Tokens]:
        """Texts that add up to `tokens`: begun and ended as the tokenizer begins and ends them."""
        return [Tokens(ids=self._cut(length)) for length in self.lengths(tokens)]

    def _cut(self, length: int) -> Sequence[int]:
        return [*self._ids[: length - 1], self._ids[-1]]
