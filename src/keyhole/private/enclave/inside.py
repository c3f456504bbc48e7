"""Inside the enclave: a table, a private key, and what may be asked of them. No sockets here.

The private key is drawn with every table and exists in this object alone: it is never returned,
written or printed, and what was recorded in one round cannot be opened by whoever takes over the
program in a later one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import IntegrityError, MalformedError, ReplayError, StaleError, TooManyError
from keyhole.private.enclave.evidence import NONCE_BYTES, Attester, Evidence, report_data_of
from keyhole.private.enclave.oblivious_select import oblivious_select
from keyhole.private.enclave.sealed import nonce_of, open_request, seal_reply
from keyhole.private.enclave.terms import EnclaveTerms, start_digest
from keyhole.private.hpke import PrivateKey
from keyhole.private.prg import Prg

__all__ = ["Inside"]

_WORD = 8  # bytes
_MOST_NONCES = 1 << 20  # of one table: each client needs one, and each takes about 100 bytes


class _Arriving:
    """A table whose rows are on their way."""

    def __init__(self, terms: EnclaveTerms) -> None:
        words = -(-terms.record_bytes // _WORD)
        self.terms = terms
        self.rows = np.zeros((terms.num_keys, words), np.uint64)
        self._bytes = self.rows.view(np.uint8)[:, : terms.record_bytes]
        self._count = 0
        self._digest = start_digest(terms.round, terms.num_keys, terms.record_bytes)

    def add(self, piece: NDArray[np.uint8]) -> bool:
        """Takes in whole rows; returns whether these were the last."""
        count, rest = divmod(piece.size, self.terms.record_bytes)
        end = self._count + count
        if rest or not count or end > self.terms.num_keys:
            raise _malformed("rows", f"{piece.size} bytes", "whole rows, no more than announced")
        self._bytes[self._count : end] = piece.reshape(count, self.terms.record_bytes)
        self._digest.update(piece.data)
        self._count = end
        return end == self.terms.num_keys

    def check(self) -> None:
        """Refuses rows that are not those of the terms."""
        if self._digest.digest() != self.terms.database:
            raise IntegrityError(
                "rows that are not those of the terms",
                got="another digest",
                allowed="the digest of the database",
                fix="load the table anew",
            )


@dataclass(repr=False)
class _Table:
    """A whole table with its key, and which nonces were asked with: true once they are used up."""

    terms: EnclaveTerms
    rows: NDArray[np.uint64]
    private: PrivateKey = field(default_factory=PrivateKey.fresh)
    nonces: dict[bytes, bool] = field(default_factory=dict)


class Inside:
    """What the enclave program does, one command after the other.

    Args:
        attester: makes the evidence.
        clock: seconds since 1970, for the evidence.
    """

    def __init__(self, attester: Attester, clock: Callable[[], float] = time.time) -> None:
        self._attester, self._clock = attester, clock
        self._arriving: _Arriving | None = None
        self._table: _Table | None = None
        self.rows_read = 0
        """Over all keys: K for each, padding included, so it tells nothing about them."""

    def load(self, terms: EnclaveTerms) -> None:
        """Forgets the table and its key, and awaits the rows of another."""
        self._table = self._arriving = None
        self._arriving = _Arriving(terms)

    def add_rows(self, piece: NDArray[np.uint8]) -> None:
        """Takes in the next rows, one behind the other.

        Raises:
            MalformedError: no table is awaited, or these are not whole rows of it.
            IntegrityError: these were the last, and the rows are not those of the terms.
        """
        arriving = self._arriving
        if arriving is None:
            raise _malformed("rows", "rows", "terms before them")
        if arriving.add(piece):
            self._arriving = None
            arriving.check()
            self._table = _Table(arriving.terms, arriving.rows)

    def evidence(self, nonce: bytes) -> Evidence:
        """Shows what this is to the client that drew a nonce, which is then good for one request.

        Raises:
            MalformedError: the nonce has another length.
            StaleError: there is no table.
            ReplayError: a request with this nonce was answered.
            TooManyError: more clients than a table can have.
        """
        table = self._whole_table()
        if len(nonce) != NONCE_BYTES:
            raise _malformed("a nonce", f"{len(nonce)} bytes", f"{NONCE_BYTES} bytes")
        if table.nonces.get(nonce):
            raise _used()
        if len(table.nonces) >= _MOST_NONCES:
            raise TooManyError(
                "too many clients of one table",
                got=len(table.nonces),
                allowed=_MOST_NONCES,
                fix="load the table anew: it gets a new key",
            )
        table.nonces[nonce] = False
        public, config = table.private.public, table.terms.digest
        report_data = report_data_of(public, config, nonce)
        quote, collateral = self._attester.attest(report_data, int(self._clock()))
        return Evidence(self._attester.kind, quote, collateral, public, config)

    def answer(self, request: bytes | bytearray) -> bytes:
        """Answers a sealed request with a sealed reply.

        Raises:
            MalformedError, StaleError, ReplayError: it cannot be answered; no row was read.
        """
        table = self._whole_table()
        nonce = nonce_of(request, table.terms)
        is_used = table.nonces.get(nonce)
        if is_used is None:
            raise StaleError(
                "a request without evidence before it",
                got="an unknown nonce",
                allowed="the nonce of evidence for this table",
                fix="fetch evidence anew",
            )
        if is_used:
            raise _used()
        keys, context = open_request(table.private, table.terms, request)
        table.nonces[nonce] = True  # before any row is read: nothing is answered twice
        found, visited = oblivious_select(table.rows, keys)
        self.rows_read += int(visited.sum())
        records = np.ascontiguousarray(found.view(np.uint8)[:, : table.terms.record_bytes])
        return seal_reply(context, table.terms, nonce, records, Prg.fresh())

    def _whole_table(self) -> _Table:
        if self._table is None:
            raise StaleError(
                "no table to answer from",
                got="none, or one whose rows are on their way",
                allowed="a whole table",
                fix="load one first",
            )
        return self._table


def _used() -> ReplayError:
    return ReplayError(
        "a request that was answered before",
        got="a nonce that is used up",
        allowed="one request for each nonce",
        fix="draw a fresh nonce and ask for evidence anew",
    )


def _malformed(what: str, got: str, allowed: str) -> MalformedError:
    return MalformedError(
        f"{what} that cannot be used",
        got=got,
        allowed=allowed,
        fix="send it as docs/wire.md describes it",
    )
