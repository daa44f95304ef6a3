"""How many unanswered tokens each stream may have: 2 x target, shared by what streams sent.

Invariants: every window is at least target / 4 and at least one input of the model's maximum; a
lone stream has all of 2 x target (3 x before a larger pass, see `steering`). Those floors come on
top: were they taken from the others, a stream with most of the traffic would be held to an equal
share as soon as the maximum is a good part of the target, and its queries would wait while the
small streams' room stays empty. Shares follow what was sent in the last seconds, so that a stream
with most of the traffic has most of the room. A fifth is shared equally: when streams are limited
by their windows, what they send says no more than what their windows were, and only a pull towards
equality lets a stream whose demand has grown get out of a small share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARED_TARGETS = 2
"""One pass running and one waiting keep an engine busy: DESIGN 3."""
_EQUAL_RATIO = 0.2
_HALF_LIFE_NS = 1_500_000_000


@dataclass(slots=True)
class _Sent:
    tokens: float
    at_ns: int

    def decayed(self, now_ns: int) -> float:
        return self.tokens * math.exp2((self.at_ns - now_ns) / _HALF_LIFE_NS)


class WindowShares:
    """The windows of all open streams, in tokens."""

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}

    def __len__(self) -> int:
        return len(self._sent)

    def open(self, stream: int, now_ns: int) -> None:
        """A stream begins with an equal share: as if it had sent what the others did on average."""
        others = [sent.decayed(now_ns) for sent in self._sent.values()]
        self._sent[stream] = _Sent(sum(others) / len(others) if others else 0.0, now_ns)

    def close(self, stream: int) -> None:
        """Its share goes to the others."""
        self._sent.pop(stream, None)

    def sent(self, stream: int, tokens: int, now_ns: int) -> None:
        """A request of so many tokens came on a stream."""
        sent = self._sent.get(stream)
        if sent is not None:
            sent.tokens = sent.decayed(now_ns) + tokens
            sent.at_ns = now_ns

    def windows(
        self,
        *,
        target: int,
        input_tokens_max: int,
        now_ns: int,
        shared_targets: int = SHARED_TARGETS,
    ) -> dict[int, int]:
        """The windows of now."""
        if not self._sent:
            return {}
        floor = max(-(-target // 4), input_tokens_max)
        weights = self._weights(now_ns)
        per_weight = shared_targets * target / sum(weights.values())
        return {stream: max(floor, round(w * per_weight)) for stream, w in weights.items()}

    def _weights(self, now_ns: int) -> dict[int, float]:
        sent = {stream: s.decayed(now_ns) for stream, s in self._sent.items()}
        total = sum(sent.values())
        if total < 1.0:
            return dict.fromkeys(sent, 1.0)
        equal = _EQUAL_RATIO * total / len(sent)
        return {s: (1.0 - _EQUAL_RATIO) * tokens + equal for s, tokens in sent.items()}
