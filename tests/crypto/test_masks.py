"""Masks: the published answers through our functions, every input bit counts, the whole ring is
covered evenly, and what cannot be masked is refused."""

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from keyhole.crypto.hpke import PrivateKey, expand, extract
from keyhole.crypto.prg import Prg
from keyhole.crypto.ring import add_mask, add_masks, pair_seed
from keyhole.errors import InputError, MalformedError, ShapeError

SEED = bytes(range(16))
ROUND = bytes(range(100, 116))
ONE, TWO = (PrivateKey(Prg(bytes([n]) * 16).bytes(32)) for n in (1, 2))
RINGS = [np.uint16, np.uint32]

# Points of low order on the curve and its twist, and numbers that stand for them: with each the
# shared secret would be zero for everybody.
FIELD = 2**255 - 19
LOW_ORDER = [
    *(number.to_bytes(32, "little") for number in (0, 1, FIELD - 1, FIELD, FIELD + 1)),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
]

# NIST SP 800-38A, F.5.1: CTR-AES128. Key stream = ciphertext xor plaintext.
NIST_KEY = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
NIST_COUNTER = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
NIST_PLAIN = bytes.fromhex(
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
NIST_CIPHER = bytes.fromhex(
    "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
    "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"
)


def mask_of(seed, count=8, dtype=np.uint32):
    out = np.zeros(count, dtype)
    add_mask(out, seed, 1)
    return out


def flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# Known answers.


def test_key_agreement_is_that_of_rfc_7748_section_6():
    alice = PrivateKey(
        bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    )
    bob = PrivateKey(
        bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    )
    assert alice.public.hex() == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert bob.public.hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    shared = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
    assert alice.agree(bob.public).hex() == bob.agree(alice.public).hex() == shared


def test_key_agreement_taken_a_thousand_times_is_that_of_rfc_7748_section_5():
    scalar = point = (9).to_bytes(32, "little")
    after = {}
    for step in range(1, 1001):
        scalar, point = PrivateKey(scalar).agree(point), scalar
        after[step] = scalar.hex()
    assert after[1] == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
    assert after[1000] == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


@pytest.mark.parametrize(
    ("secret", "salt", "info", "key", "output"),
    [
        (
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)),
            bytes(range(0x60, 0xB0)),
            bytes(range(0xB0, 0x100)),
            "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
            "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
            "cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            b"\x0b" * 22,
            b"",
            b"",
            "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
    ids=["case 1", "case 2", "case 3"],
)
def test_derivation_is_that_of_rfc_5869(secret, salt, info, key, output):
    assert extract(salt, secret).hex() == key
    assert expand(bytes.fromhex(key), info, len(output) // 2).hex() == output


@pytest.mark.parametrize("dtype", RINGS)
def test_a_mask_is_the_key_stream_of_the_ctr_example_of_nist(dtype):
    """The example's counter begins at f0f1...: that is where the mask is taken from."""
    itemsize = np.dtype(dtype).itemsize
    out = np.zeros(64 // itemsize, dtype)
    add_mask(out, NIST_KEY, 1, first=NIST_COUNTER * 16 // itemsize)
    stream = bytes(a ^ b for a, b in zip(NIST_PLAIN, NIST_CIPHER, strict=True))
    assert out.astype(out.dtype.newbyteorder("<")).tobytes() == stream


def test_a_seed_of_a_pair_is_its_stated_derivation_by_another_implementation():
    publics = min(ONE.public, TWO.public) + max(ONE.public, TWO.public)
    info = b"keyhole secure sum 1" + b"\4mask" + struct.pack(">II", 3, 70_000) + publics
    other = HKDF(SHA256(), 16, salt=ROUND, info=info).derive(ONE.agree(TWO.public))
    assert pair_seed(ONE, TWO.public, ROUND, 3, 70_000) == other


# Seeds.


def test_both_of_a_pair_derive_the_same_seed():
    seed = pair_seed(ONE, TWO.public, ROUND, 4, 9)
    assert len(seed) == 16
    assert pair_seed(TWO, ONE.public, ROUND, 4, 9) == seed


def changed_pairs():
    """Every input of `pair_seed` with one bit changed. The curve clears the lowest three bits of a
    private key and sets its two highest: these five carry nothing, so they are left out."""
    low, high = 1, 2**32 - 1
    for bit in set(range(256)) - {0, 1, 2, 254, 255}:
        own = PrivateKey(flipped(ONE.secret, bit))
        yield f"private {bit}", (own, TWO.public, ROUND, low, high)
    for bit in range(256):
        yield f"public {bit}", (ONE, flipped(TWO.public, bit), ROUND, low, high)
    for bit in range(128):
        yield f"round {bit}", (ONE, TWO.public, flipped(ROUND, bit), low, high)
    for bit in range(32):
        yield f"low {bit}", (ONE, TWO.public, ROUND, low ^ 1 << bit, high)
        yield f"high {bit}", (ONE, TWO.public, ROUND, low, high ^ 1 << bit)


def test_every_bit_of_the_inputs_of_a_pair_changes_the_mask():
    masks = {"none": mask_of(pair_seed(ONE, TWO.public, ROUND, 1, 2**32 - 1)).tobytes()}
    for name, inputs in changed_pairs():
        masks[name] = mask_of(pair_seed(*inputs)).tobytes()
    assert len(masks) == 1 + 251 + 256 + 128 + 64
    assert len(set(masks.values())) == len(masks)


def test_seeds_for_different_uses_are_unrelated():
    uses = [b"mask", b"share", b"", b"mask\0"]
    seeds = {pair_seed(ONE, TWO.public, ROUND, 0, 1, use=use) for use in uses}
    assert len(seeds) == len(uses)


@pytest.mark.parametrize("top", [0, 0x80], ids=["plain", "top bit set"])
@pytest.mark.parametrize("public", LOW_ORDER, ids=lambda public: public[:4].hex())
def test_a_public_key_of_low_order_is_refused(public, top):
    public = public[:31] + bytes([public[31] | top])
    with pytest.raises(MalformedError, match="public key") as caught:
        pair_seed(ONE, public, ROUND, 0, 1)
    assert public.hex() not in str(caught.value)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_public_key_of_another_length_is_refused(length):
    with pytest.raises(MalformedError, match="public key"):
        pair_seed(ONE, bytes([9]) * length, ROUND, 0, 1)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (-1, 1), (0, 2**32)])
def test_places_that_are_no_ordered_pair_are_refused(low, high):
    with pytest.raises(InputError, match="places"):
        pair_seed(ONE, TWO.public, ROUND, low, high)


def test_names_of_another_length_are_refused():
    for length in (0, 15, 17):
        with pytest.raises(InputError, match="round"):
            pair_seed(ONE, TWO.public, bytes(length), 0, 1)
    with pytest.raises(InputError, match="use"):
        pair_seed(ONE, TWO.public, ROUND, 0, 1, use=bytes(256))


# Masks.


def test_every_bit_of_a_seed_changes_the_mask():
    masks = {mask_of(flipped(SEED, bit)).tobytes() for bit in range(128)}
    masks.add(mask_of(SEED).tobytes())
    assert len(masks) == 129


def test_every_bit_of_a_seed_changes_half_of_the_mask():
    """Of 128 * 4,096 bits each changes with probability one half; 6 standard deviations."""
    plain, n = mask_of(SEED, 128), 128 * 4096
    changed = sum(
        int(np.bitwise_count(mask_of(flipped(SEED, bit), 128) ^ plain).sum()) for bit in range(128)
    )
    assert abs(changed - n / 2) < 6 * math.sqrt(n / 4)


@pytest.mark.parametrize("dtype", RINGS)
@pytest.mark.parametrize("count", [0, 1, 7, 65_536, 131_072, 200_001])
def test_a_mask_is_the_stream_of_its_seed(count, dtype):
    stream = np.frombuffer(Prg(SEED).bytes(count * np.dtype(dtype).itemsize), dtype)
    base = np.arange(count).astype(dtype) * dtype(40_503)
    out = base.copy()
    add_mask(out, SEED, 1)
    np.testing.assert_array_equal(out, base + stream)
    add_mask(out, SEED, -1)
    add_mask(out, SEED, -1)
    np.testing.assert_array_equal(out, base - stream)


@pytest.mark.parametrize("dtype", RINGS)
def test_a_vector_can_be_masked_in_pieces(dtype):
    whole = mask_of(SEED, 70_000, dtype)
    pieces = np.zeros(70_000, dtype)
    cuts = [0, 1, 3, 8, 13, 64, 69_999, 70_000]
    for start, stop in pairwise(cuts):
        add_mask(pieces[start:stop], SEED, 1, first=start)
    np.testing.assert_array_equal(pieces, whole)


@pytest.mark.parametrize("dtype", RINGS)
def test_many_masks_at_once_are_each_of_them(dtype):
    masks = [(bytes([n]) * 16, 1 if n % 3 else -1) for n in range(7)]
    one_by_one, at_once = (np.full((3, 50_001), 5, dtype) for _ in range(2))
    for seed, sign in masks:
        add_mask(one_by_one, seed, sign, first=11)
    add_masks(at_once, masks, first=11)
    np.testing.assert_array_equal(at_once, one_by_one)


@pytest.mark.parametrize("dtype", RINGS)
def test_masks_of_a_cohort_cancel_in_the_sum_and_wrap(dtype):
    keys = [PrivateKey(Prg(bytes([n]) * 16).bytes(32)) for n in range(5)]
    vectors = np.stack([mask_of(bytes([50 + n]) * 16, 100, dtype) for n in range(5)])
    masked = vectors.copy()
    for i, own in enumerate(keys):
        for j, other in enumerate(keys):
            if i != j:
                seed = pair_seed(own, other.public, ROUND, min(i, j), max(i, j))
                add_mask(masked[i], seed, 1 if i < j else -1)
    assert (masked != vectors).any(axis=1).all()
    np.testing.assert_array_equal(masked.sum(0, dtype=dtype), vectors.sum(0, dtype=dtype))


# Uniform.

DRAWN = 32 << 16


def halves(elements):
    """The 16-bit numbers of which every bit of every element is part: low halves, high halves."""
    return [elements] if elements.itemsize == 2 else list(elements.view("<u2").reshape(-1, 2).T)


def is_even(numbers):
    """Whether 16-bit numbers are uniform. The statistic of n uniform ones has mean d = 2^16 - 1
    and variance 2 d (n - 1) / n, and is all but normal: 6 standard deviations on both sides, for
    numbers that are too even are not random either."""
    counts = np.bincount(numbers, minlength=1 << 16)
    expected = len(numbers) / (1 << 16)
    statistic = float(((counts - expected) ** 2).sum() / expected)
    d = (1 << 16) - 1
    return abs(statistic - d) < 6 * math.sqrt(2 * d)


@pytest.mark.parametrize("dtype", RINGS)
def test_masks_cover_the_whole_ring(dtype):
    """With 32 draws a value on average, one of 2^16 is missing with probability below
    2^16 exp(-32) = 1e-9; the ends are among them."""
    for half in halves(mask_of(SEED, DRAWN, dtype)):
        assert np.bincount(half, minlength=1 << 16).min() > 0


@pytest.mark.parametrize("dtype", RINGS)
@pytest.mark.parametrize("vector", ["zeros", "ones", "a ramp", "the ends"])
def test_a_masked_vector_is_uniform_whatever_it_holds(vector, dtype):
    i = np.arange(DRAWN)
    values = {"zeros": i * 0, "ones": i * 0 + 1, "a ramp": i, "the ends": -(i % 2)}[vector]
    out = values.astype(dtype)
    add_mask(out, SEED, 1)
    assert all(is_even(half) for half in halves(out))


@pytest.mark.parametrize("dtype", RINGS)
def test_a_mask_does_not_follow_the_vector_or_itself(dtype):
    """Joint bytes of the masked vector and the vector, and of neighbours in the mask."""
    vector, mask = mask_of(bytes(16), DRAWN, dtype), mask_of(SEED, DRAWN, dtype)
    masked = vector + mask
    low = [(array & 0xFF).astype(np.uint32) for array in (vector, masked, mask, np.roll(mask, 1))]
    assert is_even(low[0] << 8 | low[1])
    assert is_even(low[2] << 8 | low[3])


def test_what_is_not_uniform_is_found():
    """Negative controls: no mask, a mask of 15 bits, one favoured value, a range that is folded
    as by `% 40000`, a value that a short range leaves out, a mask that depends on the vector."""
    mask = mask_of(SEED, DRAWN, np.uint16)
    favoured = np.where(np.arange(DRAWN) % 2000 == 0, 7, mask)
    assert is_even(mask)
    for bad in (np.arange(DRAWN) % 1000, mask & 0x7FFF, favoured, mask % 40_000):
        assert not is_even(bad)
    assert not is_even(np.arange(DRAWN) % (1 << 16))  # too even
    assert np.bincount(mask % 65_535, minlength=1 << 16).min() == 0
    vector = mask_of(bytes(16), DRAWN, np.uint16) & 0xFF
    assert not is_even(vector << 8 | (vector + (mask & 0xF)) & 0xFF)


# Refused.


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64, np.float32, ">u4"])
def test_elements_of_no_ring_are_refused(dtype):
    out = np.zeros(4, dtype)
    with pytest.raises(ShapeError, match="cannot be masked"):
        add_mask(out, SEED, 1)
    assert not out.any()


def test_arrays_that_would_be_copied_or_cannot_be_written_are_refused():
    base = np.zeros((4, 4), np.uint32)
    frozen = base.copy()
    frozen.flags.writeable = False
    for out in (base[:, ::2], base[::2], base.T, frozen):
        with pytest.raises(ShapeError, match="cannot be masked"):
            add_mask(out, SEED, 1)
    assert not base.any()


@pytest.mark.parametrize("bad", [(bytes(15), 1), (bytes(17), 1), (b"", 1), (SEED, 0), (SEED, 2)])
def test_a_bad_seed_or_sign_is_refused_and_nothing_is_added(bad):
    out = np.zeros(4, np.uint32)
    with pytest.raises(InputError, match="seed"):
        add_masks(out, [(SEED, 1), bad])
    assert not out.any()


def test_a_negative_place_is_refused():
    with pytest.raises(InputError, match="first is negative"):
        add_mask(np.zeros(4, np.uint32), SEED, 1, first=-1)


def test_no_error_holds_a_seed():
    seed = bytes(range(200, 217))
    with pytest.raises(InputError) as caught:
        add_mask(np.zeros(4, np.uint32), seed, 1)
    assert seed.hex() not in str(caught.value)
    assert repr(seed) not in str(caught.value)
