"""One masked vector is uniform and tells nothing about the vector behind it.

That finds bugs and proves nothing: what hides a vector is the argument in `client.py`. Masks
that are a little too narrow, and too weak ones, show that the tests would find them.
"""

from math import sqrt

import numpy as np
import pytest

from keyhole.crypto.prg import Prg
from tests.aggregation.masked.secagg_parties import Parties, body_of, settings_of

LENGTH = 1 << 17
MAX_SD = 5.0  # passed by chance once in two million times
VECTORS = {
    "zeros": lambda settings: np.zeros(LENGTH, settings.dtype),
    "a ramp": lambda settings: np.arange(LENGTH).astype(settings.dtype),
    "the top of the ring": lambda settings: np.full(LENGTH, 2**settings.bits - 1, settings.dtype),
    "plus or minus one": lambda settings: (2 * bits_of_input() - 1).astype(settings.dtype),
}


def bits_of_input():
    """Zeros and ones that look random."""
    return (Prg(b"bits of an input").words(LENGTH) & np.uint64(1)).astype(np.int64)


def masked(settings, vector):
    """What the server receives from client 1."""
    parties = Parties(settings).until("input")
    data = parties.clients[1].mask(parties.list_for("input", 1), vector)
    return np.frombuffer(body_of(data), settings.dtype)


def unevenness(numbers, bits):
    """Chi-square of the highest and of the lowest 8 bits over 256 bins, in standard deviations:
    it has 255 degrees of freedom, so mean 255 and variance 510."""
    worst = 0.0
    for shift in (0, bits - 8):
        counts = np.bincount((numbers >> shift).astype(np.int64) & 255, minlength=256)
        expected = len(numbers) / 256
        chi = ((counts - expected) ** 2 / expected).sum()
        worst = max(worst, abs(chi - 255) / sqrt(510))
    return worst


def dependence(numbers, bits):
    """The largest correlation of an input bit with a bit of the masked entry, in standard
    deviations."""
    signs = 2 * bits_of_input() - 1
    found = 0.0
    for bit in range(bits):
        other = 2 * ((numbers >> bit).astype(np.int64) & 1) - 1
        found = max(found, abs(int(signs @ other)) / sqrt(LENGTH))
    return found


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("what", VECTORS)
def test_a_masked_vector_is_uniform_whatever_the_vector(bits, what):
    settings = settings_of(3, length=LENGTH, bits=bits)
    sent = masked(settings, VECTORS[what](settings))
    assert unevenness(sent, bits) < MAX_SD
    assert dependence(sent, bits) < MAX_SD


@pytest.mark.parametrize("bits", [16, 32])
def test_a_mask_that_is_too_narrow_would_be_seen(bits):
    """Full width but for the highest values, and half the width."""
    settings = settings_of(3, length=LENGTH, bits=bits)
    vector = VECTORS["plus or minus one"](settings)
    mask = masked(settings, np.zeros(LENGTH, settings.dtype))
    for narrow in (mask % ((1 << bits) - (1 << bits - 6)), mask & ((1 << bits // 2) - 1)):
        assert unevenness(vector + narrow.astype(settings.dtype), bits) > 2 * MAX_SD


@pytest.mark.parametrize("bits", [16, 32])
def test_an_input_that_shines_through_would_be_seen(bits):
    """A mask that leaves the lowest bit alone in a twentieth of all entries."""
    settings = settings_of(3, length=LENGTH, bits=bits)
    mask = masked(settings, np.zeros(LENGTH, settings.dtype)).copy()
    mask[::20] &= np.array(2**bits - 2, settings.dtype)
    assert dependence(mask + bits_of_input().astype(settings.dtype), bits) > 2 * MAX_SD


def test_the_masks_of_two_clients_and_of_two_rounds_are_unrelated():
    """Differences of masked zeros are as uniform as they are themselves."""
    settings = settings_of(3, length=LENGTH)
    parties = Parties(settings).until("input")
    zeros = np.zeros(LENGTH, np.uint32)
    sent = [
        np.frombuffer(
            body_of(parties.clients[place].mask(parties.list_for("input", place), zeros)), "<u4"
        )
        for place in range(3)
    ]
    again = masked(type(settings)(bytes(16), 3, LENGTH), zeros)
    for one, other in ((sent[0], sent[1]), (sent[0], sent[2]), (sent[1], again)):
        assert unevenness(one - other, 32) < MAX_SD
    # What the masks that cancel leave is the sum of all own masks, which is as uniform.
    assert unevenness(sent[0] + sent[1] + sent[2], 32) < MAX_SD
