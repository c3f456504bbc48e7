"""The schemes of private retrieval that the contract ranges over, listed once.

A new scheme is added to `SCHEMES` and runs through every test of the contract, of bad messages and
of leaks.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.private.pir import chor, two_server
from keyhole.private.pir.batch import Batch
from keyhole.private.pir.database import Database
from keyhole.private.pir.retrieval import Answerer, Asker
from keyhole.private.pir.terms import Terms, name_of_round
from keyhole.private.prg import Prg

ROUND = name_of_round("round-7")


@dataclass(frozen=True)
class Scheme:
    """How to set up one scheme: its module, and its parties from a table and its terms."""

    module: object
    servers: object  # (database, terms) -> its servers, in their order
    asker: object  # (terms, servers) -> a client of them
    terms: object  # (database, most_keys) -> terms
    zero_bits: object  # terms -> the bits of a query's body that are always zero, and checked


@dataclass(frozen=True)
class Table:
    """A table of slices that is retrieved from: all parties in one place."""

    records: np.ndarray
    terms: Terms
    servers: tuple[Answerer, ...]
    asker: Asker
    query_bytes: int
    reply_bytes: int

    def ask(self, keys, prg=None):
        return self.asker.ask(np.array(keys, np.int64), prg)

    def replies(self, messages):
        """One reply of each server."""
        pairs = zip(self.servers, messages, strict=True)
        return [server.answer_many([message])[0] for server, message in pairs]

    def retrieve(self, keys, prg=None):
        question = self.ask(keys, prg)
        return question.open(self.replies(question.messages()))


def chor_zero_bits(terms):
    """Behind the last key, in the last byte of every share."""
    share = 8 * -(-terms.num_keys // 8)
    spare = range(terms.num_keys, share)
    return [slot * share + at for slot in range(terms.most_keys) for at in spare]


def two_server_zero_bits(terms):
    """The control bits of seed corrections, which travel elsewhere; what fills the last byte of the
    control bits; and, if a tree is a single leaf, what lies in it behind the last point."""
    batch, start = Batch.of(terms), 2 * 128  # behind a nonce and a root
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
    "chor": Scheme(
        chor,
        lambda database, terms: tuple(chor.ChorServer(database, terms, i) for i in (0, 1)),
        lambda terms, _: chor.ChorAsker(terms),
        chor.terms_of,
        chor_zero_bits,
    ),
    "two-server": Scheme(
        two_server,
        lambda database, terms: tuple(two_server.TwoServer(database, terms, i) for i in (0, 1)),
        lambda terms, _: two_server.TwoServerAsker(terms),
        two_server.terms_of,
        two_server_zero_bits,
    ),
}


def records_of(num_keys, record_bytes, name=b"slices"):
    """Bytes that are all different, the same on every run."""
    drawn = Prg(name.ljust(16, b"\0")).bytes(num_keys * record_bytes)
    return np.frombuffer(drawn, np.uint8).reshape(num_keys, record_bytes)


def table_of(
    scheme, num_keys, record_bytes, most_keys, name=b"slices", round_name=ROUND, database=None
):
    """A table with its servers and a client; the servers may be given another database."""
    how = SCHEMES[scheme]
    records = records_of(num_keys, record_bytes, name)
    database = database or Database.of(round_name, records)
    terms = how.terms(database, most_keys)
    servers = how.servers(database, terms)
    lengths = how.module.query_bytes(terms), how.module.reply_bytes(terms)
    return Table(records, terms, servers, how.asker(terms, servers), *lengths)


def seeded(number):
    """A generator for one question of a test."""
    return Prg(number.to_bytes(16, "little"))
