"""Learning with errors, below the protocol: products, errors, the noise they make and its bound."""

from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from math import exp, log2

import numpy as np
import pytest

from keyhole.crypto.prg import Prg
from keyhole.delivery.pir.lwe import (
    BLOCK,
    LweShape,
    Opening,
    add_product,
    draw_errors,
    encrypt,
    failure_of_byte,
    max_columns,
    public_matrix,
    thresholds,
)

SIGMA = 6.4


def drawn(kind, shape, name=b"drawn"):
    out = np.empty(shape, kind)
    Prg(name.ljust(16)).fill(out.view(np.uint8))
    return out


# Products


@pytest.mark.parametrize("kind", [np.uint8, np.uint32])
@pytest.mark.parametrize(
    ("count", "depth", "width"),
    [(1, 1, 1), (2, 7, 9), (3, 8, 33), (1, 16, 4096), (5, 41, 4101), (2, 33, 8200)],
)
def test_products_are_exact_modulo_2_to_the_32(kind, count, depth, width):
    weights, table = drawn(np.uint32, (count, depth)), drawn(kind, (depth, width), b"table")
    out = np.full((count, width), 2**32 - 1, np.uint32)
    add_product(out, weights, table)
    twin = weights.astype(np.uint64) @ table.astype(np.uint64) - np.uint64(1)
    np.testing.assert_array_equal(out, twin.astype(np.uint32))


def test_products_of_the_largest_numbers_wrap_as_pythons_integers_do():
    largest = np.full((2, 40), 2**32 - 1, np.uint32)
    out = np.zeros((2, 3), np.uint32)
    add_product(out, largest, np.full((40, 3), 2**32 - 1, np.uint32))
    assert set(out.flat) == {40 * (2**32 - 1) ** 2 % 2**32}


def test_the_public_matrix_comes_in_blocks_of_one_stream():
    first, second = public_matrix(bytes(16), BLOCK + 3)
    assert (first.shape, second.shape) == ((1024, BLOCK), (1024, 3))
    stream = np.frombuffer(Prg(bytes(16)).bytes(4 * 1024 * (BLOCK + 3)), "<u4")
    np.testing.assert_array_equal(np.concatenate([first.ravel(), second.ravel()]), stream)


# Errors


def exact_probabilities():
    """Of -100 to 100, to 50 digits."""
    with localcontext() as context:
        context.prec = 50
        spread = 2 * Decimal("6.4") ** 2
        weights = {x: (-Decimal(x * x) / spread).exp() for x in range(-100, 101)}
        total = sum(weights.values())
        return {x: Fraction(weight / total) for x, weight in weights.items()}


def table_probabilities():
    lowest, steps = thresholds()
    ends = [-(2**63), *(int(step) for step in steps), 2**63]
    each = [Fraction(b - a, 2**64) for a, b in pairwise(ends)]
    return {lowest + at: share for at, share in enumerate(each)}


def test_the_table_is_the_discrete_gaussian_to_within_2_to_the_minus_57():
    exact, table = exact_probabilities(), table_probabilities()
    assert sum(table.values()) == 1
    far = [abs(share - table.get(x, 0)) for x, share in exact.items()]
    assert max(far) <= Fraction(1, 2**64)
    assert sum(far) / 2 < Fraction(1, 2**57)
    assert abs(sum(x * x * p for x, p in table.items()) - Fraction("40.96")) < Fraction(1, 10**12)


def test_the_table_is_sub_gaussian_with_its_sigma():
    """E exp(t X) <= exp(t^2 sigma^2 / 2), what the bound of the noise rests on."""
    table = {x: float(p) for x, p in table_probabilities().items()}
    for t in np.linspace(-1, 1, 41):
        moment = sum(p * exp(t * x) for x, p in table.items())
        assert moment <= exp(t * t * SIGMA**2 / 2) * (1 + 1e-9)


class Chosen:
    """A source of words that no seed would ever give: the rarest errors have 2^-63."""

    def __init__(self, words):
        self.words = words

    def fill(self, out):
        out.view("<i8").ravel()[:] = self.words


def test_errors_are_what_the_table_says_of_their_words():
    lowest, steps = thresholds()
    words = np.frombuffer(Prg(bytes(16)).bytes(8 * 1000), "<i8")
    words = np.concatenate([words, steps, steps - 1, [-(2**63), 2**63 - 1]])
    expected = lowest + np.searchsorted(steps, words, side="right")
    np.testing.assert_array_equal(draw_errors(Chosen(words), words.shape), expected)
    assert (expected.min(), expected.max()) == (-59, 59)


def test_errors_have_the_frequencies_of_the_discrete_gaussian():
    """Chi-square over -20..20 and both tails: 42 degrees of freedom; 100 is at 1.2e-6."""
    errors = draw_errors(Prg(b"frequencies     "), (1 << 20,))
    table = table_probabilities()
    inner = np.arange(-20, 21)
    seen = np.array([np.count_nonzero(errors == x) for x in inner])
    seen = np.concatenate([[np.count_nonzero(errors < -20)], seen, [np.count_nonzero(errors > 20)]])
    shares = [sum(float(p) for x, p in table.items() if x < -20)]
    shares += [float(table[int(x)]) for x in inner]
    expected = np.array([*shares, 1 - sum(shares)]) * len(errors)
    assert np.sum((seen - expected) ** 2 / expected) < 100
    assert abs(errors.std() - SIGMA) < 5 * SIGMA / np.sqrt(2 * len(errors))
    assert abs(errors.mean()) < 5 * SIGMA / np.sqrt(len(errors))


# Queries


def test_a_query_is_a_times_secret_and_a_new_error_in_every_word_and_one_column():
    """All of it taken away again but the errors, over two blocks of the public matrix."""
    length, columns = BLOCK + 500, np.array([0, BLOCK, 7])
    queries, opening = encrypt(columns, length, bytes(16), Prg(b"queries         "))
    matrix = np.concatenate(list(public_matrix(bytes(16), length)), axis=1)
    masks = opening.secrets.astype(np.uint64) @ matrix.astype(np.uint64)
    errors = queries - masks.astype(np.uint32)
    errors[np.arange(3), columns] -= np.uint32(2**24)
    errors = errors.view(np.int32)
    assert np.abs(errors).max() < 6 * SIGMA
    assert np.abs(errors.std(axis=1) - SIGMA).max() < 5 * SIGMA / np.sqrt(2 * length)
    assert np.abs(np.corrcoef(errors) - np.eye(3)).max() < 5 / np.sqrt(length)
    np.testing.assert_array_equal(opening.errors.view(np.int32), errors.sum(axis=1))
    assert len(np.unique(opening.secrets)) > 3 * 1024 - 3


def test_what_the_errors_add_to_all_bytes_is_taken_away():
    """128 times a sum of errors that alone would be beyond the budget of 2^23."""
    columns = np.arange(256, dtype=np.uint32).reshape(1, 1, 256) << np.uint32(24)
    for total in (-100_000, 100_000):
        sums = np.array([total], np.int32).view(np.uint32)
        opening = Opening(np.zeros((1, 1024), np.uint32), sums)
        rows, hint = columns + np.uint32(128) * sums, np.zeros((1, 1024, 256), np.uint32)
        for noise in (0, 2**23 - 1, -(2**23)):
            noisy = rows + np.array([noise], np.int32).view(np.uint32)
            found = opening.decode(noisy, np.array([0]), hint)
            np.testing.assert_array_equal(found[0], np.arange(256))


# Noise


def test_noise_has_the_spread_of_theory_and_no_byte_is_lost():
    """Of 100 queries over 4,096 columns of 500 random bytes: sigma times the length of the centred
    rows. 50,000 bytes, of which not one is decoded wrongly."""
    table = drawn(np.uint8, (4096, 500))
    errors = draw_errors(Prg(b"noise           "), (100, 4096))
    reply = np.zeros((100, 500), np.uint32)
    add_product(reply, errors.view(np.uint32), table)
    centred = reply - np.uint32(128) * errors.sum(axis=1, dtype=np.int32).view(np.uint32)[:, None]
    noise = centred.view(np.int32)
    spread = SIGMA * np.sqrt(((table.astype(float) - 128) ** 2).sum(axis=0))
    assert abs((noise / spread).std() - 1) < 0.03
    assert np.abs(noise).max() < 2**23


def test_noise_of_the_worst_table_at_the_most_columns_stays_in_its_budget():
    """Every byte 0: the noise is 128 times the sum of the errors, nearly ten standard deviations
    below the budget."""
    columns = max_columns(1000, 2016)
    prg = Prg(b"worst           ")
    noise = np.array([128 * int(draw_errors(prg, (columns,)).sum()) for _ in range(40)])
    spread = 128 * SIGMA * columns**0.5
    assert 0.6 < noise.std() / spread < 1.5
    assert np.abs(noise).max() < 2**23 < 10 * spread


def test_the_bound_gives_the_moduli_that_simplepir_publishes():
    """The largest p whose entries fail with at most 2^-40: the table of parameters of SimplePIR's
    code, for n = 1024, sigma = 6.4, q = 2^32."""
    for bits, published in ((13, 991), (14, 833), (15, 701), (16, 589), (20, 294)):
        assert (
            failure_of_byte(2**bits, published) <= 2**-40 < failure_of_byte(2**bits, published + 1)
        )


def test_the_bound_of_bytes_is_computed_from_the_budget():
    """Half of 2^24, against 128 sigma sqrt(columns)."""
    for columns in (10**5, 2**20):
        by_hand = 2 * exp(-(2**46) / (2 * (128 * SIGMA) ** 2 * columns))
        assert failure_of_byte(columns) == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize(("max_keys", "row_bytes"), [(1, 17), (1000, 2016), (10**4, 10**6)])
def test_the_most_columns_keep_a_question_below_2_to_the_minus_40(max_keys, row_bytes):
    limit, entries = max_columns(max_keys, row_bytes), max_keys * row_bytes
    assert entries * failure_of_byte(limit) <= 2**-40
    # And are not far from the most: one bit for the whole number of bits, and one in a hundred.
    assert log2(entries * failure_of_byte(int(1.01 * limit))) > -43


# Shapes


def bytes_with(shape, r):
    words = shape.max_keys * -(-shape.num_keys // r)
    return 4 * (words + r * shape.row_bytes * (1024 + shape.max_keys))


@pytest.mark.parametrize(
    "shape",
    [
        LweShape(10_000, 2000, 100),
        LweShape(10_000, 2000, 1000),
        LweShape(3001, 2, 300),
        LweShape(997, 4, 500),
        LweShape(50_000, 16, 7),
        LweShape(1, 1, 1),
    ],
)
def test_no_other_layout_is_smaller_by_more_than_the_rounding_to_columns(shape):
    best = min(bytes_with(shape, r) for r in range(1, shape.num_keys + 1))
    chosen = bytes_with(shape, shape.slices_per_column)
    assert best <= chosen <= best + 4 * shape.max_keys
    assert shape.total_bytes == chosen + 72 + 72 + 16 + 40


def test_columns_stay_within_the_noise_budget_whatever_that_costs():
    """A single key would have the fewest bytes with one slice a column."""
    shape = LweShape(num_keys=3_000_000, row_bytes=100_016, max_keys=1)
    assert (shape.slices_per_column, shape.columns) == (3, 1_000_000)
    assert shape.failure < 2**-40
    assert shape.columns <= max_columns(1, 100_016)
