"""Learning how estimates relate to exact counts, and the margin that follows from it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from aggregator.core.calibration import SCRIPT_CLASSES, Calibration, Margin, script_class
from aggregator.core.query import Query


def make(raw: int, *, text_bytes: int | None = None, script: int = 0, kind: int = 0) -> Query:
    query = Query()
    query.estimate_raw, query.script, query.input_type = raw, script, kind
    query.text_bytes = 4 * raw if text_bytes is None else text_bytes
    query.truncate = False
    return query


def spread(rng: random.Random, count: int, **kwargs: int) -> list[Query]:
    return [make(rng.randint(2, 30), **kwargs) for _ in range(count)]


def mean_error(calibration: Calibration, queries: Sequence[Query], truth: Sequence[float]) -> float:
    calibration.estimate(queries)
    return sum(abs(q.estimate - t) for q, t in zip(queries, truth, strict=True)) / len(queries)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("what is a token", "что такое токен"),
        ("二战是什么时候开始的", "東京タワーはどこですか"),
        ("भारत की राजधानी", "ประเทศไทยมีกี่จังหวัด"),
        ("ما هي عاصمة مصر", "מה בירת ישראל"),
        ("서울은 어디인가", "二战是什么时候开始的"),
        ("crème brûlée", "plain words"),
    ],
)
def test_scripts_are_told_apart(text: str, other: str) -> None:
    assert script_class(text) != script_class(other)


def test_a_few_foreign_letters_do_not_change_the_class() -> None:
    assert script_class("二战是什么 iPhone 时候开始的") == script_class("二战是什么时候开始的")
    assert script_class("which city is 東京 in English") != script_class("東京")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 200 + "é",
        "ab" * 200 + "東" * 3 + "ab" * 900,
        "\ud800",
        "\x00",
        "\U0001f642" * 50_000,
        "é" * 131_072,
        "\u0e00",
        "\u0fff",
    ],
)
def test_any_text_has_a_class(text: str) -> None:
    assert 0 <= script_class(text) < SCRIPT_CLASSES


def test_it_starts_cautious() -> None:
    calibration = Calibration()
    query = make(10)
    calibration.estimate([query])
    assert query.estimate > 10
    assert query.variance > 1.0


def test_it_learns_an_affine_relation() -> None:
    rng = random.Random(1)
    calibration = Calibration()
    for _ in range(20):
        queries = spread(rng, 60)
        calibration.learn(queries, [round(1.5 * q.estimate_raw + 4) for q in queries])
    fresh = spread(rng, 200)
    assert mean_error(calibration, fresh, [1.5 * q.estimate_raw + 4 for q in fresh]) < 0.4


def test_bytes_predict_where_the_other_vocabulary_does_not() -> None:
    rng = random.Random(2)
    calibration = Calibration()

    def draw(count: int) -> tuple[list[Query], list[int]]:
        truth = [rng.randint(5, 40) for _ in range(count)]
        return [
            make(rng.randint(1, 60), text_bytes=3 * tokens - 6, script=10) for tokens in truth
        ], truth

    for _ in range(30):
        calibration.learn(*draw(40))
    assert mean_error(calibration, *draw(200)) < 0.5


def test_an_exact_estimator_leaves_no_margin() -> None:
    rng = random.Random(3)
    calibration = Calibration(exact=True)
    for _ in range(20):
        queries = spread(rng, 60)
        calibration.learn(queries, [q.estimate_raw + 12 for q in queries])  # a prompt of 10
    fresh = spread(rng, 200)
    assert mean_error(calibration, fresh, [q.estimate_raw + 12 for q in fresh]) < 1e-3
    assert sum(q.variance for q in fresh) < 1e-3


def test_input_types_learn_their_own_prompts() -> None:
    rng = random.Random(4)
    calibration = Calibration()
    for _ in range(30):
        for kind, prompt in ((1, 0), (2, 20)):
            queries = spread(rng, 40, kind=kind)
            calibration.learn(queries, [q.estimate_raw + prompt + 2 for q in queries])
    first, second = make(10, kind=1), make(10, kind=2)
    calibration.estimate([first, second])
    assert first.estimate == pytest.approx(12, abs=0.5)
    assert second.estimate == pytest.approx(32, abs=0.5)


def test_a_rare_class_starts_from_the_models_fit() -> None:
    rng = random.Random(5)
    calibration = Calibration()
    for _ in range(30):
        queries = spread(rng, 60)
        calibration.learn(queries, [2 * q.estimate_raw + 2 for q in queries])
    rare = make(10, script=12)
    calibration.estimate([rare])
    assert rare.estimate == pytest.approx(22, abs=1)
    assert rare.variance > 4 * make_variance(calibration)


def make_variance(calibration: Calibration) -> float:
    query = make(10)
    calibration.estimate([query])
    return query.variance


def test_the_doubt_about_a_rare_class_is_common_to_a_claim() -> None:
    calibration = Calibration()
    one, many = [make(10)], [make(10) for _ in range(10)]
    calibration.estimate(one)
    calibration.estimate(many)
    alone, together = one[0].variance, sum(q.variance for q in many)
    assert together > 50 * alone * 0.8  # nearly a hundred times: deviations add up, not variances


def test_it_forgets() -> None:
    rng = random.Random(6)
    calibration = Calibration()
    for slope in (1, 2):
        for _ in range(900):
            queries = spread(rng, 60)
            calibration.learn(queries, [slope * q.estimate_raw + 2 for q in queries])
    query = make(10)
    calibration.estimate([query])
    assert query.estimate == pytest.approx(22, abs=1)


def test_one_odd_text_does_not_bend_the_line() -> None:
    rng = random.Random(7)
    calibration = Calibration()
    for _ in range(30):
        queries = spread(rng, 60)
        calibration.learn(queries, [q.estimate_raw + 2 for q in queries])
    for _ in range(8):
        odd = make(25_000, text_bytes=100_000)  # a word of 100,000 letters: one unknown token
        calibration.learn([odd, *spread(rng, 3)], [3, 12, 12, 12])
    query = make(10)
    calibration.estimate([query])
    assert query.estimate == pytest.approx(12, abs=1.5)


def test_truncated_texts_teach_the_maximum_and_nothing_else() -> None:
    rng = random.Random(8)
    calibration = Calibration()
    for _ in range(30):
        queries = spread(rng, 60)
        calibration.learn(queries, [q.estimate_raw + 2 for q in queries])
    for raw in range(900, 2900, 100):
        cut = make(raw)
        cut.truncate = True
        calibration.learn([cut], [256])
    long, whole, short = make(5000), make(5000), make(10)
    long.truncate = True
    calibration.estimate([long, whole, short])
    assert long.estimate == 256
    assert whole.estimate > 4000
    assert short.estimate == pytest.approx(12, abs=0.5)


def test_estimates_stay_positive_whatever_was_learnt() -> None:
    calibration = Calibration()
    for _ in range(50):
        queries = [make(raw, text_bytes=0) for raw in range(10, 60)]
        calibration.learn(queries, [max(1, q.estimate_raw - 9) for q in queries])
    query = make(1, text_bytes=0)
    calibration.estimate([query])
    assert query.estimate >= 1.0


def test_the_margin_holds_the_rate_of_claims_over_their_target() -> None:
    rng = random.Random(9)
    margin = Margin()
    over = 0
    for claim in range(6000):
        # Errors twice as wide as they are believed to be, skewed to the right.
        error = 16.0 * (rng.expovariate(1.0) - 1.0)
        if claim >= 3000:
            over += error > margin.in_deviations * 8.0
        margin.observe(550.0 + error, 550.0, 64.0)
    assert over / 3000 < 0.01
    assert margin.in_deviations > 4.0


def test_the_margin_shrinks_when_estimates_are_better_than_believed() -> None:
    rng = random.Random(10)
    margin = Margin()
    for _ in range(2000):
        margin.observe(550.0 + rng.gauss(0.0, 4.0), 550.0, 64.0)
    assert margin.in_deviations < 1.6


def test_an_exact_claim_teaches_the_margin_nothing() -> None:
    margin = Margin()
    margin.observe(600.0, 600.0, 0.0)
    assert margin.claims == 0
