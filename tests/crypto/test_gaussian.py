"""Numbers of the discrete Gaussian: their table, their frequencies, the work they take."""

from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise
from math import exp

import numpy as np
import pytest

from keyhole.crypto.gaussian import draw_gaussian, thresholds
from keyhole.crypto.prg import Prg

SIGMA = 3.2


def exact_probabilities():
    """Of -50 to 50, to 50 digits."""
    with localcontext() as context:
        context.prec = 50
        spread = 2 * Decimal("3.2") ** 2
        weights = {x: (-Decimal(x * x) / spread).exp() for x in range(-50, 51)}
        total = sum(weights.values())
        return {x: Fraction(weight / total) for x, weight in weights.items()}


def table_probabilities():
    lowest, steps = thresholds(SIGMA)
    ends = [-(2**63), *(int(step) for step in steps), 2**63]
    each = [Fraction(b - a, 2**64) for a, b in pairwise(ends)]
    return {lowest + at: share for at, share in enumerate(each)}


def test_the_table_is_the_discrete_gaussian_to_within_2_to_the_minus_57():
    exact, table = exact_probabilities(), table_probabilities()
    assert sum(table.values()) == 1
    far = [abs(share - table.get(x, 0)) for x, share in exact.items()]
    assert max(far) <= Fraction(1, 2**64)
    assert sum(far) / 2 < Fraction(1, 2**57)


def test_the_table_is_sub_gaussian_with_its_sigma():
    """E exp(t X) <= exp(t^2 sigma^2 / 2), what the bound of the noise rests on."""
    table = {x: float(p) for x, p in table_probabilities().items()}
    for t in np.linspace(-2, 2, 41):
        moment = sum(p * exp(t * x) for x, p in table.items())
        assert moment <= exp(t * t * SIGMA**2 / 2) * (1 + 1e-9)


class Chosen:
    """A source of words that no seed would ever give: the rarest numbers have 2^-63."""

    def __init__(self, words):
        self.words = words

    def fill(self, out):
        out.view("<i8").ravel()[:] = self.words


def test_numbers_are_what_the_table_says_of_their_words():
    lowest, steps = thresholds(SIGMA)
    words = np.frombuffer(Prg(bytes(16)).bytes(8 * 1000), "<i8")
    words = np.concatenate([words, steps, steps - 1, [-(2**63), 2**63 - 1]])
    expected = lowest + np.searchsorted(steps, words, side="right")
    np.testing.assert_array_equal(draw_gaussian(Chosen(words), SIGMA, words.shape), expected)
    assert (expected.min(), expected.max()) == (-29, 29)


def chi_square(numbers):
    """Over -10..10 and both tails: 22 degrees of freedom; 75 is at 1e-7."""
    table = {x: float(p) for x, p in table_probabilities().items()}
    inner = np.arange(-10, 11)
    seen = [np.count_nonzero(numbers == x) for x in inner]
    seen = np.array([np.count_nonzero(numbers < -10), *seen, np.count_nonzero(numbers > 10)])
    below = sum(p for x, p in table.items() if x < -10)
    shares = [below, *(table[int(x)] for x in inner)]
    expected = np.array([*shares, 1 - sum(shares)]) * numbers.size
    return np.sum((seen - expected) ** 2 / expected)


def test_numbers_have_the_frequencies_of_the_discrete_gaussian():
    assert chi_square(draw_gaussian(Prg(b"frequencies     "), SIGMA, (1 << 20,))) < 75


@pytest.mark.parametrize("planted", ["rounded", "wider", "shifted"])
def test_numbers_of_another_distribution_would_be_found(planted):
    """Rounded normal numbers have a variance 1/12 more, which is 0.8 %."""
    rng = np.random.default_rng(0)
    numbers = {
        "rounded": lambda: np.rint(rng.normal(0, SIGMA, 1 << 21)),
        "wider": lambda: draw_gaussian(Prg(bytes(16)), 3.25, (1 << 20,)),
        "shifted": lambda: (
            draw_gaussian(Prg(bytes(16)), SIGMA, (1 << 20,)) + (rng.random(1 << 20) < 0.02)
        ),
    }[planted]()
    assert chi_square(numbers) > 75
