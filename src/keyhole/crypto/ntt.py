"""Multiplies polynomials modulo X^N + 1 with number-theoretic transforms, many at a time.

A transform takes a polynomial to its values at the N odd powers of a root psi of order 2N modulo a
prime p = 1 mod 2N. The product of two polynomials modulo X^N + 1 has the products of their values,
so it takes N multiplications instead of N^2. Values stand in bit-reversed order.

Polynomials lie side by side: an array (..., N, lanes) holds one in each lane, so that every
instruction of a butterfly works on many of them (2 us each for N = 2048, with 32 lanes).
Multiplication by a constant W takes W' = floor(2^32 W / p): x W - floor(x W' / 2^32) p lies below
2p for every x of 32 bits (Shoup). Sums of the forward transform are reduced at its end alone: each
of log2 N levels adds less than 2p, which 32 bits hold up to N = 2048 and p below 2^27 (Harvey,
"Faster arithmetic for number-theoretic transforms", 2014).

Nothing branches or reads memory by the numbers it works on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from keyhole.compiled import loop
from keyhole.errors import InputError

Residues = NDArray[np.uint32]
"""Numbers modulo a prime below 2^27."""

MAX_DEGREE = 2048
"""N of the longest polynomials."""

MAX_MODULUS = 1 << 27
"""What moduli are below."""

_WORD = 32


def next_prime(start: int, step: int, *, is_down: bool = False) -> int:
    """Returns the first prime that is 1 modulo `step`, upwards from `start` or downwards.

    >>> next_prime(1 << 20, 4096), next_prime(1 << 27, 4096, is_down=True)
    (1073153, 134176769)
    """
    steps = (start - 1) // step if is_down else -((1 - start) // step)
    found = steps * step + 1
    while not _is_prime(found):
        found += -step if is_down else step
    return found


def _is_prime(number: int) -> bool:
    """By division: numbers are small."""
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


@lru_cache(maxsize=32)  # a pure function of two numbers
def transform_of(degree: int, modulus: int) -> Transform:
    """Returns the transform of polynomials of a degree modulo a prime."""
    return Transform(degree, modulus)


@dataclass(frozen=True)
class Transform:
    """The transform of polynomials of N coefficients modulo p.

    Args:
        degree: N, a power of two from 2 to 2048.
        modulus: p, a prime below 2^27 that is 1 modulo 2N.

    Raises:
        InputError: another degree or modulus.

    >>> ring = Transform(degree=4, modulus=17)
    >>> x = np.array([0, 1, 0, 0], np.uint32)[:, None]  # X, in one lane
    >>> values = ring.forward(x.copy())
    >>> ring.inverse(values * values % np.uint32(17)).T  # X^2
    array([[0, 0, 1, 0]], dtype=uint32)
    """

    degree: int
    modulus: int

    def __post_init__(self) -> None:
        n, p = self.degree, self.modulus
        is_degree = 2 <= n <= MAX_DEGREE and n & (n - 1) == 0
        if not is_degree or not (p < MAX_MODULUS and p % (2 * n) == 1 and _is_prime(p)):
            raise InputError(
                f"no transform of such polynomials: got N = {n} and p = {p}; expected a power of "
                f"two from 2 to {MAX_DEGREE} and a prime below 2^27 that is 1 modulo 2N; take the "
                "prime from next_prime"
            )

    def forward(self, columns: Residues) -> Residues:
        """Replaces polynomials, (..., N, lanes) of any 32 bits that are below p, by their values;
        returns the same array."""
        to_values(_blocks(columns, self.degree), *self._powers, self._p)
        return columns

    def multiply(self, values: Residues, factors: Residues) -> Residues:
        """Returns the values of products of polynomials, (..., N, lanes), with another one that has
        the values `factors`, (N,), all below p: below 2p."""
        scaled = (factors.astype(np.uint64) << np.uint64(_WORD)) // np.uint64(self.modulus)
        found = times(values[..., None, :], factors, scaled.astype(np.uint32), self._p)
        return found[..., 0, :]

    def inverse(self, columns: Residues) -> Residues:
        """Replaces values by their polynomials; returns the same array."""
        to_polynomials(_blocks(columns, self.degree), *self._back, *self._last, self._p)
        return columns

    @property
    def _p(self) -> np.uint32:
        return np.uint32(self.modulus)

    @cached_property
    def _powers(self) -> tuple[Residues, Residues]:
        """psi^rev(i), and what it is multiplied with."""
        return self._shoup(_root(self.modulus, 2 * self.degree))

    @cached_property
    def _back(self) -> tuple[Residues, Residues]:
        return self._shoup(pow(_root(self.modulus, 2 * self.degree), -1, self.modulus))

    @cached_property
    def _last(self) -> tuple[np.uint32, np.uint32]:
        """1 / N."""
        last = pow(self.degree, -1, self.modulus)
        return np.uint32(last), np.uint32((last << _WORD) // self.modulus)

    def _shoup(self, root: int) -> tuple[Residues, Residues]:
        bits = self.degree.bit_length() - 1
        order = [int(f"{i:0{bits}b}"[::-1], 2) for i in range(self.degree)]
        powers = [pow(root, i, self.modulus) for i in order]
        scaled = [(power << _WORD) // self.modulus for power in powers]
        return np.array(powers, np.uint32), np.array(scaled, np.uint32)


def _blocks(columns: Residues, degree: int) -> Residues:
    """The same memory, (blocks, N, lanes)."""
    assert columns.dtype == np.uint32
    assert columns.flags.c_contiguous
    return columns.reshape(-1, degree, columns.shape[-1])


def _root(modulus: int, order: int) -> int:
    """The root of this order that the smallest base gives: of order 2^k exactly, if its half-way
    power is -1."""
    base = 2
    while pow(base, (modulus - 1) // 2, modulus) == 1:
        base += 1
    return pow(base, (modulus - 1) // order, modulus)


@loop("keyhole.crypto.ntt_loops")
def to_values(columns: Residues, powers: Residues, scaled: Residues, p: np.uint32) -> None:
    """Transforms polynomials, (blocks, N, lanes), by the butterflies of Cooley and Tukey: sums grow
    by less than 2p a level and are reduced in the end."""
    degree, lanes = columns.shape[1:]
    one = np.array([(1 << _WORD) // int(p)], np.uint64)
    for block in columns:  # one after the other: what is worked on stays in a cache
        groups = 1
        while groups < degree:
            pairs = block.reshape(groups, 2, degree // (2 * groups), lanes)
            low, high = pairs[:, 0], pairs[:, 1]
            turned = times(high, powers[groups : 2 * groups], scaled[groups : 2 * groups], p)
            np.add(low, p + p, out=high)
            high -= turned
            low += turned
            groups *= 2
        np.subtract(block, _upper_halves(block * one) * p, out=block)
        np.minimum(block, block - p, out=block)


@loop("keyhole.crypto.ntt_loops")
def to_polynomials(
    columns: Residues,
    powers: Residues,
    scaled: Residues,
    last: np.uint32,
    last_scaled: np.uint32,
    p: np.uint32,
) -> None:
    """Transforms values back, by the butterflies of Gentleman and Sande, between numbers below
    2p."""
    degree, lanes = columns.shape[1:]
    for block in columns:
        groups, twice = degree // 2, p + p
        while groups:
            pairs = block.reshape(groups, 2, degree // (2 * groups), lanes)
            low, high = pairs[:, 0], pairs[:, 1]
            apart = low + twice
            apart -= high
            low += high
            np.minimum(low, low - twice, out=low)
            high[:] = times(apart, powers[groups : 2 * groups], scaled[groups : 2 * groups], p)
            groups //= 2
        block[:] = times(block[None], np.array([last]), np.array([last_scaled]), p)[0]
        np.minimum(block, block - p, out=block)


def times(x: Residues, powers: Residues, scaled: Residues, p: np.uint32) -> Residues:
    """Returns x W modulo p, below 2p, with one W and W' for each group: (..., groups, n, lanes)."""
    product = x * powers[:, None, None]
    product -= _upper_halves(x * scaled.astype(np.uint64)[:, None, None]) * p
    return product


def _upper_halves(wide: NDArray[np.uint64]) -> Residues:
    """The upper 32 bits of words, without copying them."""
    halves = wide.astype("<u8", copy=False).view("<u4")
    upper: Residues = halves[..., 1::2]
    return upper
