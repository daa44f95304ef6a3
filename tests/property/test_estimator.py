"""Any string has an estimate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aggregator.adapters.estimator import TIKTOKEN_CHARACTERS_MAX, TiktokenEstimator

ESTIMATOR = TiktokenEstimator()

any_text = st.text(st.characters(), max_size=200)


@given(any_text)
def test_any_text_is_estimated_within_its_bytes(text: str) -> None:
    # A lone surrogate becomes the three bytes of a replacement character.
    assert 1 <= ESTIMATOR.estimate(text) <= max(1, len(text.encode("utf-8", "surrogatepass")))


@given(any_text.filter(bool), st.integers(1, 5))
def test_repeated_texts_are_estimated_by_their_length(text: str, times: int) -> None:
    count = times * (TIKTOKEN_CHARACTERS_MAX // len(text) + 1)
    long = text * count

    assert 1 <= ESTIMATOR.estimate(long) <= 4 * len(long)
