"""Describes a table that is retrieved from, and the params that a client and its servers agree on.

Every slice carries a tag that binds it to its round and key. Params are public; that they fit the
table is checked when a client or a server is made.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cached_property
from hashlib import sha256
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.codec import read_facts
from keyhole.delivery.base import PublicTable, making_seconds
from keyhole.errors import InputError, ShapeError, StaleError
from keyhole.pricing import Speeds, Workload

Scheme: TypeAlias = Literal["one-server", "two-server"]
"""How slices are retrieved."""

TAG_BYTES = 16
"""Of the tag that every slice carries."""

_MAGIC = b"KHT1"
_FORM = struct.Struct("<4sB3x16sQQQ32s")
_SCHEMES: Mapping[Scheme, int] = MappingProxyType({"one-server": 1, "two-server": 2})
_MAX = 1 << 40  # of keys, and of bytes of a record: beyond what anybody can scan


@dataclass(frozen=True)
class PirParams:
    """The public facts of one table that is retrieved from in private.

    Anything that an observer can see depends on these and on nothing else.

    Args:
        round: 16 bytes: which slices these are.
        database: 32 bytes: the digest of all slices, or of the hint if there is one, which holds
            that digest.
    """

    scheme: Scheme
    round: bytes
    num_keys: int
    record_bytes: int
    max_keys: int
    database: bytes

    def __post_init__(self) -> None:
        numbers = (self.num_keys, self.record_bytes, self.max_keys)
        if self.scheme not in _SCHEMES or (len(self.round), len(self.database)) != (16, 32):
            raise _bad(f"scheme {self.scheme!r}, names of {len(self.round)} bytes")
        if min(numbers) < 1 or max(numbers) > _MAX or self.max_keys > self.num_keys:
            raise _bad(f"{self.num_keys} keys, {self.record_bytes} bytes, {self.max_keys} a query")

    @property
    def row_bytes(self) -> int:
        """A slice and its tag."""
        return self.record_bytes + TAG_BYTES

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def public(self, scheme: Scheme) -> PublicTable:
        """Returns what they say of a table that is retrieved from by a scheme."""
        check_scheme(self, scheme)
        return PublicTable(self.round, self.num_keys, self.record_bytes, self.max_keys)

    def encode(self) -> bytes:
        """Returns the params as a client fetches them."""
        _, *rest = astuple(self)
        return _FORM.pack(_MAGIC, _SCHEMES[self.scheme], *rest)

    @staticmethod
    def decode(data: bytes) -> PirParams:
        """Returns the params that `data` holds."""
        return read_facts(data, "params of private retrieval", _unpack)


def numbers_only(scheme: Scheme, num_keys: int, record_bytes: int, max_keys: int) -> PirParams:
    """Params of public numbers alone; names and digests do not change a length."""
    return PirParams(scheme, bytes(16), num_keys, record_bytes, max_keys, bytes(32))


def _unpack(data: bytes) -> PirParams:
    _, scheme, *rest = _FORM.unpack(data)
    names = [name for name, number in _SCHEMES.items() if number == scheme]
    return PirParams(names[0], *rest)


def _bad(got: str) -> InputError:
    return InputError(
        f"params of private retrieval that make no sense: got {got}; expected schemes "
        f"{', '.join(_SCHEMES)}; 1..2^40; no more keys a query than there are; check num_keys, "
        "record_bytes and max_keys"
    )


_ROUND_BYTES = 16
_WORD = 8  # bytes
_LINE = 64  # bytes: rows of the same cache lines on every run
_PURPOSE = b"keyhole-slice"
_HASH_BYTES = 32
_PIECE = 128  # slices that are hashed together: what they take stays in the cache


def rows_bytes(num_keys: int, record_bytes: int) -> int:
    """Of the rows of a database, known before it is made."""
    return num_keys * _words(record_bytes) * _WORD


def tags_of(round: bytes, keys: KeyArray, records: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The tags of slices: the first 16 bytes of SHA-256 over round, key and slice.

    A tag shows a client that what it opened is what the database of this round holds under its key.
    It is no secret and no signature: a server that answers from a table of its own makes the tags
    of that table too. What ties a client to one table is the digest of `Database`, which both
    servers state. Records are (m, record_bytes), tags (m, 16).
    """
    return np.ascontiguousarray(_hashes_of(round, keys, records)[:, :TAG_BYTES])


def _hashes_of(round: bytes, keys: KeyArray, records: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """SHA-256 over round, key and slice, of which a tag is the beginning, (m, 32)."""
    _check(round, records)
    if keys.shape != records.shape[:1]:
        raise _misfit(f"{keys.shape} keys for {records.shape} slices")
    pieces = range(0, len(records), _PIECE)
    hashes = [_hash(round, keys[i : i + _PIECE], records[i : i + _PIECE]) for i in pieces]
    return np.frombuffer(b"".join(hashes), np.uint8).reshape(len(records), _HASH_BYTES)


def _hash(round: bytes, keys: KeyArray, records: NDArray[np.uint8]) -> bytes:
    """SHA-256 of each slice. Texts are laid out side by side first: calls are what costs."""
    name = _PURPOSE + round
    length = len(name) + _WORD + records.shape[1]
    texts = np.empty((len(records), length), np.uint8)
    texts[:, : len(name)] = np.frombuffer(name, np.uint8)
    texts[:, len(name) : len(name) + _WORD] = keys.astype("<u8")[:, None].view(np.uint8)
    texts[:, len(name) + _WORD :] = records
    flat = texts.reshape(-1).data
    return b"".join([sha256(flat[i : i + length]).digest() for i in range(0, len(flat), length)])


@dataclass(frozen=True, repr=False)
class Database:
    """The slices of one round as a server scans them.

    Args:
        round: 16 bytes: which slices these are.
        rows: (K, words) uint64, little-endian: slice, tag, zeros up to a whole word.
        digest: 32 bytes: SHA-256 over round, K, record_bytes and the whole hashes of all slices, of
            which tags are the first halves. Servers with the same digest hold the same slices,
            unless somebody finds a collision of SHA-256.
    """

    round: bytes
    record_bytes: int
    rows: NDArray[np.uint64]
    digest: bytes

    def __repr__(self) -> str:
        return f"Database({self.num_keys} slices of {self.record_bytes} bytes)"

    @property
    def num_keys(self) -> int:
        """K."""
        return len(self.rows)

    @staticmethod
    def of(round: bytes, records: NDArray[np.uint8]) -> Database:
        """Returns the database of records (K, record_bytes), which are copied: key k is row k;
        `round` is of `name_of_round`.

        >>> Database.of(bytes(16), np.zeros((3, 10), np.uint8))
        Database(3 slices of 10 bytes)
        """
        _check(round, records)
        if not records.size:
            raise _misfit(f"{records.shape}")
        num_keys, record_bytes = records.shape
        words = _words(record_bytes)
        raw = np.empty(num_keys * words * _WORD + _LINE, np.uint8)
        start = -raw.ctypes.data % _LINE
        rows = raw[start : start + num_keys * words * _WORD].view("<u8").reshape(num_keys, words)
        cells = rows.view(np.uint8)
        cells[:, :record_bytes] = records
        hashes = _hashes_of(round, np.arange(num_keys), records)
        cells[:, record_bytes : record_bytes + TAG_BYTES] = hashes[:, :TAG_BYTES]
        cells[:, record_bytes + TAG_BYTES :] = 0
        digest = sha256(round + struct.pack("<QQ", num_keys, record_bytes))
        digest.update(hashes.data)
        rows.setflags(write=False)
        return Database(round, record_bytes, rows, digest.digest())


def _words(record_bytes: int) -> int:
    """Of one row: a slice and its tag."""
    return -(-(record_bytes + TAG_BYTES) // _WORD)


def _check(round: bytes, records: NDArray[np.uint8]) -> None:
    if len(round) != _ROUND_BYTES:
        raise _misfit(f"a round of {len(round)} bytes")
    if records.ndim != 2 or records.dtype != np.uint8:
        raise _misfit(f"{records.dtype} {records.shape}")


def _misfit(got: str) -> ShapeError:
    return ShapeError(
        f"slices that cannot be made a database: got {got}; expected uint8 (num_keys, "
        "record_bytes), one key for each, a round of 16 bytes; pass records as rows of bytes and "
        "name_of_round(...)"
    )


def plain_params(scheme: Scheme, database: Database, max_keys: int) -> PirParams:
    """Returns the params of a table without a hint; `max_keys` beyond its rows are as many as it
    has."""
    num_keys, most = database.num_keys, min(max_keys, database.num_keys)
    return PirParams(scheme, database.round, num_keys, database.record_bytes, most, database.digest)


def check_scheme(params: PirParams, scheme: Scheme) -> None:
    """Raises StaleError if the params are of another scheme."""
    if params.scheme != scheme:
        raise StaleError(
            f"params of another scheme of private retrieval: got {params.scheme}; expected "
            f"{scheme}; check the URLs of the servers"
        )


def tagging_seconds(load: Workload, speeds: Speeds) -> float:
    """CPU seconds for all slices, and a table of them with a tag for each."""
    tags = load.num_keys * speeds.tag_seconds + load.table_bytes / speeds.tagging
    return making_seconds(load, speeds) + tags


def replying_seconds(load: Workload, speeds: Speeds, rows: int) -> float:
    """CPU seconds for putting rows into the reply of each client, and the check of its frame."""
    return load.cohort * rows * (load.slice_bytes + TAG_BYTES) / speeds.reply
