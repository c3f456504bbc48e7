"""Shares a secret: any `threshold` shares give it back, fewer tell nothing about it.

A secret is the value at 0 of a polynomial of degree threshold - 1 whose other coefficients are
uniform in the field of 2^521 - 1 elements; a share is its value at another place (Shamir, How to
share a secret, CACM 1979). The field holds 64 bytes, a share is always 66.

Hidden: the secret, from anyone who has fewer than `threshold` shares, whatever they can compute, as
far as the coefficients are uniform: they are those of `Prg`, so as far as AES-128 holds. Not
covered: shares carry no proof. A false one gives a false secret, and shares are linear: a holder
that adds d / weight to its share adds d to the secret, whatever that is. A secret that does not fit
into `length` bytes is refused, which finds shares that are mixed up or random; anyone who combines
has to check the secret against something its owner published. Arithmetic is that of Python's
integers and is not claimed to take constant time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, MalformedError, ThresholdError

PRIME = 2**521 - 1
"""The order of the field: a Mersenne prime."""

SHARE_BYTES = 66
"""Bytes of a share: a number of the field, big-endian."""

MAX_SECRET_BYTES = 64
"""Bytes of a secret: its number is below 2^512, and so in the field."""


def split(secret: bytes, threshold: int, xs: Sequence[int], prg: Prg) -> list[bytes]:
    """Returns a share of 66 bytes for every place of `xs`, one a holder: distinct and not zero,
    where the secret itself, of at most 64 bytes, lies.

    >>> shares = split(b"secret", 2, [1, 2, 3], Prg(bytes(16)))
    >>> combine({1: shares[0], 3: shares[2]}, 2, length=6)
    b'secret'
    """
    if len(secret) > MAX_SECRET_BYTES:
        raise InputError(
            f"secret is too long to be shared: got {len(secret)} bytes; expected at most "
            f"{MAX_SECRET_BYTES}; share a seed and derive the rest from it"
        )
    numbers = share_number(int.from_bytes(secret, "big"), threshold, xs, prg)
    return [number.to_bytes(SHARE_BYTES, "big") for number in numbers]


def combine(shares: Mapping[int, bytes], threshold: int, length: int) -> bytes:
    """Returns the secret of `length` bytes, from the shares of the `threshold` lowest places; those
    of other places are not looked at."""
    if len(shares) < threshold:
        raise ThresholdError(
            f"too few shares to give a secret back: got {len(shares)}; expected {threshold} or "
            "more; give this round up: nothing of it can be opened"
        )
    return Combiner(sorted(shares)[: max(0, threshold)]).combine(shares, length)


class Combiner:
    """Gives secrets back from the shares of one set of places: its weights are computed once.

    secret = sum_i weight_i share_i, with weight_i = prod_(j != i) x_j / (x_j - x_i)
    """

    def __init__(self, xs: Sequence[int]) -> None:
        self.xs = tuple(xs)
        self._weights = weights_at_zero(self.xs)

    def combine(self, shares: Mapping[int, bytes], length: int) -> bytes:
        """Returns the secret of `length` bytes; shares of other places are not looked at."""
        missing = sum(x not in shares for x in self.xs)
        if missing:
            raise ThresholdError(
                f"shares of some places are missing: got {len(self.xs) - missing} of "
                f"{len(self.xs)}; expected all of them; combine the shares of the places that "
                "there are"
            )
        numbers = [_number(shares[x]) for x in self.xs]
        total = sum(weight * number for weight, number in zip(self._weights, numbers, strict=True))
        secret = total % PRIME
        if secret.bit_length() > 8 * length:
            raise MalformedError(
                f"shares do not belong together: got {len(self.xs)} shares; expected shares of one "
                f"secret of {length} bytes; give this round up: a holder sent a false share"
            )
        return secret.to_bytes(length, "big")


def share_number(
    secret: int, threshold: int, xs: Sequence[int], prg: Prg, prime: int = PRIME
) -> list[int]:
    """Shares of a number of the field of `prime` elements; `split` is this for bytes."""
    _check_places(xs, prime)
    if not 1 <= threshold <= len(xs):
        raise InputError(
            f"threshold is out of range: got {threshold} of {len(xs)}; expected 1..{len(xs)}; "
            "lower the threshold or share with more holders"
        )
    if not 0 <= secret < prime:
        raise InputError(
            f"secret is not in the field: got {secret.bit_length()} bits; expected a number of "
            f"{prime.bit_length()} bits below the prime; share a shorter one"
        )
    polynomial = [secret] + [_uniform(prime, prg) for _ in range(threshold - 1)]
    return [value_at(x, polynomial, prime) for x in xs]


def value_at(x: int, polynomial: Sequence[int], prime: int = PRIME) -> int:
    """Returns the value of a polynomial, its constant first."""
    value = 0
    for step, coefficient in enumerate(reversed(polynomial)):
        value = value * x + coefficient
        # Places are short, so a value grows slowly: reducing it now and then is the cheaper way.
        if step % 16 == 0:
            value %= prime
    return value % prime


def weights_at_zero(xs: Sequence[int], prime: int = PRIME) -> tuple[int, ...]:
    """Weights with which values at some places add up to the value at 0 (Lagrange).

    >>> weights_at_zero([1, 2, 3], prime=7)
    (3, 4, 1)
    """
    _check_places(xs, prime)
    # Places are short: their differences are multiplied first and reduced once.
    below = [math.prod(x - own for x in xs if x != own) * own % prime for own in xs]
    above = math.prod(xs) % prime
    return tuple(above * inverse % prime for inverse in _inverses(below, prime))


def _inverses(numbers: Sequence[int], prime: int) -> list[int]:
    """Inverses of numbers that are not zero, from that of their product: one costs as much as
    dozens of products."""
    products = list(accumulate(numbers, lambda one, two: one * two % prime, initial=1))
    rest, found = pow(products.pop(), -1, prime), []
    for number, before in zip(reversed(numbers), reversed(products), strict=True):
        found.append(rest * before % prime)
        rest = rest * number % prime
    return found[::-1]


def _check_places(xs: Sequence[int], prime: int) -> None:
    """Refuses places at which a share would be the secret, or equal to another."""
    if not xs or len(set(xs)) < len(xs) or not all(0 < x < prime for x in xs):
        raise InputError(
            f"places of shares are invalid: got {len(xs)} places, {len(set(xs))} distinct, "
            f"{sum(x == 0 for x in xs)} zero; expected one or more, distinct, above 0 and in the "
            "field; give holder i of 0, 1, ... the place i + 1"
        )


def _uniform(prime: int, prg: Prg) -> int:
    """A number of the field; those that would favour small ones are drawn again."""
    bits = prime.bit_length()
    while True:
        drawn = int.from_bytes(prg.bytes(-(-bits // 8)), "big") & ((1 << bits) - 1)
        if drawn < prime:
            return drawn


def _number(share: bytes) -> int:
    """The number of a share."""
    number = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or number >= PRIME:
        raise MalformedError(
            f"this is not a share: got {len(share)} bytes, in the field: {number < PRIME}; "
            f"expected {SHARE_BYTES} bytes with a number of the field; give this round up: a "
            "holder sent a false share"
        )
    return number
