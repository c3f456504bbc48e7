"""Retrieves as it was first done, by random sets of rows (Chor, Goldreich, Kushilevitz and Sudan,
FOCS 1995).

For each key, server 0 gets a uniformly random set of rows, as one bit a row, and server 1 the same
set with the key's row put in or taken out. Each XORs the rows of its set; the XOR of both replies
is the row. It is what the two-server scheme is tested against, under the same params: a query grows
with the table, so it is no delivery.

Hidden: which keys a client asks for and how many, from each server, if both servers do not collude
and AES-128 in counter mode is pseudo-random: a set alone is a stretch of the stream of a `Prg`. (In
the paper sets are truly random, and nothing rests on what a server can compute; here a server that
finds a seed of 128 bits finds the keys.) Not hidden: who asks, when, and under which params. What
`two_server.py` says of servers that lie holds here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.once import distinct_keys
from keyhole.crypto.prg import Prg
from keyhole.delivery.pir.database import Database, PirParams, check_scheme
from keyhole.delivery.pir.messages import (
    FRAME_BYTES,
    MAX_QUERIES,
    REPLY_BYTES,
    PirQuery,
    PirServer,
    Wanted,
    seal,
)
from keyhole.delivery.pir.scan import scan_rows
from keyhole.delivery.pir.two_server import params_of, xor_rows
from keyhole.errors import MalformedError

_NONCE_BYTES = 16


def query_bytes(params: PirParams) -> int:
    """Of one query to one server, whatever the keys."""
    return FRAME_BYTES + _query_body(params)


def reply_bytes(params: PirParams) -> int:
    """Of one reply of one server."""
    return REPLY_BYTES + params.max_keys * params.row_bytes


class ChorClient:
    """The client of a table at two servers.

    Args:
        params: of the table, the same from both servers.

    Raises:
        InputError: params of another scheme.
    """

    def __init__(self, params: PirParams) -> None:
        check_scheme(params, "two-server")
        self.params = params

    def query(self, keys: KeyArray, prg: Prg | None = None) -> PirQuery:
        """Makes a question for keys; see `SelectClient`."""
        wanted, places = distinct_keys(keys, self.params.num_keys, self.params.max_keys)
        prg = Prg.fresh() if prg is None else prg
        points = prg.below(self.params.num_keys, self.params.max_keys)
        points[: len(wanted)] = wanted
        sets = np.empty((self.params.max_keys, _set_bytes(self.params)), np.uint8)
        prg.fill(sets)
        sets[:, -1] &= _last_byte(self.params)
        # Of a small table two clients may draw the same sets: the nonce makes their queries differ.
        nonce = prg.bytes(_NONCE_BYTES)
        first = seal("query", self.params, 0, nonce + sets.tobytes())
        sets[np.arange(len(points)), points >> 3] ^= (1 << (points & 7)).astype(np.uint8)
        messages = first, seal("query", self.params, 1, nonce + sets.tobytes())
        wanted = Wanted(places, xor_rows(self.params.row_bytes))
        return PirQuery(self.params, messages, wanted, len(points) * self.params.row_bytes)


def chor_servers(database: Database) -> tuple[PirServer, PirServer]:
    """Returns both servers of a table."""
    params = params_of(database)

    def read(bodies: Sequence[memoryview]) -> Callable[[], list[bytes]]:
        sets = [_read_sets(body, params) for body in bodies]

        def scan() -> list[bytes]:
            found = scan_rows(database.rows, np.concatenate(sets)).view(np.uint8)
            cells = found[:, : params.row_bytes].reshape(len(sets), -1)
            return [rows.tobytes() for rows in cells]

        return scan

    first, second = (
        PirServer(params, place, query_bytes(params), read, MAX_QUERIES) for place in (0, 1)
    )
    return first, second


def _read_sets(body: memoryview, params: PirParams) -> NDArray[np.uint8]:
    """Returns the sets of one query, (max_keys, bytes)."""
    sets = np.frombuffer(body[_NONCE_BYTES:], np.uint8).reshape(params.max_keys, _set_bytes(params))
    if (sets[:, -1] & ~_last_byte(params)).any():
        raise MalformedError(
            "sets of rows cannot be read: got spare bits that are set; expected "
            "zeros; send them as docs/wire.md describes them"
        )
    return sets


def _query_body(params: PirParams) -> int:
    """A nonce, then a set for each key."""
    return _NONCE_BYTES + params.max_keys * _set_bytes(params)


def _set_bytes(params: PirParams) -> int:
    return -(-params.num_keys // 8)


def _last_byte(params: PirParams) -> np.uint8:
    """The bits of the last byte of a set that stand for rows."""
    return np.uint8((1 << (params.num_keys - 1) % 8 + 1) - 1)
