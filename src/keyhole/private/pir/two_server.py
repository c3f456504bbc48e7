"""Private retrieval from two servers: point functions over cuckoo buckets.

A client shares one point a bucket, and one a stash query, between both servers; each XORs the rows
that its share selects, and the XOR of both replies is the row of the point. What is sent is the
number of queries times a row, whatever the number of rows.

Hidden: which keys a client asks for and how many, from each server, for any number of colluding
clients, if both servers do not collude and AES under a fixed key is a circular correlation-robust
hash. Not hidden: who asks, when, and under which terms.

A server that answers from a wrong table, or sends wrong rows, is found by the tags of the slices:
those of padding are checked like all others, so that a wrong row shows whatever its query is for.
The tags hold no secret: a server that guesses the key of one query can forge that slice, and if it
sees whether the client fails it learns whether it guessed right, of a wanted key or of padding. A
client that falls silent shows the same as one that fails. Not covered beyond that: both servers
together, the time that a client's work takes, and a table that was wrong from the start.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from keyhole.private.asking import distinct_keys
from keyhole.private.dpf import (
    Domain,
    PointKeys,
    decode_corrections,
    encode_corrections,
    expand,
    share_from_roots,
)
from keyhole.private.pir.answered import MOST_QUERIES, Answered
from keyhole.private.pir.batch import Batch, Points
from keyhole.private.pir.database import Database
from keyhole.private.pir.fitting import check_scheme, check_server, plain_terms
from keyhole.private.pir.messages import (
    FRAME_BYTES,
    REPLY_BYTES,
    seal,
    seal_reply,
    unseal,
)
from keyhole.private.pir.questions import Wanted, XorQuestion
from keyhole.private.pir.terms import Terms
from keyhole.private.pir.xor_scan import scan_buckets, scan_rows
from keyhole.private.prg import SEED_BYTES, Prg
from keyhole.types import KeyArray

__all__ = ["TwoServer", "TwoServerAsker", "query_bytes", "reply_bytes", "terms_of"]


def terms_of(database: Database, most_keys: int) -> Terms:
    """Returns the terms of a table; `most_keys` beyond its rows are as many as it has."""
    return plain_terms("two-server", database, most_keys)


def query_bytes(terms: Terms) -> int:
    """Of one query to one server, whatever the keys."""
    return FRAME_BYTES + _query_body(Batch.of(terms))


def reply_bytes(terms: Terms) -> int:
    """Of one reply of one server."""
    return REPLY_BYTES + Batch.of(terms).num_queries * terms.row_bytes


class TwoServerAsker:
    """The client of a table at two servers.

    Args:
        terms: of the table, the same from both servers.

    Raises:
        InputError: terms of another scheme, or of a table that is too large for its buckets.
    """

    def __init__(self, terms: Terms) -> None:
        check_scheme(terms, "two-server")
        self.terms = terms
        self._batch = Batch.of(terms)

    def ask(self, keys: KeyArray, prg: Prg | None = None) -> XorQuestion:
        """Makes a question for keys; see `Asker`."""
        wanted, places = distinct_keys(keys, self.terms.num_keys, self.terms.most_keys)
        prg = Prg.fresh() if prg is None else prg
        points = self._batch.assign(wanted, prg)
        messages = self._share(points, prg)
        return XorQuestion(self.terms, messages, Wanted(points.keys, points.slots[places]))

    def _share(self, points: Points, prg: Prg) -> tuple[bytes, bytes]:
        nonce, roots = prg.bytes(SEED_BYTES), (prg.bytes(SEED_BYTES), prg.bytes(SEED_BYTES))
        one, other = (_batch_roots(root) for root in roots)
        bucket, table = self._batch.bucket, self._batch.table
        shared = (
            share_from_roots(points.in_buckets, bucket, nonce, (one[0], other[0])),
            share_from_roots(points.in_stash, table, nonce, (one[1], other[1])),
        )
        tail = b"".join(encode_corrections(keys) for keys, _ in shared)
        first, second = (
            seal("query", self.terms, party, nonce + roots[party] + tail) for party in (0, 1)
        )
        return first, second


class TwoServer:
    """One of both servers of a table, for as long as its round lasts.

    Args:
        database: what is retrieved from.
        terms: of this database.
        server: 0 or 1: which of both this one is.
        most_queries: that it answers and remembers, see `Answered`.

    Raises:
        InputError: terms of something else, or no such server.
    """

    def __init__(
        self, database: Database, terms: Terms, server: int, most_queries: int = MOST_QUERIES
    ) -> None:
        check_server("two-server", database, terms, server)
        self.terms = terms
        self._rows = database.rows
        self._server = server
        self._batch = Batch.of(terms)
        self._answered = Answered(most_queries)

    def answer_many(self, queries: Sequence[bytes]) -> list[bytes]:
        """Answers queries in one pass over the table; see `Answerer`.

        Raises:
            ReplayError: also if this table has answered as many as it can remember.
        """
        length = _query_body(self._batch)
        bodies = [unseal(query, "query", self.terms, self._server, length) for query in queries]
        asked = [_read_query(body, self._batch, self._server) for body in bodies]
        if not asked:
            return []
        nonces, in_buckets, in_stash = zip(*asked, strict=True)
        with self._answered.claim(queries):
            found = np.concatenate(
                [self._scan_buckets(nonces, in_buckets), self._scan_stash(nonces, in_stash)], axis=1
            )
            cells = found.view(np.uint8)[:, :, : self.terms.row_bytes]
            pairs = zip(queries, cells, strict=True)
            return [
                seal_reply(query, self.terms, self._server, rows.tobytes()) for query, rows in pairs
            ]

    def _scan_buckets(
        self, nonces: Sequence[bytes], keys: Sequence[PointKeys]
    ) -> NDArray[np.uint64]:
        placement = self._batch.placement
        if placement is None:
            return np.zeros((len(keys), 0, self._rows.shape[1]), np.uint64)
        bits = _expand_all(keys, self._batch.bucket, nonces)
        return scan_buckets(self._rows, placement.members(), bits)

    def _scan_stash(self, nonces: Sequence[bytes], keys: Sequence[PointKeys]) -> NDArray[np.uint64]:
        bits = _expand_all(keys, self._batch.table, nonces)
        found = scan_rows(self._rows, bits.reshape(-1, bits.shape[2]))
        return found.reshape(*bits.shape[:2], -1)


def _query_body(batch: Batch) -> int:
    """A nonce, a root, the corrections of the buckets, those of the stash."""
    corrections = batch.bucket.batch_bytes(batch.shape.num_buckets)
    return 2 * SEED_BYTES + corrections + batch.table.batch_bytes(batch.shape.stash)


def _read_query(body: memoryview, batch: Batch, party: int) -> tuple[bytes, PointKeys, PointKeys]:
    """Returns the nonce and the keys of one query."""
    nonce, root, tail = bytes(body[:16]), bytes(body[16:32]), body[32:]
    cut, (first, second) = batch.bucket.batch_bytes(batch.shape.num_buckets), _batch_roots(root)
    return (
        nonce,
        decode_corrections(tail[:cut], batch.shape.num_buckets, batch.bucket, party, first),
        decode_corrections(tail[cut:], batch.shape.stash, batch.table, party, second),
    )


def _batch_roots(root: bytes) -> tuple[bytes, bytes]:
    """The roots of the buckets and of the stash: one secret is sent for both."""
    stream = Prg(root)
    return stream.bytes(SEED_BYTES), stream.bytes(SEED_BYTES)


def _expand_all(
    keys: Sequence[PointKeys], domain: Domain, nonces: Sequence[bytes]
) -> NDArray[np.uint8]:
    """The shares of all queries, (queries, points, bytes)."""
    both = zip(keys, nonces, strict=True)
    return np.stack([expand(some, domain, nonce) for some, nonce in both])
