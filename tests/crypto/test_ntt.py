"""Transforms of polynomials: their products are those of the schoolbook, and, by
`delivery/pir/test_seal.py`, of Microsoft SEAL."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.crypto.ntt import MAX_MODULUS, Transform, next_prime, transform_of
from keyhole.delivery.pir.shape import PRIMES, plain_modulus
from keyhole.errors import InputError

LARGEST = [*PRIMES, plain_modulus(16), plain_modulus(20)]


def schoolbook(one, other, modulus):
    """one * other modulo X^N + 1 and p, in Python's integers."""
    degree, out = len(one), [0] * len(one)
    for i, x in enumerate(one):
        for j, y in enumerate(other):
            at, sign = (i + j) % degree, 1 if i + j < degree else -1
            out[at] += sign * int(x) * int(y)
    return [x % modulus for x in out]


def multiplied(ring, one, other):
    """Products of polynomials that lie in the lanes of two arrays."""
    values = ring.forward(one.copy()).astype(np.uint64) * ring.forward(other.copy())
    return ring.inverse((values % np.uint64(ring.modulus)).astype(np.uint32))


def drawn(seed, *shape, below):
    return np.random.default_rng(seed).integers(0, below, shape, dtype=np.uint32)


@pytest.mark.parametrize(("degree", "modulus"), [(2, 5), (2, 13), (4, 17)])
def test_all_products_of_small_polynomials_are_those_of_the_schoolbook(degree, modulus):
    """Of every pair for N = 2 and p = 5, and of every polynomial with some others beyond."""
    every = np.array(list(product(range(modulus), repeat=degree)), np.uint32).T.copy()
    ring = Transform(degree, modulus)
    others = every if degree == 2 else every[:, ::9973]
    for other in others.T:
        held = np.repeat(other[:, None], every.shape[1], axis=1)
        found = multiplied(ring, every, held)
        # In matrix form: the schoolbook for all polynomials at once.
        shifts = [schoolbook(np.eye(degree, dtype=int)[k], other, modulus) for k in range(degree)]
        np.testing.assert_array_equal(found, np.array(shifts).T @ every.astype(int) % modulus)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([8, 64, 256]), st.sampled_from(LARGEST), st.integers(0, 2**32))
def test_products_are_those_of_the_schoolbook(degree, modulus, seed):
    one, other = drawn(seed, 2, degree, 1, below=modulus)
    found = multiplied(transform_of(degree, modulus), one, other)
    assert found[:, 0].tolist() == schoolbook(one[:, 0], other[:, 0], modulus)


@pytest.mark.parametrize("modulus", LARGEST)
@pytest.mark.parametrize("degree", [2, 256, 2048])
def test_both_ways_of_a_transform_undo_each_other(degree, modulus):
    """The largest coefficients among them: sums of the forward transform are at their bound."""
    ring = transform_of(degree, modulus)
    for start in (drawn(1, 3, degree, 5, below=modulus), np.full((1, degree, 1), modulus - 1)):
        columns = start.astype(np.uint32)
        values = ring.forward(columns.copy())
        assert values.max() < modulus
        np.testing.assert_array_equal(ring.inverse(values), columns)


def test_values_are_those_at_the_odd_powers_of_a_root():
    ring = transform_of(8, 17)
    values = ring.forward(np.arange(8, dtype=np.uint32)[:, None].copy())[:, 0]
    roots = [r for r in range(17) if pow(r, 8, 17) == 16]
    assert sorted(values) == sorted(sum(k * r**k for k in range(8)) % 17 for r in roots)


def test_lanes_do_not_touch_each_other():
    ring, columns = transform_of(256, PRIMES[0]), drawn(2, 2, 256, 7, below=PRIMES[0])
    together = ring.forward(columns.copy())
    for block, lane in product(range(2), range(7)):
        alone = ring.forward(columns[block, :, lane : lane + 1].copy())
        np.testing.assert_array_equal(together[block, :, lane], alone[:, 0])


@pytest.mark.parametrize(
    ("degree", "modulus"),
    [(3, 17), (1, 17), (4096, next_prime(1 << 20, 8192)), (8, 19), (8, 33), (4, 134_217_757)],
    ids=["no power", "too short", "too long", "no root", "no prime", "2^27 and more"],
)
def test_what_has_no_transform_is_refused(degree, modulus):
    with pytest.raises(InputError, match="no transform"):
        Transform(degree, modulus)


def test_the_next_prime_is_next():
    assert next_prime(2, 2) == 3
    assert next_prime(18, 16) == 97
    assert next_prime(17, 16) == 17
    assert next_prime(MAX_MODULUS, 4096, is_down=True) == PRIMES[0]
    assert next_prime(PRIMES[1], 4096) == PRIMES[1]
