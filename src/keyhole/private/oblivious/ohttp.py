"""Oblivious HTTP: a request that its relay cannot read, and whose sender its gateway cannot see.

RFC 9458. The client seals a request of binary HTTP to the gateway's key and hands it to a relay;
the gateway opens it and seals its answer under a key that only this client has.

The relay learns who asks, when, how many requests of which lengths. The gateway learns what is
asked, and that it came through the relay. As long as the two do not work together, and the relay
serves enough clients and mixes them, nobody knows who asks for what. Not covered: what timing and
lengths give away, requests that nobody else makes, and a gateway key that is stolen later, which
opens what was recorded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag

from keyhole.errors import MalformedError
from keyhole.private.hpke import (
    KDF_ID,
    KEM_ID,
    NONCE_BYTES,
    PUBLIC_BYTES,
    TAG_BYTES,
    Context,
    PrivateKey,
    Suite,
    cannot_open,
    expand,
    extract,
    open_from,
    seal_to,
    suite_of,
)
from keyhole.private.oblivious.key_config import KeyConfig
from keyhole.private.prg import Prg

__all__ = [
    "REQUEST_OVERHEAD",
    "REQUEST_TYPE",
    "RESPONSE_TYPE",
    "Exchange",
    "open_request",
    "open_response",
    "response_overhead",
    "seal_request",
    "seal_response",
]

REQUEST_TYPE = "message/ohttp-req"
RESPONSE_TYPE = "message/ohttp-res"

_REQUEST_LABEL = b"message/bhttp request"
_RESPONSE_LABEL = b"message/bhttp response"
_HEAD = struct.Struct(">BHHH")

REQUEST_OVERHEAD = _HEAD.size + PUBLIC_BYTES + TAG_BYTES
"""Bytes that sealing adds to a request: 55."""


@dataclass(frozen=True, repr=False)
class Exchange:
    """What either side keeps of a request until its answer is sealed or opened.

    Args:
        enc: of the request, 32 bytes; no two requests share it.
        context: of HPKE.
    """

    enc: bytes
    context: Context

    def __repr__(self) -> str:
        return f"Exchange({self.context!r})"


def seal_request(
    config: KeyConfig, plain: bytes, *, ephemeral: PrivateKey | None = None
) -> tuple[bytes, Exchange]:
    """Seals a request (section 4.3).

    Args:
        config: of the gateway.
        plain: binary HTTP, padded so that its length tells nothing.
        ephemeral: a key for this request alone; a fresh one if None. Given by tests only.

    Returns:
        The sealed request, 55 bytes longer, and what opens its answer.

    Raises:
        MalformedError: the key of the configuration cannot be used.
    """
    suite = config.suite
    head = _HEAD.pack(config.key_id, KEM_ID, KDF_ID, suite.aead_id)
    enc, context = seal_to(config.public, _info(head), suite, ephemeral=ephemeral)
    return head + enc + context.seal(b"", plain), Exchange(enc, context)


def open_request(keys: Mapping[int, PrivateKey], sealed: bytes) -> tuple[bytes, Exchange]:
    """Opens a request at the gateway (section 4.3).

    Args:
        keys: of the gateway, by their number.
        sealed: as it arrived.

    Returns:
        The request, and what seals its answer.

    Raises:
        MalformedError: it was not sealed to one of the keys, or was changed since. All causes look
            alike to whoever sent it (`gateway.PROBLEM`).
    """
    if len(sealed) < REQUEST_OVERHEAD:
        raise cannot_open(len(sealed))
    head, enc = sealed[: _HEAD.size], sealed[_HEAD.size : _HEAD.size + PUBLIC_BYTES]
    key_id, *suite_ids = _HEAD.unpack(head)
    if key_id not in keys:
        raise cannot_open(len(sealed))
    try:
        context = open_from(keys[key_id], enc, _info(head), suite_of(*suite_ids))
        return context.open(b"", sealed[_HEAD.size + PUBLIC_BYTES :]), Exchange(enc, context)
    except MalformedError as error:
        raise cannot_open(len(sealed)) from error


def seal_response(exchange: Exchange, plain: bytes, prg: Prg | None = None) -> bytes:
    """Seals an answer at the gateway, under a key of this answer alone (section 4.4).

    Args:
        exchange: of the request.
        plain: binary HTTP, padded so that its length tells nothing.
        prg: where the nonce comes from; a fresh one if None.
    """
    nonce = (prg or Prg.fresh()).bytes(_secret_bytes(exchange.context.suite))
    return _seal_with_nonce(exchange, plain, nonce)


def open_response(exchange: Exchange, sealed: bytes) -> bytes:
    """Opens an answer at the client (section 4.4).

    Raises:
        MalformedError: it is not an answer of the gateway to this request, or was changed.
    """
    size = _secret_bytes(exchange.context.suite)
    if len(sealed) < size + TAG_BYTES:
        raise cannot_open(len(sealed))
    key, nonce = _response_key(exchange, sealed[:size])
    try:
        return exchange.context.suite.cipher(key).decrypt(nonce, sealed[size:], b"")
    except (InvalidTag, ValueError) as error:
        raise cannot_open(len(sealed)) from error


def response_overhead(suite: Suite) -> int:
    """Bytes that sealing adds to an answer: 32 with AES-128-GCM, 48 with ChaCha20-Poly1305."""
    return _secret_bytes(suite) + TAG_BYTES


def _seal_with_nonce(exchange: Exchange, plain: bytes, response_nonce: bytes) -> bytes:
    key, nonce = _response_key(exchange, response_nonce)
    return response_nonce + exchange.context.suite.cipher(key).encrypt(nonce, plain, b"")


def _response_key(exchange: Exchange, response_nonce: bytes) -> tuple[bytes, bytes]:
    """Key and nonce of an answer."""
    suite = exchange.context.suite
    secret = exchange.context.export(_RESPONSE_LABEL, _secret_bytes(suite))
    key = extract(exchange.enc + response_nonce, secret)
    return expand(key, b"key", suite.key_bytes), expand(key, b"nonce", NONCE_BYTES)


def _secret_bytes(suite: Suite) -> int:
    return max(NONCE_BYTES, suite.key_bytes)


def _info(head: bytes) -> bytes:
    return _REQUEST_LABEL + b"\0" + head
