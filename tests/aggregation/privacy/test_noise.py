"""Gaussian noise: its distribution, its edges, and that it is what the seed says."""

from math import erf, log, sqrt

import mpmath
import numpy as np
import pytest

from keyhole.aggregation.privacy.noise import (
    LARGEST,
    add_noise,
    add_ring_noise,
    noise_room,
    normal,
)
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, ShapeError


class Chosen:
    """A source of words that no seed would ever give."""

    def __init__(self, words):
        self.given = np.array(words, np.uint64)

    def words(self, count):
        assert count == len(self.given)
        return self.given


def exact(word, other):
    """The formula of Box and Muller to 60 digits."""
    with mpmath.workdps(60):
        radius = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(word | 1) / 2**64))
        angle = 2 * mpmath.pi * (mpmath.mpf(other >> 11) / 2**53)
        return radius * mpmath.cos(angle), radius * mpmath.sin(angle)


def test_numbers_are_the_formula_of_their_words_to_within_2_to_the_minus_46():
    """Random words, and those at the edges of u, of v and of the two ways to the logarithm."""
    edges = [0, 1, 2**11, 2**63 - 1, 2**63, 3 * 2**62, 2**64 - 2**14, 2**64 - 5, 2**64 - 1]
    words = [*(int(w) for w in Prg(b"words of normals").words(2000))]
    words += [word for u in edges for v in edges for word in (u, v)]
    numbers = normal(Chosen(words), len(words))
    for at in range(0, len(words), 2):
        for got, wanted in zip(numbers[at : at + 2], exact(*words[at : at + 2]), strict=True):
            assert abs(mpmath.mpf(float(got)) - wanted) < mpmath.mpf(2) ** -46


def test_no_number_is_further_out_than_the_largest_one():
    numbers = normal(Chosen([0, 0, 1, 2**62, 2**64 - 1, 0]), 6)
    assert numbers[0] == pytest.approx(LARGEST) == pytest.approx(sqrt(128 * log(2)))
    assert np.abs(numbers).max() <= LARGEST
    assert 0 <= numbers[4] < 1e-9


def test_numbers_have_the_frequencies_of_the_normal_distribution():
    """Chi-square over 62 intervals: 120 is at 1e-5. Negative control: a spread 1 % larger."""
    numbers = normal(Prg(b"frequencies     "), 1 << 20)
    edges = np.linspace(-3, 3, 61)

    def chi_square(values):
        cdf = np.array([0.5 * (1 + erf(x / sqrt(2))) for x in edges])
        shares = np.diff(np.concatenate([[0], cdf, [1]]))
        seen = np.histogram(values, np.concatenate([[-np.inf], edges, [np.inf]]))[0]
        return np.sum((seen - shares * len(values)) ** 2 / (shares * len(values)))

    assert chi_square(numbers) < 120 < chi_square(1.01 * numbers)


def test_numbers_of_a_pair_and_of_neighbours_do_not_depend_on_each_other():
    numbers = normal(Prg(b"pairs           "), 1 << 18)
    limit = 5 / sqrt(1 << 17)
    for values in (numbers, np.square(numbers)):
        assert abs(np.corrcoef(values[::2], values[1::2])[0, 1]) < limit
        assert abs(np.corrcoef(values[1:-1:2], values[2::2])[0, 1]) < limit


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1 << 14, (1 << 14) + 1, 40_001])
def test_any_count_is_filled_and_the_same_seed_gives_the_same(count):
    one, other = normal(Prg(bytes(16)), count), normal(Prg(bytes(16)), count)
    np.testing.assert_array_equal(one, other)
    assert np.count_nonzero(one) == count
    if count:
        assert not np.array_equal(one, normal(Prg(b"another seed    "), count))


def test_shapes_are_filled_in_the_order_of_their_numbers():
    flat = normal(Prg(bytes(16)), 35)
    np.testing.assert_array_equal(normal(Prg(bytes(16)), (5, 7)), flat.reshape(5, 7))


# On sums


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_noise_on_floats_has_its_standard_deviation_in_every_row(dtype):
    noisy = add_noise(np.zeros((50, 4000), dtype), 2.5, Prg(b"rows            "))
    assert noisy.dtype == dtype
    assert abs(noisy.std() - 2.5) < 5 * 2.5 / sqrt(2 * noisy.size)
    assert np.abs(noisy.mean(axis=1)).max() < 5 * 2.5 / sqrt(4000)
    correlations = np.corrcoef(noisy) - np.eye(50)
    assert np.abs(correlations).max() < 6 / sqrt(4000)


@pytest.mark.parametrize(("dtype", "sd"), [(np.uint16, 300.0), (np.uint32, 2.0**24)])
def test_noise_in_a_ring_is_rounded_and_wraps(dtype, sd):
    """Around zero, half of it is below: without wrapping nothing would be."""
    sums = np.zeros((100, 1000), dtype)
    signed = np.dtype(dtype.__name__[1:])
    noisy = add_ring_noise(sums.copy(), sd, Prg(b"ring            "))
    noise = noisy.view(signed).astype(np.float64)
    np.testing.assert_array_equal(
        noise, np.rint(sd * normal(Prg(b"ring            "), (100, 1000)))
    )
    assert abs(noise.std() - sd) < 5 * sd / sqrt(2 * noise.size)
    shifted = add_ring_noise(sums - dtype(3), sd, Prg(b"ring            ")).view(signed)
    np.testing.assert_array_equal(shifted.astype(np.float64), noise - 3)


def test_rounded_noise_on_an_integer_is_the_rounded_sum():
    """Why the ring costs no privacy: rounding is applied to the Gaussian release."""
    numbers = 7.3 * normal(Prg(bytes(16)), 10_000)
    noisy = add_ring_noise(np.full(10_000, 41, np.uint32), 7.3, Prg(bytes(16))).view(np.int32)
    np.testing.assert_array_equal(noisy, np.rint(41 + numbers))


def test_small_noise_in_a_ring_has_the_frequencies_of_the_rounded_gaussian():
    """sd 0.8: chi-square over -3..3 and beyond, 8 degrees of freedom; 45 is at 4e-7."""
    noise = add_ring_noise(np.zeros(1 << 18, np.uint32), 0.8, Prg(b"rounded         "))
    edges = np.concatenate([[-np.inf], np.arange(-3.5, 4), [np.inf]])
    cdf = [0.5 * (1 + erf(x / 0.8 / sqrt(2))) for x in edges]
    expected = np.diff(cdf) * len(noise)
    seen = np.histogram(noise.view(np.int32), edges)[0]
    assert np.sum((seen - expected) ** 2 / expected) < 45


@pytest.mark.parametrize("add", [add_noise, add_ring_noise])
def test_no_noise_leaves_a_sum_as_it_is(add):
    sums = np.arange(10, dtype=np.float32 if add is add_noise else np.uint32)
    np.testing.assert_array_equal(add(sums.copy(), 0.0, Prg(bytes(16))), sums)


@pytest.mark.parametrize("add", [add_noise, add_ring_noise])
def test_noise_is_added_in_place_and_never_to_a_copy(add):
    sums = np.arange(50_000, dtype=np.float32 if add is add_noise else np.uint32).reshape(5, -1)
    before = sums.copy()
    assert add(sums, 9.0, Prg(bytes(16))) is sums
    assert (sums != before).mean() > 0.9
    np.testing.assert_array_equal(sums.ravel(), add(before.ravel(), 9.0, Prg(bytes(16))))
    with pytest.raises(ShapeError, match="contiguous"):
        add(sums.T, 9.0, Prg(bytes(16)))


@pytest.mark.parametrize("sd", [-1.0, np.nan, np.inf])
@pytest.mark.parametrize("add", [add_noise, add_ring_noise])
def test_a_standard_deviation_that_cannot_be_is_refused(add, sd):
    sums = np.zeros(3, np.float32 if add is add_noise else np.uint32)
    with pytest.raises(InputError, match="standard deviation"):
        add(sums, sd, Prg(bytes(16)))


def test_noise_too_large_for_its_ring_is_refused():
    assert LARGEST * 2**11 < 2**15
    assert LARGEST * 2**27 < 2**31
    for dtype, sd in ((np.uint16, 2**11 + 1), (np.uint32, 2**27 + 1)):
        with pytest.raises(InputError, match="in this ring"):
            add_ring_noise(np.zeros(3, dtype), sd, Prg(bytes(16)))


def test_numbers_of_the_wrong_kind_are_refused():
    with pytest.raises(ShapeError):
        add_noise(np.zeros(3, np.uint32), 1.0, Prg(bytes(16)))
    for dtype in (np.float32, np.int32, np.uint64):
        with pytest.raises(ShapeError):
            add_ring_noise(np.zeros(3, dtype), 1.0, Prg(bytes(16)))


@pytest.mark.parametrize(("multiplier", "parties"), [(0.0, 1), (0.3, 1), (1.0, 2), (5.0, 1)])
def test_a_ring_with_room_for_noise_cannot_overflow(multiplier, parties):
    """The largest sum and the largest noise, against half of a ring made for cohort and room."""
    cohort, clip = 50, 1.0
    capacity = (cohort + noise_room(multiplier, parties)) * clip
    assert cohort * clip + parties * LARGEST * multiplier * clip <= capacity
