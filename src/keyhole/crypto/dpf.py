"""Shares the unit vector of a secret point between two parties: distributed point functions.

The tree of Boyle, Gilboa and Ishai (CCS 2016) in the form of Boneh, Boyle, Corrigan-Gibbs, Gilboa
and Ishai (IEEE S&P 2021) and the VDAF draft: a node is a seed and a control bit, the lowest bit of
a child's first byte is its control bit and is cleared, and one correction a level makes both
parties' nodes equal everywhere but on the path to the point. The tree ends early: a leaf holds many
points, as many as make a key shortest.

Hidden: the point, from a party that holds one of the keys, for seeds of 127 bits and AES under a
fixed key as a circular correlation-robust hash. Not hidden: the domain and the number of points,
nor anything from anyone who holds both keys. Time and memory access are not claimed to be constant.

`extend` and `apply_corrections` define what the inner loops do; tests hold both together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.compiled import has_aes, loop
from keyhole.crypto.prg import SEED_BYTES, FixedKeyAes, Prg, SeedArray, fixed_key
from keyhole.errors import InputError, KeySpaceError, MalformedError

Bits = NDArray[np.bool_]


@loop("keyhole.crypto.loops")
def grow(
    children: NDArray[np.uint64],
    bits: Bits,
    control: Bits,
    seed_words: NDArray[np.uint64],
    bit_words: Bits,
) -> None:
    """Takes control bits out of children, (n, w, 2, 2) of tree, node, side and half of a seed, and
    corrects both in place; writes `bits`, (n, w, 2). `control` is (n, w), both words (n, 2)."""
    low = children[..., 0]
    np.not_equal(low & np.uint64(1), 0, out=bits)
    low &= ~np.uint64(1)
    children ^= control[..., None, None] * seed_words[:, None, None]
    bits ^= control[..., None] & bit_words[:, None]


@loop("keyhole.crypto.aes_loops", can=has_aes)
def descend(
    key: NDArray[np.uint8],
    seeds: NDArray[np.uint64],
    party: int,
    seed_words: NDArray[np.uint64],
    bit_words: Bits,
    nodes: NDArray[np.uint64],
    control: Bits,
) -> None:
    """Grows trees from their roots, (n, 2), to as many nodes of the last level as `nodes`,
    (n, needed, 2), and `control`, (n, needed), have room for; both words (n, depth, 2)."""
    tree, depth, needed = FixedKeyAes(key.tobytes()), seed_words.shape[1], control.shape[1]
    found, bits = seeds[:, None], np.full((len(seeds), 1), party == 1)
    for level in range(depth):
        words = np.array(seed_words[:, level]), np.array(bit_words[:, level])
        children = tree.expand(found.reshape(-1, 2).view(np.uint8), 2)
        grown = np.empty((*bits.shape, 2), np.bool_)
        grow(children.view("<u8").reshape(*grown.shape, 2), grown, bits, *words)
        kept = -(-needed >> (depth - 1 - level))
        found = children.view("<u8").reshape(len(seeds), -1, 2)[:, :kept]
        bits = np.ascontiguousarray(grown.reshape(len(seeds), -1)[:, :kept])
    nodes[:], control[:] = found, bits


@loop("keyhole.crypto.aes_loops", can=has_aes)
def follow(
    key: NDArray[np.uint8],
    leaves: KeyArray,
    seeds: NDArray[np.uint64],
    control: Bits,
    seed_words: NDArray[np.uint64],
    bit_words: Bits,
) -> None:
    """Follows the paths to leaves (n,): `seeds`, (2, n, 2) of party, path and half, and `control`,
    (2, n), go from the roots to the ends; both words of each level are written, (n, depth, 2)."""
    tree, depth = FixedKeyAes(key.tobytes()), seed_words.shape[1]
    for level in range(depth):
        goes_right = (leaves >> (depth - 1 - level) & 1).astype(np.bool_)
        children, bits = extend(tree, seeds.view(np.uint8))
        words = correct_level(children, bits, goes_right)
        seed_words[:, level], bit_words[:, level] = words[0].view("<u8"), words[1]
        apply_corrections(children, bits, control, *words)
        seeds[:] = _choose(goes_right, children, 1).view("<u8")
        control[:] = np.where(goes_right, bits[:, :, 1], bits[:, :, 0])


@loop("keyhole.crypto.loops")
def write_leaves(
    leaves: NDArray[np.uint8],
    control: Bits,
    corrections: NDArray[np.uint8],
    out: NDArray[np.uint8],
) -> None:
    """Corrects leaves, (n, w, leaf_bytes or more), by `corrections`, (n, leaf_bytes), and writes
    them to `out`, (n, share_bytes), one behind the other, as far as there is room."""
    width = corrections.shape[1]
    corrected = leaves[..., :width] ^ control[..., None] * corrections[:, None]
    out[:] = corrected.reshape(len(out), -1)[:, : out.shape[1]]


_TREE, _LEAF = b"keyhole-tree", b"keyhole-leaf"
_TILE = 512 << 10  # bytes of nodes that are expanded together: what stays in a core's cache


@dataclass(frozen=True)
class Domain:
    """Points 0 to num_points - 1, and the shape of a key for one of them.

    Args:
        num_points: 1 or more; it need not be a power of two.

    >>> Domain(1_000_000).depth, Domain(1_000_000).leaf_bytes
    (12, 31)
    """

    num_points: int

    def __post_init__(self) -> None:
        if self.num_points < 1:
            raise InputError(
                f"domain has no points: got {self.num_points}; expected 1 or more; share points of "
                "a table that has rows"
            )

    @cached_property
    def depth(self) -> int:
        """Levels of the tree. A level costs a key 16 bytes and 2 bits and halves its leaf: the
        depth with the shortest key, of several the least."""
        bits = self.num_points.bit_length()
        return min(range(bits), key=lambda depth: 65 * depth + 4 * self._leaf_bytes(depth))

    @cached_property
    def leaf_bytes(self) -> int:
        """The number of bytes of a leaf: 8 points a byte."""
        return self._leaf_bytes(self.depth)

    @property
    def share_bytes(self) -> int:
        """The number of bytes of one expanded share: 8 points a byte."""
        return -(-self.num_points // 8)

    def batch_bytes(self, count: int) -> int:
        """Returns the number of bytes of the encoded corrections of `count` keys, whose control
        bits are packed together."""
        return -(-2 * self.depth * count // 8) + count * (self.depth * SEED_BYTES + self.leaf_bytes)

    def _leaf_bytes(self, depth: int) -> int:
        return -(-self.num_points // (8 << depth))


@dataclass(frozen=True, repr=False)
class PointKeys:
    """One party's keys for a batch of points of one domain; both parties have the same corrections.

    Args:
        party: 0 or 1.
        root: 16 secret bytes; the seeds of the roots of all trees are the stream of `Prg(root)`,
            with control bits cleared.
        seed_corrections: (n, depth, 16) uint8, control bits clear.
        bit_corrections: (n, depth, 2) bool, of the left and the right child.
        leaf_corrections: (n, leaf_bytes) uint8.
    """

    party: int
    root: bytes
    seed_corrections: NDArray[np.uint8]
    bit_corrections: Bits
    leaf_corrections: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.leaf_corrections)

    def __repr__(self) -> str:
        """Keys are secret: printing shows how many there are."""
        return f"PointKeys(party {self.party}, {len(self)} keys)"


def share_points(
    points: KeyArray, domain: Domain, nonce: bytes, prg: Prg
) -> tuple[PointKeys, PointKeys]:
    """Returns the keys of two parties for points: the XOR of their expansions are unit vectors.

    Args:
        points: (n,) int64 of [0, num_points).
        nonce: 16 bytes that belong to this request alone; no secret.

    >>> nonce, prg, domain = bytes(16), Prg.fresh(), Domain(10)
    >>> one, other = share_points(np.array([3]), domain, nonce, prg)
    >>> shares = expand(one, domain, nonce) ^ expand(other, domain, nonce)
    >>> np.unpackbits(shares, axis=1, bitorder="little")[:, :10]
    array([[0, 0, 0, 1, 0, 0, 0, 0, 0, 0]], dtype=uint8)
    """
    return share_from_roots(points, domain, nonce, (prg.bytes(SEED_BYTES), prg.bytes(SEED_BYTES)))


def share_from_roots(
    points: KeyArray, domain: Domain, nonce: bytes, roots: tuple[bytes, bytes]
) -> tuple[PointKeys, PointKeys]:
    """As `share_points`, for a protocol that derives both roots: fresh, secret, for one use."""
    outside = np.count_nonzero((points < 0) | (points >= domain.num_points))
    if outside:
        raise KeySpaceError(
            f"points lie outside their domain: got {outside} of {len(points)} points; expected "
            f"0..{domain.num_points - 1}; check them against the table before they are shared"
        )
    tree, n = FixedKeyAes(fixed_key(nonce, _TREE)), len(points)
    leaves, places = np.divmod(points, 8 * domain.leaf_bytes)
    seed_corrections, bit_corrections, seeds, _ = share_paths(tree, leaves, domain.depth, roots)
    ends = _leaves(seeds, domain, nonce)
    leaf_corrections = (ends[0] ^ ends[1])[:, : domain.leaf_bytes]
    leaf_corrections[np.arange(n), places >> 3] ^= (1 << (places & 7)).astype(np.uint8)
    if domain.depth == 0:
        _clear_spare(leaf_corrections, domain)
    corrections = seed_corrections, bit_corrections, leaf_corrections
    return PointKeys(0, roots[0], *corrections), PointKeys(1, roots[1], *corrections)


def expand(keys: PointKeys, domain: Domain, nonce: bytes) -> NDArray[np.uint8]:
    """Returns one party's shares of the unit vectors, (n, ceil(num_points / 8)).

    Bit j of byte i is point 8 i + j; what lies behind the last point is zero. The work depends on
    the domain and the number of keys alone.
    """
    tree, seeds = FixedKeyAes(fixed_key(nonce, _TREE)), root_seeds(keys.root, len(keys))
    shares = np.empty((len(keys), domain.share_bytes), np.uint8)
    needed = -(-domain.share_bytes // domain.leaf_bytes)  # leaves with points
    step = max(1, _TILE // (2 * SEED_BYTES << domain.depth))
    for start in range(0, len(keys), step):
        some = slice(start, start + step)
        words = keys.seed_corrections[some], keys.bit_corrections[some]
        nodes, control = grow_trees(tree, seeds[some], keys.party, *words, needed)
        leaves = _leaves(nodes.view(np.uint8), domain, nonce)
        write_leaves(leaves, control, np.array(keys.leaf_corrections[some]), shares[some])
    _clear_spare(shares, domain)
    return shares


def share_paths(
    tree: FixedKeyAes, leaves: KeyArray, depth: int, roots: tuple[bytes, bytes]
) -> tuple[NDArray[np.uint8], Bits, SeedArray, Bits]:
    """Returns the corrections of the paths to leaves (n,), and where both parties end on them."""
    n = len(leaves)
    seeds = np.stack([root_seeds(root, n) for root in roots])
    control = np.stack([np.zeros(n, np.bool_), np.ones(n, np.bool_)])
    seed_corrections = np.empty((n, depth, SEED_BYTES), np.uint8)
    bit_corrections = np.empty((n, depth, 2), np.bool_)
    words = seeds.view("<u8"), control, seed_corrections.view("<u8"), bit_corrections
    follow(tree.key, leaves, *words)
    return seed_corrections, bit_corrections, seeds, control


def encode_corrections(keys: PointKeys) -> bytes:
    """Returns what both parties receive alike, `batch_bytes` long.

    Control bits, two a level, of all keys, 8 a byte from the lowest; then the seed corrections of
    all keys; then their leaf corrections.
    """
    bits = np.packbits(keys.bit_corrections, bitorder="little")
    return bits.tobytes() + keys.seed_corrections.tobytes() + keys.leaf_corrections.tobytes()


def decode_corrections(
    data: bytes | memoryview, count: int, domain: Domain, party: int, root: bytes
) -> PointKeys:
    """Returns the keys of one party."""
    if len(data) != domain.batch_bytes(count):
        raise _malformed(f"{len(data)} bytes", f"{domain.batch_bytes(count)} bytes")
    raw, depth, num_bits = np.frombuffer(data, np.uint8), domain.depth, 2 * domain.depth * count
    ends = np.cumsum([-(-num_bits // 8), depth * count * SEED_BYTES])
    packed, seeds, leaves = np.split(raw, ends)
    bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
    seeds = seeds.reshape(count, depth, SEED_BYTES)
    leaves = leaves.reshape(count, domain.leaf_bytes)
    spare = 0 if depth else 0x100 - (1 << (domain.num_points - 1) % 8 + 1)
    if bits[num_bits:].any() or (seeds[:, :, 0] & 1).any() or (leaves[:, -1] & spare).any():
        raise _malformed("spare bits that are set", "zeros")
    return PointKeys(party, root, seeds, bits[:num_bits].reshape(count, depth, 2), leaves)


def extend(tree: FixedKeyAes, seeds: SeedArray) -> tuple[SeedArray, Bits]:
    """Returns both children of nodes (..., 16) before correction: (..., 2, 16) and (..., 2)."""
    children = tree.expand(seeds.reshape(-1, SEED_BYTES), 2)
    children = children.reshape(*seeds.shape[:-1], 2, SEED_BYTES)
    bits = (children[..., 0] & 1).astype(np.bool_)
    children[..., 0] &= 0xFE
    return children, bits


def correct_level(children: SeedArray, bits: Bits, goes_right: Bits) -> tuple[SeedArray, Bits]:
    """Returns the corrections of one level, from what both parties' nodes on the path extend to:
    children (2, n, 2, 16) of party, path and side, with their bits.

    They make the children off the path equal, and those on it differ in their control bits.
    """
    lost = _choose(goes_right, children, 0)
    kept = np.stack([~goes_right, goes_right], axis=1)
    return lost[0] ^ lost[1], bits[0] ^ bits[1] ^ kept


def apply_corrections(
    children: SeedArray, bits: Bits, control: Bits, seed_words: SeedArray, bit_words: Bits
) -> None:
    """Corrects, in place, the children (..., 2, 16) of nodes whose control bit (...) is set."""
    words, seeds = children.view("<u8"), np.ascontiguousarray(seed_words).view("<u8")
    words ^= control[..., None, None] * seeds[..., None, :]
    bits ^= control[..., None] & bit_words


def grow_trees(
    tree: FixedKeyAes,
    seeds: SeedArray,
    party: int,
    seed_corrections: NDArray[np.uint8],
    bit_corrections: Bits,
    needed: int,
) -> tuple[NDArray[np.uint64], Bits]:
    """Returns one party's first nodes of the last level, (n, needed, 2) and (n, needed).

    Args:
        seeds: (n, 16) of the roots.
        seed_corrections: (n, depth, 16); `bit_corrections` are (n, depth, 2).
        needed: how many nodes, 2^depth at most: others are not grown.
    """
    nodes = np.empty((len(seeds), needed, 2), "<u8")
    control = np.empty((len(seeds), needed), np.bool_)
    # Copies: the loop wants memory in order, as an array cut out of a message is not.
    words = np.array(seed_corrections).view("<u8"), np.array(bit_corrections)
    descend(tree.key, np.array(seeds).view("<u8"), party, *words, nodes, control)
    return nodes, control


def root_seeds(root: bytes, count: int) -> SeedArray:
    """Returns the seeds of the roots of `count` trees, control bits clear."""
    seeds = Prg(root).seeds(count)
    seeds[:, 0] &= 0xFE
    return seeds


def _leaves(seeds: SeedArray, domain: Domain, nonce: bytes) -> NDArray[np.uint8]:
    """What the seeds of leaves (..., 16) become: (..., leaf_bytes up to a whole block)."""
    leaf = FixedKeyAes(fixed_key(nonce, _LEAF))
    blocks = -(-domain.leaf_bytes // SEED_BYTES)
    whole = leaf.expand(seeds.reshape(-1, SEED_BYTES), blocks)
    return whole.reshape(*seeds.shape[:-1], blocks * SEED_BYTES)


def _choose(goes_right: Bits, children: SeedArray, right: int) -> SeedArray:
    """Of (2, n, 2, 16), side `right` where the path goes right and the other one elsewhere."""
    words = children.view("<u8")
    chosen = np.where(goes_right[:, None], words[:, :, right], words[:, :, 1 - right])
    return chosen.view(np.uint8)


def _clear_spare(shares: NDArray[np.uint8], domain: Domain) -> None:
    """Clears what lies behind the last point, in the last byte."""
    if domain.num_points % 8:
        shares[:, -1] &= (1 << domain.num_points % 8) - 1


def _malformed(got: str, allowed: str) -> MalformedError:
    return MalformedError(
        f"corrections of point functions cannot be read: got {got}; expected {allowed}; encode "
        "them for the same domain and number of keys"
    )
