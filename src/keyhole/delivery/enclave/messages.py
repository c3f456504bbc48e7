"""Writes what passes between clients, host and enclave program: evidence and the params of a table,
sealed messages, and frames.

Evidence is what an enclave shows of itself to one client; roles are as in RFC 9334: the enclave is
the attester, the client verifies and decides by itself (`verifier.py`).

A request is a head, HPKE's `enc`, and m keys sealed to the enclave's public key; the head is bound
to it both as HPKE's info and as associated data. The reply is sealed under a key that both sides
export from the same HPKE context together with a nonce that the enclave draws, as Oblivious HTTP
does (RFC 9458, section 4.4).

Hidden from the host: the keys, how many of them are padding, and the rows, if HPKE holds and the
private key stays inside. Not hidden: who asks, when, and the params.

Between host and program all travels in frames, on a pair of sockets.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from enum import IntEnum
from functools import cached_property
from hashlib import sha256, sha512
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
from cryptography.exceptions import InvalidTag
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.codec import read_facts
from keyhole.crypto.cuckoo import (
    MAX_IN_BUCKETS,
    BatchShape,
    Placement,
    batch_shape,
    place,
)
from keyhole.crypto.hpke import (
    AES_128_GCM,
    PUBLIC_BYTES,
    TAG_BYTES,
    Context,
    PrivateKey,
    open_from,
    seal_to,
)
from keyhole.crypto.hpke import NONCE_BYTES as _IV_BYTES
from keyhole.crypto.prg import Prg
from keyhole.delivery.base import PublicTable
from keyhole.errors import InputError, IntegrityError, MalformedError, StaleError

EvidenceKind: TypeAlias = Literal["tdx", "sgx", "simulated"]
"""What vouches for the enclave: Intel TDX, Intel SGX, or nothing at all."""

NONCE_BYTES = 32
"""Bytes of the client's nonce, which makes evidence its own."""

_EVIDENCE_MAGIC = b"KHA1"
_EVIDENCE_KINDS = get_args(EvidenceKind)
_EVIDENCE_HEAD = struct.Struct("<4sB3xII32s32s")
_MAX_QUOTE = 64 << 10  # bytes; quotes have about 5,000
_MAX_COLLATERAL = 1 << 20  # bytes; collateral has about 16,000


@dataclass(frozen=True)
class Evidence:
    """What an enclave shows to one client. All of it is public.

    Args:
        quote: as the hardware signed it, with nothing before or behind.
        collateral: what is needed to verify the quote: for tdx and sgx the JSON of the certificate
            chains, revocation lists, TCB information and identity of the quoting enclave.
        public: 32 bytes: the key to which requests are sealed.
        config: 32 bytes: the digest of the params of the table that the enclave holds.
    """

    kind: EvidenceKind
    quote: bytes
    collateral: bytes
    public: bytes
    config: bytes

    def __post_init__(self) -> None:
        lengths = (len(self.quote), len(self.collateral), len(self.public), len(self.config))
        is_long = lengths[0] > _MAX_QUOTE or lengths[1] > _MAX_COLLATERAL
        if self.kind not in _EVIDENCE_KINDS or is_long or lengths[2:] != (32, 32):
            raise InputError(
                f"evidence of no enclave: got kind {self.kind!r}, fields of {lengths} bytes; "
                f"expected {', '.join(_EVIDENCE_KINDS)}; at most {_MAX_QUOTE}, {_MAX_COLLATERAL}, "
                "32, 32; take it from the enclave as it is"
            )

    def encode(self) -> bytes:
        """Returns the evidence as it travels."""
        number, lengths = _EVIDENCE_KINDS.index(self.kind), (len(self.quote), len(self.collateral))
        head = _EVIDENCE_HEAD.pack(_EVIDENCE_MAGIC, number, *lengths, self.public, self.config)
        return head + self.quote + self.collateral

    @staticmethod
    def decode(data: bytes | bytearray) -> Evidence:
        """Returns the evidence that `data` holds. It is not verified."""
        return read_facts(bytes(data), "evidence of an enclave", _unpack_evidence)


def _unpack_evidence(data: bytes) -> Evidence:
    _, kind, quote_bytes, _, public, config = _EVIDENCE_HEAD.unpack_from(data)
    middle = _EVIDENCE_HEAD.size + quote_bytes
    quote, collateral = data[_EVIDENCE_HEAD.size : middle], data[middle:]
    return Evidence(_EVIDENCE_KINDS[kind], quote, collateral, public, config)


class Attester(Protocol):
    """What makes evidence, inside the enclave."""

    @property
    def kind(self) -> EvidenceKind:
        """What vouches for the enclave."""
        ...

    def attest(self, report_data: bytes, now: int) -> tuple[bytes, bytes]:
        """Returns a quote over 64 bytes of report data, and its collateral.

        Args:
            report_data: what the quote binds to the enclave.
            now: seconds since 1970.
        """
        ...


def report_data_of(public: bytes, config: bytes, nonce: bytes) -> bytes:
    """Returns what the quote must bind: the enclave's key, its table, and the client that asks.

    SHA-512("keyhole-enclave-v1" || public || config || nonce); each of the three has 32 bytes:
    with other lengths two choices could be mistaken for each other.

    >>> len(report_data_of(bytes(32), bytes(32), bytes(32)))
    64
    """
    if (len(public), len(config), len(nonce)) != (32, 32, NONCE_BYTES):
        raise InputError(
            f"report data of fields that have another length: got {len(public)}, {len(config)} and "
            f"{len(nonce)} bytes; expected 32 bytes each; draw a nonce with fresh_nonce()"
        )
    return sha512(b"keyhole-enclave-v1" + public + config + nonce).digest()


_PARAMS_MAGIC = b"KHT4"
_FORM = struct.Struct("<4s4x16s32s32sQQQ")
_MAX = 1 << 40  # of keys: beyond what anybody can scan
_MAX_SEALED = (1 << 31) - 4096  # bytes of keys, or of records, that can be sealed at once
_KEY = np.dtype("<i8")  # in a request


@dataclass(frozen=True)
class EnclaveParams:
    """The public facts of one table in an enclave.

    What the host can see of a request and its answer depends on these and on nothing else.

    Args:
        round: 16 bytes: which table of which round.
        model: 32 bytes: the digest of the round's manifest.
        root: 32 bytes: of the tree over all slices. The program does not compare rows with it:
            clients do, by the path in each row.
        row_bytes: of a slice and its path.
        max_keys: m; every request is padded to the places for this many.
    """

    round: bytes
    model: bytes
    root: bytes
    num_keys: int
    row_bytes: int
    max_keys: int

    def __post_init__(self) -> None:
        PublicTable(*astuple(self))  # checks each field
        if self.num_places * max(_KEY.itemsize, self.row_bytes) > _MAX_SEALED:
            raise InputError(
                f"a request too large for an enclave: got {self.max_keys} keys per query, for rows "
                f"of {self.row_bytes} bytes; expected at most 2 GB of keys, 8 bytes each, or rows; "
                "lower max_keys"
            )

    @staticmethod
    def of(table: PublicTable) -> EnclaveParams:
        """Returns the params of a table."""
        return EnclaveParams(*astuple(table)[:6])

    @cached_property
    def shape(self) -> BatchShape:
        """How a request is laid out: a key or none for each bucket, then those of the stash, for
        which the whole table is read."""
        if self.num_keys > MAX_IN_BUCKETS:
            return BatchShape(0, self.max_keys)
        return batch_shape(self.max_keys, self.num_keys)

    @property
    def num_places(self) -> int:
        """The number of keys in a request, padding included, and of rows in a reply."""
        return self.shape.num_buckets + self.shape.stash

    @cached_property
    def placement(self) -> Placement | None:
        """Which keys lie in which bucket; None where no request has buckets."""
        if not self.shape.num_buckets:
            return None
        return Placement(self.num_keys, self.shape.num_buckets)

    def assign(self, keys: KeyArray) -> tuple[KeyArray, NDArray[np.int64]]:
        """Puts different keys into places.

        Returns:
            The keys as they are sent, (num_places,), -1 for none; and the place of each key, -1 for
            one that found none, which is seldom (`batch_shape`).
        """
        asked, places = np.full(self.num_places, NO_KEY, np.int64), np.full(len(keys), -1, np.int64)
        if self.placement is not None:
            places[:] = place(self.placement.buckets_of(keys), self.shape.num_buckets)
        left = np.flatnonzero(places < 0)[: self.shape.stash]
        places[left] = self.shape.num_buckets + np.arange(len(left))
        is_placed = places >= 0
        asked[places[is_placed]] = keys[is_placed]
        return asked, places

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it: the config digest of the evidence."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the params as a client fetches them."""
        return _FORM.pack(_PARAMS_MAGIC, *astuple(self))

    @staticmethod
    def decode(data: bytes) -> EnclaveParams:
        """Returns the params that `data` holds."""
        return read_facts(
            data, "params of an enclave's table", lambda raw: EnclaveParams(*_FORM.unpack(raw)[1:])
        )


NO_KEY = -1
"""What a request is padded with: no row answers to it."""

_Kind: TypeAlias = Literal["request", "reply"]
_MAGIC = b"KHE1"
_KINDS = {"request": 1, "reply": 2}
_HEAD = struct.Struct("<4sB3x16s32s32s")
_SALT_BYTES = 16  # of the enclave's nonce: as long as the longer of key and nonce of the cipher
_LABEL = b"keyhole-enclave-v1 reply"


def request_bytes(params: EnclaveParams) -> int:
    """Returns the length of every request under these params."""
    return _HEAD.size + PUBLIC_BYTES + _KEY.itemsize * params.num_places + TAG_BYTES


def reply_bytes(params: EnclaveParams) -> int:
    """Returns the length of every reply under these params."""
    return _HEAD.size + _SALT_BYTES + params.num_places * params.row_bytes + TAG_BYTES


def seal_request(
    public: bytes, params: EnclaveParams, nonce: bytes, keys: KeyArray, prg: Prg | None = None
) -> tuple[bytes, Context]:
    """Returns a request for keys in their places (`params.assign`), filled up with none, and the
    context that opens its reply; `prg` is given by tests only."""
    head = _head("request", params, nonce)
    padded = np.full(params.num_places, NO_KEY, _KEY)
    padded[: len(keys)] = keys
    enc, context = seal_to(public, head, ephemeral=PrivateKey.fresh(prg))
    return head + enc + context.seal(head, padded.tobytes()), context


def nonce_of(request: bytes | bytearray, params: EnclaveParams) -> bytes:
    """Returns the nonce that a request names, after its length and head are checked."""
    if len(request) != request_bytes(params):
        raise _malformed("request", f"{len(request)} bytes", f"{request_bytes(params)} bytes")
    nonce = bytes(request[_HEAD.size - NONCE_BYTES : _HEAD.size])
    _check_head(bytes(request[: _HEAD.size]), "request", params, nonce)
    return nonce


def open_request(
    private: PrivateKey, params: EnclaveParams, request: bytes | bytearray
) -> tuple[KeyArray, Context]:
    """Returns the keys of a request in their places, -1 for none, and the context that seals its
    reply."""
    head = _head("request", params, nonce_of(request, params))
    start = _HEAD.size + PUBLIC_BYTES
    context = open_from(private, bytes(request[_HEAD.size : start]), head)
    plain = context.open(head, bytes(request[start:]))
    keys = np.frombuffer(plain, _KEY).astype(np.int64)
    if ((keys < NO_KEY) | (keys >= params.num_keys)).any():
        raise _malformed("request", "keys outside the table", f"-1..{params.num_keys - 1}")
    return keys, context


def seal_reply(
    context: Context, params: EnclaveParams, nonce: bytes, rows: NDArray[np.uint8], prg: Prg
) -> bytes:
    """Returns the reply to the request of a context: rows (num_places, row_bytes), contiguous."""
    head, salt = _head("reply", params, nonce), prg.bytes(_SALT_BYTES)
    key, iv = _reply_key(context, salt)
    return b"".join([head, salt, AES_128_GCM.cipher(key).encrypt(iv, rows.data, head)])


def open_reply(
    context: Context, params: EnclaveParams, nonce: bytes, reply: bytes
) -> NDArray[np.uint8]:
    """Returns the rows of a reply, (num_places, row_bytes)."""
    if len(reply) != reply_bytes(params):
        raise _malformed("reply", f"{len(reply)} bytes", f"{reply_bytes(params)} bytes")
    head, start = reply[: _HEAD.size], _HEAD.size + _SALT_BYTES
    _check_head(head, "reply", params, nonce)
    key, iv = _reply_key(context, reply[_HEAD.size : start])
    try:
        plain = AES_128_GCM.cipher(key).decrypt(iv, reply[start:], head)
    except InvalidTag as error:
        raise IntegrityError(
            f"a sealed reply cannot be opened: got {len(reply)} bytes; expected what the enclave "
            "sealed for this request, unchanged; ask again for all keys, with fresh evidence; the "
            "host may be lying"
        ) from error
    return np.frombuffer(plain, np.uint8).reshape(params.num_places, params.row_bytes)


def _reply_key(context: Context, salt: bytes) -> tuple[bytes, bytes]:
    """Key and nonce of a reply: new ones even if a request were answered twice."""
    derived = context.export(_LABEL + salt, AES_128_GCM.key_bytes + _IV_BYTES)
    return derived[: AES_128_GCM.key_bytes], derived[AES_128_GCM.key_bytes :]


def _head(kind: _Kind, params: EnclaveParams, nonce: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, _KINDS[kind], params.round, params.digest, nonce)


def _check_head(head: bytes, kind: _Kind, params: EnclaveParams, nonce: bytes) -> None:
    if head == _head(kind, params, nonce):
        return
    magic, number, *about, _ = _HEAD.unpack(head)
    is_of_kind = (magic, number) == (_MAGIC, _KINDS[kind])
    if is_of_kind and about != [params.round, params.digest]:
        raise StaleError(
            f"a sealed {kind} about other slices: got another round, or other params; expected the "
            "round and params of this table; fetch params and evidence again"
        )
    raise _malformed(kind, "another head", f"a {kind} of version 1, with the nonce of its evidence")


def _malformed(kind: _Kind, got: str, allowed: str) -> MalformedError:
    return MalformedError(
        f"a sealed {kind} cannot be read: got {got}; expected {allowed}; send it as docs/wire.md "
        "describes it, under the params of the table"
    )


_FRAME = struct.Struct("<II")

PIECE_BYTES = 1 << 20
"""Bytes of rows that travel in one frame; a single longer row travels alone."""

MAX_BYTES = 1 << 31
"""Bytes of any frame. More cannot be a frame, and what follows it could not be found."""


class Kind(IntEnum):
    """What a frame is. An answer has the kind of its command."""

    LOAD = 1
    ROWS = 2
    EVIDENCE = 3
    ANSWER = 4
    STOP = 5
    ROWS_READ = 6
    READY = 7
    REFUSED = 255


class Channel:
    """One end of a pair of sockets, on which frames travel.

    Args:
        watch: is shown every piece of bytes that passes, in either direction.
    """

    def __init__(self, end: socket.socket, watch: Callable[[bytes], None] | None = None) -> None:
        self._end, self._watch = end, watch

    def send(self, kind: int, body: bytes | memoryview = b"", within: float | None = None) -> None:
        """Sends a frame."""
        head = _FRAME.pack(kind, len(body))
        self._end.settimeout(within)
        # Nothing is not sent: anyone who has the head of STOP may be gone by then.
        for piece in (head, body) if body else (head,):
            self._end.sendall(piece)
            self._show(piece)

    def receive(self, within: float | None = None) -> tuple[int, bytearray]:
        """Returns the next frame."""
        deadline = None if within is None else time.monotonic() + within
        kind, length = _FRAME.unpack(self._receive(_FRAME.size, deadline))
        if length > MAX_BYTES:
            raise MalformedError(
                f"a frame that is too long: got {length} bytes; expected {MAX_BYTES} bytes; send "
                "rows in pieces, and requests of the length that the params demand"
            )
        return kind, self._receive(length, deadline)

    def close(self) -> None:
        """Closes this end; the other one sees it."""
        self._end.close()

    def _receive(self, length: int, deadline: float | None) -> bytearray:
        whole = bytearray(length)
        left = memoryview(whole)
        while left:
            if deadline is not None:
                self._end.settimeout(max(1e-3, deadline - time.monotonic()))
            count = self._end.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        self._show(whole)
        return whole

    def _show(self, piece: bytes | bytearray | memoryview) -> None:
        if self._watch and piece:
            self._watch(bytes(piece))
