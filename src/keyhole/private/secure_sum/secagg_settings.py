"""Settings of a secure sum: the public facts that all its parties must agree on."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import numpy as np

from keyhole.errors import InputError
from keyhole.private.facts import read_facts
from keyhole.private.secure_sum.graph import degree_of, neighbours, threshold_of

__all__ = ["SecAggSettings"]

_MAGIC = b"KHG1"
_FORM = struct.Struct("<4sBBH16sIQII")
_MOST_CLIENTS = 1 << 16
_MOST_ENTRIES = 1 << 32
_MOST_PAIRS = 1 << 24  # clients times neighbours of a sparse graph, which every party holds


@dataclass(frozen=True)
class SecAggSettings:
    """The public facts of one secure sum.

    Args:
        round: 16 bytes: which sum this is. No client takes part in one twice.
        cohort: N, how many clients are invited; their places are 0 to N - 1.
        length: of every vector.
        bits: of every entry: sums wrap at 2^16 or 2^32.
        threshold: t, how many members of a group must stay to the end for its secrets to be
            rebuilt; by default floor(2 N / 3) + 1 of all, or what the sparse graph asks for.
        degree: k, with how many others each client shares masks; by default with all of them below
            200 clients and with those of the sparse graph from there on.
        signed: whether clients sign what they see, which a server that cheats does not survive.
            Then everyone shares masks with everyone, since everyone must see the same list.

    Raises:
        InputError: a number is out of range, or signatures are asked for on a sparse graph.

    >>> SecAggSettings(bytes(16), cohort=50, length=8).shares_needed
    34
    """

    round: bytes
    cohort: int
    length: int
    bits: Literal[16, 32] = 32
    threshold: int | None = None
    degree: int | None = None
    signed: bool = False

    def __post_init__(self) -> None:
        if len(self.round) != 16 or self.bits not in (16, 32):
            raise _bad(f"a name of {len(self.round)} bytes, entries of {self.bits} bits")
        if not (2 <= self.cohort <= _MOST_CLIENTS and 1 <= self.length <= _MOST_ENTRIES):
            raise _bad(f"{self.cohort} clients, {self.length} entries")
        if self.signed and self.degree not in (None, self.cohort - 1):
            raise _bad(f"signatures, and {self.degree} neighbours each")
        if self.degree not in (None, self.cohort - 1) and self.cohort * self.degree > _MOST_PAIRS:
            raise _bad(f"{self.cohort} clients, with {self.degree} neighbours each")
        smallest = min(len(group) for group in self._groups)
        # One share alone must not open a secret, and a sum of one is an input.
        if not 2 <= self.shares_needed <= smallest:
            raise _bad(f"threshold {self.shares_needed} in groups of {smallest}")
        if self.signed and 2 * self.shares_needed <= self.cohort:
            raise _bad(f"signatures, and threshold {self.shares_needed} of {self.cohort}")

    @property
    def is_complete(self) -> bool:
        """Whether everyone shares masks with everyone."""
        return len(self._groups[0]) == self.cohort

    @cached_property
    def shares_needed(self) -> int:
        """t: with fewer shares a secret stays one."""
        if self.threshold is not None:
            return self.threshold
        return threshold_of(self.cohort, len(self._groups[0]) - 1)

    @property
    def least_survivors(self) -> int:
        """How many inputs a sum that is released has at least."""
        if self.is_complete:
            return self.shares_needed
        return threshold_of(self.cohort, self.cohort - 1)

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        degree = degree_of(self.cohort) if self.degree is None else self.degree
        if self.signed or degree == self.cohort - 1:
            return (tuple(range(self.cohort)),) * self.cohort
        near = neighbours(self.cohort, degree, self.round)
        return tuple(tuple(sorted((place, *others))) for place, others in enumerate(near))

    def group(self, place: int) -> tuple[int, ...]:
        """Returns the places that hold shares of a client's secrets, ascending: those with which
        it shares masks, and its own."""
        return self._groups[place]

    def group_set(self, place: int) -> frozenset[int]:
        """The same as a set."""
        return self._group_sets[place]

    @cached_property
    def _group_sets(self) -> tuple[frozenset[int], ...]:
        if self.is_complete:
            return (frozenset(self._groups[0]),) * self.cohort
        return tuple(map(frozenset, self._groups))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of ring elements, as they travel."""
        return np.dtype("<u4" if self.bits == 32 else "<u2")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the settings as a client fetches them; a zero stands for a default."""
        return _FORM.pack(
            _MAGIC,
            self.bits,
            self.signed,
            0,
            self.round,
            self.cohort,
            self.length,
            self.threshold or 0,
            self.degree or 0,
        )

    @staticmethod
    def decode(data: bytes) -> SecAggSettings:
        """Returns the settings that `data` holds.

        Raises:
            MalformedError: they are not settings of this version.
        """
        return read_facts(data, "settings of a secure sum", _unpack)


def _unpack(data: bytes) -> SecAggSettings:
    _, bits, signed, _, name, cohort, length, threshold, degree = _FORM.unpack(data)
    return SecAggSettings(
        name, cohort, length, bits, threshold or None, degree or None, signed == 1
    )


def _bad(got: str) -> InputError:
    return InputError(
        "settings of a secure sum that make no sense",
        got=got,
        allowed=f"names of 16 bytes; 16 or 32 bits; 2..{_MOST_CLIENTS} clients; 1..2^32 entries; "
        "all others as neighbours, or so few that there are 2^24 in all; "
        "thresholds from 2 to the size of a group, with signatures above half of everyone",
        fix="leave threshold and degree to their defaults",
    )
