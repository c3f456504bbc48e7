"""Frames queries and replies, checks what arrives, and remembers what was answered.

A frame is a head (what it is, for or from which server, of which round, under which params), a body
whose length follows from the params, and a check over all of it. What arrives is compared with the
one length it can have, then with its check, then with the params, before its content is looked at.
The body of a reply begins with the check of the query that it answers: an old reply does not pass
for that to a new query. The check finds damage. It does not stop a forger: that is what TLS is for.

Every row of a reply is checked, that of padding too: it is the row of a key that the client drew.
Were padding not checked, a server that changes one row and sees whether the client fails would
learn whether that query was padding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from threading import Lock
from typing import Literal, Protocol, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.delivery.pir.database import PirParams, tags_of
from keyhole.errors import InputError, IntegrityError, MalformedError, ReplayError, StaleError

FrameKind: TypeAlias = Literal["query", "reply"]
Body: TypeAlias = bytes | bytearray | memoryview

_MAGIC = b"KHP1"
_KINDS = {"query": 1, "reply": 2}
_HEAD = struct.Struct("<4sBBH16s32s")
_PIECE = 1 << 30  # bytes that the sum of a reply takes at once: the library ends at 2^31

CHECK_BYTES = 16
"""Of the check at the end of a message."""

FRAME_BYTES = _HEAD.size + CHECK_BYTES
"""What a frame adds to its body."""

REPLY_BYTES = FRAME_BYTES + CHECK_BYTES
"""What a reply adds to its rows: a frame, and the check of its query."""


def seal(kind: FrameKind, params: PirParams, server: int, *body: Body) -> bytes:
    """Returns a message.

    Args:
        server: 0 or 1, to which a query goes and from which a reply comes.
        body: in one or more parts, together of the length that the params demand.
    """
    head = _HEAD.pack(_MAGIC, _KINDS[kind], server, 0, params.round, params.digest)
    return b"".join([head, *body, _check(kind, head, *body)])


def seal_reply(query: bytes | memoryview, params: PirParams, server: int, rows: Body) -> bytes:
    """Returns the reply to a query.

    Args:
        server: 0 or 1, from which the reply comes.
    """
    return seal("reply", params, server, check_of(query), rows)


def unseal(
    data: bytes | memoryview, kind: FrameKind, params: PirParams, server: int, body_bytes: int
) -> memoryview:
    """Returns the body of a message."""
    view = memoryview(data)
    if len(view) != body_bytes + FRAME_BYTES:
        raise _malformed(f"{len(view)} bytes", f"{body_bytes + FRAME_BYTES} bytes")
    head, body = view[: _HEAD.size], view[_HEAD.size : -CHECK_BYTES]
    if check_of(view) != _check(kind, head, body):
        raise _malformed("a wrong check", "the check of its bytes")
    magic, number, party, zero, round_name, digest = _HEAD.unpack(head)
    if (magic, number, party, zero) != (_MAGIC, _KINDS[kind], server, 0):
        raise _malformed("another head", f"a {kind} of server {server}, of version 1")
    if round_name != params.round or digest != params.digest:
        raise StaleError(
            "a message about other slices: got another round, or other params; expected the round "
            "and params of this table; fetch the params anew, from every server"
        )
    return body


def unseal_reply(
    data: bytes | memoryview, asked: bytes, params: PirParams, server: int, rows_bytes: int
) -> memoryview:
    """Returns the rows of the reply to a query.

    Args:
        asked: the check of the query, see `check_of`.
    """
    body = unseal(data, "reply", params, server, CHECK_BYTES + rows_bytes)
    if body[:CHECK_BYTES] != asked:
        raise _malformed("the reply to another query", "the reply to this one")
    return body[CHECK_BYTES:]


def check_of(message: bytes | memoryview) -> bytes:
    """The 16 bytes at the end of a message, which tell it from every other."""
    return bytes(message[-CHECK_BYTES:])


def _check(kind: FrameKind, *parts: Body) -> bytes:
    """SHA-256 of a query, which tells it from every other; GMAC of a reply, under a key that
    everybody knows: it finds damage, five times as fast, and replies are long."""
    if kind == "query":
        whole = sha256()
        for part in parts:
            whole.update(part)
        return whole.digest()[:CHECK_BYTES]
    summed = Cipher(AES(b"keyhole-pir-repl"), GCM(bytes(12))).encryptor()
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _PIECE):
            summed.authenticate_additional_data(view[start : start + _PIECE])
    summed.finalize()
    return summed.tag


def _malformed(got: str, allowed: str) -> MalformedError:
    return MalformedError(
        f"a message of private retrieval cannot be read: got {got}; expected {allowed}; send it as "
        "docs/wire.md describes it, under the params of the table"
    )


MAX_QUERIES = 1 << 22
"""How many queries a table answers, unless it is told otherwise."""

_FRESH = 1 << 14  # checks that are held one by one; then they are sorted in among the others


class AnsweredQueries:
    """Remembers queries by their checks, for as long as a table is served.

    A query that comes back shows a client that sends one key twice, or somebody in between. It is
    refused; but anyone who can make a new check can get round that, so the secrecy of keys does not
    rest on it. Safe for threads.

    Args:
        limit: how many queries are remembered. Then every further one is refused: none is ever
            forgotten. Each takes 16 bytes, those of the last 16,384 about 110; every 16,384
            queries all are copied once. 4,194,304 take 67 MB, twice that while they are copied.
    """

    def __init__(self, limit: int = MAX_QUERIES) -> None:
        if limit < 1:
            raise InputError(
                f"a table that answers nobody: got {limit}; expected 1 or more; raise it"
            )
        self._limit = limit
        self._claimed: set[bytes] = set()
        self._fresh: set[bytes] = set()
        self._sorted = np.empty((0, 2), np.uint64)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._claimed) + len(self._fresh) + len(self._sorted)

    @contextmanager
    def claim(self, queries: Sequence[bytes]) -> Iterator[None]:
        """Holds queries while they are answered: all of them, or none. If the answer fails they are
        given back, since nothing was answered; else they are remembered.

        Raises:
            ReplayError: one has been answered before, is being answered or stands here twice, or
                there is no room.
        """
        checks = {check_of(query) for query in queries}
        self._take(checks, len(queries))
        try:
            yield
        except BaseException:
            with self._lock:
                self._claimed -= checks
            raise
        with self._lock:
            self._claimed -= checks
            self._fresh |= checks
            if len(self._fresh) >= _FRESH:
                self._sort_in()

    def _take(self, checks: set[bytes], count: int) -> None:
        with self._lock:
            new = checks - self._claimed - self._fresh
            again = count - len(new) + _count_known(self._sorted, _words_of(new))
            if again:
                raise _replay(f"{again} of {count} a second time", "each query once")
            if len(self) + len(checks) > self._limit:
                raise _replay(f"{count} after {len(self)}", f"{self._limit} in all")
            self._claimed |= checks

    def _sort_in(self) -> None:
        both = np.concatenate([self._sorted, _words_of(self._fresh)])
        self._sorted = both[np.argsort(both[:, 0], kind="stable")]
        self._fresh = set()


def _words_of(checks: set[bytes]) -> NDArray[np.uint64]:
    """Checks as two words each, (n, 2)."""
    return np.frombuffer(b"".join(checks), np.uint64).reshape(-1, CHECK_BYTES // 8)


def _count_known(known: NDArray[np.uint64], asked: NDArray[np.uint64]) -> int:
    """How many of `asked` are among `known`, whose first words are sorted."""
    first = np.searchsorted(known[:, 0], asked[:, 0], "left")
    last = np.searchsorted(known[:, 0], asked[:, 0], "right")
    # Of checks with the same first word there is hardly ever more than one.
    return sum(
        bool((known[start:end, 1] == second).any())
        for start, end, second in zip(first, last, asked[:, 1], strict=True)
        if start < end
    )


def _replay(got: str, allowed: str) -> ReplayError:
    return ReplayError(
        f"queries that this table does not answer: got {got}; expected {allowed}; make a new "
        "query for every request; a new round has a new table"
    )


class PirServer(Protocol):
    """One server of one table."""

    @property
    def params(self) -> PirParams:
        """What a client must know before it asks."""
        ...

    @property
    def hint(self) -> bytes:
        """What a client must have before it asks; empty where it needs nothing."""
        ...

    def answer(self, queries: Sequence[bytes]) -> list[bytes]:
        """Answers queries in one pass over the table; see `SelectServer`."""
        ...


@dataclass(frozen=True)
class PirParty:
    """A server of a table as services know it, a `SelectServer`: params are bytes."""

    server: PirServer
    place: int
    query_bytes: int

    @property
    def params(self) -> bytes:
        """Implements `SelectServer.params`."""
        return self.server.params.encode()

    @property
    def hint(self) -> bytes:
        """Implements `SelectServer.hint`."""
        return self.server.hint

    def check(self, query: bytes) -> None:
        """Implements `SelectServer.check`."""
        unseal(query, "query", self.server.params, self.place, self.query_bytes - FRAME_BYTES)

    def answer(self, queries: Sequence[bytes]) -> list[bytes]:
        """Implements `SelectServer.answer`."""
        return self.server.answer(queries)


@dataclass(frozen=True, repr=False)
class Wanted:
    """What a client asked for and where in the replies it will be.

    Args:
        keys: (q,) int64: the key of each row of a reply, wanted or drawn as padding.
        slots: (n,) int64: the row of each key that was asked for; -1 if it is in none.
    """

    keys: KeyArray
    slots: NDArray[np.int64]

    def __repr__(self) -> str:
        """Keys are private: printing shows how many queries there are, padding included."""
        return f"Wanted({len(self.keys)} queries)"


def check_tags(params: PirParams, keys: KeyArray, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the slices of rows (m, row_bytes), once all of them have the tags of their keys."""
    records, tags = rows[:, : params.record_bytes], rows[:, params.record_bytes :]
    if not np.array_equal(tags_of(params.round, keys, records), tags):
        raise IntegrityError(
            "slices that are not those of this round: got a slice without the tag of its round "
            "and key; expected slices as the digest of the table covers them; ask again for all "
            "keys, or leave the round: a server lies or is damaged"
        )
    return records
