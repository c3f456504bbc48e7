"""Terms and tables that fit each other: checked when a client or a server is made."""

from __future__ import annotations

from keyhole.errors import InputError
from keyhole.private.pir.database import Database
from keyhole.private.pir.terms import Scheme, Terms

__all__ = ["check_scheme", "check_server", "plain_terms"]


def plain_terms(scheme: Scheme, database: Database, most_keys: int) -> Terms:
    """Returns the terms of a table without a hint.

    Args:
        scheme: how it is retrieved from.
        database: the table.
        most_keys: beyond the rows of the table they are as many as it has.
    """
    return Terms(
        scheme=scheme,
        round=database.round,
        num_keys=database.num_keys,
        record_bytes=database.record_bytes,
        most_keys=min(most_keys, database.num_keys),
        database=database.digest,
    )


def check_scheme(terms: Terms, scheme: Scheme) -> None:
    """Raises InputError if the terms are of another scheme."""
    if terms.scheme != scheme:
        raise InputError(
            "terms of another scheme",
            got=terms.scheme,
            allowed=scheme,
            fix="use the asker and the server of the scheme that the terms name",
        )


def check_server(scheme: Scheme, database: Database, terms: Terms, server: int) -> None:
    """Raises InputError if terms are not of this table, or there is no such server of two."""
    check_scheme(terms, scheme)
    if terms != plain_terms(scheme, database, terms.most_keys) or server not in (0, 1):
        raise InputError(
            "a server and terms that do not fit",
            got=f"server {server}, terms of {terms.num_keys} slices",
            allowed=f"server 0 or 1, terms_of these {database.num_keys} slices",
            fix="make the terms with terms_of(database, most_keys)",
        )
