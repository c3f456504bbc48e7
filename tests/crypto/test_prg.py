"""The generators give the published known answers, and what they draw is uniform."""

import json

import numpy as np
import pytest

from keyhole.crypto.prg import FixedKeyAes, Prg, fixed_key
from keyhole.errors import InputError
from tests.crypto.turboshake import turboshake128
from tests.helpers import vector_file

# NIST SP 800-38A: key and plaintext of all AES-128 examples; F.1.1 ECB, F.5.1 CTR.
NIST_KEY = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
NIST_PLAIN = bytes.fromhex(
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
NIST_ECB = bytes.fromhex(
    "3ad77bb40d7a3660a89ecaf32466ef97f5d3d58503b9699de785895a96fdbaaf"
    "43b1cd7f598ece23881b00e3ed0306887b0c785e27e8ad3f8223207104725dd4"
)
NIST_COUNTER = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
NIST_CTR = bytes.fromhex(
    "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
    "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"
)


def blocks_of(data):
    return np.frombuffer(bytearray(data), np.uint8).reshape(-1, 16)


def aes(key, blocks):
    """AES of blocks, through `FixedKeyAes`: h(x) = AES(sigma(x)) xor sigma(x) is undone.

    sigma(low || high) = high || (high xor low), so x = (a xor b) || a has sigma(x) = a || b.
    """
    a, b = blocks[:, :8], blocks[:, 8:]
    return FixedKeyAes(key).expand(np.hstack([a ^ b, a]), 1) ^ blocks


def counters(start, count):
    return blocks_of(b"".join((start + i).to_bytes(16, "big") for i in range(count)))


def test_fixed_key_aes_is_aes_as_in_the_ecb_example_of_nist():
    assert aes(NIST_KEY, blocks_of(NIST_PLAIN)).tobytes() == NIST_ECB


def test_fixed_key_aes_of_the_counters_is_the_key_stream_of_the_ctr_example_of_nist():
    stream = aes(NIST_KEY, counters(NIST_COUNTER, 4))
    assert (stream ^ blocks_of(NIST_PLAIN)).tobytes() == NIST_CTR


def test_a_prg_is_the_stream_of_the_ctr_example_with_its_counter_at_zero():
    """NIST's counter begins at f0f1...; ours at 0. With the key of the example, our blocks are AES
    of the counters 0, 1, ..., by the AES that the two tests above hold to the examples. Block 256
    and 65,536 are those in which a carry goes on."""
    count = 65_540
    stream = blocks_of(Prg(NIST_KEY).bytes(16 * count))
    assert stream.tobytes() == aes(NIST_KEY, counters(0, count)).tobytes()


def test_a_prg_under_a_seed_of_zeros_gives_the_blocks_of_the_gcm_specification():
    """McGrew and Viega, The Galois/Counter Mode of Operation: the key of test cases 1 and 2 is
    zero, H is AES of counter 0, the tag of case 1 that of counter 1 and the ciphertext of case 2
    (of a plaintext of zeros) that of counter 2."""
    assert Prg(bytes(16)).bytes(48).hex() == (
        "66e94bd4ef8a2c3b884cfa59ca342b2e"
        "58e2fccefa7e3061367f1d57a4e7455a"
        "0388dace60b6a392f328c2b971b2fe78"
    )


def test_turboshake_of_the_tests_gives_the_answers_of_rfc_9861():
    assert turboshake128(b"", 0x1F, 32).hex() == (
        "1e415f1c5983aff2169217277d17bb538cd945a397ddec541f1ce41af2c1b74c"
    )
    assert turboshake128(b"", 0x07, 32).hex() == (
        "5a223ad30b3b8c66a243048cfced430f54e7529287d15150b973133adfac6a2f"
    )


def test_fixed_key_aes_is_the_xof_of_the_vdaf_draft():
    """Under a key derived as the draft does; 40 elements of its field of 128 bits, of which a
    stream that is not below the modulus would be skipped: here none is."""
    vector = json.loads(vector_file("XofFixedKeyAes128.json").read_text())
    seed, dst, binder = (bytes.fromhex(vector[name]) for name in ("seed", "dst", "binder"))
    key = turboshake128(len(dst).to_bytes(2, "little") + dst + binder, 2, 16)
    found = FixedKeyAes(key).expand(blocks_of(seed), vector["length"]).tobytes()
    modulus = 2**66 * 4611686018427387897 + 1
    starts = range(0, len(found), 16)
    assert all(int.from_bytes(found[i : i + 16], "little") < modulus for i in starts)
    assert found.hex() == vector["expanded_vec_field128"]
    assert found[:16].hex() == vector["derived_seed"]


@pytest.mark.parametrize("count", [0, 1, 2047, 2048, 2049, 5000])
@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_many_seeds_at_once_give_what_each_gives_alone(count, blocks):
    """Around 2,048 seeds of two blocks a tile is full."""
    seeds, cipher = Prg(b"many seeds......").seeds(count), FixedKeyAes(NIST_KEY)
    found = cipher.expand(seeds, blocks)
    assert found.shape == (count, 16 * blocks)
    for i in {0, count // 2, count - 1} & set(range(count)):
        np.testing.assert_array_equal(found[i], cipher.expand(seeds[i : i + 1], blocks)[0])


def test_one_seed_longer_than_a_tile_is_the_same_stream():
    cipher, seed = FixedKeyAes(NIST_KEY), Prg(bytes(16)).seeds(1)
    long = cipher.expand(seed, 9000)
    np.testing.assert_array_equal(long[:, : 16 * 7], cipher.expand(seed, 7))
    counter = seed ^ blocks_of((8999).to_bytes(16, "little"))
    np.testing.assert_array_equal(long[:, -16:], cipher.expand(counter, 1))


def test_expanding_leaves_the_seeds_and_earlier_outputs_alone():
    cipher, seeds = FixedKeyAes(NIST_KEY), Prg(bytes(16)).seeds(9)
    before, first = seeds.copy(), cipher.expand(seeds, 2)
    kept = first.copy()
    cipher.expand(seeds ^ 1, 2)
    np.testing.assert_array_equal(seeds, before)
    np.testing.assert_array_equal(first, kept)


def test_keys_differ_by_nonce_and_by_usage():
    keys = {fixed_key(nonce, usage) for nonce in (bytes(16), b"1" * 16) for usage in (b"a", b"b")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {16}


def test_the_same_seed_gives_the_same_bytes_however_they_are_taken():
    seed = b"the same seed..."
    whole = Prg(seed).bytes(600_000)
    prg, filled = Prg(seed), np.empty(599_000, np.uint8)
    pieces = prg.bytes(0) + prg.bytes(1) + prg.bytes(999)
    prg.fill(filled)
    assert pieces + filled.tobytes() == whole
    np.testing.assert_array_equal(Prg(seed).words(10), np.frombuffer(whole[:80], "<u8"))
    np.testing.assert_array_equal(Prg(seed).seeds(10), blocks_of(whole[:160]))


def test_fresh_streams_differ_from_each_other_and_do_not_repeat():
    streams = [Prg.fresh() for _ in range(4)]
    blocks = [stream.bytes(16) for stream in streams for _ in range(500)]
    assert len(set(blocks)) == len(blocks)


def test_what_is_drawn_can_be_written_to():
    for drawn in (Prg(bytes(16)).seeds(2), Prg(bytes(16)).words(2), Prg(bytes(16)).below(5, 2)):
        assert drawn.flags.writeable
        drawn[0] = 0


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_a_seed_of_another_length_is_refused(length):
    with pytest.raises(InputError, match=f"{length} bytes"):
        Prg(bytes(length))


def test_printing_a_prg_does_not_show_its_seed():
    assert repr(Prg(b"a secret seed...")) == "Prg(...)"


@pytest.mark.parametrize("bound", [1, 2, 3, 7, 8, 100, 2**31, 2**62 + 1, 2**63 - 1])
def test_numbers_below_a_bound_are_below_it(bound):
    drawn = Prg(b"below...........").below(bound, 1000)
    assert drawn.dtype == np.int64
    assert drawn.shape == (1000,)
    assert drawn.min() >= 0
    assert drawn.max() < bound


def test_no_numbers_are_drawn_if_none_are_asked_for():
    assert Prg(bytes(16)).below(5, 0).shape == (0,)
    assert Prg(bytes(16)).permutation(0).shape == (0,)
    assert Prg(bytes(16)).bytes(0) == b""


@pytest.mark.parametrize("bound", [0, -1, 2**63 + 1, 2**64, 2**70])
@pytest.mark.parametrize("count", [0, 3])
def test_a_bound_that_numbers_cannot_be_below_is_refused(bound, count):
    with pytest.raises(InputError, match=r"1\.\.2\^63"):
        Prg(bytes(16)).below(bound, count)


def test_numbers_below_the_largest_bound_have_no_sign():
    drawn = Prg(bytes(16)).below(2**63, 1000)
    assert drawn.min() >= 0
    assert drawn.max() > 2**62


@pytest.mark.parametrize("bound", [2, 3, 10, 37])
def test_numbers_below_a_bound_are_uniform(bound):
    """Chi-square of 37,000 fixed draws: expected bound - 1, standard deviation sqrt(2 (bound - 1));
    within five of them."""
    drawn = Prg(b"uniform.........").below(bound, 37_000)
    expected = 37_000 / bound
    chi_square = np.sum((np.bincount(drawn, minlength=bound) - expected) ** 2) / expected
    assert abs(chi_square - (bound - 1)) < 5 * np.sqrt(2 * (bound - 1))


def test_words_that_would_favour_small_numbers_are_drawn_again():
    """2^64 is 2 bounds of 3 * 2^61 and 2^62 more: a plain remainder would be below 2^61 for 3/8 of
    all words, 13 standard deviations of 20,000 draws from the 1/3 that is right."""
    drawn = Prg(b"favours.........").below(3 * 2**61, 20_000)
    assert abs(np.mean(drawn < 2**61) - 1 / 3) < 5 * np.sqrt(2 / 9 / 20_000)


def test_a_permutation_has_every_number_once_and_is_another_each_time():
    prg = Prg(b"permutation.....")
    one, other = prg.permutation(1000), prg.permutation(1000)
    for found in (one, other):
        np.testing.assert_array_equal(np.sort(found), np.arange(1000))
    assert np.mean(one == other) < 0.02
    assert prg.permutation(1).tolist() == [0]


def test_every_order_of_four_is_as_frequent_as_every_other():
    """24 orders, 24,000 fixed draws: chi-square 23, standard deviation 6.8; within five of them."""
    prg = Prg(b"orders..........")
    codes = [int(prg.permutation(4) @ [1, 4, 16, 64]) for _ in range(24_000)]
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == 24
    assert abs(np.sum((counts - 1000) ** 2) / 1000 - 23) < 5 * np.sqrt(2 * 23)


def test_filling_nothing_draws_nothing():
    prg = Prg(bytes(16))
    prg.fill(np.empty((3, 0), np.uint8))
    assert prg.bytes(4) == Prg(bytes(16)).bytes(4)
