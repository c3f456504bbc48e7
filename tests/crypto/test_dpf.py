"""Two shares of a point add up to its unit vector, whatever the point and the domain."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from keyhole.crypto.dpf import (
    Domain,
    PointKeys,
    apply_corrections,
    decode_corrections,
    encode_corrections,
    expand,
    extend,
    share_from_roots,
    share_points,
)
from keyhole.crypto.prg import FixedKeyAes, Prg, fixed_key
from keyhole.errors import InputError, KeySpaceError, MalformedError
from tests.crypto.idpf import Idpf
from tests.helpers import vector_file

NONCE = b"a nonce of tests"
GOLDEN = (
    "26e86b7b56229f4287ff9eaafe75282736b0631d85983bc3bde4f3f8bb5ff05f0b781ffd487c553d0cb67d4638530c"
    "117aa62c2b20fd5a3f0f2c44c924150cf4da650f9896070eee6fe94ee9cd54535288ea23114c8bfea8b1b80c6b5fa8"
    "2c6bf24251ca1c07338d37b8"
)


def prg(name=b"dpf"):
    return Prg(name.ljust(16, b"."))


def bits_of(shares, num_points):
    """Points as a matrix of bits; what lies behind the last point must be zero."""
    bits = np.unpackbits(shares, axis=1, bitorder="little")
    assert not bits[:, num_points:].any()
    return bits[:, :num_points]


def assert_unit_vectors(num_points):
    domain = Domain(num_points)
    shares = [
        expand(keys, domain, NONCE)
        for keys in share_points(np.arange(num_points), domain, NONCE, prg())
    ]
    found = bits_of(shares[0] ^ shares[1], num_points)
    np.testing.assert_array_equal(found, np.eye(num_points, dtype=np.uint8))


def test_shares_of_every_point_of_every_domain_up_to_512_add_up_to_its_unit_vector():
    for num_points in range(1, 513):
        assert_unit_vectors(num_points)


@pytest.mark.parametrize("num_points", [2308, 9001, 262_144, 1_000_003])
def test_points_of_large_domains_are_found_at_their_edges_and_within(num_points):
    domain = Domain(num_points)
    leaf = 8 * domain.leaf_bytes
    edges = [0, 1, leaf - 1, leaf, num_points // 2, num_points - 2, num_points - 1]
    points = np.concatenate([edges, prg().below(num_points, 40)])  # more than are expanded at once
    one, other = share_points(points, domain, NONCE, prg())
    found = bits_of(expand(one, domain, NONCE) ^ expand(other, domain, NONCE), num_points)
    rows, columns = np.nonzero(found)
    np.testing.assert_array_equal(rows, np.arange(len(points)))
    np.testing.assert_array_equal(columns, points)


@pytest.mark.parametrize("num_points", [64, 500, 2308])
def test_one_share_alone_is_as_many_ones_as_zeros_at_the_point_and_elsewhere(num_points):
    """8,192 shares of one point: at every point the ones are within six standard deviations of
    half. It finds a share that shows its point; it proves nothing."""
    domain, count = Domain(num_points), 8192
    points = np.full(count, num_points // 3)
    for keys in share_points(points, domain, NONCE, prg()):
        ones = bits_of(expand(keys, domain, NONCE), num_points).mean(axis=0)
        assert np.abs(ones - 0.5).max() < 6 * 0.5 / np.sqrt(count)


@pytest.mark.parametrize("num_points", [1, 7, 256, 257, 5000])
def test_the_tree_that_is_expanded_is_the_one_that_extend_and_correct_define(num_points):
    """The kernels against the steps that the draft's vector goes through, level by level."""
    domain = Domain(num_points)
    points = prg().below(num_points, 50)
    for keys in share_points(points, domain, NONCE, prg()):
        tree = FixedKeyAes(fixed_key(NONCE, b"keyhole-tree"))
        leaf = FixedKeyAes(fixed_key(NONCE, b"keyhole-leaf"))
        nodes = Prg(keys.root).seeds(len(points))[:, None]
        nodes[..., 0] &= 0xFE
        control = np.full((len(points), 1), keys.party == 1)
        for level in range(domain.depth):
            children, bits = extend(tree, nodes)
            words = keys.seed_corrections[:, None, level], keys.bit_corrections[:, None, level]
            apply_corrections(children, bits, control, *words)
            nodes, control = children.reshape(50, -1, 16), bits.reshape(50, -1)
        whole = leaf.expand(nodes.reshape(-1, 16), 3)[:, : domain.leaf_bytes]
        whole = whole.reshape(50, -1, domain.leaf_bytes)
        whole = whole ^ control[:, :, None] * keys.leaf_corrections[:, None]
        bits = np.unpackbits(whole.reshape(50, -1), axis=1, bitorder="little")[:, :num_points]
        np.testing.assert_array_equal(bits_of(expand(keys, domain, NONCE), num_points), bits)


def test_the_tree_is_the_one_of_the_vdaf_draft():
    """Its public share comes out byte for byte, and both parties' values of all prefixes of all
    levels add up to beta on the path and to zero beside it. 18 is the draft's version."""
    vector = json.loads(vector_file("IdpfBBCGGI21.json").read_text())
    betas = [[int(x) for x in beta] for beta in [*vector["beta_inner"], vector["beta_leaf"]]]
    names = (bytes.fromhex(vector[name]) for name in ("ctx", "nonce"))
    idpf = Idpf(vector["bits"], len(betas[0]), 18, *names)
    keys, alpha = [bytes.fromhex(key) for key in vector["keys"]], vector["alpha"]
    words = idpf.share(alpha, betas, keys)
    assert idpf.encode(words).hex() == vector["public_share"]
    for level, beta in enumerate(betas):
        path = alpha[: level + 1]
        beside = [[*path[:i], not path[i], *path[i + 1 :]] for i in range(level + 1)]
        for prefix in [path, *beside]:
            shares = [idpf.evaluate(party, words, keys[party], prefix) for party in (0, 1)]
            total = [(a + b) % idpf.field(level)[0] for a, b in zip(*shares, strict=True)]
            assert total == (beta if prefix == path else [0] * len(beta))


def test_no_other_depth_has_shorter_keys():
    for num_points in (*range(1, 600), 2308, 23_256, 10**5, 10**6, 2**40):
        domain = Domain(num_points)
        assert num_points <= (8 * domain.leaf_bytes) << domain.depth
        mine = 130 * domain.depth + 8 * domain.leaf_bytes  # bits: 128 and 2 a level
        for depth in range(41):
            assert mine <= 130 * depth + 8 * -(-num_points // (8 << depth))


def test_lengths_of_keys_are_as_documented():
    found = [(Domain(k).depth, Domain(k).leaf_bytes) for k in (24, 231, 2308, 23_256, 10**6)]
    assert found == [(0, 3), (0, 29), (4, 19), (7, 23), (12, 31)]
    assert Domain(2308).batch_bytes(1) == 1 + 4 * 16 + 19
    assert Domain(2308).batch_bytes(3) == 3 + 3 * 83  # 3 keys of 8 control bits


@pytest.mark.parametrize(("num_points", "count"), [*product([1, 9, 300, 5000], [0, 1, 3, 40])])
def test_corrections_survive_encoding(num_points, count):
    domain = Domain(num_points)
    for keys in share_points(prg().below(num_points, count), domain, NONCE, prg()):
        data = encode_corrections(keys)
        assert len(data) == domain.batch_bytes(count)
        read = decode_corrections(memoryview(data), count, domain, keys.party, keys.root)
        assert encode_corrections(read) == data
        np.testing.assert_array_equal(expand(read, domain, NONCE), expand(keys, domain, NONCE))


def test_both_parties_receive_the_same_corrections():
    one, other = share_points(np.array([5, 77]), Domain(3000), NONCE, prg())
    assert encode_corrections(one) == encode_corrections(other)
    assert one.root != other.root
    assert (one.party, other.party) == (0, 1)


def test_the_bytes_of_corrections_do_not_change():
    """Of points 3, 250 and 299 of 300, under fixed roots: what is on the wire stays readable."""
    roots = (b"root of party 0.", b"root of party 1.")
    keys, _ = share_from_roots(np.array([3, 250, 299]), Domain(300), NONCE, roots)
    assert encode_corrections(keys).hex() == GOLDEN


def test_a_cut_or_longer_batch_of_corrections_is_refused():
    domain = Domain(5000)
    keys, _ = share_points(np.array([1, 2, 3]), domain, NONCE, prg())
    data = encode_corrections(keys)
    for wrong in (data[:-1], data + b"\0", b"", data[: len(data) // 2]):
        with pytest.raises(MalformedError, match=f"{len(data)} bytes"):
            decode_corrections(wrong, 3, domain, 0, keys.root)


@pytest.mark.parametrize("num_points", [3, 300, 5000])
def test_a_bit_that_is_always_zero_and_is_set_is_refused_and_no_other(num_points):
    domain = Domain(num_points)
    keys, _ = share_points(np.array([1, 2, 0]), domain, NONCE, prg())
    data, refused = encode_corrections(keys), 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            decode_corrections(bytes(flipped), 3, domain, 0, keys.root)
        except MalformedError:
            refused += 1
    # The fill of the control bits, one bit a seed, and what a lone leaf has behind the points.
    fill = -(2 * domain.depth * 3) % 8
    lone = 0 if domain.depth else 3 * (-num_points % 8)
    assert refused == fill + 3 * domain.depth + lone


@pytest.mark.parametrize("points", [[-1], [10], [0, 99, -5]])
def test_points_outside_their_domain_are_refused_and_not_named(points):
    with pytest.raises(KeySpaceError) as caught:
        share_points(np.array(points), Domain(10), NONCE, prg())
    assert "99" not in str(caught.value)
    assert "-5" not in str(caught.value)


@pytest.mark.parametrize("num_points", [0, -3])
def test_a_domain_without_points_is_refused(num_points):
    with pytest.raises(InputError, match="has no points"):
        Domain(num_points)


def test_fresh_keys_of_one_point_differ_in_every_seed():
    """Root seeds of a batch, its corrections, and those of the next batch: no two are the same."""
    domain, points = Domain(5000), np.full(100, 17)
    source, seen = prg(), []
    for _ in range(2):
        keys, _ = share_points(points, domain, NONCE, source)
        seen += [keys.seed_corrections.reshape(-1, 16), Prg(keys.root).seeds(100)]
    everything = np.concatenate(seen)
    assert len(np.unique(everything, axis=0)) == len(everything)


def test_another_nonce_gives_another_share():
    domain, points = Domain(5000), np.array([17])
    keys, _ = share_points(points, domain, NONCE, prg())
    assert (expand(keys, domain, NONCE) != expand(keys, domain, bytes(16))).any()


def test_a_wrong_party_does_not_find_the_point():
    domain = Domain(5000)
    one, other = share_points(np.array([17]), domain, NONCE, prg())
    swapped = expand(replace(one, party=1), domain, NONCE)
    assert np.unpackbits(swapped ^ expand(other, domain, NONCE)).sum() > 1


def test_printing_keys_shows_their_number_alone():
    keys: PointKeys = share_points(np.array([5, 77]), Domain(300), NONCE, prg())[0]
    assert repr(keys) == "PointKeys(party 0, 2 keys)"
