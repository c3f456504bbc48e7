"""Writes what passes between clients, host and enclave program: sealed messages, and frames.

A request is a head, HPKE's `enc`, and m keys sealed to the enclave's public key; the head is bound
to it both as HPKE's info and as associated data. The reply is sealed under a key that both sides
export from the same HPKE context together with a nonce that the enclave draws, as Oblivious HTTP
does (RFC 9458, section 4.4).

Hidden from the host: the keys, how many of them are padding, and the records, if HPKE holds and the
private key stays inside. Not hidden: who asks, when, and the params.

Between host and program all travels in frames, on a pair of sockets.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Literal, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
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
from keyhole.delivery.enclave.evidence import NONCE_BYTES, EnclaveParams
from keyhole.errors import IntegrityError, MalformedError, StaleError

NO_KEY = -1
"""What a request is padded with: no row answers to it."""

_Kind: TypeAlias = Literal["request", "reply"]
_MAGIC = b"KHE1"
_KINDS = {"request": 1, "reply": 2}
_HEAD = struct.Struct("<4sB3x16s32s32s")
_KEY = np.dtype("<i8")
_SALT_BYTES = 16  # of the enclave's nonce: as long as the longer of key and nonce of the cipher
_LABEL = b"keyhole-enclave-v1 reply"


def request_bytes(params: EnclaveParams) -> int:
    """The length of every request under these params."""
    return _HEAD.size + PUBLIC_BYTES + _KEY.itemsize * params.max_keys + TAG_BYTES


def reply_bytes(params: EnclaveParams) -> int:
    """The length of every reply under these params."""
    return _HEAD.size + _SALT_BYTES + params.max_keys * params.record_bytes + TAG_BYTES


def seal_request(
    public: bytes, params: EnclaveParams, nonce: bytes, keys: KeyArray, prg: Prg | None = None
) -> tuple[bytes, Context]:
    """Returns a request, and the context that opens its reply.

    Args:
        keys: (m,) different keys, at most `params.max_keys`.
        prg: where secrets come from; a fresh one if None. Given by tests only.
    """
    head = _head("request", params, nonce)
    padded = np.full(params.max_keys, NO_KEY, _KEY)
    padded[: len(keys)] = keys
    enc, context = seal_to(public, head, ephemeral=PrivateKey.fresh(prg))
    return head + enc + context.seal(head, padded.tobytes()), context


def nonce_of(request: bytes | bytearray, params: EnclaveParams) -> bytes:
    """The nonce that a request names, after its length and head are checked."""
    if len(request) != request_bytes(params):
        raise _malformed("request", f"{len(request)} bytes", f"{request_bytes(params)} bytes")
    nonce = bytes(request[_HEAD.size - NONCE_BYTES : _HEAD.size])
    _check_head(bytes(request[: _HEAD.size]), "request", params, nonce)
    return nonce


def open_request(
    private: PrivateKey, params: EnclaveParams, request: bytes | bytearray
) -> tuple[KeyArray, Context]:
    """Returns the padded keys of a request, and the context that seals its reply.

    Raises:
        MalformedError: another length or form, not sealed to this key, or keys that are none.
    """
    head = _head("request", params, nonce_of(request, params))
    start = _HEAD.size + PUBLIC_BYTES
    context = open_from(private, bytes(request[_HEAD.size : start]), head)
    plain = context.open(head, bytes(request[start:]))
    keys = np.frombuffer(plain, _KEY).astype(np.int64)
    if ((keys < NO_KEY) | (keys >= params.num_keys)).any():
        raise _malformed("request", "keys outside the table", f"-1..{params.num_keys - 1}")
    return keys, context


def seal_reply(
    context: Context, params: EnclaveParams, nonce: bytes, records: NDArray[np.uint8], prg: Prg
) -> bytes:
    """Returns the reply to the request of a context.

    Args:
        records: (max_keys, record_bytes), contiguous.
    """
    head, salt = _head("reply", params, nonce), prg.bytes(_SALT_BYTES)
    key, iv = _reply_key(context, salt)
    return b"".join([head, salt, AES_128_GCM.cipher(key).encrypt(iv, records.data, head)])


def open_reply(
    context: Context, params: EnclaveParams, nonce: bytes, reply: bytes
) -> NDArray[np.uint8]:
    """Returns the records of a reply, (max_keys, record_bytes)."""
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
    return np.frombuffer(plain, np.uint8).reshape(params.max_keys, params.record_bytes)


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
            "round and params of this table; fetch params and evidence anew"
        )
    raise _malformed(kind, "another head", f"a {kind} of version 1, with the nonce of its evidence")


def _malformed(kind: _Kind, got: str, allowed: str) -> MalformedError:
    return MalformedError(
        f"a sealed {kind} cannot be read: got {got}; expected {allowed}; send it as docs/wire.md "
        "describes it, under the params of the table"
    )


_FRAME = struct.Struct("<II")

PIECE_BYTES = 1 << 20
"""Of rows that travel in one frame; a single longer row travels alone."""

MAX_BYTES = 1 << 31
"""Of any frame. More cannot be a frame, and what follows it could not be found."""


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
