"""The schemes of private retrieval that the contract ranges over, listed once.

A new scheme is added to `SCHEMES` and runs through every test of the contract, of bad messages and
of leaks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from keyhole.crypto.prg import Prg
from keyhole.delivery.base import (
    PrivateTable,
    QueryDelivery,
    SelectClient,
    SelectServer,
    name_of_round,
)
from keyhole.delivery.paths import Top, top_of
from keyhole.delivery.pir import one_server, two_server
from keyhole.delivery.pir.database import Database, PirParams
from keyhole.delivery.pir.two_server import Batch

ROUND_ID = "round-7"
ROUND = name_of_round(ROUND_ID)
MODEL = bytes(range(32))

BATCHED = (1500, 9, 110)
"""K, bytes of a record, keys of a query: enough of them for buckets in the two-server scheme."""


@dataclass(frozen=True)
class Scheme:
    """How to set up one scheme.

    Args:
        delivery: with its lengths.
        servers: makes them, in their order, from a database.
        asker: makes a client from (params, servers).
        zero_bits: the bits of a query's body that are always zero, and checked, from params.
        small: K for a table with short messages that have every part there is.
    """

    delivery: QueryDelivery
    servers: Callable[[Database], tuple[SelectServer, ...]]
    asker: Callable[[PirParams, tuple[SelectServer, ...]], SelectClient]
    zero_bits: Callable[[PirParams], Iterable[int]]
    small: int


@dataclass(frozen=True)
class Table:
    """A table of slices that is retrieved from: all parties in one place; `top` is of the true
    records, whatever servers hold."""

    records: np.ndarray
    top: Top
    params: PirParams
    servers: tuple[SelectServer, ...]
    asker: SelectClient
    query_bytes: int
    reply_bytes: int

    def query(self, keys, prg=None):
        return self.asker.query(np.array(keys, np.int64), prg)

    def replies(self, messages):
        """One reply of each server."""
        pairs = zip(self.servers, messages, strict=True)
        return [server.answer([message])[0] for server, message in pairs]

    def open(self, question, keys, replies):
        """What a client does with replies: it opens them and compares rows with the top."""
        return question.decode(replies).checked(self.top, np.array(keys, np.int64))

    def retrieve(self, keys, prg=None):
        question = self.query(keys, prg)
        return self.open(question, keys, self.replies(question.messages()))


def two_server_zero_bits(params):
    """The control bits of seed corrections, which travel elsewhere; what fills the last byte of the
    control bits; and, if a tree is a single leaf, what lies in it behind the last point."""
    batch, start = Batch.of(params), 2 * 128  # behind a nonce and a root
    for domain, count in (
        (batch.bucket, batch.shape.num_buckets),
        (batch.table, batch.shape.stash),
    ):
        controls, leaf = 2 * domain.depth * count, 8 * domain.leaf_bytes
        yield from range(start + controls, start + 8 * -(-controls // 8))
        start += 8 * -(-controls // 8)
        yield from range(start, start + 128 * domain.depth * count, 128)
        start += 128 * domain.depth * count
        for key in range(count if domain.depth == 0 else 0):
            yield from range(start + key * leaf + domain.num_points, start + (key + 1) * leaf)
        start += leaf * count


SCHEMES = {
    "one-server": Scheme(
        one_server.OneServerPir(),
        lambda database: (one_server.server_of(database),),
        lambda params, servers: one_server.OneServerClient(params, servers[0].hint),
        lambda _: [],
        40,
    ),
    "two-server": Scheme(
        two_server.TwoServerPir(),
        two_server.servers_of,
        lambda params, _: two_server.TwoServerClient(params),
        two_server_zero_bits,
        1001,  # trees of two levels
    ),
}
PAIRS = sorted(SCHEMES.keys() - {"one-server"})
"""Of two servers, whose replies are XORed."""


def records_of(num_keys, record_bytes, name=b"slices"):
    """Bytes that are all different, the same on every run."""
    drawn = Prg(name.ljust(16, b"\0")).bytes(num_keys * record_bytes)
    return np.frombuffer(drawn, np.uint8).reshape(num_keys, record_bytes)


def private_table(records, max_keys, round_id=ROUND_ID):
    """Records as a table of a round."""
    return PrivateTable.of(round_id, MODEL, records, max_keys)


def database_of(records, max_keys, round_id=ROUND_ID):
    """A table as servers scan it."""
    return Database.of(private_table(records, max_keys, round_id))


def table_of(
    scheme, num_keys, record_bytes, max_keys, name=b"slices", round_id=ROUND_ID, database=None
):
    """A table with its servers and a client; the servers may be given another database."""
    how = SCHEMES[scheme]
    table = private_table(records_of(num_keys, record_bytes, name), max_keys, round_id)
    servers = how.servers(database or Database.of(table))
    params = PirParams.decode(servers[0].params)
    lengths = how.delivery.lengths(servers[0].params)
    asker = how.asker(params, servers)
    top = Top.of(num_keys, table.tree.root, top_of(table.tree))
    return Table(table.records, top, params, servers, asker, lengths.query, lengths.reply)


def small_table_of(scheme, record_bytes, max_keys, **more):
    """A table whose messages are short and have every part there is."""
    return table_of(scheme, SCHEMES[scheme].small, record_bytes, max_keys, **more)


def seeded(number):
    """A generator for one question of a test."""
    return Prg(number.to_bytes(16, "little"))
