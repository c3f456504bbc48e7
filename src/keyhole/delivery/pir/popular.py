"""Retrieves from a table of popular keys and from the whole table in one query, by either scheme.

A query is one of each table, one after the other, and so are its reply and the hint; how many there
are, and how long, follows from the params. Both are queries under params of their own, whose name
is a hash of the params of all (`PirParams.tables`), so that nobody can answer one with popular keys
of another choice. Rows of the popular table carry their paths in the whole one: a row that is not
that of its key is found out as any other is, by `Retrieved.checked`.

Hidden: what the scheme hides, of each of the two; and which keys go into which, and which are
dropped, since both are asked by everyone for the same number of keys. A client that does not find a
key does what it does for one without a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.once import distinct_keys
from keyhole.crypto.prg import Prg
from keyhole.delivery.base import Lengths, Retrieved, SelectClient, SelectServer
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.messages import PirQuery, PirServer

_Bytes = TypeVar("_Bytes", bytes, memoryview)


class TableClient(SelectClient[KeyArray, Retrieved], Protocol):
    """The client of one table."""

    params: PirParams

    def ask(self, wanted: KeyArray, places: NDArray[np.int64], prg: Prg) -> PirQuery:
        """Makes a query for different keys, of which the first find a place before others, that
        finds the rows of `wanted[places]`."""
        ...


def client_of(
    params: PirParams,
    hint: bytes,
    make: Callable[[PirParams, bytes], TableClient],
    lengths: Callable[[PirParams], Lengths],
) -> SelectClient[KeyArray, Retrieved]:
    """Returns the client of a table, or of the two that its popular keys make of it.

    Args:
        make: the client of one table, with its hint.
        lengths: of the messages of one table.
    """
    if params.popular is None:
        return make(params, hint)
    hints = _cut(hint, [lengths(each).hint for each in params.tables])
    pairs = zip(params.tables, hints, strict=True)
    return PopularClient(params, [make(table, one) for table, one in pairs])


def servers_of_all(
    params: PirParams, each: Sequence[Sequence[PirServer]]
) -> tuple[SelectServer, ...]:
    """Returns the servers of a table: those of the only one of `each`, or of both as one."""
    if params.popular is None:
        return tuple(each[0])
    return tuple(PopularServer(params, servers) for servers in zip(*each, strict=True))


def lengths_of_all(params: PirParams, lengths: Callable[[PirParams], Lengths]) -> Lengths:
    """Returns the lengths of messages of all tables together."""
    found = [lengths(each) for each in params.tables]
    return Lengths(
        sum(each.query for each in found),
        sum(each.reply for each in found),
        sum(each.hint for each in found),
    )


class PopularClient:
    """The client of a table with popular keys: a `SelectClient`."""

    def __init__(self, params: PirParams, clients: Sequence[TableClient]) -> None:
        assert params.popular is not None
        self.params, self._popular, self._clients = params, params.popular, clients
        self._seed = int.from_bytes(params.model[:8], "little")  # public, of the round

    def query(self, keys: KeyArray, prg: Prg | None = None) -> PopularQuery:
        """Makes a query for keys; see `SelectClient`. Those that do not fit are not found."""
        wanted, places = distinct_keys(keys, self.params.num_keys, self.params.max_keys)
        prg = Prg.fresh() if prg is None else prg
        rest = sum(client.params.max_keys for client in self._clients[1:])
        popular, whole, at = self._popular.split(wanted, rest, self._seed)
        asked = [(popular, at), (whole, wanted[whole])]
        row_of = np.full(len(wanted), -1, np.int64)  # in the rows of both, one after the other
        queries, start = [], 0
        for client, (which, theirs) in zip(self._clients, asked, strict=False):
            queries.append(client.ask(theirs, np.arange(len(theirs)), prg))
            row_of[which] = start + np.arange(len(which))
            start += len(which)
        return PopularQuery(queries, row_of[places], self.params.row_bytes)


class PopularQuery:
    """One query of all tables, for one use: a `Query`. Replies that are none do not use it up."""

    def __init__(
        self, queries: Sequence[PirQuery], row_of: NDArray[np.int64], row_bytes: int
    ) -> None:
        self._queries, self._row_of, self._row_bytes = queries, row_of, row_bytes

    def __repr__(self) -> str:
        """Keys are private: printing shows what everybody sees."""
        return f"PopularQuery({', '.join(map(repr, self._queries))})"

    def messages(self) -> tuple[bytes, ...]:
        """Implements `Query.messages`."""
        each = [query.messages() for query in self._queries]
        return tuple(b"".join(parts) for parts in zip(*each, strict=True))

    def decode(self, replies: Sequence[bytes]) -> Retrieved:
        """Implements `Query.decode`."""
        sizes = [query.reply_bytes for query in self._queries]
        cut = [list(_cut(memoryview(reply), sizes)) for reply in replies]
        rows = [query.read([parts[at] for parts in cut]) for at, query in enumerate(self._queries)]
        pairs = zip(self._queries, rows, strict=True)
        found = [query.open(one) for query, one in pairs]
        nothing = np.zeros((1, self._row_bytes), np.uint8)
        records = np.concatenate([*(each.records for each in found), nothing])
        is_found = np.concatenate([*(each.is_found for each in found), [False]])
        return Retrieved(records[self._row_of], is_found[self._row_of])


class PopularServer:
    """One server of a table with popular keys: a `SelectServer`."""

    def __init__(self, params: PirParams, servers: Sequence[PirServer]) -> None:
        self.params, self._servers = params.encode(), servers
        self.hint = b"".join(server.hint for server in servers)
        self._sizes = [server.query_bytes for server in servers]

    def check(self, query: bytes) -> None:
        """Implements `SelectServer.check`."""
        for server, part in zip(self._servers, _cut(query, self._sizes), strict=True):
            server.check(part)

    def answer(self, queries: Sequence[bytes]) -> list[bytes]:
        """Implements `SelectServer.answer`. All tables take the queries before one is read, so that
        a query which one table refuses uses up no part of the others."""
        each = zip(*(_cut(query, self._sizes) for query in queries), strict=True)
        pairs = zip(self._servers, each, strict=False)  # no queries have no parts
        with ExitStack() as taken:
            answers = [taken.enter_context(server.taken(parts)) for server, parts in pairs]
            replies = [answer() for answer in answers]
        return [b"".join(parts) for parts in zip(*replies, strict=True)]


def _cut(whole: _Bytes, sizes: Sequence[int]) -> Iterator[_Bytes]:
    """Yields the parts of a message; the last one is too long or too short where the message is,
    which its reader refuses."""
    start = 0
    for size in sizes[:-1]:
        yield whole[start : start + size]
        start += size
    yield whole[start:]
