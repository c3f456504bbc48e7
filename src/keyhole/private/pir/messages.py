"""Frames: what stands around every query and reply, and how a message is refused.

A frame is a head (what it is, for or from which server, of which round, under which terms), a body
whose length follows from the terms, and a check over all of it. What arrives is compared with the
one length it can have, then with its check, then with the terms, before its content is looked at.
Whatever is wrong, a server answers with the same bytes. The body of a reply begins with the check
of the query that it answers: an old reply does not pass for that to a new query.

The check finds damage. It does not stop whoever wants to forge a message: that is what TLS is for.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Literal, TypeAlias

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from keyhole.errors import MalformedError, StaleError
from keyhole.private.pir.terms import Terms

__all__ = [
    "CHECK_BYTES",
    "FRAME_BYTES",
    "REFUSAL",
    "REPLY_BYTES",
    "FrameKind",
    "check_of",
    "seal",
    "seal_reply",
    "unseal",
    "unseal_reply",
]

FrameKind: TypeAlias = Literal["query", "reply"]
Body: TypeAlias = bytes | bytearray | memoryview

_MAGIC = b"KHP1"
_KINDS = {"query": 1, "reply": 2}
_HEAD = struct.Struct("<4sBBH16s32s")
_PIECE = 1 << 30  # bytes that the sum of a reply takes at once: the library ends at 2^31

CHECK_BYTES = 16
"""Of the check at the end of a message."""

FRAME_BYTES = _HEAD.size + CHECK_BYTES
"""What a frame adds to its body."""

REPLY_BYTES = FRAME_BYTES + CHECK_BYTES
"""What a reply adds to its rows: a frame, and the check of its query."""

REFUSAL = _MAGIC + bytes([3]) + bytes(FRAME_BYTES - 5)
"""The answer to every message that cannot be used: it does not tell why."""


def seal(kind: FrameKind, terms: Terms, server: int, *body: Body) -> bytes:
    """Returns a message.

    Args:
        kind: of the message.
        terms: under which it is sent.
        server: 0 or 1, to which a query goes and from which a reply comes.
        body: in one or more parts, together of the length that the terms demand.
    """
    head = _HEAD.pack(_MAGIC, _KINDS[kind], server, 0, terms.round, terms.digest)
    return b"".join([head, *body, _check(kind, head, *body)])


def seal_reply(query: bytes | memoryview, terms: Terms, server: int, rows: Body) -> bytes:
    """Returns the reply to a query.

    Args:
        query: as it arrived.
        terms: under which it is answered.
        server: 0 or 1, from which the reply comes.
        rows: of the length that the terms demand.
    """
    return seal("reply", terms, server, check_of(query), rows)


def unseal(
    data: bytes | memoryview, kind: FrameKind, terms: Terms, server: int, body_bytes: int
) -> memoryview:
    """Returns the body of a message.

    Args:
        data: as it arrived.
        kind: what it must be.
        terms: what it must be under.
        server: which server it must be for, or from.
        body_bytes: the only length that its body can have.

    Raises:
        MalformedError: not such a message, or damaged.
        StaleError: of another round, or under other terms.
    """
    view = memoryview(data)
    if len(view) != body_bytes + FRAME_BYTES:
        raise _malformed(f"{len(view)} bytes", f"{body_bytes + FRAME_BYTES} bytes")
    head, body = view[: _HEAD.size], view[_HEAD.size : -CHECK_BYTES]
    if check_of(view) != _check(kind, head, body):
        raise _malformed("a wrong check", "the check of its bytes")
    magic, number, party, zero, round_name, digest = _HEAD.unpack(head)
    if (magic, number, party, zero) != (_MAGIC, _KINDS[kind], server, 0):
        raise _malformed("another head", f"a {kind} of server {server}, of version 1")
    if round_name != terms.round or digest != terms.digest:
        raise StaleError(
            "a message about other slices",
            got="another round, or other terms",
            allowed="the round and terms of this table",
            fix="fetch the terms anew, from every server",
        )
    return body


def unseal_reply(
    data: bytes | memoryview, asked: bytes, terms: Terms, server: int, rows_bytes: int
) -> memoryview:
    """Returns the rows of the reply to a query.

    Args:
        data: as it arrived.
        asked: the check of the query, see `check_of`.
        terms: what it must be under.
        server: which server it must be from.
        rows_bytes: the only length that its rows can have.

    Raises:
        MalformedError: no reply, or damaged, or that to another query.
        StaleError: of another round, or under other terms.
    """
    body = unseal(data, "reply", terms, server, CHECK_BYTES + rows_bytes)
    if body[:CHECK_BYTES] != asked:
        raise _malformed("the reply to another query", "the reply to this one")
    return body[CHECK_BYTES:]


def check_of(message: bytes | memoryview) -> bytes:
    """The 16 bytes at the end of a message, which tell it from every other."""
    return bytes(message[-CHECK_BYTES:])


def _check(kind: FrameKind, *parts: Body) -> bytes:
    """SHA-256 of a query, which tells it from every other; GMAC of a reply, under a key that
    everybody knows: it finds damage, five times as fast, and replies are long."""
    if kind == "query":
        whole = sha256()
        for part in parts:
            whole.update(part)
        return whole.digest()[:CHECK_BYTES]
    summed = Cipher(AES(b"keyhole-pir-repl"), GCM(bytes(12))).encryptor()
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _PIECE):
            summed.authenticate_additional_data(view[start : start + _PIECE])
    summed.finalize()
    return summed.tag


def _malformed(got: str, allowed: str) -> MalformedError:
    return MalformedError(
        "a message of private retrieval cannot be read",
        got=got,
        allowed=allowed,
        fix="send it as docs/wire.md describes it, under the terms of the table",
    )
