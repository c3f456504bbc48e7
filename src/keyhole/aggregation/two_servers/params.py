"""Defines the public facts of a sum, on which clients and both servers agree.

An update has several parts. Of some a client touches few keys: they travel as point functions. Of
others it sends every row: a mask to one server and the rest to the other. One list of clients and
one set of params stands for all parts.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import inf
from typing import Any

import numpy as np

from keyhole.aggregation.privacy.gaussian import LARGEST
from keyhole.aggregation.two_servers.sparse import SparseParams, sparse_upload_bytes
from keyhole.crypto.codec import read_facts
from keyhole.crypto.ring import FixedPoint, RingBits, ring_dtype
from keyhole.errors import InputError

_MAGIC = b"KHM1"
_FORM = struct.Struct("<4sBBH16sQQQddd")
_PART = struct.Struct("<QQQQ")
_MAX = 2**31 - 1  # of every whole number
_MAX_PARTS = 2**16 - 1
_NAME_BYTES = 16
_SERVERS = 2  # each adds noise
_SLACK = 1e-9  # of a product of two floats


@dataclass(frozen=True)
class PartParams:
    """One part of an update.

    Args:
        num_keys: K, of its rows.
        width: ring elements of a row.
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
        parts: of an update, in order.
        max_clients: the most that may be added; the ring holds no more.
        min_clients: below which neither server releases anything.
        clip: numbers beyond it are clipped by the client.
        bits: of an element of the ring.
        with_counts: a row has one more element: how many clients sent the key. The trainer learns
            it.
        norm: clients shorten an update that measures more (Euclidean, all parts together); infinite
            for none. Nobody can check that a client did.
        noise: standard deviation of the noise that each server adds to its share, in the units of
            updates; 0 for none.
        room: for how many clients more the ring has room, so that noise cannot make it overflow.

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

    def __post_init__(self) -> None:
        numbers = self.max_clients, self.min_clients
        if len(self.round) != _NAME_BYTES or min(numbers) < 1 or max(numbers) > _MAX:
            raise _bad(f"a name of {len(self.round)} bytes, {numbers} clients")
        if not 1 <= len(self.parts) <= _MAX_PARTS:
            raise _bad(f"{len(self.parts)} parts")
        if not (self.norm > 0 and 0 <= self.noise < inf and 0 <= self.room <= _MAX):
            raise _bad(f"norm {self.norm}, noise {self.noise}, room {self.room}")
        fixed, _ = self.fixed_point, self.sparse  # raise where a number is out of their range
        if self.noise and self.with_counts:
            raise _bad("noise, and counts without any")
        if self.room * fixed.clip < _SERVERS * LARGEST * self.noise * (1 - _SLACK):
            raise _bad(f"noise of {self.noise} and room for {self.room} clients")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of ring elements."""
        return ring_dtype(self.bits)

    @cached_property
    def fixed_point(self) -> FixedPoint:
        """How numbers become ring elements."""
        return FixedPoint(self.clip, self.max_clients + self.room, self.bits)

    @property
    def ring_noise(self) -> float:
        """Standard deviation of a server's noise, in steps of the ring."""
        return self.noise * self.fixed_point.scale

    def shape(self, place: int) -> tuple[int, int]:
        """Of the sum of a part: rows and elements of a row, with its count if there is one."""
        part = self.parts[place]
        return part.num_keys, part.width + self.with_counts

    @property
    def table_bytes(self) -> int:
        """Of a server's share of the sum."""
        shapes = (self.shape(place) for place in range(len(self.parts)))
        return sum(rows * row for rows, row in shapes) * self.dtype.itemsize

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
                with_counts=self.with_counts,
            )
            for place, part in enumerate(self.parts)
        )

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the terms as everybody is told them."""
        numbers = self.max_clients, self.min_clients, self.room
        head = self.bits, self.with_counts, len(self.parts), self.round
        form = _FORM.pack(_MAGIC, *head, *numbers, self.clip, self.norm, self.noise)
        packed = (_PART.pack(p.num_keys, p.width, p.max_keys, p.is_sparse) for p in self.parts)
        return form + b"".join(packed)

    @staticmethod
    def decode(data: bytes) -> SumParams:
        """Returns the terms that `data` holds.

        Raises:
            MalformedError: they are not terms of this version.
        """
        return read_facts(data, "terms of a sum", _unpack)


def _unpack(data: bytes) -> SumParams:
    _, bits, counts, _, name, *numbers = _FORM.unpack_from(data)
    limit, minimum, room, clip, norm, noise = numbers
    found = _PART.iter_unpack(data[_FORM.size :])
    parts = tuple(PartParams(keys, width, m, is_sparse == 1) for keys, width, m, is_sparse in found)
    return SumParams(name, parts, limit, minimum, clip, bits, counts == 1, norm, noise, room)


def part_params(
    num_keys: int, width: int, max_keys: int, bits: RingBits, with_counts: bool
) -> PartParams:
    """The terms of a part, which travels in the way that takes fewer bytes.

    Where nearly every key is sent, or rows are short, all rows take fewer.
    """
    max_keys = max(1, max_keys)
    alone = SparseParams(bytes(_NAME_BYTES), num_keys, width, max_keys, bits, 1, with_counts)
    is_sparse = sparse_upload_bytes(alone) < num_keys * alone.row * alone.dtype.itemsize
    return PartParams(num_keys, width, max_keys, is_sparse)


def _bad(got: str) -> InputError:
    return InputError(
        "terms of a sum that make no sense",
        got=got,
        allowed=f"a name of {_NAME_BYTES} bytes; 1..{_MAX}; room for the noise of the two servers; "
        "noise without counts",
        fix="check cohort, parts, clip and noise",
    )
