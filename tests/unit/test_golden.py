"""The golden check passes engines that agree with their reference, remembers it, refuses others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model_server.engines.base import ModelInfo, Text, TextRefused, Tokens, Vectors
from model_server.engines.golden import (
    GOLDEN_TEXTS,
    GoldenMismatchError,
    check_golden,
    cosine,
    golden_tokens,
)

MAXIMUM = 64
INFO = ModelInfo(
    revision="abc",
    dimensions=6,
    normalized=False,
    input_tokens_max=MAXIMUM,
    engine="fake",
    device="none",
    precision="float32",
)


class Fake:
    """A byte is a token; a vector is drawn by them. Its faults are set by each test."""

    def __init__(self) -> None:
        self.info = INFO
        self.references = 0
        self.has_reference = True
        self.refuses = False
        self.wrong_together = False
        self.wrong = False
        self.value: float | None = None
        self.ran: list[list[int]] = []
        """The tokens of each input of each pass."""

    def tokenize(self, texts: Sequence[Text]) -> list[Tokens | TextRefused]:
        if self.refuses:
            return [TextRefused(message="too odd") for _ in texts]
        most = self.info.input_tokens_max
        return [Tokens(ids=list(text.text.encode()[:most])) for text in texts]

    def embed(self, inputs: Sequence[Tokens]) -> Vectors:
        self.ran.append([len(one.ids) for one in inputs])
        vectors = self._vectors(inputs)
        if self.wrong or (self.wrong_together and len(inputs) > 1):
            vectors[-1] = -vectors[-1]
        if self.value is not None:
            vectors[0, 0] = self.value
        return vectors

    def reference(self, inputs: Sequence[Tokens]) -> Vectors | None:
        self.references += 1
        return self._vectors(inputs) if self.has_reference else None

    def close(self) -> None:
        """Nothing is held."""

    def _vectors(self, inputs: Sequence[Tokens]) -> Vectors:
        rows = [np.random.default_rng(list(one.ids)).normal(size=6) for one in inputs]
        return np.asarray(rows, dtype=np.float32)


def test_the_texts_are_eight_and_the_last_fills_any_maximum() -> None:
    assert len(GOLDEN_TEXTS) == 8
    assert len(GOLDEN_TEXTS[0]) == 1
    assert len(golden_tokens(Fake())[-1].ids) == MAXIMUM
    assert 130_000 < len(GOLDEN_TEXTS[-1].encode()) < 135_000


def test_agreement_is_reported_and_the_reference_kept(tmp_path: Path) -> None:
    engine = Fake()
    first = check_golden(engine, tmp_path / "cache")
    second = check_golden(engine, tmp_path / "cache")
    assert first is not None
    assert second is not None
    assert (first.from_cache, second.from_cache) == (False, True)
    assert first.cosines == second.cosines == pytest.approx((1.0,) * 8)
    assert first.cosine_min == 0.9999
    assert engine.references == 1
    check_golden(engine)
    assert engine.references == 2


@pytest.mark.parametrize(("maximum", "inputs_max"), [(64, 1_024), (512, 1_024), (512, 3), (64, 1)])
def test_no_pass_is_larger_than_any_server_allows(maximum: int, inputs_max: int) -> None:
    """`batch_tokens_max` may be as small as one input of the maximum."""
    engine = Fake()
    engine.info = replace(INFO, input_tokens_max=maximum)
    assert check_golden(engine, inputs_max=inputs_max) is not None
    assert max(sum(lengths) for lengths in engine.ran) == maximum
    assert max(len(lengths) for lengths in engine.ran) <= inputs_max
    texts = [len(one.ids) for one in golden_tokens(engine)]
    assert [[length] for length in texts] == engine.ran[-len(texts) :]
    together = [length for lengths in engine.ran[: -len(texts)] for length in lengths]
    assert together == texts


def test_short_texts_go_together() -> None:
    engine = Fake()
    engine.info = replace(INFO, input_tokens_max=512)
    check_golden(engine)
    assert [len(lengths) for lengths in engine.ran[:2]] == [7, 1]


def test_a_reference_that_can_not_be_kept_is_used_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = check_golden(Fake(), tmp_path / "file" / "cache")
    assert report is not None
    assert "file" in report.not_kept
    kept = check_golden(Fake(), tmp_path)
    assert kept is not None
    assert kept.not_kept == ""


def test_another_revision_has_a_reference_of_its_own(tmp_path: Path) -> None:
    engine = Fake()
    check_golden(engine, tmp_path)
    engine.info = replace(INFO, revision="def")
    check_golden(engine, tmp_path)
    assert engine.references == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"ids": []}', b"\xff\xff", "nan", "short"])
def test_a_damaged_cache_is_remade(tmp_path: Path, damage: bytes | str) -> None:
    engine = Fake()
    check_golden(engine, tmp_path)
    (path,) = tmp_path.iterdir()
    kept = json.loads(path.read_bytes())
    if damage == "nan":
        kept["vectors"][0][0] = float("nan")
    if damage == "short":
        del kept["vectors"][0]
    path.write_bytes(damage if isinstance(damage, bytes) else json.dumps(kept).encode())
    check_golden(engine, tmp_path)
    assert engine.references == 2
    check_golden(engine, tmp_path)
    assert engine.references == 2
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fault", ["wrong", "wrong_together"])
def test_disagreement_is_refused_with_its_text(tmp_path: Path, fault: str) -> None:
    engine = Fake()
    setattr(engine, fault, True)
    with pytest.raises(GoldenMismatchError, match=r"golden text \d of 8 .* below 0\.9999"):
        check_golden(engine, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    engine = Fake()
    engine.value = value
    with pytest.raises(GoldenMismatchError, match="not finite"):
        check_golden(engine)


def test_a_refused_golden_text_is_told() -> None:
    engine = Fake()
    engine.refuses = True
    with pytest.raises(GoldenMismatchError, match="too odd"):
        check_golden(engine)


def test_vectors_of_another_size_are_refused() -> None:
    engine = Fake()
    engine.info = replace(INFO, dimensions=7)
    with pytest.raises(GoldenMismatchError, match="shape"):
        check_golden(engine)


def test_bounds_by_precision() -> None:
    engine = Fake()
    engine.info = replace(INFO, precision="bfloat16")
    half = check_golden(engine)
    assert half is not None
    assert half.cosine_min == 0.999
    engine.info = replace(INFO, precision="int8")
    with pytest.raises(ValueError, match="golden_cosine_min"):
        check_golden(engine)
    given = check_golden(engine, cosine_min=0.98)
    assert given is not None
    assert given.cosine_min == 0.98


def test_an_engine_without_reference_is_not_compared() -> None:
    engine = Fake()
    engine.has_reference = False
    assert check_golden(engine) is None


def test_cosine_of_zero_vectors() -> None:
    left = np.array([[0, 0], [0, 0], [1, 0], [3, 4]], dtype=np.float32)
    right = np.array([[0, 0], [1, 0], [-2, 0], [3, 4]], dtype=np.float32)
    assert cosine(left, right).tolist() == pytest.approx([1.0, 0.0, -1.0, 1.0])
