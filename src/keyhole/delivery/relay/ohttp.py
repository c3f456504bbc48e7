"""Seals requests that a relay cannot read and whose sender the gateway cannot see (RFC 9458).

The client seals a request of binary HTTP to the gateway's key and hands it to a relay; the gateway
opens it and seals its answer under a key that only this client has. A client that is given a key of
its own can be told from all others, so it compares key configurations from two sources (section 7):
they must be equal, byte for byte.

The relay learns who asks, when, how many requests of which lengths. The gateway learns what is
asked, and that it came through the relay. As long as the two do not work together, and the relay
serves enough clients and mixes them, nobody knows who asks for what. Not covered: what timing and
lengths give away, requests that nobody else makes, and a gateway key that is stolen later, which
opens what was recorded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidTag

from keyhole.crypto.hpke import (
    AES_128_GCM,
    CHACHA20_POLY1305,
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
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, MalformedError

KEYS_TYPE = "application/ohttp-keys"
"""Content type of a list of key configurations."""

_CONFIG_HEAD = struct.Struct(">BH")
_LENGTH = struct.Struct(">H")
_PAIR = struct.Struct(">HH")
_SUITES = {(KDF_ID, suite.aead_id): suite for suite in (AES_128_GCM, CHACHA20_POLY1305)}


@dataclass(frozen=True)
class KeyConfig:
    """One public key of a gateway, and with which ciphers it may be used.

    Args:
        key_id: 0..255.
        algorithms: (kdf, aead) pairs in the gateway's order; unknown ones are kept and not used.
    """

    key_id: int
    public: bytes
    algorithms: tuple[tuple[int, int], ...] = tuple(_SUITES)

    def __post_init__(self) -> None:
        if not (0 <= self.key_id <= 255 and len(self.public) == PUBLIC_BYTES and self.algorithms):
            raise _malformed(f"{len(self.public)} bytes of key, {len(self.algorithms)} ciphers")

    @property
    def suite(self) -> Suite:
        """The first of the gateway's ciphers that is known here."""
        for pair in self.algorithms:
            if pair in _SUITES:
                return _SUITES[pair]
        raise _malformed("no cipher that is known here")

    def encode(self) -> bytes:
        """Returns the configuration as section 3.1 lays it out."""
        pairs = b"".join([_PAIR.pack(*pair) for pair in self.algorithms])
        return (
            _CONFIG_HEAD.pack(self.key_id, KEM_ID) + self.public + _LENGTH.pack(len(pairs)) + pairs
        )

    @staticmethod
    def decode(data: bytes) -> KeyConfig:
        """Returns the configuration that `data` holds."""
        at = _CONFIG_HEAD.size + PUBLIC_BYTES
        if len(data) < at + _LENGTH.size + _PAIR.size:
            raise _malformed(f"{len(data)} bytes")
        key_id, kem_id = _CONFIG_HEAD.unpack_from(data)
        pairs = data[at + _LENGTH.size :]
        if kem_id != KEM_ID:
            raise _malformed(f"kem {kem_id:#06x}")
        if _LENGTH.unpack_from(data, at) != (len(pairs),) or len(pairs) % _PAIR.size:
            raise _malformed(f"{len(pairs)} bytes of ciphers")
        return KeyConfig(key_id, data[_CONFIG_HEAD.size : at], tuple(_PAIR.iter_unpack(pairs)))


def encode_configs(configs: Sequence[KeyConfig]) -> bytes:
    """Returns a list of configurations, each behind its length (section 3.2)."""
    encoded = [config.encode() for config in configs]
    return b"".join([_LENGTH.pack(len(one)) + one for one in encoded])


def decode_configs(data: bytes) -> tuple[KeyConfig, ...]:
    """Returns the configurations of a list that can be used here, one or more.

    Raises:
        MalformedError: any part of the list is wrong: then nothing of it is used, since clients
            that recover different parts could be told apart. Or no key in it is of X25519.
    """
    found: list[KeyConfig] = []
    at = 0
    while at < len(data):
        start = at + _LENGTH.size
        if start > len(data):
            raise _malformed("a list that ends too early")
        at = start + _LENGTH.unpack_from(data, start - _LENGTH.size)[0]
        if at > len(data) or at - start < _CONFIG_HEAD.size:
            raise _malformed("a list that ends too early")
        if _CONFIG_HEAD.unpack_from(data, start)[1] == KEM_ID:
            found.append(KeyConfig.decode(data[start:at]))
    if not found or len({config.key_id for config in found}) < len(found):
        raise _malformed(f"{len(found)} keys of X25519")
    return tuple(found)


@dataclass(frozen=True, repr=False)
class GatewayKey:
    """A key of a gateway; requests name it by `key_id`, 0..255."""

    key_id: int
    private: PrivateKey

    def __repr__(self) -> str:
        return f"GatewayKey({self.key_id}, ...)"

    @staticmethod
    def fresh(key_id: int = 1) -> GatewayKey:
        """Returns a new key."""
        return GatewayKey(key_id, PrivateKey.fresh())

    @property
    def config(self) -> KeyConfig:
        """What clients are told."""
        return KeyConfig(self.key_id, self.private.public)


def encode_gateway_key(key: GatewayKey) -> str:
    """Returns a key as a line of a key file: its number and its secret in hex."""
    return f"{key.key_id} {key.private.secret.hex()}\n"


def decode_gateway_keys(text: str) -> tuple[GatewayKey, ...]:
    """Returns the keys of a key file, the one that clients are to use first."""
    found: list[GatewayKey] = []
    for line in text.split("\n"):
        words = line.split()
        if not words:
            continue
        try:
            number, secret = int(words[0]), bytes.fromhex(" ".join(words[1:]))
        except ValueError as error:
            raise _bad_file(len(found)) from error
        if len(words) != 2 or not 0 <= number <= 255 or len(secret) != PUBLIC_BYTES:
            raise _bad_file(len(found))
        found.append(GatewayKey(number, PrivateKey(secret)))
    if not found or len({key.key_id for key in found}) < len(found):
        raise _bad_file(len(found))
    return tuple(found)


def load_gateway_keys(path: Path) -> tuple[GatewayKey, ...]:
    """Reads a file of keys, made by `keyhole token gateway-key`.

    Each line has the number of a key, 0..255, and its secret in hex. Clients are told of all keys
    and use the first; a new one is put in front, and the old one removed a while later.
    """
    try:
        mode, text = path.stat().st_mode, path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the gateway keys of {path.name}: got {type(error).__name__}; expected a "
            "file of keys; make one with `keyhole token gateway-key`"
        ) from error
    if mode & 0o077:
        raise InputError(
            f"{path.name} can be read by others: got mode {mode & 511:o}; expected mode 600: its "
            f"owner alone; chmod 600 {path.name}, and make a new key if it may have been seen"
        )
    return decode_gateway_keys(text)


def _bad_file(good: int) -> InputError:
    return InputError(
        f"not a file of gateway keys: got {good} good lines before a bad one, or none; expected "
        "lines of a number of 0..255 and 64 hex digits, each number once; make one with `keyhole "
        "token gateway-key`"
    )


def _malformed(got: str) -> MalformedError:
    return MalformedError(
        f"this is not a key configuration that can be used: got {got}; expected what RFC 9458 lays "
        "out, with a key of X25519 and HKDF-SHA256; fetch it again; check that both sides are of "
        "one version"
    )


REQUEST_TYPE = "message/ohttp-req"
RESPONSE_TYPE = "message/ohttp-res"

_REQUEST_LABEL = b"message/bhttp request"
_RESPONSE_LABEL = b"message/bhttp response"
_HEAD = struct.Struct(">BHHH")

REQUEST_OVERHEAD = _HEAD.size + PUBLIC_BYTES + TAG_BYTES
"""Bytes that sealing adds to a request: 55."""


@dataclass(frozen=True, repr=False)
class Exchange:
    """What either side keeps of a request until its answer is sealed or opened; no two requests
    share the 32 bytes of `enc`."""

    enc: bytes
    context: Context

    def __repr__(self) -> str:
        return f"Exchange({self.context!r})"


def seal_request(
    config: KeyConfig, plain: bytes, *, ephemeral: PrivateKey | None = None
) -> tuple[bytes, Exchange]:
    """Seals a request (section 4.3): returns it, 55 bytes longer, and what opens its answer.
    `ephemeral`, a key for this request alone, is given by tests only."""
    suite = config.suite
    head = _HEAD.pack(config.key_id, KEM_ID, KDF_ID, suite.aead_id)
    enc, context = seal_to(config.public, _info(head), suite, ephemeral=ephemeral)
    return head + enc + context.seal(b"", plain), Exchange(enc, context)


def open_request(keys: Mapping[int, PrivateKey], sealed: bytes) -> tuple[bytes, Exchange]:
    """Opens a request at the gateway (section 4.3); returns it, and what seals its answer. All
    causes why it does not open look alike to anyone who sent it (`gateway.PROBLEM`)."""
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
    """Seals an answer at the gateway, under a key of this answer alone (section 4.4)."""
    nonce = (prg or Prg.fresh()).bytes(_secret_bytes(exchange.context.suite))
    return _seal_with_nonce(exchange, plain, nonce)


def open_response(exchange: Exchange, sealed: bytes) -> bytes:
    """Opens an answer at the client (section 4.4)."""
    size = _secret_bytes(exchange.context.suite)
    if len(sealed) < size + TAG_BYTES:
        raise cannot_open(len(sealed))
    key, nonce = _response_key(exchange, sealed[:size])
    try:
        return exchange.context.suite.cipher(key).decrypt(nonce, sealed[size:], b"")
    except (InvalidTag, ValueError) as error:
        raise cannot_open(len(sealed)) from error


def response_overhead(suite: Suite) -> int:
    """Returns the number of bytes that sealing adds to an answer: 32 with AES-128-GCM, 48 with
    ChaCha20-Poly1305."""
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
