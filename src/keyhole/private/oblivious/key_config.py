"""Key configurations: how clients learn to which key a gateway's requests are sealed (RFC 9458).

A client that is given a key of its own can be told from all others, so it compares configurations
from two sources (section 7): they must be equal, byte for byte.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.errors import InputError, MalformedError
from keyhole.private.hpke import (
    AES_128_GCM,
    CHACHA20_POLY1305,
    KDF_ID,
    KEM_ID,
    PUBLIC_BYTES,
    PrivateKey,
    Suite,
)

__all__ = [
    "KEYS_TYPE",
    "GatewayKey",
    "KeyConfig",
    "decode_configs",
    "decode_gateway_keys",
    "encode_configs",
    "encode_gateway_key",
]

KEYS_TYPE = "application/ohttp-keys"
"""Content type of a list of key configurations."""

_HEAD = struct.Struct(">BH")
_LENGTH = struct.Struct(">H")
_PAIR = struct.Struct(">HH")
_SUITES = {(KDF_ID, suite.aead_id): suite for suite in (AES_128_GCM, CHACHA20_POLY1305)}


@dataclass(frozen=True)
class KeyConfig:
    """One public key of a gateway, and with which ciphers it may be used.

    Args:
        key_id: 0..255.
        public: of X25519, 32 bytes.
        algorithms: (kdf, aead) pairs in the gateway's order; unknown ones are kept and not used.

    Raises:
        MalformedError: such a configuration cannot be.
    """

    key_id: int
    public: bytes
    algorithms: tuple[tuple[int, int], ...] = tuple(_SUITES)

    def __post_init__(self) -> None:
        if not (0 <= self.key_id <= 255 and len(self.public) == PUBLIC_BYTES and self.algorithms):
            raise _malformed(f"{len(self.public)} bytes of key, {len(self.algorithms)} ciphers")

    @property
    def suite(self) -> Suite:
        """The first of the gateway's ciphers that is known here.

        Raises:
            MalformedError: there is none.
        """
        for pair in self.algorithms:
            if pair in _SUITES:
                return _SUITES[pair]
        raise _malformed("no cipher that is known here")

    def encode(self) -> bytes:
        """Returns the configuration as section 3.1 lays it out."""
        pairs = b"".join([_PAIR.pack(*pair) for pair in self.algorithms])
        return _HEAD.pack(self.key_id, KEM_ID) + self.public + _LENGTH.pack(len(pairs)) + pairs

    @staticmethod
    def decode(data: bytes) -> KeyConfig:
        """Returns the configuration that `data` holds.

        Raises:
            MalformedError: it holds none, or one of another key agreement.
        """
        at = _HEAD.size + PUBLIC_BYTES
        if len(data) < at + _LENGTH.size + _PAIR.size:
            raise _malformed(f"{len(data)} bytes")
        key_id, kem_id = _HEAD.unpack_from(data)
        pairs = data[at + _LENGTH.size :]
        if kem_id != KEM_ID:
            raise _malformed(f"kem {kem_id:#06x}")
        if _LENGTH.unpack_from(data, at) != (len(pairs),) or len(pairs) % _PAIR.size:
            raise _malformed(f"{len(pairs)} bytes of ciphers")
        return KeyConfig(key_id, data[_HEAD.size : at], tuple(_PAIR.iter_unpack(pairs)))


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
        if at > len(data) or at - start < _HEAD.size:
            raise _malformed("a list that ends too early")
        if _HEAD.unpack_from(data, start)[1] == KEM_ID:
            found.append(KeyConfig.decode(data[start:at]))
    if not found or len({config.key_id for config in found}) < len(found):
        raise _malformed(f"{len(found)} keys of X25519")
    return tuple(found)


@dataclass(frozen=True, repr=False)
class GatewayKey:
    """A key of a gateway.

    Args:
        key_id: 0..255, by which requests name it.
        private: its secret.
    """

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
    """Returns the keys of a key file, the one that clients are to use first.

    Raises:
        InputError: a line is not a number of 0..255 and 64 hex digits, or a number is there twice.
    """
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


def _bad_file(good: int) -> InputError:
    return InputError(
        "not a file of gateway keys",
        got=f"{good} good lines before a bad one, or none",
        allowed="lines of a number of 0..255 and 64 hex digits, each number once",
        fix="make one with `keyhole token gateway-key`",
    )


def _malformed(got: str) -> MalformedError:
    return MalformedError(
        "this is not a key configuration that can be used",
        got=got,
        allowed="what RFC 9458 lays out, with a key of X25519 and HKDF-SHA256",
        fix="fetch it again; check that both sides are of one version",
    )
