"""The schemes of private retrieval, by name: what stands at a service, and what on a device."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.private.pir import chor, one_server, two_server
from keyhole.private.pir.batch import Batch
from keyhole.private.pir.database import Database, rows_bytes
from keyhole.private.pir.retrieval import Answerer, Asker
from keyhole.private.pir.terms import Scheme, Terms, name_of_round
from keyhole.serving.pir.settings import Role

__all__ = [
    "SERVER_HEADER",
    "Lengths",
    "Opened",
    "lengths_of",
    "name_table",
    "open_asker",
    "serve",
    "table_bytes",
]

SERVER_HEADER = "keyhole-server"
"""The header of terms that says which server gave them."""


@dataclass(frozen=True)
class Lengths:
    """Bytes of a query, a reply and a hint, the same for all keys; 0 where there is no hint."""

    query: int
    reply: int
    hint: int = 0


@dataclass(frozen=True)
class Opened:
    """A table that a server can be asked about.

    Args:
        server: answers.
        lengths: of messages.
        hint: what a client must have before it asks; empty where it needs nothing.
    """

    server: Answerer
    lengths: Lengths
    hint: bytes = b""


def name_table(round_id: str, place: int) -> bytes:
    """The 16 bytes that stand for one table of a round in terms, tags and messages."""
    return name_of_round(f"{round_id}/tables/{place}")


def table_bytes(scheme: Scheme, num_keys: int, record_bytes: int, most_keys: int) -> int:
    """What a server keeps in memory for a table: its rows, and its hint or its list of buckets."""
    rows = rows_bytes(num_keys, record_bytes)
    terms = Terms(scheme, bytes(16), num_keys, record_bytes, most_keys, bytes(32))
    if scheme == "two-server":
        placement = Batch.of(terms).placement
        return rows + (placement.members_bytes if placement else 0)
    return rows + lengths_of(terms).hint


def serve(role: Role, database: Database, most_keys: int, most_queries: int) -> Opened:
    """Opens a table at a server, for so many queries of so many keys."""
    if role.scheme == "one-server":
        hint = one_server.hint_of(database, most_keys)
        terms = one_server.terms_of(database, most_keys, hint)
        one = one_server.OneServer(database, terms, hint, most_queries)
        return Opened(one, lengths_of(terms), hint)
    if role.scheme == "chor":
        terms = chor.terms_of(database, most_keys)
        other = chor.ChorServer(database, terms, role.server, most_queries)
        return Opened(other, lengths_of(terms))
    terms = two_server.terms_of(database, most_keys)
    two = two_server.TwoServer(database, terms, role.server, most_queries)
    return Opened(two, lengths_of(terms))


def lengths_of(terms: Terms) -> Lengths:
    """The lengths of messages under terms."""
    if terms.scheme == "one-server":
        query, reply = one_server.query_bytes(terms), one_server.reply_bytes(terms)
        return Lengths(query, reply, one_server.hint_bytes(terms))
    module = chor if terms.scheme == "chor" else two_server
    return Lengths(module.query_bytes(terms), module.reply_bytes(terms))


def open_asker(terms: Terms, hint: bytes | memoryview = b"") -> Asker:
    """The client of a table.

    Raises:
        ProtocolError: the hint is not the one that the terms cover.
    """
    if terms.scheme == "one-server":
        return one_server.OneServerAsker(terms, bytes(hint))
    if terms.scheme == "chor":
        return chor.ChorAsker(terms)
    return two_server.TwoServerAsker(terms)
