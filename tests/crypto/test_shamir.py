"""Shamir's sharing: any `threshold` shares give the secret, fewer are consistent with every secret,
and what is not a share is refused."""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.crypto.prg import Prg
from keyhole.crypto.shamir import (
    PRIME,
    SHARE_BYTES,
    Combiner,
    combine,
    share_number,
    split,
    value_at,
    weights_at_zero,
)
from keyhole.errors import InputError, MalformedError, ThresholdError

SECRET = bytes(range(100, 132))


def prg(number=0):
    return Prg(bytes([number]) * 16)


def shares_of(secret, threshold, xs, source=None):
    return dict(zip(xs, split(secret, threshold, xs, source or prg()), strict=True))


@pytest.mark.parametrize("threshold", [1, 2, 3, 4, 5])
def test_any_threshold_shares_give_the_secret(threshold):
    shares = shares_of(SECRET, threshold, [1, 2, 3, 4, 5])
    for xs in combinations(shares, threshold):
        assert combine({x: shares[x] for x in xs}, threshold, 32) == SECRET
    assert combine(shares, threshold, 32) == SECRET


@given(
    st.binary(max_size=64),
    st.lists(
        st.integers(1, 2**32) | st.integers(1, PRIME - 1), min_size=1, max_size=8, unique=True
    ),
    st.binary(min_size=16, max_size=16),
    st.data(),
)
@settings(max_examples=30)
def test_secrets_of_every_length_come_back_from_any_places(secret, xs, seed, data):
    threshold = data.draw(st.integers(1, len(xs)))
    shares = shares_of(secret, threshold, xs, Prg(seed))
    kept = data.draw(st.permutations(xs))[:threshold]
    assert combine({x: shares[x] for x in kept}, threshold, len(secret)) == secret


@pytest.mark.parametrize("secret", [bytes(64), b"\xff" * 64, bytes(63) + b"\1", b""])
def test_secrets_at_the_ends_come_back(secret):
    shares = shares_of(secret, 3, [1, 2, 3, 4])
    assert all(len(share) == SHARE_BYTES for share in shares.values())
    assert combine(shares, 3, len(secret)) == secret


def test_the_thresholds_of_fifty_clients():
    shares = shares_of(SECRET, 34, range(1, 51))
    combiner = Combiner(range(17, 51))
    assert combiner.combine(shares, 32) == SECRET
    assert combiner.combine(shares_of(b"\7" * 16, 34, range(1, 51), prg(1)), 16) == b"\7" * 16


@pytest.mark.parametrize(("prime", "threshold"), [(5, 2), (7, 2), (5, 3), (7, 3), (5, 4)])
def test_fewer_shares_are_consistent_with_every_secret(prime, threshold):
    """Over all polynomials with a secret, every set of threshold - 1 shares sees every combination
    of values exactly once: the same for each secret, so they tell nothing."""
    for xs in combinations(range(1, prime), threshold - 1):
        for secret in range(prime):
            seen = Counter(
                tuple(value_at(x, (secret, *rest), prime) for x in xs)
                for rest in product(range(prime), repeat=threshold - 1)
            )
            assert set(seen.values()) == {1}
            assert len(seen) == prime ** (threshold - 1)


def test_threshold_shares_are_consistent_with_one_secret_only():
    """Negative control of the test above."""
    sets = [
        {
            tuple(value_at(x, (secret, *rest), 7) for x in (1, 2, 3))
            for rest in product(range(7), repeat=2)
        }
        for secret in range(7)
    ]
    assert all(a.isdisjoint(b) for a, b in combinations(sets, 2))


@pytest.mark.parametrize("secret", range(5))
def test_polynomials_are_drawn_evenly_those_of_lower_degree_among_them(secret):
    """A draw is told by the shares at 1 and 2: 25 pairs, as many as polynomials. Were the highest
    coefficient never 0, a fifth of them would be missing. Of 24 degrees of freedom, chi-square
    exceeds 81 with probability 4e-8."""
    source, n = prg(secret), 5000
    seen = Counter(tuple(share_number(secret, 3, [1, 2, 3], source, 5)[:2]) for _ in range(n))
    assert len(seen) == 25
    assert sum((count - n / 25) ** 2 for count in seen.values()) / (n / 25) < 81


@given(st.data(), st.sampled_from([5, 7, 11]))
@settings(max_examples=50)
def test_shares_in_a_small_field_add_up_with_their_weights(data, prime):
    threshold = data.draw(st.integers(1, prime - 1))
    secret = data.draw(st.integers(0, prime - 1))
    xs = list(range(1, prime))
    shares = dict(zip(xs, share_number(secret, threshold, xs, prg(), prime), strict=True))
    kept = data.draw(st.permutations(xs))[:threshold]
    weights = weights_at_zero(kept, prime)
    assert sum(w * shares[x] for w, x in zip(weights, kept, strict=True)) % prime == secret


@given(st.lists(st.integers(1, 500), min_size=1, max_size=12, unique=True))
@settings(max_examples=30)
def test_weights_are_those_of_lagrange(xs):
    for own, weight in zip(xs, weights_at_zero(xs), strict=True):
        exact = math.prod((Fraction(x, x - own) for x in xs if x != own), start=Fraction(1))
        assert weight == exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME


@given(st.integers(0, 2**32), st.lists(st.integers(0, PRIME - 1), max_size=40))
@settings(max_examples=30)
def test_a_value_is_the_sum_of_its_powers(x, polynomial):
    assert value_at(x, polynomial) == sum(c * x**i for i, c in enumerate(polynomial)) % PRIME


def test_two_splits_of_one_secret_have_nothing_in_common():
    source = prg()
    first, second = (split(SECRET, 2, [1, 2, 3], source) for _ in range(2))
    assert not set(first) & set(second)


# Refused.


@pytest.mark.parametrize(
    "xs", [[0, 1, 2], [1, 1, 2], [1, 2, PRIME], [1, 2, PRIME + 1], [-1, 1, 2], []]
)
def test_places_that_are_zero_equal_or_outside_are_refused(xs):
    with pytest.raises(InputError, match="places"):
        split(SECRET, 2, xs, prg())
    with pytest.raises(InputError, match="places"):
        Combiner(xs)


def test_a_share_at_place_zero_is_refused_as_it_would_be_the_secret():
    shares = {0: bytes(34) + SECRET, **shares_of(SECRET, 2, [1, 2])}
    with pytest.raises(InputError, match="places"):
        combine(shares, 2, 32)


@pytest.mark.parametrize("threshold", [-1, 0, 4])
def test_a_threshold_that_cannot_be_reached_is_refused(threshold):
    with pytest.raises(InputError, match="threshold"):
        split(SECRET, threshold, [1, 2, 3], prg())


@pytest.mark.parametrize("threshold", [-1, 0])
def test_no_secret_is_made_of_no_shares(threshold):
    with pytest.raises(InputError, match="places"):
        combine(shares_of(SECRET, 2, [1, 2]), threshold, 32)


def test_a_secret_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="too long"):
        split(bytes(65), 2, [1, 2], prg())
    for secret in (-1, 7):
        with pytest.raises(InputError, match="not in the field"):
            share_number(secret, 2, [1, 2], prg(), 7)


def test_one_share_too_few_is_refused():
    shares = shares_of(SECRET, 3, [1, 2, 3, 4])
    with pytest.raises(ThresholdError, match="got 2; expected 3"):
        combine({x: shares[x] for x in (1, 4)}, 3, 32)
    with pytest.raises(ThresholdError, match="2 of 3"):
        Combiner([1, 2, 5]).combine(shares, 32)


@pytest.mark.parametrize(
    "share",
    [b"", bytes(65), bytes(67), PRIME.to_bytes(66, "big"), b"\xff" * 66],
    ids=["empty", "short", "long", "the prime", "beyond it"],
)
def test_what_is_not_a_share_is_refused(share):
    shares = shares_of(SECRET, 2, [1, 2])
    with pytest.raises(MalformedError, match="not a share"):
        combine({**shares, 2: share}, 2, 32)


def test_a_random_share_is_refused():
    """The secret that it gives is a number of the field like any other: below 2^256 with
    probability 2^-265."""
    shares, source = shares_of(SECRET, 2, [1, 2]), prg(9)
    for _ in range(200):
        with pytest.raises(MalformedError, match="belong together"):
            combine({**shares, 2: b"\0" + source.bytes(65)}, 2, 32)


def test_a_share_that_is_moved_on_purpose_moves_the_secret_unnoticed():
    """What sharing does not give, and why a combined secret is checked against what its owner
    published: shares are linear."""
    shares = shares_of(SECRET, 2, [1, 2])
    step = pow(weights_at_zero([1, 2])[1], -1, PRIME)
    moved = (int.from_bytes(shares[2], "big") + step) % PRIME
    secret = combine({**shares, 2: moved.to_bytes(SHARE_BYTES, "big")}, 2, 32)
    assert int.from_bytes(secret, "big") == int.from_bytes(SECRET, "big") + 1


def test_shares_of_different_secrets_or_at_swapped_places_are_refused():
    one, two = shares_of(SECRET, 2, [1, 2]), shares_of(SECRET, 2, [1, 2], prg(1))
    for shares in ({1: one[1], 2: two[2]}, {1: one[2], 2: one[1]}, {1: one[1], 3: one[2]}):
        with pytest.raises(MalformedError, match="belong together"):
            combine(shares, 2, 32)


def test_a_lower_threshold_than_that_of_the_split_gives_nothing():
    shares = shares_of(SECRET, 4, [1, 2, 3, 4])
    for threshold in (1, 2, 3):
        with pytest.raises(MalformedError, match="belong together"):
            combine(shares, threshold, 32)


def test_no_error_holds_a_share():
    shares = shares_of(SECRET, 2, [1, 2])
    for bad in ({1: shares[1]}, {1: shares[2], 2: shares[1]}, {1: shares[1], 2: shares[2][1:]}):
        with pytest.raises((MalformedError, ThresholdError)) as caught:
            combine(bad, 2, 32)
        for share in shares.values():
            assert share.hex() not in str(caught.value)
            assert str(int.from_bytes(share, "big")) not in str(caught.value)
