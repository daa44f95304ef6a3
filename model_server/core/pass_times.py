"""How long a pass takes, learnt from those that ran: milliseconds = fixed + slope x tokens.

A weighted least-squares line with forgetting; both coefficients are at least 0. It serves only
`busy_ms` (when will this server be free) and retry hints, so a rough line is enough: no knee is
fitted.
"""

from __future__ import annotations

_KEEP = 0.98
"""Weight of the past at each sample: about the last 50 passes count."""
_SPREAD_MIN = 0.02
"""Relative variance of tokens below which a slope can't be told from noise."""


class PassTimes:
    """A running estimate of pass time; starts at 0 and learns from the first sample on."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._x = self._y = self._xx = self._xy = 0.0
        self._fixed_ms = 0.0
        self._slope_ms = 0.0

    def observe(self, tokens: int, duration_ns: int) -> None:
        """Learn from one pass."""
        x, y = float(tokens), duration_ns / 1e6
        self._weight = self._weight * _KEEP + 1.0
        self._x = self._x * _KEEP + x
        self._y = self._y * _KEEP + y
        self._xx = self._xx * _KEEP + x * x
        self._xy = self._xy * _KEEP + x * y
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > _SPREAD_MIN * mean_x * mean_x:
            covariance = self._xy / self._weight - mean_x * mean_y
            self._slope_ms = min(max(covariance / variance, 0.0), mean_y / mean_x)
        else:
            self._slope_ms = min(self._slope_ms, mean_y / mean_x)
        self._fixed_ms = max(mean_y - self._slope_ms * mean_x, 0.0)

    def pass_ms(self, tokens: int) -> float:
        """Expected duration of one pass."""
        return self._fixed_ms + self._slope_ms * tokens

    def queue_ms(self, tokens: int, target: int) -> float:
        """Expected duration of the passes, of `target` tokens each, that `tokens` need."""
        if tokens <= 0:
            return 0.0
        return -(-tokens // target) * self._fixed_ms + self._slope_ms * tokens
