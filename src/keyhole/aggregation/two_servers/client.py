"""Turns a client's update into two shares, one for each server.

Of a sparse part, each key goes to one of the buckets that hold it, no two to the same, and each
bucket is one point function: at the key's position the row, or at a random one a row of zeros if no
key went there. What is sent is one row per bucket, whatever the number of keys in the table. Of a
dense part, server 0 gets the seed of a mask and server 1 what is left when the mask is taken away.

A point function has a row as value: zero everywhere but at one secret position. The tree is that of
`crypto/dpf.py`, with a leaf for every position. At a position with seed s and control bit t, party
b's share of the row is

    (-1)^b (convert(s) + t * correction)

in the ring, where convert stretches a seed to a row and the correction makes both shares add up to
the secret row at the secret position (Boyle, Gilboa and Ishai, EUROCRYPT 2015 and CCS 2016, for
any group). Everywhere else both parties have the same seed and bit, and the shares cancel.

Hidden from each server: keys, their number up to `max_keys` of each part, and rows, if the two do
not collude, AES under a fixed key is a circular correlation-robust hash of seeds of 127 bits, and
in counter mode it is a pseudo-random function. Not hidden: who takes part; anything from a party
that holds both roots. Not prevented: a client that lies. It can share any rows at any number of
keys, of any size, and so spoil a sum; neither server can see it.

A client relies on its params: the device's policy checks `min_clients`. Its messages are of one
sum and one model, and no server of another takes them.

    public   of a sparse part: head, nonce (16), control bits (two per level, of all buckets, 8 per
             byte from the lowest), seed corrections (16 per level and bucket), row corrections (a
             row of little-endian ring elements per bucket)
    own      of a sparse part: head, root (16), SHA-256 of public (32), check (16); of a dense part:
             the seed (16) to server 0, or all rows minus their mask to server 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.shares import SplitUpdate
from keyhole.aggregation.two_servers.params import SPARSE_FRAMING, SparseParams, SumParams
from keyhole.arrays import KeyArray
from keyhole.crypto.cuckoo import place
from keyhole.crypto.dpf import Bits, share_paths
from keyhole.crypto.once import distinct_keys
from keyhole.crypto.prg import SEED_BYTES, FixedKeyAes, Prg, SeedArray, fixed_key
from keyhole.crypto.ring import RingArray, add_mask
from keyhole.errors import KeySpaceError, ShapeError

_TREE, _ROWS = b"keyhole-sum-tree", b"keyhole-sum-rows"


@dataclass(frozen=True, repr=False)
class Corrections:
    """What both parties receive alike, for n point functions.

    Args:
        nonce: 16 bytes that belong to this client's message alone.
        seeds: (n, depth, 16) uint8, control bits clear.
        bits: (n, depth, 2) bool, of the left and the right child.
        rows: (n, row) ring.
    """

    nonce: bytes
    seeds: NDArray[np.uint8]
    bits: Bits
    rows: RingArray

    def __repr__(self) -> str:
        return f"Corrections({len(self.rows)} points)"


def tree_aes(nonce: bytes) -> FixedKeyAes:
    """Returns what grows the trees of one client."""
    return FixedKeyAes(fixed_key(nonce, _TREE))


def rows_aes(nonce: bytes) -> FixedKeyAes:
    """Returns what stretches the seeds of one client's positions to rows."""
    return FixedKeyAes(fixed_key(nonce, _ROWS))


def row_blocks(row: int, dtype: np.dtype[Any]) -> int:
    """Blocks of AES that cover a row."""
    return -(-row * dtype.itemsize // SEED_BYTES)


def convert(seeds: SeedArray, row: int, dtype: np.dtype[Any], nonce: bytes) -> RingArray:
    """Returns the rows of seeds (..., 16): (..., row), little-endian elements."""
    whole = rows_aes(nonce).expand(seeds.reshape(-1, SEED_BYTES), row_blocks(row, dtype))
    cut = whole.view(dtype.newbyteorder("<"))[:, :row].astype(dtype, copy=False)
    return cut.reshape(*seeds.shape[:-1], row)


def read_sparse_public(terms: SparseParams, data: bytes) -> Corrections:
    """Returns the corrections of a public message."""
    SPARSE_FRAMING.check_length(data, terms.public_bytes)
    SPARSE_FRAMING.check_head(terms, "public", 0, data)
    start = SPARSE_FRAMING.head_bytes
    nonce, start = data[start : start + SEED_BYTES], start + SEED_BYTES
    raw = np.frombuffer(data, np.uint8, offset=start)
    packed, seeds, rows = np.split(raw, np.cumsum(terms.public_parts)[:2])
    count, depth = terms.num_buckets, terms.depth
    bits = np.unpackbits(packed, bitorder="little").astype(np.bool_)
    used = 2 * depth * count
    seeds = seeds.reshape(count, depth, SEED_BYTES)
    if bits[used:].any() or (seeds[:, :, 0] & 1).any():
        raise SPARSE_FRAMING.malformed("spare bits that are set", "zeros")
    ring = rows.view(terms.dtype.newbyteorder("<")).reshape(count, terms.row)
    return Corrections(bytes(nonce), seeds, bits[:used].reshape(count, depth, 2), ring)


def read_sparse_own(terms: SparseParams, party: int, data: bytes) -> tuple[bytes, bytes]:
    """Returns the root of a client, and the digest of its public message."""
    body = bytes(SPARSE_FRAMING.unseal(terms, "own", party, data, SEED_BYTES + 32))
    return body[:SEED_BYTES], body[SEED_BYTES:]


@dataclass(frozen=True, repr=False)
class SparseShares:
    """What one client sends, once. A party that has both messages of `to` can read the rows.

    Args:
        public: for both servers alike: sent to server 0, which relays it to server 1.
        to: one message for each server, which nobody else may see.
        is_placed: (m,) bool: the keys that found a bucket; rows of others are left out. The
            client's secret.
    """

    public: bytes
    to: tuple[bytes, bytes]
    is_placed: NDArray[np.bool_]

    def __repr__(self) -> str:
        """Printing shows what everybody sees."""
        return f"SparseShares({len(self.public)} bytes and {len(self.to[0])} for each server)"


def share_rows(
    terms: SparseParams, keys: KeyArray, rows: RingArray, prg: Prg | None = None
) -> SparseShares:
    """Shares rows (m, width) of keys (m,), all different, if there are any, between both servers;
    roots, nonce and random positions come from `prg`, a fresh one if left out.

    >>> terms = SparseParams(bytes(16), 1000, 4, 10, bits=32, min_clients=2)
    >>> shares = share_rows(terms, np.array([7, 3]), np.ones((2, 4), np.uint32))
    >>> shares, int(shares.is_placed.sum())
    (SparseShares(3138 bytes and 120 for each server), 2)
    """
    keys = np.asarray(keys)
    _check_rows(terms, keys, rows)
    prg = Prg.fresh() if prg is None else prg
    points, payload, is_placed = _fill_buckets(terms, keys.astype(np.int64), rows, prg)
    roots = prg.bytes(SEED_BYTES), prg.bytes(SEED_BYTES)
    nonce = prg.bytes(SEED_BYTES)
    seeds, bits, ends, control = share_paths(tree_aes(nonce), points, terms.depth, roots)
    one, other = convert(ends, terms.row, terms.dtype, nonce)
    # At the point one control bit is set: the correction counts once, with that party's sign.
    missing = payload - one + other
    values = np.where(control[1][:, None], -missing, missing)
    values = values.astype(terms.dtype.newbyteorder("<"), copy=False)
    packed = np.packbits(bits, bitorder="little")
    head = SPARSE_FRAMING.head(terms, "public", 0)
    public = b"".join([head, nonce, packed.tobytes(), seeds.tobytes(), values.tobytes()])
    digest = sha256(public).digest()
    first, second = (
        SPARSE_FRAMING.seal(terms, "own", party, root, digest) for party, root in enumerate(roots)
    )
    return SparseShares(public, (first, second), is_placed)


def _fill_buckets(
    terms: SparseParams, keys: KeyArray, rows: RingArray, prg: Prg
) -> tuple[KeyArray, RingArray, NDArray[np.bool_]]:
    """Returns position (B,) and row (B, row) of every bucket, and which keys (m,) found one."""
    points = prg.below(terms.bucket_size, terms.num_buckets)
    payload = np.zeros((terms.num_buckets, terms.row), terms.dtype)
    choices = terms.placement.buckets_of(keys)
    buckets = place(choices, terms.num_buckets)
    row, column = np.nonzero(choices == buckets[:, None])  # at most one for each key
    points[buckets[row]] = terms.placement.positions_of(keys)[row, column]
    payload[buckets[row], : terms.width] = rows[row]
    payload[buckets[row], terms.width :] = 1
    return points, payload, buckets >= 0


def _check_rows(terms: SparseParams, keys: KeyArray, rows: RingArray) -> None:
    if len(distinct_keys(keys, terms.num_keys, terms.max_keys)[0]) != len(keys):
        raise KeySpaceError(
            f"keys that are repeated: got {len(keys)} keys; expected each key once; add up the "
            "rows of equal keys first"
        )
    if rows.shape != (len(keys), terms.width) or rows.dtype != terms.dtype:
        raise ShapeError(
            f"rows that do not fit their keys or the params: got {rows.dtype} of shape "
            f"{rows.shape}; expected {terms.dtype} of shape ({len(keys)}, {terms.width}); encode "
            "them with FixedPoint of the same ring"
        )


def split_rows(
    terms: SumParams, rows: Sequence[tuple[KeyArray, RingArray]], prg: Prg
) -> SplitUpdate:
    """Returns what each server gets of an update: of each part its keys (m,), all different, and
    their rows (m, width)."""
    if len(rows) != len(terms.parts):
        raise ShapeError(
            f"an update of another number of parts: got {len(rows)}; expected {len(terms.parts)}; "
            "share it under the params of its own round"
        )
    publics: list[bytes] = []
    own: tuple[list[bytes], list[bytes]] = [], []
    unplaced = 0
    for part, (keys, values) in enumerate(rows):
        if terms.parts[part].is_sparse:
            shared = share_rows(terms.sparse[part], keys, values, prg)
            publics.append(shared.public)
            messages = shared.to
            unplaced += int(np.count_nonzero(~shared.is_placed))
        else:
            messages = _dense(terms, part, np.asarray(keys), values, prg)
        for mine, message in zip(own, messages, strict=True):
            mine.append(message)
    return SplitUpdate((b"".join(own[0]), b"".join(own[1])), b"".join(publics), unplaced)


def _dense(
    terms: SumParams, place: int, keys: KeyArray, rows: RingArray, prg: Prg
) -> tuple[bytes, bytes]:
    """The seed of a mask for server 0, which adds the stream of `Prg(seed)`, and all rows minus
    that mask for server 1. Hidden from each: the rows, if AES-128 is a pseudo-random function."""
    _check_rows(terms.sparse[place], keys, rows)
    whole = np.zeros(terms.shape(place), terms.dtype)
    whole[keys, : rows.shape[1]] = rows
    whole[keys, rows.shape[1] :] = 1
    seed = prg.bytes(SEED_BYTES)
    add_mask(whole, seed, -1)
    return seed, whole.astype(terms.dtype.newbyteorder("<"), copy=False).tobytes()
