"""Fixed point: sums cannot overflow, rounding is right on average, and what cannot be encoded is
refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.crypto.prg import Prg
from keyhole.crypto.ring import FixedPoint, ring_dtype
from keyhole.errors import InputError, NotFiniteError, ShapeError

SEED = bytes(range(16))
BITS = st.sampled_from([16, 32])
CLIPS = st.floats(2.0**-64, 2.0**64)
# Cohorts up to those for which a ring leaves 64 steps: 2^(bits - 1) / 65.
SMALL = {16: 504, 32: 33_038_209}


@st.composite
def points(draw):
    """Settings that a ring can hold, at the bound as often as not."""
    bits = draw(BITS)
    largest = SMALL[bits]
    cohort = draw(st.sampled_from([1, largest]) | st.integers(1, largest))
    clip = draw(CLIPS | st.integers(-64, 63).map(lambda e: 2.0**e))
    try:
        return FixedPoint(clip, cohort, bits)
    except InputError:  # near the bound, a clip that is no power of two has fewer steps
        return FixedPoint(clip, max(1, cohort // 4), bits)


def signed(elements):
    return elements.view(f"i{elements.itemsize}").astype(np.int64)


def words_of(seed, count):
    return np.frombuffer(Prg(seed).bytes(4 * count), "<u4")


def by_definition(point, values, words):
    """Slow twin: rational numbers and the same random words."""
    numbers = []
    for value, word in zip(values, words, strict=True):
        clipped = max(-Fraction(point.clip), min(Fraction(point.clip), Fraction(float(value))))
        steps = clipped * Fraction(point.scale)
        floor = math.floor(steps)
        is_up = Fraction(int(word)) + Fraction(1, 2) < (steps - floor) * 2**32
        numbers.append((floor + is_up) % 2**point.bits)
    return np.array(numbers, point.dtype)


@given(points())
def test_a_cohort_of_the_largest_numbers_stays_within_half_of_the_ring(point):
    largest = math.ceil(Fraction(point.clip) * Fraction(point.scale))
    assert point.cohort * largest < 2 ** (point.bits - 1)


@given(points())
def test_the_scale_is_the_largest_power_of_two_that_has_room(point):
    def has_room(scale):
        return point.cohort * (Fraction(point.clip) * scale + 1) < 2 ** (point.bits - 1)

    scale = Fraction(point.scale)
    assert math.frexp(point.scale)[0] == 0.5
    assert has_room(scale)
    assert not has_room(2 * scale)


@given(points(), st.booleans(), st.sampled_from([-1, 1]))
@settings(max_examples=30)
def test_a_sum_of_a_whole_cohort_at_the_clip_has_the_right_sign_and_size(point, is_beyond, sign):
    """One number that is rounded as far as it can be, taken `cohort` times in the ring."""
    value = sign * (np.finfo(np.float64).max if is_beyond else point.clip)
    drawn = point.encode(np.full(64, value), Prg(SEED))
    worst = drawn[np.argmax(sign * signed(drawn))]
    with np.errstate(over="ignore"):
        total = (worst.astype(np.uint64) * np.uint64(point.cohort)).astype(point.dtype)
    exact = point.cohort * int(signed(worst[None])[0])
    assert int(signed(total[None])[0]) == exact
    assert point.decode(total[None])[0] == np.float32(exact / point.scale)
    slack = point.cohort * (point.rounding + point.clip * 2.0**-24)
    assert abs(exact / point.scale - sign * point.cohort * point.clip) <= slack


@given(
    points(),
    st.lists(st.floats(-1.25, 1.25), max_size=20),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.binary(min_size=16, max_size=16),
)
@settings(max_examples=30)
def test_encoding_is_its_definition_in_rational_numbers(point, parts, dtype, seed):
    with np.errstate(over="ignore"):
        values = (np.array(parts) * point.clip).astype(dtype)
    values = values[np.isfinite(values)]
    encoded = point.encode(values, Prg(seed))
    assert encoded.dtype == point.dtype
    np.testing.assert_array_equal(
        encoded, by_definition(point, values, words_of(seed, len(values)))
    )


@pytest.mark.parametrize("bits", [16, 32])
def test_encoding_is_its_definition_over_more_than_one_chunk(bits):
    point = FixedPoint(0.3, 17, bits)
    values = np.sin(np.arange(65_536 + 100)).astype(np.float32) * 0.4
    encoded = point.encode(values, Prg(SEED))
    words, edge = words_of(SEED, len(values)), np.r_[0:50, 65_500:65_600]
    np.testing.assert_array_equal(encoded[edge], by_definition(point, values[edge], words[edge]))


def test_the_probability_of_rounding_up_has_32_bits():
    """Fractions that lie a quarter of 2^-32 beside the middle of their own random word."""
    point, words = FixedPoint(1.0, 100), words_of(SEED, 1000).astype(np.float64)
    for beside, is_up in ((0.25, 1), (-0.25, 0)):
        fractions = (words + 0.5 + beside) / 2**32
        encoded = signed(point.encode((7 + fractions) / point.scale, Prg(SEED)))
        assert set(encoded) == {7 + is_up}


@given(points(), st.lists(st.floats(-1, 1), min_size=1, max_size=20))
@settings(max_examples=30)
def test_a_number_is_off_by_less_than_the_stated_rounding(point, parts):
    values = np.array(parts) * point.clip
    encoded = signed(point.encode(values, Prg(SEED)))
    for value, number in zip(values, encoded, strict=True):
        off = abs(Fraction(int(number)) / Fraction(point.scale) - Fraction(float(value)))
        assert off < Fraction(point.rounding)


@given(points(), st.data())
@settings(max_examples=30)
def test_whole_numbers_of_steps_are_not_rounded(point, data):
    limit = math.floor(point.clip * point.scale)
    steps = data.draw(st.lists(st.integers(-limit, limit), min_size=1, max_size=10))
    values = np.array([step / point.scale for step in [*steps, limit, -limit]])
    assert signed(point.encode(values, Prg(SEED))).tolist() == [*steps, limit, -limit]


@pytest.mark.parametrize("bits", [16, 32])
def test_clipping_is_exact_and_touches_nothing_within(bits):
    point = FixedPoint(0.5, 10, bits)
    limit = int(0.5 * point.scale)
    beyond = np.array([0.5, np.nextafter(0.5, 1), 0.75, 1e30, 1e300])
    assert signed(point.encode(beyond, Prg(SEED))).tolist() == [limit] * 5
    assert signed(point.encode(-beyond, Prg(SEED))).tolist() == [-limit] * 5
    one_less = np.array([(limit - 1) / point.scale, -(limit - 1) / point.scale])
    assert signed(point.encode(one_less, Prg(SEED))).tolist() == [limit - 1, 1 - limit]


def has_right_mean(steps, fraction):
    """Whether so many of n numbers were rounded up as a fraction of them should: their count is
    binomial, so within 6 standard deviations but for a chance of 2e-9; the generator's own bias of
    2^-33 is far below."""
    n = len(steps)
    return abs(steps.mean() - fraction) <= 6 * math.sqrt(fraction * (1 - fraction) / n)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("fraction", [0.001, 0.25, 0.5, 0.7, 0.999])
def test_rounding_is_right_on_average(fraction, sign):
    point = FixedPoint(1.0, 100)
    values = np.full(200_000, sign * (1000 + fraction) / point.scale)
    steps = sign * signed(point.encode(values, Prg(SEED))) - 1000
    assert set(np.unique(steps)) == {0, 1}
    assert has_right_mean(steps, fraction)


def test_rounding_to_the_nearest_would_not_be_right_on_average():
    """Negative control of the test above."""
    assert not has_right_mean(np.rint(np.full(200_000, 0.7)), 0.7)
    assert not has_right_mean(np.floor(np.full(200_000, 0.001)), 0.001)


def test_a_sum_of_many_clients_is_right_on_average_where_rounding_to_the_nearest_is_not():
    """A hundred clients send a third of a step each: the nearest step is 0 for all of them. The
    mean of 4,000 sums, each with a variance below 100 / 4 steps, is within 6 deviations."""
    point = FixedPoint(1.0, 100, 16)
    prg, total = Prg(SEED), np.zeros(4000, np.uint16)
    for _ in range(100):
        total += point.encode(np.full(4000, point.rounding / 3, np.float32), prg)
    mean = point.decode(total).mean(dtype=np.float64) * point.scale
    assert abs(mean - 100 / 3) < 6 * math.sqrt(25 / 4000)


@given(
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.integers(0, 99),
    BITS,
)
@settings(max_examples=30)
def test_nan_and_infinity_are_refused_wherever_they_stand(value, dtype, place, bits):
    values = np.full(100, 0.123, dtype)
    values[place] = value
    with pytest.raises(NotFiniteError, match="1 of 100") as caught:
        FixedPoint(1.0, 10, bits).encode(values, Prg(SEED))
    assert "0.12" not in str(caught.value)


def test_all_that_is_not_finite_is_counted_beyond_one_chunk():
    values = np.zeros(70_000, np.float32)
    values[[0, 65_535, 65_536, 69_999]] = [np.nan, np.inf, -np.inf, np.nan]
    with pytest.raises(NotFiniteError, match="4 of 70000"):
        FixedPoint(1.0, 10).encode(values, Prg(SEED))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 4)])
def test_the_shape_stays(shape):
    point = FixedPoint(1.0, 10)
    encoded = point.encode(np.full(shape, 0.5, np.float32), Prg(SEED))
    assert encoded.shape == shape
    decoded = point.decode(encoded)
    assert decoded.shape == shape
    assert decoded.dtype == np.float32
    assert (decoded == 0.5).all()


def test_values_that_are_not_contiguous_are_encoded_in_their_order():
    point, values = FixedPoint(1.0, 10), np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    for view in (values.T, values[::2, ::-1], values.astype(">f4")):
        expected = point.encode(np.array(view, np.float32, order="C"), Prg(SEED))
        np.testing.assert_array_equal(point.encode(view, Prg(SEED)), expected)


def test_what_is_not_a_float_is_refused():
    for dtype in (np.int32, np.bool_, np.complex64):
        with pytest.raises(ShapeError, match="float"):
            FixedPoint(1.0, 10).encode(np.ones(3, dtype), Prg(SEED))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint64, np.float32, ">u4"])
def test_sums_of_another_ring_are_refused(dtype):
    with pytest.raises(ShapeError, match="another ring"):
        FixedPoint(1.0, 10).decode(np.ones(3, dtype))


@pytest.mark.parametrize("clip", [0.0, -1.0, np.nan, np.inf, 2.0**-65, 2.0**65])
def test_a_clip_that_cannot_be_used_is_refused(clip):
    with pytest.raises(InputError, match="clip"):
        FixedPoint(clip, 10)


@pytest.mark.parametrize("cohort", [0, -1])
def test_a_cohort_without_clients_is_refused(cohort):
    with pytest.raises(InputError, match="cohort has no clients"):
        FixedPoint(1.0, cohort)


@pytest.mark.parametrize("bits", [8, 31, 64])
def test_a_ring_of_another_size_is_refused(bits):
    with pytest.raises(InputError, match="ring size"):
        FixedPoint(1.0, 10, bits)
    with pytest.raises(InputError, match="ring size"):
        ring_dtype(bits)


@pytest.mark.parametrize("bits", [16, 32])
def test_a_cohort_that_leaves_fewer_than_64_steps_is_refused(bits):
    """64 steps and one for rounding, times the cohort, are below 2^(bits - 1)."""
    assert FixedPoint(1.0, SMALL[bits], bits).scale == 64
    for clip, cohort in (
        (63.9 / 64, SMALL[bits]),
        (1.0, SMALL[bits] + 1),
        (1.0, 2 ** (bits - 1)),
        (1.0, 2**40),
    ):
        with pytest.raises(InputError, match="too small for sums"):
            FixedPoint(clip, cohort, bits)
