"""Runs the enclave program, `python -m keyhole.delivery.enclave.program`: oblivious select inside.

For every key all rows are read, in their order, and all but one are masked to zeros:

    out[j] = OR over r of (rows[r] AND mask[j, r])
    mask[j, r] = all ones if r = keys[j], else zero

Of a request with many keys, the client puts each into a bucket (`crypto/cuckoo.py`). Which rows a
bucket has is public and the same for everyone. For each bucket its rows are read, in their order,
and all but that of its key are masked: three passes over the table in all, and one for each key of
the stash, whatever the keys.

Hidden: which rows are selected, from anyone who sees the addresses that this code reads and writes.
Not covered: what a processor does beneath them, time, power, and the Python around this file, which
is not constant-time. Run as it is, it is an ordinary process that its host can look into: isolation
is neither provided nor tested here.

The private key is drawn with every table and exists in `Inside` alone: it is never returned,
written or printed, and what was recorded in one round cannot be opened by anyone who takes over the
program in a later one. Commands come in frames on the socket that is the standard input; one that
cannot be fulfilled is answered by the same frame, whatever the reason.
"""

from __future__ import annotations

import argparse
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numba import njit
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.hpke import PrivateKey
from keyhole.crypto.prg import Prg
from keyhole.delivery.enclave.messages import (
    NONCE_BYTES,
    Attester,
    Channel,
    EnclaveParams,
    Evidence,
    Kind,
    nonce_of,
    open_request,
    report_data_of,
    seal_reply,
)
from keyhole.delivery.enclave.verifier import (
    NO_HARDWARE_PROTECTION,
    SimulatedAttester,
    simulated_measurement,
)
from keyhole.errors import (
    KeyholeError,
    MalformedError,
    ReplayError,
    StaleError,
    TooManyError,
)

_TILE = 32 << 10  # bytes of rows that all keys pass over: a first-level cache holds 48 KB
_MASKS = 1 << 20  # bytes of masks that are held at a time
_AT_ONCE = 8  # rows for each write of an output: fewer writes, and still one pointer each


def oblivious_select(
    rows: NDArray[np.uint64], keys: KeyArray
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Selects rows by reading all of `rows`, (K, words) and contiguous, for every key; -1 selects
    nothing, at the same cost.

    Returns:
        The rows of the keys, (m, words), zeros for -1; and how many rows were read for each key,
        (m,): K, whatever the key.
    """
    num_keys, words = rows.shape
    out = np.zeros((len(keys), words), np.uint64)
    visited = np.zeros(len(keys), np.int64)
    tile = max(1, _TILE // max(1, 8 * words * _AT_ONCE)) * _AT_ONCE
    group = max(1, _MASKS // (8 * tile))
    for start in range(0, num_keys, tile):
        piece = rows[start : start + tile]
        for first in range(0, len(keys), group):
            some = slice(first, first + group)
            _scan_tile(piece, _masks(keys[some], start, len(piece)), out[some], visited[some])
    return out, visited


def bucketed_select(
    rows: NDArray[np.uint64], members: NDArray[np.int32], keys: KeyArray
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Selects a row of each bucket by reading all rows of the bucket; -1 selects nothing, at the
    same cost, and so does a key of another bucket.

    Args:
        members: the rows of every bucket, (B, size), -1 where there are no more; public.
        keys: one for each bucket, (B,).

    Returns:
        The rows, (B, words), and how many were read for each key, (B,): the size of a bucket.
    """
    num_buckets, size = members.shape
    out = np.zeros((num_buckets, rows.shape[1]), np.uint64)
    visited = np.zeros(num_buckets, np.int64)
    group = max(1, _MASKS // (8 * size))
    for start in range(0, num_buckets, group):
        some = slice(start, start + group)
        mine = np.maximum(members[some], 0)  # an empty place reads row 0, for nothing
        own = (members[some] == keys[some, None]) & (members[some] >= 0)
        masks = np.negative(own.astype(np.uint64))
        _scan_buckets(rows, mine, masks, out[some], visited[some])
    return out, visited


@njit(cache=True, nogil=True)
def _scan_buckets(rows, members, masks, out, visited):  # type: ignore[no-untyped-def]
    """Adds the masked rows of each bucket to the output of its key."""
    size, words = members.shape[1], rows.shape[1]
    whole = size - size % 4
    for b in range(len(members)):
        own, mask, target = members[b], masks[b], out[b]
        for p in range(0, whole, 4):
            q, r, s, t = own[p], own[p + 1], own[p + 2], own[p + 3]
            e, f, g, h = mask[p], mask[p + 1], mask[p + 2], mask[p + 3]
            for w in range(words):
                target[w] |= (
                    (rows[q, w] & e) | (rows[r, w] & f) | (rows[s, w] & g) | (rows[t, w] & h)
                )
            visited[b] += 4
        for p in range(whole, size):
            for w in range(words):
                target[w] |= rows[own[p], w] & mask[p]
            visited[b] += 1


def oblivious_select_plain(rows: NDArray[np.uint64], keys: KeyArray) -> NDArray[np.uint64]:
    """Computes the equation at the top in NumPy: the twin that tests hold the fast one to."""
    masks = _masks(keys, 0, len(rows))
    found: NDArray[np.uint64] = np.bitwise_or.reduce(masks[:, :, None] & rows[None], axis=1)
    return found


def _masks(keys: KeyArray, start: int, count: int) -> NDArray[np.uint64]:
    """All ones where a row is a key's own, (m, count).

    They are made apart from the scan, which sees numbers and not a comparison: a compiler could
    turn a comparison into a jump past the row.
    """
    own = keys[:, None] == np.arange(start, start + count)[None, :]
    masks: NDArray[np.uint64] = np.negative(own.astype(np.uint64))
    return masks


@njit(cache=True, nogil=True)
def _scan_tile(rows, masks, out, visited):  # type: ignore[no-untyped-def]
    """Adds the masked rows of a tile to the output of every key."""
    count, words = rows.shape
    whole = count - count % _AT_ONCE
    for key in range(len(masks)):
        mask, target = masks[key], out[key]
        for r in range(0, whole, _AT_ONCE):
            a, b, c, d = mask[r], mask[r + 1], mask[r + 2], mask[r + 3]
            e, f, g, h = mask[r + 4], mask[r + 5], mask[r + 6], mask[r + 7]
            for w in range(words):
                target[w] |= (
                    (rows[r, w] & a)
                    | (rows[r + 1, w] & b)
                    | (rows[r + 2, w] & c)
                    | (rows[r + 3, w] & d)
                    | (rows[r + 4, w] & e)
                    | (rows[r + 5, w] & f)
                    | (rows[r + 6, w] & g)
                    | (rows[r + 7, w] & h)
                )
            visited[key] += _AT_ONCE
        for r in range(whole, count):
            for w in range(words):
                target[w] |= rows[r, w] & mask[r]
            visited[key] += 1


_WORD = 8  # bytes
_MAX_NONCES = 1 << 20  # of one table: each client needs one, and each takes about 100 bytes


class _Arriving:
    """A table whose rows are on their way."""

    def __init__(self, params: EnclaveParams) -> None:
        words = -(-params.row_bytes // _WORD)
        self.params = params
        self.rows = np.zeros((params.num_keys, words), np.uint64)
        self._bytes = self.rows.view(np.uint8)[:, : params.row_bytes]
        self._count = 0

    def add(self, piece: NDArray[np.uint8]) -> bool:
        """Takes in whole rows; returns whether these were the last."""
        count, rest = divmod(piece.size, self.params.row_bytes)
        end = self._count + count
        if rest or not count or end > self.params.num_keys:
            raise _malformed("rows", f"{piece.size} bytes", "whole rows, no more than announced")
        self._bytes[self._count : end] = piece.reshape(count, self.params.row_bytes)
        self._count = end
        return end == self.params.num_keys


@dataclass(repr=False)
class _Table:
    """A whole table with its key, and which nonces were asked with: true once they are used up."""

    params: EnclaveParams
    rows: NDArray[np.uint64]
    private: PrivateKey = field(default_factory=PrivateKey.fresh)
    nonces: dict[bytes, bool] = field(default_factory=dict)


class Inside:
    """What the enclave program does, one command after the other.

    Args:
        clock: seconds since 1970, for the evidence.
    """

    def __init__(self, attester: Attester, clock: Callable[[], float] = time.time) -> None:
        self._attester, self._clock = attester, clock
        self._arriving: _Arriving | None = None
        self._table: _Table | None = None
        self.rows_read = 0
        """Over all keys: K or the size of a bucket for each, padding included, so it tells nothing
        about them."""

    def load(self, params: EnclaveParams) -> None:
        """Forgets the table and its key, and awaits the rows of another."""
        self._table = self._arriving = None
        self._arriving = _Arriving(params)

    def add_rows(self, piece: NDArray[np.uint8]) -> None:
        """Takes in the next rows, one behind the other."""
        arriving = self._arriving
        if arriving is None:
            raise _malformed("rows", "rows", "params before them")
        if arriving.add(piece):
            self._arriving = None
            self._table = _Table(arriving.params, arriving.rows)

    def evidence(self, nonce: bytes) -> Evidence:
        """Shows what this is to the client that drew a nonce, then good for one request."""
        table = self._whole_table()
        if len(nonce) != NONCE_BYTES:
            raise _malformed("a nonce", f"{len(nonce)} bytes", f"{NONCE_BYTES} bytes")
        if table.nonces.get(nonce):
            raise _used()
        if len(table.nonces) >= _MAX_NONCES:
            raise TooManyError(
                f"too many clients of one table: got {len(table.nonces)}; expected {_MAX_NONCES}; "
                "load the table again: it gets a new key"
            )
        table.nonces[nonce] = False
        public, config = table.private.public, table.params.digest
        report_data = report_data_of(public, config, nonce)
        quote, collateral = self._attester.attest(report_data, int(self._clock()))
        return Evidence(self._attester.kind, quote, collateral, public, config)

    def answer(self, request: bytes | bytearray) -> bytes:
        """Answers a sealed request with a sealed reply."""
        table = self._whole_table()
        nonce = nonce_of(request, table.params)
        is_used = table.nonces.get(nonce)
        if is_used is None:
            raise StaleError(
                "a request without evidence before it: got an unknown nonce; expected the nonce "
                "of evidence for this table; fetch evidence again"
            )
        if is_used:
            raise _used()
        keys, context = open_request(table.private, table.params, request)
        table.nonces[nonce] = True  # before any row is read: nothing is answered twice
        found = self._select(table, keys)
        rows = np.ascontiguousarray(found.view(np.uint8)[:, : table.params.row_bytes])
        return seal_reply(context, table.params, nonce, rows, Prg.fresh())

    def _select(self, table: _Table, keys: KeyArray) -> NDArray[np.uint64]:
        """The rows of keys in their places: those of buckets, then those of the stash."""
        cut, placement = table.params.shape.num_buckets, table.params.placement
        found, visited = oblivious_select(table.rows, keys[cut:])
        self.rows_read += int(visited.sum())
        if placement is None:
            return found
        in_buckets, visited = bucketed_select(table.rows, placement.members(), keys[:cut])
        self.rows_read += int(visited.sum())
        return np.concatenate([in_buckets, found])

    def _whole_table(self) -> _Table:
        if self._table is None:
            raise StaleError(
                "no table to answer from: got none, or one whose rows are on their way; expected "
                "a whole table; load one first"
            )
        return self._table


def _used() -> ReplayError:
    return ReplayError(
        "a request that was answered before: got a nonce that is used up; expected one request "
        "for each nonce; draw a fresh nonce and ask for evidence again"
    )


def _malformed(what: str, got: str, allowed: str) -> MalformedError:
    return MalformedError(
        f"cannot use {what}: got {got}; expected {allowed}; send it as docs/wire.md describes it"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program until it is stopped; returns its exit code."""
    parser = argparse.ArgumentParser(prog="keyhole.delivery.enclave.program")
    parser.add_argument(
        "--attester",
        choices=["simulated"],
        required=True,
        help=f"simulated: {NO_HARDWARE_PROTECTION}",
    )
    parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    channel = Channel(socket.socket(fileno=sys.stdin.fileno()))
    try:
        serve(channel, Inside(SimulatedAttester(simulated_measurement())))
    except KeyboardInterrupt:
        return 130
    except (EOFError, OSError):
        return 0  # the host is gone, and with it anyone who could ask
    except Exception as error:  # noqa: BLE001 - a trace could show what only this process may know
        sys.stderr.write(f"the enclave program ends on {type(error).__name__}\n")
        return 1
    return 0


def serve(channel: Channel, inside: Inside) -> None:
    """Answers commands until STOP."""
    channel.send(Kind.READY)
    while True:
        try:
            kind, body = channel.receive()
        except MalformedError:
            channel.send(Kind.REFUSED)
            return  # where the next frame begins is unknown
        if kind == Kind.STOP and not body:
            channel.send(Kind.STOP)
            return
        try:
            answer = _obey(inside, kind, body)
        except (KeyholeError, MemoryError):
            channel.send(Kind.REFUSED)
        else:
            channel.send(kind, answer)


def _obey(inside: Inside, kind: int, body: bytearray) -> bytes:
    """Fulfils one command; returns the body of its answer."""
    if kind == Kind.LOAD:
        inside.load(EnclaveParams.decode(bytes(body)))
        return b""
    if kind == Kind.ROWS:
        inside.add_rows(np.frombuffer(body, np.uint8))
        return b""
    if kind == Kind.EVIDENCE:
        return inside.evidence(bytes(body)).encode()
    if kind == Kind.ANSWER:
        return inside.answer(body)
    if kind == Kind.ROWS_READ and not body:
        return struct.pack("<Q", inside.rows_read)
    raise MalformedError(
        f"an unknown command: got kind {kind}, {len(body)} bytes; expected a command of "
        "docs/wire.md; check that both sides are of one version"
    )


if __name__ == "__main__":
    sys.exit(main())
