"""Frames queries and replies, checks what arrives, remembers what was answered: what both schemes
of private retrieval share.

A frame is a head (what it is, for or from which server, of which round, under which params), a body
whose length follows from the params, and a check over all of it. What arrives is compared with the
one length it can have, then with its check, then with the params, before its content is looked at.
The body of a reply begins with the check of the query that it answers: an old reply does not pass
for that to a new query. The check finds damage. It does not stop a forger: that is what TLS is for.

Reading a reply fails for what its sender knows alone: length, check, head, and which query it
answers. None of that depends on a key, so a client may say that it cannot read a reply. What the
rows of a good reply hold does depend on keys; a row that is wrong never makes a client fail, ask
again or fall silent (`Retrieved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Literal, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from numpy.typing import NDArray

from keyhole.crypto.codec import CHECK_BYTES, Body, Framing
from keyhole.crypto.once import Once
from keyhole.delivery.base import Retrieved
from keyhole.delivery.pir.database import PirParams
from keyhole.errors import InputError, MalformedError, ReplayError

FrameKind: TypeAlias = Literal["query", "reply"]

_PIECE = 1 << 30  # bytes that the sum of a reply takes at once: the library ends at 2^31


def _sum_of_reply(pieces: Iterable[Body]) -> bytes:
    """GMAC under a key that everybody knows: it finds damage as the SHA-256 of a query does, five
    times as fast, and replies are long."""
    summed = Cipher(AES(b"keyhole-pir-repl"), GCM(bytes(12))).encryptor()
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE):
            summed.authenticate_additional_data(view[start : start + _PIECE])
    summed.finalize()
    return summed.tag


_WHAT = "a message of private retrieval"
_FRAMES: Mapping[FrameKind, Framing] = {
    "query": Framing(b"KHP2", {"query": 1}, _WHAT),
    "reply": Framing(b"KHP2", {"reply": 2}, _WHAT, _sum_of_reply),
}

FRAME_BYTES = _FRAMES["query"].head_bytes + CHECK_BYTES
"""What a frame adds to its body."""

REPLY_BYTES = FRAME_BYTES + CHECK_BYTES
"""What a reply adds to its rows: a frame, and the check of its query."""


def seal(kind: FrameKind, params: PirParams, server: int, *body: Body) -> bytes:
    """Returns a message to or from server 0 or 1, its body in one or more parts."""
    return _FRAMES[kind].seal(params, kind, server, *body)


def unseal(
    data: bytes | memoryview, kind: FrameKind, params: PirParams, server: int, body_bytes: int
) -> memoryview:
    """Returns the body of a message."""
    return _FRAMES[kind].unseal(params, kind, server, data, body_bytes)


def seal_reply(query: bytes | memoryview, params: PirParams, server: int, rows: Body) -> bytes:
    """Returns the reply of a server to a query."""
    return seal("reply", params, server, check_of(query), rows)


def unseal_reply(
    data: bytes | memoryview, asked: bytes, params: PirParams, server: int, rows_bytes: int
) -> memoryview:
    """Returns the rows of the reply to the query whose check is `asked`."""
    body = unseal(data, "reply", params, server, CHECK_BYTES + rows_bytes)
    if body[:CHECK_BYTES] != asked:
        raise _FRAMES["reply"].malformed("the reply to another query", "the reply to this one")
    return body[CHECK_BYTES:]


def check_of(message: bytes | memoryview) -> bytes:
    """Returns the 16 bytes at the end of a message, which tell it from every other."""
    return bytes(message[-CHECK_BYTES:])


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


class PirServer:
    """One server of a table, for as long as its round lasts: a `SelectServer`.

    Args:
        place: 0 or 1: which of the servers this one is.
        query_bytes: of every query.
        read: bodies of queries -> the scan that makes the rows of each reply, in one pass over the
            table. It raises what is wrong with a body; its scan then refuses none.
        max_queries: that it answers and remembers, see `AnsweredQueries`.
    """

    def __init__(
        self,
        params: PirParams,
        place: int,
        query_bytes: int,
        read: Callable[[Sequence[memoryview]], Callable[[], Iterable[Body]]],
        max_queries: int,
        hint: bytes = b"",
    ) -> None:
        self.params, self.hint = params.encode(), hint
        self._facts, self._place, self._read = params, place, read
        self.query_bytes, self._body_bytes = query_bytes, query_bytes - FRAME_BYTES
        self._answered = AnsweredQueries(max_queries)

    def check(self, query: bytes) -> None:
        """Implements `SelectServer.check`."""
        self._body(query)

    def answer(self, queries: Sequence[bytes]) -> list[bytes]:
        """Implements `SelectServer.answer`."""
        with self.taken(queries) as replies:
            return replies()

    @contextmanager
    def taken(self, queries: Sequence[bytes]) -> Iterator[Callable[[], list[bytes]]]:
        """Holds queries that can all be answered, and gives what answers them. They are remembered
        when the context ends, and given back if it fails.

        Raises:
            MalformedError, StaleError, ReplayError: a query cannot be answered; none is held.
        """
        bodies = [self._body(query) for query in queries]
        with self._answered.claim(queries):
            scan = self._read(bodies)

            def replies() -> list[bytes]:
                pairs = zip(queries, scan(), strict=True)
                return [seal_reply(query, self._facts, self._place, rows) for query, rows in pairs]

            yield replies

    def _body(self, query: bytes) -> memoryview:
        return unseal(query, "query", self._facts, self._place, self._body_bytes)


@dataclass(frozen=True, repr=False)
class Wanted:
    """What a client asked for and where in the replies it will be.

    Args:
        slots: (n,) int64: the row of each key that was asked for; -1 if it is in none.
        open: rows of the reply of each server -> (q, row_bytes) uint8; holds what is secret.
    """

    slots: NDArray[np.int64]
    open: Callable[[Sequence[memoryview]], NDArray[np.uint8]]

    def __repr__(self) -> str:
        """Keys are private, and so is how many there are."""
        return "Wanted(...)"


class PirQuery:
    """One query to one server or two, for one use: a `Query`. Replies that are none do not use it
    up.

    Args:
        messages: one for each server.
        rows_bytes: of the rows of every reply.
    """

    def __init__(
        self, params: PirParams, messages: tuple[bytes, ...], wanted: Wanted, rows_bytes: int
    ) -> None:
        self._params, self._rows_bytes = params, rows_bytes
        self._checks = [check_of(message) for message in messages]
        self._messages = Once(messages, "messages")
        self._wanted = Once(wanted, "replies")

    def __repr__(self) -> str:
        """Keys are private: printing shows what everybody sees."""
        return f"PirQuery(max_keys={self._params.max_keys}, servers={len(self._checks)})"

    @property
    def reply_bytes(self) -> int:
        """The number of bytes of every reply."""
        return REPLY_BYTES + self._rows_bytes

    def messages(self) -> tuple[bytes, ...]:
        """Implements `Query.messages`."""
        return self._messages.take()

    def decode(self, replies: Sequence[bytes]) -> Retrieved:
        """Implements `Query.decode`."""
        return self.open(self.read(replies))

    def read(self, replies: Sequence[bytes | memoryview]) -> list[memoryview]:
        """Returns the rows of replies to this query; fails for what their senders know alone, and
        uses nothing up."""
        self._wanted.peek()
        if len(replies) != len(self._checks):
            raise MalformedError(
                f"replies of another number of servers: got {len(replies)} replies; expected "
                f"{len(self._checks)}, in the order of the messages; wait for all servers"
            )
        return [
            unseal_reply(reply, check, self._params, server, self._rows_bytes)
            for server, (reply, check) in enumerate(zip(replies, self._checks, strict=True))
        ]

    def open(self, rows: Sequence[memoryview]) -> Retrieved:
        """Returns what was asked for, of the rows that `read` returned."""
        wanted = self._wanted.take()
        found, is_found = wanted.open(rows)[wanted.slots], wanted.slots >= 0
        found[~is_found] = 0
        return Retrieved(found, is_found)
