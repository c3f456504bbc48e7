"""Terms: the public facts that a client and its servers must agree on before a key is asked for."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, sha256
from typing import Literal, TypeAlias, get_args

from keyhole.errors import InputError
from keyhole.private.facts import read_facts

__all__ = ["TAG_BYTES", "Scheme", "Terms", "name_of_round"]

Scheme: TypeAlias = Literal["chor", "one-server", "two-server"]
"""How slices are retrieved."""

TAG_BYTES = 16
"""Of the tag that every slice carries."""

_MAGIC = b"KHT1"
_FORM = struct.Struct("<4sB3x16sQQQ32s")
_SCHEMES = get_args(Scheme)
_MOST = 1 << 40  # of keys, and of bytes of a record: beyond what anybody can scan


def name_of_round(round_id: str) -> bytes:
    """The 16 bytes that stand for a round, its tables and its slices in messages."""
    return blake2b(round_id.encode("utf-8"), digest_size=16, person=b"keyhole-round").digest()


@dataclass(frozen=True)
class Terms:
    """The public facts of one table that is retrieved from in private.

    Anything that an observer can see depends on these and on nothing else.

    Args:
        scheme: how slices are retrieved.
        round: 16 bytes: which slices these are.
        num_keys: K.
        record_bytes: of one slice, without its tag.
        most_keys: m, to which every query is padded.
        database: 32 bytes: the digest of all slices, or of the hint if there is one, which holds
            that digest.

    Raises:
        InputError: a number is out of range.
    """

    scheme: Scheme
    round: bytes
    num_keys: int
    record_bytes: int
    most_keys: int
    database: bytes

    def __post_init__(self) -> None:
        numbers = (self.num_keys, self.record_bytes, self.most_keys)
        if self.scheme not in _SCHEMES or (len(self.round), len(self.database)) != (16, 32):
            raise _bad(f"scheme {self.scheme!r}, names of {len(self.round)} bytes")
        if min(numbers) < 1 or max(numbers) > _MOST or self.most_keys > self.num_keys:
            raise _bad(f"{self.num_keys} keys, {self.record_bytes} bytes, {self.most_keys} a query")

    @property
    def row_bytes(self) -> int:
        """A slice and its tag."""
        return self.record_bytes + TAG_BYTES

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the terms as a client fetches them."""
        return _FORM.pack(
            _MAGIC,
            _SCHEMES.index(self.scheme),
            self.round,
            self.num_keys,
            self.record_bytes,
            self.most_keys,
            self.database,
        )

    @staticmethod
    def decode(data: bytes) -> Terms:
        """Returns the terms that `data` holds.

        Raises:
            MalformedError: they are not terms of this version.
        """
        return read_facts(data, "terms of private retrieval", _unpack)


def _unpack(data: bytes) -> Terms:
    _, scheme, *rest = _FORM.unpack(data)
    return Terms(_SCHEMES[scheme], *rest)


def _bad(got: str) -> InputError:
    return InputError(
        "terms of private retrieval that make no sense",
        got=got,
        allowed=f"schemes {', '.join(_SCHEMES)}; 1..2^40; no more keys a query than there are",
        fix="check num_keys, record_bytes and most_keys",
    )
