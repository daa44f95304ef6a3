"""Vectors to bytes: golden bytes of each encoding, and what must hold for any vector."""

from __future__ import annotations

import numpy as np
import pytest

from model_server.engines.base import Vectors
from model_server.vectors import Encoding, encode

ROW = [0.5, -0.25, 0.0, 1.0, -1.0, 0.125, 0.75, -0.5]


def matrix(*rows: list[float]) -> Vectors:
    return np.array(rows, dtype=np.float32)


def encoded(vectors: Vectors, encoding: Encoding, *, normalized: bool = False) -> list[bytes]:
    result = encode(vectors, dimensions=vectors.shape[1], encoding=encoding, normalized=normalized)
    return [row.tobytes() for row in result.rows]


def test_golden_bytes_of_float32() -> None:
    assert encoded(matrix([0.5, -2.0]), Encoding.FLOAT32) == [bytes.fromhex("0000003f000000c0")]


def test_golden_bytes_of_float16() -> None:
    assert encoded(matrix([0.5, -2.0]), Encoding.FLOAT16) == [bytes.fromhex("003800c0")]


def test_golden_bytes_of_int8_round_half_to_even() -> None:
    # The scale is 1, so that values are their own quotients; halves go to the even neighbour.
    vectors = matrix([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 3.4])
    result = encode(vectors, dimensions=8, encoding=Encoding.INT8, normalized=False)
    assert result.rows.view(np.int8).tolist() == [[127, 0, 2, 2, 0, -2, -127, 3]]
    assert result.scales is not None
    assert result.scales.dtype == np.float32
    assert result.scales.tolist() == [1.0]


def test_golden_bytes_of_ubinary_first_dimension_in_the_highest_bit() -> None:
    assert encoded(matrix(ROW), Encoding.UBINARY) == [bytes([0b10010110])]


def test_an_int8_scale_is_of_the_vector_alone() -> None:
    small, large = [0.01, -0.02], [1.0, 2.0]
    together = encode(matrix(small, large), dimensions=2, encoding=Encoding.INT8, normalized=False)
    alone = encode(matrix(small), dimensions=2, encoding=Encoding.INT8, normalized=False)
    assert together.rows[0].tobytes() == alone.rows[0].tobytes()
    assert together.scales is not None
    assert alone.scales is not None
    assert together.scales[0] == alone.scales[0] == np.float32(0.02) / np.float32(127)


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("normalized", [True, False])
def test_a_row_does_not_depend_on_its_mates(encoding: Encoding, normalized: bool) -> None:
    random = np.random.default_rng(5)
    vectors = random.normal(size=(40, 64)).astype(np.float32)
    vectors[::3] /= np.linalg.norm(vectors[::3], axis=1, keepdims=True)
    together = encoded(vectors, encoding, normalized=normalized)
    alone = [encoded(vectors[i : i + 1], encoding, normalized=normalized)[0] for i in range(40)]
    assert together == alone


def test_a_cut_vector_of_a_normalising_model_has_length_one_again() -> None:
    random = np.random.default_rng(6)
    vectors = random.normal(size=(10, 64)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cut = encode(vectors, dimensions=16, encoding=Encoding.FLOAT32)
    values = cut.rows.view("<f4")
    assert values.shape == (10, 16)
    assert np.linalg.norm(values, axis=1) == pytest.approx(np.ones(10), abs=1e-6)
    kept = encode(vectors, dimensions=16, encoding=Encoding.FLOAT32, normalized=False)
    assert np.array_equal(kept.rows.view("<f4"), vectors[:, :16])


def test_a_vector_of_length_1_003_is_normalised_again() -> None:
    vectors = matrix([0.6, 0.8]) * np.float32(1.003)
    values = encode(vectors, dimensions=2, encoding=Encoding.FLOAT32).rows.view("<f4")
    assert values[0] == pytest.approx([0.6, 0.8], abs=1e-6)


@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_zero_vector_stays_zero(encoding: Encoding) -> None:
    result = encode(np.zeros((1, 8), np.float32), dimensions=8, encoding=encoding)
    assert not result.rows.any()
    assert result.bad_rows == ()
    if encoding is Encoding.INT8:
        assert result.scales is not None
        assert result.scales.tolist() == [0.0]


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_named(
    encoding: Encoding, normalized: bool, value: float
) -> None:
    vectors = matrix(ROW, ROW, ROW)
    vectors[1, 3] = value
    result = encode(vectors, dimensions=8, encoding=encoding, normalized=normalized)
    assert result.bad_rows == (1,)
    good = encode(matrix(ROW), dimensions=8, encoding=encoding, normalized=normalized)
    assert result.rows[2].tobytes() == good.rows[0].tobytes()


def test_what_only_float16_cannot_hold_is_found_after_converting() -> None:
    vectors = matrix([70_000.0, 1.0], [1.0, 2.0])
    assert encode(vectors, dimensions=2, encoding=Encoding.FLOAT16, normalized=False).bad_rows == (
        0,
    )
    assert encode(vectors, dimensions=2, encoding=Encoding.FLOAT16).bad_rows == ()


def test_large_finite_values_of_a_model_that_does_not_normalise_are_good() -> None:
    vectors = matrix([3e38, -3e38])
    result = encode(vectors, dimensions=2, encoding=Encoding.FLOAT32, normalized=False)
    assert result.bad_rows == ()
    assert np.array_equal(result.rows.view("<f4"), vectors)


def test_subnormal_values_stay_in_range() -> None:
    vectors = matrix([1e-45, -1e-45, 1.4e-44])
    result = encode(vectors, dimensions=3, encoding=Encoding.INT8, normalized=False)
    assert result.bad_rows == ()
    assert np.abs(result.rows.view(np.int8).astype(int)).max() <= 127


def test_ubinary_refuses_a_size_that_does_not_fill_bytes() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        encode(matrix([1.0, 2.0]), dimensions=2, encoding=Encoding.UBINARY)


def test_the_input_is_left_as_it_was() -> None:
    vectors = matrix([3.0, 4.0])
    encode(vectors, dimensions=2, encoding=Encoding.FLOAT32)
    assert vectors.tolist() == [[3.0, 4.0]]
