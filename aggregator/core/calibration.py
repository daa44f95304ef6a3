"""How a cheap token estimate relates to the exact count, learnt from the counts that come back.

Owns, for one model: per class of texts (input type x script of the text) a weighted linear fit

    tokens ~ slope x estimate + slope_bytes x bytes + intercept,   variance ~ noise x (estimate + 2)

with slow forgetting, and the margin that a claim keeps below its target. The bytes of the text are
a second regressor because they come for free and carry what the estimator's vocabulary does not:
for scripts that a model spells out character by character they predict its count several times
better than any other vocabulary's count does. Where the two say the same, the prior decides.

A class starts from the fit of the whole model and leaves it as its own counts come in (Bayesian
linear regression: the pull of the prior is in units of the noise, so that it vanishes where the
counts leave no residual, as they do when the estimator is the model's own tokenizer).

It must not know of servers, claims in flight or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Final

from aggregator.core.query import Query

# Script classes ----------------------------------------------------------------------------------

_SAMPLE_CHARACTERS: Final = 64
_ASCII, _LATIN, _GREEK, _CYRILLIC, _ARMENIAN, _HEBREW, _ARABIC = range(7)
_SYMBOLS, _OTHER, _HAN, _KANA, _HANGUL, _ETHIOPIC_KHMER, _SUPPLEMENTARY, _BRAHMIC = range(7, 15)
_BRAHMIC_FIRST: Final = 20
"""From here one class for each pair of blocks below U+1000: Devanagari, Bengali, ..., Thai, Lao."""
SCRIPT_CLASSES: Final = 64
"""Every class is below this."""


def _lead_classes() -> bytes:
    """Script class by the first byte of a character's UTF-8 form."""
    table = bytearray(256)
    spans = (
        (0xC2, 0xC2, _SYMBOLS),
        (0xC3, 0xCA, _LATIN),
        (0xCB, 0xCD, _OTHER),
        (0xCE, 0xCF, _GREEK),
        (0xD0, 0xD3, _CYRILLIC),
        (0xD4, 0xD5, _ARMENIAN),
        (0xD6, 0xD7, _HEBREW),
        (0xD8, 0xDB, _ARABIC),
        (0xDC, 0xDF, _OTHER),
        (0xE0, 0xE0, _BRAHMIC),
        (0xE1, 0xE1, _ETHIOPIC_KHMER),
        (0xE2, 0xE2, _SYMBOLS),
        (0xE3, 0xE3, _KANA),
        (0xE4, 0xE9, _HAN),
        (0xEA, 0xED, _HANGUL),
        (0xEE, 0xEF, _SYMBOLS),
        (0xF0, 0xF4, _SUPPLEMENTARY),
    )
    for first, last, script in spans:
        table[first : last + 1] = bytes([script]) * (last - first + 1)
    return bytes(table)


_LEAD_CLASSES: Final = _lead_classes()
_CONTINUATION: Final = bytes(range(0x80, 0xC0))


def script_class(text: str) -> int:
    """The dominant script of a text, as a small number; bounded work for any text.

    ASCII is class 0 (one flag of the string). Otherwise the first characters and some from the
    middle are counted by the first byte of their UTF-8 form, which tells the script.
    """
    if text.isascii():
        return _ASCII
    if len(text) > _SAMPLE_CHARACTERS:
        middle = len(text) // 2
        half = _SAMPLE_CHARACTERS // 2
        text = text[:half] + text[middle : middle + half]
    data = text.encode("utf-8", "surrogatepass")
    leads = data.translate(_LEAD_CLASSES, _CONTINUATION)
    if 2 * leads.count(_ASCII) > len(leads):
        return _LATIN
    foreign = set(leads)
    foreign.discard(_ASCII)
    script = foreign.pop() if len(foreign) == 1 else max(foreign, key=leads.count)
    if script in (_HAN, _KANA):
        kana = b"\xe3\x81" in data or b"\xe3\x82" in data or b"\xe3\x83" in data
        return _KANA if kana else _HAN
    if script == _BRAHMIC:
        return _BRAHMIC_FIRST + ((data[data.index(0xE0) + 1] - 0xA0) >> 1)
    return script


# Fits --------------------------------------------------------------------------------------------

_MEMORY: Final = 3000.0
"""Observations after which an old one weighs 1/e."""
_PRIOR_OBSERVATIONS: Final = 64.0
"""Fewer than this, and a class is still treated with the caution of the prior."""
_CLIP_DEVIATIONS: Final = 6.0
_CLIP_NOISE_MIN: Final = 0.25
_SLOPE_DEVIATION: Final = 0.5
_BYTES_DEVIATION: Final = 0.25
_INTERCEPT_DEVIATION: Final = 8.0
_SLOPE_MAX: Final = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is believed before any count has come back.

    The slope and intercept are those of common English word-piece vocabularies against cl100k; the
    relative deviation makes the first claims small rather than too large.
    """

    slope: float = 1.15
    slope_bytes: float = 0.0
    intercept: float = 3.0
    noise: float = 0.5
    """Variance of the residual per (estimate + 2) tokens."""
    deviation_relative: float = 0.25
    """Of the mean estimate of a class of which nothing is known yet."""


EXACT_PRIOR: Final = Prior(slope=1.0, intercept=2.0, noise=0.02)
"""The estimator is the model's own tokenizer: only special tokens and the prompt are unknown."""


class _Sums:
    """Weighted normal equations of y on (x, z, 1), weight 1 / (x + 2)."""

    __slots__ = ("n", "w", "x", "xx", "xy", "xz", "y", "yy", "z", "zy", "zz")

    def __init__(self) -> None:
        self.n = self.w = self.x = self.z = self.y = 0.0
        self.xx = self.xz = self.zz = self.xy = self.zy = self.yy = 0.0

    def blend(self, fresh: _Sums) -> None:
        """Forget a little and take the new ones in."""
        keep = max(0.0, 1.0 - fresh.n / _MEMORY)
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) * keep + getattr(fresh, name))


class _Fit:
    """One class: its sums, its coefficients and how far they can be trusted."""

    __slots__ = (
        "caution",
        "error",
        "fresh",
        "intercept",
        "noise",
        "slope",
        "slope_bytes",
        "total",
    )

    def __init__(self, prior: Prior) -> None:
        self.fresh = _Sums()
        self.total = _Sums()
        self.slope = prior.slope
        self.slope_bytes = prior.slope_bytes
        self.intercept = prior.intercept
        self.noise = prior.noise
        self.error = 0.0
        """Relative standard error of the mean estimate, from the counts."""
        self.caution = prior.deviation_relative
        """The same, while there are too few counts to tell."""

    def refit(self, prior: _Fit | Prior, base: Prior) -> None:
        """Solve the normal equations with the pull towards `prior`, in units of the noise."""
        self.total.blend(self.fresh)
        self.fresh = _Sums()
        sums = self.total
        self.slope, self.slope_bytes, self.intercept = _solve(sums, self.noise, prior)
        residual = _residual(sums, self.slope, self.slope_bytes, self.intercept)
        doubt = _PRIOR_OBSERVATIONS / 8.0 if sums.n < _PRIOR_OBSERVATIONS else 0.0
        freedom = max(sums.n - 3.0, 1.0)
        self.noise = (residual + doubt * base.noise) / (freedom + doubt)
        mean = sums.y / sums.w if sums.w else 1.0
        self.error = sqrt(self.noise / sums.w) / max(mean, 1.0) if sums.w else 1.0
        self.caution = base.deviation_relative * max(0.0, 1.0 - sums.n / _PRIOR_OBSERVATIONS)


def _solve(sums: _Sums, noise: float, prior: _Fit | Prior) -> tuple[float, float, float]:
    """Posterior mean of (slope, slope of bytes, intercept): a 3 x 3 symmetric solve by hand."""
    pull_x = noise / _SLOPE_DEVIATION**2
    pull_z = noise / _BYTES_DEVIATION**2
    pull_1 = noise / _INTERCEPT_DEVIATION**2
    tiny = 1e-9 * (sums.w + 1.0)
    a11 = sums.xx + pull_x + tiny
    a22 = sums.zz + pull_z + tiny
    a33 = sums.w + pull_1 + tiny
    a12, a13, a23 = sums.xz, sums.x, sums.z
    r1 = sums.xy + (pull_x + tiny) * prior.slope
    r2 = sums.zy + (pull_z + tiny) * prior.slope_bytes
    r3 = sums.y + (pull_1 + tiny) * prior.intercept
    # Cholesky: stable where the regressors say the same.
    l11 = sqrt(a11)
    l21, l31 = a12 / l11, a13 / l11
    l22 = sqrt(max(a22 - l21 * l21, tiny))
    l32 = (a23 - l31 * l21) / l22
    l33 = sqrt(max(a33 - l31 * l31 - l32 * l32, tiny))
    t1 = r1 / l11
    t2 = (r2 - l21 * t1) / l22
    t3 = (r3 - l31 * t1 - l32 * t2) / l33
    intercept = t3 / l33
    slope_bytes = (t2 - l32 * intercept) / l22
    slope = (t1 - l21 * slope_bytes - l31 * intercept) / l11
    return min(slope, _SLOPE_MAX), min(slope_bytes, 1.0), intercept


def _residual(sums: _Sums, a: float, c: float, b: float) -> float:
    """Weighted sum of squared residuals, from the sums."""
    value = (
        sums.yy
        - 2.0 * (a * sums.xy + c * sums.zy + b * sums.y)
        + a * a * sums.xx
        + c * c * sums.zz
        + b * b * sums.w
        + 2.0 * (a * c * sums.xz + a * b * sums.x + c * b * sums.z)
    )
    return value if value > 1e-9 * sums.yy else 0.0


def _add_doubt(doubted: Sequence[tuple[float, Query]]) -> None:
    """Add what is common to texts of classes that are hardly known: (sum of caution x estimate)^2.

    It is spread over them in proportion, so that it adds up to that when they go into one claim.
    """
    total = sum([caution * query.estimate for caution, query in doubted])
    for caution, query in doubted:
        query.variance += caution * query.estimate * total


_Row = tuple[float, float, float, float, float, float]
"""slope, slope of bytes, intercept, variance per (estimate + 2), variance per estimated token,
caution."""


class Calibration:
    """Estimates of one model; see the module's docstring."""

    def __init__(self, *, exact: bool = False, claim_tokens: float = 600.0) -> None:
        """`exact`: the estimator is the model's own tokenizer, so the script does not matter."""
        self._exact = exact
        self._prior = EXACT_PRIOR if exact else Prior()
        self._pool = _Fit(self._prior)
        self._fits: dict[int, _Fit] = {}
        self._rows: dict[int, _Row] = {}
        self._claim_tokens = claim_tokens
        self.tokens_per_unit = self._prior.slope + 0.25
        """Estimated tokens per (raw estimate + 2), of what was claimed lately."""
        self._turn = 0
        self._cap = inf
        self._cap_seen = 0
        self._cap_times = 0
        self.observations = 0
        """Exact counts learnt from."""
        self.error_raw_sum = 0.0
        """Sum over observed claims of |tokens - uncalibrated estimate|."""
        self.error_sum = 0.0
        """Sum over observed claims of |tokens - calibrated estimate|."""
        self.tokens_sum = 0

    @property
    def claim_tokens(self) -> float:
        """The size of claims for which the uncertainty of the fits is reckoned."""
        return self._claim_tokens

    @claim_tokens.setter
    def claim_tokens(self, value: float) -> None:
        if value != self._claim_tokens:
            self._claim_tokens = value
            self._rows = {}

    def estimate(self, queries: Sequence[Query]) -> None:
        """Set `estimate` and `variance` of each from its raw estimate, bytes and class."""
        rows = self._rows
        shift = 0 if self._exact else 1
        doubted: list[tuple[float, Query]] = []
        sum_tokens = 0.0
        sum_raw = 0
        key = -1
        slope = slope_bytes = intercept = noise = doubt = caution = 0.0
        for query in queries:
            key_next = query.input_type << 6 | query.script * shift
            if key_next != key:  # mostly all are of one class
                key = key_next
                row = rows.get(key) or self._row(key)
                slope, slope_bytes, intercept, noise, doubt, caution = row
            raw = query.estimate_raw
            tokens = slope * raw + slope_bytes * query.text_bytes + intercept
            if tokens < 1.0:  # noqa: PLR1730 (max() costs a call for each query)
                tokens = 1.0
            query.estimate = tokens
            query.variance = noise * (raw + 2) + doubt * tokens
            sum_tokens += tokens
            sum_raw += raw
            if caution:
                doubted.append((caution, query))
        if doubted:
            _add_doubt(doubted)
        if self._cap < inf:
            self._cut(queries)
        if len(queries) > 1:
            weight = min(1.0, len(queries) / 256)
            ratio = sum_tokens / (sum_raw + 2 * len(queries))
            self.tokens_per_unit += weight * (ratio - self.tokens_per_unit)

    def _cut(self, queries: Sequence[Query]) -> None:
        """What is truncated ends at the model's maximum."""
        for query in queries:
            if query.truncate and query.estimate > self._cap:
                query.estimate = self._cap
                query.variance = 0.0

    def _row(self, key: int) -> _Row:
        fit = self._fits.get(key, self._pool)
        # The error of a fit is common to all of a claim: (sum u e)^2 <= (sum e) (sum u^2 e).
        row = (
            fit.slope,
            fit.slope_bytes,
            fit.intercept,
            fit.noise,
            fit.error * fit.error * self._claim_tokens,
            fit.caution if key in self._fits else self._prior.deviation_relative,
        )
        self._rows[key] = row
        return row

    def learn(self, queries: Sequence[Query], tokens: Sequence[int]) -> None:
        """Learn from exact counts, `tokens[i]` of `queries[i]`: all at first, later a quarter."""
        if not queries:
            return
        shift = 0 if self._exact else 1
        middle = queries[len(queries) // 2]
        fit = self._fits.get(middle.input_type << 6 | middle.script * shift)
        step = 1 if fit is None or fit.total.n < 4 * _PRIOR_OBSERVATIONS else 4
        self._turn = (self._turn + 1) % step
        touched = set()
        for i in range(self._turn, len(queries), step):
            query = queries[i]
            if query.truncate and self._truncated(query, tokens[i]):
                continue
            key = query.input_type << 6 | query.script * shift
            self._observe(key, query.estimate_raw, query.text_bytes, tokens[i])
            touched.add(key)
        for key in touched:
            fit = self._fits[key]
            if fit.fresh.n >= 4.0 + 0.02 * fit.total.n:
                self._refit(key, fit)

    def _observe(self, key: int, x: float, z: float, y: float) -> None:
        fit = self._fits.get(key)
        if fit is None:
            fit = self._fits[key] = _Fit(self._prior)
            fit.slope, fit.slope_bytes = self._pool.slope, self._pool.slope_bytes
            fit.intercept, fit.noise = self._pool.intercept, self._pool.noise
        scale = x + 2.0
        if fit.total.n >= _PRIOR_OBSERVATIONS:
            # One odd text (a word of 100,000 letters is one unknown token) must not bend the line.
            expected = fit.slope * x + fit.slope_bytes * z + fit.intercept
            reach = _CLIP_DEVIATIONS * sqrt(max(fit.noise, _CLIP_NOISE_MIN) * scale)
            y = min(max(y, expected - reach), expected + reach)
        w = 1.0 / scale
        wx, wz, wy = w * x, w * z, w * y
        sums = fit.fresh
        sums.n += 1.0
        sums.w += w
        sums.x += wx
        sums.z += wz
        sums.y += wy
        sums.xx += wx * x
        sums.xz += wx * z
        sums.zz += wz * z
        sums.xy += wx * y
        sums.zy += wz * y
        sums.yy += wy * y
        self.observations += 1

    def _refit(self, key: int, fit: _Fit) -> None:
        self._pool.fresh = fit.fresh
        self._pool.refit(self._prior, self._prior)
        fit.refit(self._pool, self._prior)
        self._rows.pop(key, None)

    def _truncated(self, query: Query, tokens: int) -> bool:
        """Whether this count tells of the model's maximum and nothing of the text."""
        if tokens > self._cap:
            self._cap, self._cap_times = inf, 0
        if tokens > self._cap_seen:
            self._cap_seen, self._cap_times = tokens, 0
        if tokens < self._cap_seen or query.estimate_raw < 1.25 * tokens:
            return self._cap < inf and tokens == self._cap
        self._cap_times += 1
        if self._cap_times >= 2:
            self._cap = float(tokens)
        return True


# Margin ------------------------------------------------------------------------------------------


class Margin:
    """How many standard deviations a claim stays below its target, steered by what came of it.

    A stochastic approximation of the quantile of (tokens - estimate) / deviation that is exceeded
    in `OVER_RATE` of the claims (Robbins and Monro, 1951): up by much when a claim was over, down
    by little when it was not.
    """

    __slots__ = ("claims", "claims_over", "deviations", "inflation")

    OVER_RATE: Final = 0.004
    STEP: Final = 0.1
    DEVIATIONS_MIN: Final = 1.5
    DEVIATIONS_MAX: Final = 5.0
    START: Final = 2.65
    INFLATION_MEMORY: Final = 80.0

    def __init__(self) -> None:
        """Start at the normal distribution's quantile."""
        self.deviations = self.START
        self.inflation = 1.0
        self.claims = 0
        self.claims_over = 0

    @property
    def in_deviations(self) -> float:
        """The margin to keep, in standard deviations of a claim's estimate."""
        return self.deviations * sqrt(self.inflation)

    def observe(self, tokens: float, estimate: float, variance: float) -> None:
        """Learn from one whole claim: its exact count, and what was expected of it."""
        if variance <= 0.0:
            return
        score_squared = (tokens - estimate) ** 2 / variance
        over = tokens > estimate + self.in_deviations * sqrt(variance)
        self.claims += 1
        self.claims_over += over
        change = self.STEP * ((1.0 - self.OVER_RATE) if over else -self.OVER_RATE)
        self.deviations = min(
            max(self.deviations + change, self.DEVIATIONS_MIN), self.DEVIATIONS_MAX
        )
        step = (min(score_squared, 16.0) - self.inflation) / self.INFLATION_MEMORY
        self.inflation = min(max(self.inflation + step, 0.25), 16.0)
