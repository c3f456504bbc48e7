"""Terms of a sparse sum: the public facts that clients and both servers agree on beforehand.

Which buckets there are follows from them, see `pir/cuckoo.py`. There is no stash here: a row sent
for the whole table would cost a server as much as a third of all buckets. Instead there are a few
buckets more, which weigh where keys are few, and a key without a bucket is left out.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

from keyhole.errors import InputError
from keyhole.private.facts import read_facts
from keyhole.private.pir.cuckoo import Placement
from keyhole.private.secure_sum.fixed_point import RingBits, ring_dtype

__all__ = ["SparseTerms"]

_MAGIC = b"KHV1"
_FORM = struct.Struct("<4sBBH16sQQQQ")
_MOST = 2**31 - 1  # of keys, as in a placement, and of every other number
_NAME_BYTES = 16
_HASHES = 3  # buckets that hold a key
_SPARE_BUCKETS = 8


@dataclass(frozen=True)
class SparseTerms:
    """The public facts of one sparse sum. The lengths of messages and the work of servers depend
    on these alone.

    Args:
        round: 16 bytes: its name. A name is used once.
        num_keys: K.
        width: ring elements of a row.
        most_keys: m, to which every client's keys are padded.
        bits: of an element of the ring.
        least_clients: below which neither server releases anything. With 1 the sum may be one
            client's update.
        with_counts: a row has one more element, the last: how many clients sent the key, modulo
            the ring. Whoever combines the shares learns it.

    Raises:
        InputError: a number is out of range.

    >>> terms = SparseTerms(bytes(16), 100_000, 500, 1000, bits=32, least_clients=10)
    >>> terms.num_buckets, terms.bucket_size, terms.depth
    (1308, 230, 8)
    """

    round: bytes
    num_keys: int
    width: int
    most_keys: int
    bits: RingBits
    least_clients: int
    with_counts: bool = False

    def __post_init__(self) -> None:
        ring_dtype(self.bits)
        numbers = self.num_keys, self.width, self.most_keys, self.least_clients
        if len(self.round) != _NAME_BYTES or min(numbers) < 1 or max(numbers) > _MOST:
            raise _bad(f"a name of {len(self.round)} bytes and the numbers {numbers}")
        if self.most_keys > self.num_keys:
            raise _bad(f"{self.most_keys} of {self.num_keys} keys")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of ring elements."""
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
        few = self.most_keys <= _HASHES
        return self.most_keys if few else -(-13 * self.most_keys // 10) + _SPARE_BUCKETS

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

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the terms as everybody fetches them."""
        return _FORM.pack(
            _MAGIC,
            self.bits,
            self.with_counts,
            0,
            self.round,
            self.num_keys,
            self.width,
            self.most_keys,
            self.least_clients,
        )

    @staticmethod
    def decode(data: bytes) -> SparseTerms:
        """Returns the terms that `data` holds.

        Raises:
            MalformedError: they are not terms of this version.
        """
        return read_facts(data, "terms of a sparse sum", _unpack)


def _unpack(data: bytes) -> SparseTerms:
    _, bits, counts, _, name, num_keys, width, most_keys, least = _FORM.unpack(data)
    return SparseTerms(name, num_keys, width, most_keys, bits, least, counts == 1)


def _bad(got: str) -> InputError:
    return InputError(
        "terms of a sparse sum that make no sense",
        got=got,
        allowed=f"a name of {_NAME_BYTES} bytes; 1..{_MOST}; no more keys a client than there are",
        fix="check num_keys, width, most_keys and least_clients",
    )
