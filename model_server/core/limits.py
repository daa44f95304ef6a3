"""What a server takes: sizes, windows' guard, and the checks of a request and of its inputs.

Pure arithmetic on counts. It knows no messages; the shell reads columns out of them and asks here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from model_server.core.failures import Failure, invalid, too_large

HELD_TARGETS_MAX = 8
"""A stream that already holds more than so many targets is refused, unless its window is larger:
that of a model whose maximum is many targets."""
TEXT_BYTES_MAX = 131_072
"""128 KiB of UTF-8 per text, whatever `truncate` says; checked before any tokenizer."""
_DAY_MS = 86_400_000
TIMEOUT_MS_MAX = 365 * _DAY_MS
"""Longer timeouts are as good as none, and would not fit the clock's 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of passes and requests.

    `batch_tokens_target` is aimed at; `batch_tokens_max` is never exceeded, and holds one input of
    `input_tokens_max`.

    Raises:
        ValueError: they contradict each other.
    """

    batch_tokens_target: int
    batch_tokens_max: int
    input_tokens_max: int
    inputs_max: int
    request_bytes_max: int

    def __post_init__(self) -> None:
        if min(self.batch_tokens_target, self.input_tokens_max, self.inputs_max) < 1:
            raise ValueError("limits must be at least 1")
        if self.batch_tokens_max < self.batch_tokens_target:
            raise ValueError(
                f"batch_tokens_max ({self.batch_tokens_max}) is below batch_tokens_target "
                f"({self.batch_tokens_target})"
            )
        if self.batch_tokens_max < self.input_tokens_max:
            raise ValueError(
                f"batch_tokens_max ({self.batch_tokens_max}) is below the model's maximum for one "
                f"input ({self.input_tokens_max} tokens): such an input could never run"
            )
        if self.request_bytes_max < TEXT_BYTES_MAX:
            raise ValueError(
                f"request_bytes_max ({self.request_bytes_max}) is below one text's maximum "
                f"({TEXT_BYTES_MAX} bytes)"
            )

    def lowered(self, tokens: int) -> Limits:
        """The same for passes of at most `tokens`; only a single longer input may still be larger.

        The target goes down all the way, the maximum not below one input of the model's maximum.
        """
        tokens = max(1, tokens)
        return Limits(
            batch_tokens_target=min(self.batch_tokens_target, tokens),
            batch_tokens_max=max(min(self.batch_tokens_max, tokens), self.input_tokens_max),
            input_tokens_max=self.input_tokens_max,
            inputs_max=self.inputs_max,
            request_bytes_max=self.request_bytes_max,
        )

    @property
    def held_tokens_max(self) -> int:
        """A stream that holds more than this, and more than its window, is refused."""
        return HELD_TARGETS_MAX * self.batch_tokens_target

    def check_request(self, *, inputs: int, request_bytes: int) -> Failure | None:
        """Whether a request of this size is taken at all."""
        if inputs == 0:
            return invalid("inputs", "A request needs at least one input.")
        if inputs > self.inputs_max:
            return too_large("inputs", f"{inputs} inputs; at most {self.inputs_max} a request.")
        if request_bytes > self.request_bytes_max:
            return too_large(
                "inputs",
                f"{request_bytes} bytes of text; at most {self.request_bytes_max} a request.",
            )
        return None


def check_text(text_bytes: int) -> Failure | None:
    """The size of one text, in UTF-8 bytes."""
    if text_bytes == 0:
        return invalid("text", "The text is empty.")
    if text_bytes > TEXT_BYTES_MAX:
        return invalid("text", f"The text has {text_bytes} bytes; at most {TEXT_BYTES_MAX}.")
    return None


def check_dimensions(
    dimensions: int, *, offered: Collection[int], multiple_of_8: bool
) -> Failure | None:
    """Dimensions asked for (already defaulted), and whether the encoding can hold them."""
    if dimensions not in offered:
        known = ", ".join(str(d) for d in sorted(offered, reverse=True))
        return invalid("dimensions", f"{dimensions} dimensions; this model offers {known}.")
    if multiple_of_8 and dimensions % 8:
        return invalid("encoding", f"ubinary needs a multiple of 8 dimensions, not {dimensions}.")
    return None


def check_timeout(timeout_ms: int) -> Failure | None:
    """The time left of one input; 0: no limit."""
    if timeout_ms < 0:
        return invalid("timeout_ms", f"The timeout is negative: {timeout_ms} ms.")
    return None


def deadline_ns(arrived_ns: int, timeout_ms: int) -> int:
    """When an input expires; 0: never."""
    return arrived_ns + min(timeout_ms, TIMEOUT_MS_MAX) * 1_000_000 if timeout_ms else 0
