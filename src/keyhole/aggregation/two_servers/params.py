"""Defines the public facts of a sum, on which clients and both servers agree.

An update has several parts. Of some a client touches few keys: they travel as point functions. Of
others it sends every row: a mask to one server and the rest to the other. One list of clients and
one set of params stands for all parts.

Of a sparse part, buckets follow from the params (`crypto/cuckoo.py`). There is no stash: a row sent
for the whole table would cost a server as much as a third of all buckets. Instead there are a few
buckets more, which weigh where keys are few, and a key without a bucket is left out.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import copysign, inf
from typing import Any

import numpy as np

from keyhole.aggregation.privacy.noise import LARGEST
from keyhole.aggregation.shares import SumFacts
from keyhole.crypto.codec import CHECK_BYTES, Framing, read_facts
from keyhole.crypto.cuckoo import Placement
from keyhole.crypto.prg import SEED_BYTES
from keyhole.crypto.ring import FixedPoint, RingBits, ring_dtype
from keyhole.errors import InputError

SPARSE_FRAMING = Framing(b"KHW1", {"public": 1, "own": 2}, "a message of a sum")
"""The framing of what a client sends of one sparse part."""

SPARSE_OWN_BYTES = SPARSE_FRAMING.head_bytes + SEED_BYTES + 32 + CHECK_BYTES
"""Bytes of a client's own message of a sparse part to one server."""

_SPARSE_MAGIC, _SPARSE_FORM = b"KHV1", struct.Struct("<4sBBH16sQQQQ")
_MAGIC, _FORM = b"KHM2", struct.Struct("<4sBBH16sQQQQdddd")
_PART = struct.Struct("<QQQQ")
_MAX = 2**31 - 1  # of keys, as in a placement, and of every other whole number
_MAX_PARTS = 2**16 - 1
_NAME_BYTES = 16
_HASHES = 3  # buckets that hold a key
_SPARE_BUCKETS = 8
_SERVERS = 2  # each adds noise
_SLACK = 1e-9  # of a product of two floats


@dataclass(frozen=True)
class SparseParams:
    """The public facts of one sparse sum. The lengths of messages and the work of servers depend
    on these alone.

    Args:
        round: 16 bytes: its name. A name is used once.
        max_keys: m, to which every client's keys are padded.
        min_clients: below which neither server releases anything. With 1 the sum may be one
            client's update.
        with_counts: a row has one more element, the last: how many clients sent the key, modulo
            the ring. The trainer, which combines the shares, learns it.

    >>> terms = SparseParams(bytes(16), 100_000, 500, 1000, bits=32, min_clients=10)
    >>> terms.num_buckets, terms.bucket_size, terms.depth
    (1308, 230, 8)
    """

    round: bytes
    num_keys: int
    width: int
    max_keys: int
    bits: RingBits
    min_clients: int
    with_counts: bool = False

    def __post_init__(self) -> None:
        ring_dtype(self.bits)
        numbers = self.num_keys, self.width, self.max_keys, self.min_clients
        if len(self.round) != _NAME_BYTES or min(numbers) < 1 or max(numbers) > _MAX:
            raise _bad_sparse(f"a name of {len(self.round)} bytes and the numbers {numbers}")
        if self.max_keys > self.num_keys:
            raise _bad_sparse(f"{self.max_keys} of {self.num_keys} keys")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ring elements."""
        return ring_dtype(self.bits)

    @property
    def row(self) -> int:
        """Ring elements of a row, with its count if there is one."""
        return self.width + self.with_counts

    @property
    def num_buckets(self) -> int:
        """B, of which each takes one key of a client.

        Up to 3 keys have a bucket each that holds the whole table: none is ever left out. Else it
        is 1.3 m + 8. Measured, as the fraction of clients with uniform keys that lose a key (4 to
        10 x 10^5 clients up to m = 48, 3 to 0.7 x 10^5 above):

            m       4     8     16    24    32    48    64  100  150  300
            lost    1e-6  7e-6  2e-5  1e-5  1e-5  7e-6  0   0    0    0
        """
        few = self.max_keys <= _HASHES
        return self.max_keys if few else -(-13 * self.max_keys // 10) + _SPARE_BUCKETS

    @cached_property
    def placement(self) -> Placement:
        """Where keys lie."""
        return Placement(self.num_keys, self.num_buckets, min(_HASHES, self.num_buckets))

    @property
    def bucket_size(self) -> int:
        """Positions of a bucket."""
        return self.placement.bucket_size

    @property
    def depth(self) -> int:
        """Levels of a bucket's tree: every position is a leaf."""
        return (self.bucket_size - 1).bit_length()

    @property
    def public_parts(self) -> tuple[int, int, int]:
        """Bytes of control bits, seed corrections and row corrections."""
        count, depth = self.num_buckets, self.depth
        row = self.row * self.dtype.itemsize
        return -(-2 * depth * count // 8), depth * count * SEED_BYTES, count * row

    @property
    def public_bytes(self) -> int:
        """The number of bytes of a client's public message."""
        return SPARSE_FRAMING.head_bytes + SEED_BYTES + sum(self.public_parts)

    @property
    def upload_bytes(self) -> int:
        """The number of bytes of all that a client sends: once what is public, and a message to
        each server."""
        return self.public_bytes + 2 * SPARSE_OWN_BYTES

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the text that is digested; it does not travel, as `SumParams` tells all of it."""
        return _SPARSE_FORM.pack(
            _SPARSE_MAGIC,
            self.bits,
            self.with_counts,
            0,
            self.round,
            self.num_keys,
            self.width,
            self.max_keys,
            self.min_clients,
        )


def _bad_sparse(got: str) -> InputError:
    return InputError(
        f"params of a sparse sum that make no sense: got {got}; expected a name of "
        f"{_NAME_BYTES} bytes; 1..{_MAX}; no more keys per client than there are; check "
        "num_keys, width, max_keys and min_clients"
    )


@dataclass(frozen=True)
class PartParams:
    """One part of an update.

    Args:
        max_keys: m, to which every client's keys are padded.
        is_sparse: whether it travels as point functions, or every row of it.
    """

    num_keys: int
    width: int
    max_keys: int
    is_sparse: bool


@dataclass(frozen=True)
class SumParams:
    """The public facts of one sum. The lengths of messages and the work of servers depend on these
    alone.

    Args:
        round: 16 bytes: its name. A name is used once.
        max_clients: whose updates may be added; the ring holds no more.
        min_clients: below which neither server releases anything.
        clip: numbers beyond it are clipped by the client.
        with_counts: a row has one more element: how many clients sent the key. The trainer learns
            it.
        norm: clients shorten an update that measures more (Euclidean, all parts together); infinite
            for none. Nobody can check that a client did.
        noise: standard deviation of the noise that each server adds to its share, in the units of
            updates; 0 for none.
        room: for how many clients more the ring has room, so that noise cannot make it overflow.
        min_per_key: rows that fewer clients sent are dropped before anything is opened; 0 for none.
            Not of a part of one key, which everybody sends: `min_clients` is its bound.
        count_noise: standard deviation of the noise that each server adds to the counts by which
            rows are dropped, in clients; 0 for none.

    Raises:
        InputError: a number is out of range, noise has no room, or counts would be given out
            without noise beside rows that have it.

    >>> part = PartParams(100_000, 500, 1000, is_sparse=True)
    >>> terms = SumParams(bytes(16), (part,), max_clients=50, min_clients=10)
    >>> terms.fixed_point.scale, SumParams.decode(terms.encode()) == terms
    (2097152.0, True)
    """

    round: bytes
    parts: tuple[PartParams, ...]
    max_clients: int
    min_clients: int
    clip: float = 16.0
    bits: RingBits = 32
    with_counts: bool = False
    norm: float = inf
    noise: float = 0.0
    room: int = 0
    min_per_key: int = 0
    count_noise: float = 0.0

    def __post_init__(self) -> None:
        numbers = self.max_clients, self.min_clients
        if len(self.round) != _NAME_BYTES or min(numbers) < 1 or max(numbers) > _MAX:
            raise _bad(f"a name of {len(self.round)} bytes, {numbers} clients")
        if not 1 <= len(self.parts) <= _MAX_PARTS:
            raise _bad(f"{len(self.parts)} parts")
        if not (self.norm > 0 and 0 <= self.noise < inf and 0 <= self.room <= _MAX):
            raise _bad(f"norm {self.norm}, noise {self.noise}, room {self.room}")
        fixed, _ = self.fixed_point, self.sparse  # raise where a number is out of their range
        if min(copysign(1, noise) for noise in (self.noise, self.count_noise)) < 0:
            raise _bad("noise of -0, a second text of the same params")
        if self.noise and self.is_counted:
            raise _bad("noise, and counts without any")
        if not 0 <= self.min_per_key <= self.max_clients:
            raise _bad(f"rows of at least {self.min_per_key} of {self.max_clients} clients")
        if not 0 <= self.count_noise < inf or (self.count_noise and not self.min_per_key):
            raise _bad(f"noise of {self.count_noise} on counts, {self.min_per_key} clients per row")
        if self.room * fixed.clip < _SERVERS * LARGEST * self.noise * (1 - _SLACK):
            raise _bad(f"noise of {self.noise} and room for {self.room} clients")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ring elements."""
        return ring_dtype(self.bits)

    @property
    def is_counted(self) -> bool:
        """Whether rows have one more element, which the trainer need not learn."""
        return self.with_counts or self.min_per_key > 0

    @property
    def counted_keys(self) -> list[int]:
        """Keys of each part whose rows may be dropped."""
        sizes = [part.num_keys for part in self.parts]
        return [keys if self.min_per_key and keys > 1 else 0 for keys in sizes]

    @cached_property
    def fixed_point(self) -> FixedPoint:
        """How numbers become ring elements."""
        return FixedPoint(self.clip, self.max_clients + self.room, self.bits)

    @property
    def ring_noise(self) -> float:
        """Standard deviation of a server's noise, in steps of the ring."""
        return self.noise * self.fixed_point.scale

    def shape(self, place: int) -> tuple[int, int]:
        """Returns the shape of the sum of a part: rows and elements of a row, with its count if
        there is one."""
        part = self.parts[place]
        return part.num_keys, part.width + self.is_counted

    def given_shape(self, place: int) -> tuple[int, int]:
        """Returns the shape of what is given out of it: with counts only where the trainer is to
        learn them."""
        part = self.parts[place]
        return part.num_keys, part.width + self.with_counts

    def dense_bytes(self, place: int) -> int:
        """Returns the number of bytes of all rows of a part."""
        return math.prod(self.shape(place)) * self.dtype.itemsize

    @cached_property
    def sparse(self) -> tuple[SparseParams, ...]:
        """The terms of each part, as those of a sum of its own."""
        return tuple(
            SparseParams(
                round=sha256(b"keyhole part" + self.round + struct.pack("<Q", place)).digest()[:16],
                num_keys=part.num_keys,
                width=part.width,
                max_keys=part.max_keys,
                bits=self.bits,
                min_clients=self.min_clients,
                with_counts=self.is_counted,
            )
            for place, part in enumerate(self.parts)
        )

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    @property
    def public_lengths(self) -> list[int]:
        """Bytes of each part in a public message; none of a dense one."""
        pairs = zip(self.parts, self.sparse, strict=True)
        return [sparse.public_bytes if part.is_sparse else 0 for part, sparse in pairs]

    def own_lengths(self, party: int) -> list[int]:
        """Bytes of each part in an own message: of a dense one a seed, or all rows."""
        return [
            SPARSE_OWN_BYTES
            if part.is_sparse
            else (SEED_BYTES if party == 0 else self.dense_bytes(place))
            for place, part in enumerate(self.parts)
        ]

    @cached_property
    def facts(self) -> SumFacts:
        """What services and devices may know."""
        return SumFacts(
            params=self.encode(),
            round=self.round,
            min_clients=self.min_clients,
            max_clients=self.max_clients,
            public_bytes=sum(self.public_lengths),
            own_bytes=(sum(self.own_lengths(0)), sum(self.own_lengths(1))),
            share_bytes=sum(math.prod(self.given_shape(place)) for place in range(len(self.parts)))
            * self.dtype.itemsize,
            count_bytes=sum(self.counted_keys) * self.dtype.itemsize,
            min_per_key=self.min_per_key,
            clip=self.clip,
            norm=self.norm,
            noise=self.noise,
            with_counts=self.with_counts,
        )

    def encode(self) -> bytes:
        """Returns the params as everybody is told them."""
        numbers = self.max_clients, self.min_clients, self.room, self.min_per_key
        head = self.bits, self.with_counts, len(self.parts), self.round
        form = _FORM.pack(
            _MAGIC, *head, *numbers, self.clip, self.norm, self.noise, self.count_noise
        )
        packed = (_PART.pack(p.num_keys, p.width, p.max_keys, p.is_sparse) for p in self.parts)
        return form + b"".join(packed)

    @staticmethod
    def decode(data: bytes) -> SumParams:
        """Returns the params that `data` holds."""
        return read_facts(data, "params of a sum", _unpack)


def _unpack(data: bytes) -> SumParams:
    _, bits, counts, _, name, *numbers = _FORM.unpack_from(data)
    limit, minimum, room, per_key, clip, norm, noise, on_counts = numbers
    found = _PART.iter_unpack(data[_FORM.size :])
    parts = tuple(PartParams(keys, width, m, is_sparse == 1) for keys, width, m, is_sparse in found)
    rest = clip, bits, counts == 1, norm, noise, room, per_key, on_counts
    return SumParams(name, parts, limit, minimum, *rest)


def part_params(
    num_keys: int, width: int, max_keys: int, bits: RingBits, with_counts: bool
) -> PartParams:
    """Returns the terms of a part, which travels in the way that takes fewer bytes.

    Where nearly every key is sent, or rows are short, all rows take fewer.
    """
    max_keys = max(1, max_keys)
    alone = SparseParams(bytes(_NAME_BYTES), num_keys, width, max_keys, bits, 1, with_counts)
    is_sparse = alone.upload_bytes < num_keys * alone.row * alone.dtype.itemsize
    return PartParams(num_keys, width, max_keys, is_sparse)


def _bad(got: str) -> InputError:
    return InputError(
        f"params of a sum that make no sense: got {got}; expected a name of "
        f"{_NAME_BYTES} bytes; 1..{_MAX}; room for the noise of the two servers; "
        "noise without counts; rows of 0..most clients, and noise on counts where there are any; "
        "check cohort, parts, clip, noise and min_per_key"
    )
