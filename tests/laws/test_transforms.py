"""Laws of transforming select functions: rounding is bounded, fair, and a pure function of the
key."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import keyhole as kh
from keyhole.errors import InputError, NotFiniteError
from keyhole.models.transpose import derive_deselect
from keyhole.primitives.coding import dequantize_rows, quantize_rows
from tests.helpers import assert_trees_equal

FLOATS = st.floats(-1e6, 1e6, width=32)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(0, 4), st.integers(0, 9)), elements=FLOATS)
BITS = pytest.mark.parametrize("bits", [8, 4])


def pick(x, k):
    return {"w": x["w"][k], "b": x["b"][k]}


def server():
    rng = np.random.default_rng(3)
    return {
        "w": rng.normal(size=(5, 2, 3)).astype(np.float32),
        "b": rng.normal(size=5).astype(np.float32),
    }


@BITS
@given(rows=ROWS, seed=st.integers(0, 2**64 - 1))
def test_each_number_is_off_by_less_than_one_level(bits, rows, seed):
    quantized = quantize_rows(rows, np.arange(len(rows)), bits, seed)
    error = np.abs(dequantize_rows(quantized) - rows)
    rounding = 1e-6 * np.abs(rows).max(initial=0)
    assert np.all(error <= quantized.scale[:, None] * 1.0001 + rounding)


@BITS
def test_rounding_is_right_on_average(bits):
    """The mean over 4,000 seeds of a number 0.3 levels above a level, within 5 standard errors."""
    rows = np.array([[0.0, 2**bits - 1.0, 3.3]], np.float32)
    decoded = [
        dequantize_rows(quantize_rows(rows, np.array([1]), bits, seed))[0, 2]
        for seed in range(4000)
    ]
    assert abs(np.mean(decoded) - 3.3) < 5 * np.sqrt(0.3 * 0.7 / 4000)


@BITS
@given(rows=ROWS, seed=st.integers(0, 2**32))
def test_rows_are_quantized_alike_alone_and_together(bits, rows, seed):
    keys = np.arange(len(rows)) * 3
    together = dequantize_rows(quantize_rows(rows, keys, bits, seed))
    for i in range(len(rows)):
        alone = dequantize_rows(quantize_rows(rows[i : i + 1], keys[i : i + 1], bits, seed))
        np.testing.assert_array_equal(alone[0], together[i])


@BITS
def test_the_same_seed_gives_the_same_slice_and_another_seed_another(bits):
    x = server()
    first = kh.decode(kh.Quantized(pick, bits, seed=1)(x, 2))
    assert_trees_equal(kh.decode(kh.Quantized(pick, bits, seed=1)(x, 2)), first)
    assert np.any(kh.decode(kh.Quantized(pick, bits, seed=2)(x, 2))["w"] != first["w"])


@BITS
def test_codes_take_their_bits_and_eight_bytes_a_row(bits):
    quantized = quantize_rows(np.ones((3, 10), np.float32), np.arange(3), bits, seed=0)
    assert quantized.nbytes == 3 * (10 * bits // 8 + 8)


def test_numbers_on_a_level_are_exact():
    rows = np.arange(16, dtype=np.float32)[None]
    np.testing.assert_array_equal(dequantize_rows(quantize_rows(rows, np.array([0]), 4, 9)), rows)


def test_noise_is_uniform_over_keys_and_positions():
    from keyhole.primitives.coding import uniform

    draws = uniform(5, np.arange(1000), 100)
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    chi_square = ((counts - 5000) ** 2 / 5000).sum()
    assert chi_square < 43.8  # 99.9 % of chi-square with 19 degrees of freedom
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.15


@given(hnp.arrays(np.float32, (5, 3), elements=st.floats(-60000, 60000, width=32)))
def test_half_precision_is_float16_and_comes_back_in_the_type_it_had(x):
    decoded = kh.decode(kh.HalfPrecision(lambda x, k: x[k])(x, 4))
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, x[4].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    "transform",
    [
        lambda psi: kh.Quantized(psi, 8, seed=0),
        lambda psi: kh.Quantized(psi, 4, seed=0),
        kh.HalfPrecision,
    ],
)
def test_deselect_of_a_transformed_select_is_the_plain_ones(transform):
    x, space = server(), kh.KeySpace("row", 5)
    keys, update = space.keys([4, 0, 4]), [pick(x, k) for k in (1, 2, 3)]
    plain = derive_deselect(pick, x, space)(update, keys)
    assert_trees_equal(derive_deselect(transform(pick), x, space)(update, keys), plain)


def test_a_plain_slice_decodes_to_itself():
    assert_trees_equal(kh.decode(pick(server(), 1)), pick(server(), 1))


@pytest.mark.parametrize("bits", [0, 1, 16, -8])
def test_other_widths_are_refused(bits):
    with pytest.raises(InputError, match="expected 8 or 4"):
        kh.Quantized(pick, bits, seed=0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_numbers_without_a_level_are_refused(bad):
    with pytest.raises(NotFiniteError, match="fewer bits"):
        quantize_rows(np.array([[1.0, bad]]), np.array([0]), 8, seed=0)


def test_numbers_beyond_half_precision_are_refused():
    with pytest.raises(NotFiniteError, match="fewer bits"):
        kh.HalfPrecision(lambda x, k: x[k])(np.array([1e5], np.float32), 0)
