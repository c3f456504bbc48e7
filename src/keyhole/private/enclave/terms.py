"""Terms: the public facts of a table that an enclave holds, which its evidence vouches for."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import InputError, ShapeError
from keyhole.private.facts import read_facts

if TYPE_CHECKING:
    from hashlib import _Hash

__all__ = ["EnclaveTerms", "start_digest", "terms_of"]

_MAGIC = b"KHT2"
_FORM = struct.Struct("<4s4x16sQQQ32s")
_MOST = 1 << 40  # of keys: beyond what anybody can scan
_MOST_SEALED = (1 << 31) - 4096  # bytes of keys, or of records, that can be sealed at once
_KEY_BYTES = 8  # of a key in a request


@dataclass(frozen=True)
class EnclaveTerms:
    """The public facts of one table in an enclave.

    What the host can see of a request and its answer depends on these and on nothing else.

    Args:
        round: 16 bytes: which slices these are.
        num_keys: K.
        record_bytes: of one slice.
        most_keys: m, to which every request is padded.
        database: 32 bytes: the digest of all slices.

    Raises:
        InputError: a number is out of range.
    """

    round: bytes
    num_keys: int
    record_bytes: int
    most_keys: int
    database: bytes

    def __post_init__(self) -> None:
        numbers = (self.num_keys, self.record_bytes, self.most_keys)
        if (len(self.round), len(self.database)) != (16, 32):
            raise _bad(f"names of {len(self.round)} and {len(self.database)} bytes")
        if min(numbers) < 1 or max(numbers) > _MOST or self.most_keys > self.num_keys:
            raise _bad(f"{self.num_keys} keys, {self.record_bytes} bytes, {self.most_keys} a query")
        if self.most_keys * max(_KEY_BYTES, self.record_bytes) > _MOST_SEALED:
            raise _bad(f"{self.most_keys} keys a query, for records of {self.record_bytes} bytes")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it: the config digest of the evidence."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the terms as a client fetches them."""
        return _FORM.pack(
            _MAGIC, self.round, self.num_keys, self.record_bytes, self.most_keys, self.database
        )

    @staticmethod
    def decode(data: bytes) -> EnclaveTerms:
        """Returns the terms that `data` holds.

        Raises:
            MalformedError: they are not terms of this version.
        """
        return read_facts(data, "terms of an enclave's table", _unpack)


def terms_of(round: bytes, records: NDArray[np.uint8], most_keys: int) -> EnclaveTerms:
    """The terms of a table.

    Args:
        round: 16 bytes that name the round.
        records: (K, record_bytes).
        most_keys: of one request; clipped to K.

    Raises:
        ShapeError: the records are not a table of bytes.
        InputError: a number is out of range.
    """
    if records.ndim != 2 or records.dtype != np.uint8:
        raise ShapeError(
            "records that are not a table of bytes",
            got=f"{records.dtype} of shape {records.shape}",
            allowed="uint8 of shape (num_keys, record_bytes)",
            fix="pass the slices as bytes, a row for each key",
        )
    num_keys, record_bytes = records.shape
    digest = start_digest(round, num_keys, record_bytes)
    digest.update(np.ascontiguousarray(records).data)
    return EnclaveTerms(round, num_keys, record_bytes, min(most_keys, num_keys), digest.digest())


def start_digest(round: bytes, num_keys: int, record_bytes: int) -> _Hash:
    """The digest of a table before its records: SHA-256, which the records are added to."""
    return sha256(b"keyhole-enclave-table" + round + struct.pack("<QQ", num_keys, record_bytes))


def _unpack(data: bytes) -> EnclaveTerms:
    _, *rest = _FORM.unpack(data)
    return EnclaveTerms(*rest)


def _bad(got: str) -> InputError:
    return InputError(
        "terms of an enclave's table that make no sense",
        got=got,
        allowed="names of 16 and 32 bytes; 1..2^40; a request for at most num_keys, with 2 GB of "
        "keys, 8 bytes each, or records",
        fix="check num_keys, record_bytes and most_keys",
    )
