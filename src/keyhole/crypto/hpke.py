"""Seals a message so that only the holder of one private key can read it.

The base mode of RFC 9180 with DHKEM(X25519, HKDF-SHA256), HKDF-SHA256 and AES-128-GCM or
ChaCha20-Poly1305. Hidden: the content of a message, from everybody but the holder of the private
key, if X25519 and the cipher hold. Not hidden: that there is a message, its length, and for which
key it is. Base mode does not tell the receiver who sent it, and one who gets the private key later
can read what was recorded before.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, MalformedError

KEM_ID = 0x0020
"""DHKEM(X25519, HKDF-SHA256)."""

KDF_ID = 0x0001
"""HKDF-SHA256."""

PUBLIC_BYTES = 32
"""Bytes of a public key, and of what is sent in front of a sealed message (`enc`)."""

TAG_BYTES = 16
"""What sealing adds to a message."""

NONCE_BYTES = 12
"""Bytes of a nonce of either cipher."""

_HASH_BYTES = 32
_LONGEST_EXPORT = 255 * _HASH_BYTES
_Cipher: TypeAlias = AESGCM | ChaCha20Poly1305


@dataclass(frozen=True)
class Suite:
    """A cipher beside the key agreement and the derivation, of which there is one each.

    Args:
        aead_id: its number in the registry of RFC 9180.
    """

    name: str
    aead_id: int
    key_bytes: int

    def cipher(self, key: bytes) -> _Cipher:
        """Returns the cipher under a key."""
        return AESGCM(key) if self.aead_id == AES_128_GCM.aead_id else ChaCha20Poly1305(key)


AES_128_GCM = Suite("AES-128-GCM", 0x0001, 16)
CHACHA20_POLY1305 = Suite("ChaCha20-Poly1305", 0x0003, 32)


def suite_of(kem_id: int, kdf_id: int, aead_id: int) -> Suite:
    """Returns the suite with these numbers."""
    for suite in (AES_128_GCM, CHACHA20_POLY1305):
        if (kem_id, kdf_id, aead_id) == (KEM_ID, KDF_ID, suite.aead_id):
            return suite
    raise MalformedError(
        f"HPKE suite is unknown: got kem {kem_id:#06x}, kdf {kdf_id:#06x}, aead {aead_id:#06x}; "
        f"expected kem {KEM_ID:#06x}, kdf {KDF_ID:#06x}, aead 0x0001 or 0x0003; take the suite "
        "from the key configuration"
    )


@dataclass(frozen=True, repr=False)
class PrivateKey:
    """A private key of X25519; printing it shows nothing.

    Args:
        secret: 32 bytes.

    >>> PrivateKey.fresh()
    PrivateKey(...)
    """

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != PUBLIC_BYTES:
            raise InputError(
                f"private key has the wrong length: got {len(self.secret)} bytes; expected "
                f"{PUBLIC_BYTES} bytes; make one with PrivateKey.fresh()"
            )

    def __repr__(self) -> str:
        return "PrivateKey(...)"

    @staticmethod
    def fresh(prg: Prg | None = None) -> PrivateKey:
        """Returns a new key, from `prg` if one is given (by tests)."""
        return PrivateKey((prg or Prg.fresh()).bytes(PUBLIC_BYTES))

    @cached_property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    @cached_property
    def _key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.secret)

    def agree(self, public: bytes) -> bytes:
        """Returns the secret shared with the holder of a public key.

        Raises:
            MalformedError: not a public key, or one of low order, with which the secret would be
                zero for everybody.
        """
        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise MalformedError(
                f"public key is invalid: got {len(public)} bytes; expected {PUBLIC_BYTES} bytes of "
                "X25519, not a point of low order; check that both sides are of one version"
            ) from error


@dataclass(frozen=True, repr=False)
class _Schedule:
    """What a context is made from (RFC 9180, section 5.1); printing it shows nothing."""

    key: bytes
    base_nonce: bytes
    exporter_secret: bytes

    def __repr__(self) -> str:
        return "_Schedule(...)"


@dataclass(repr=False)
class Context:
    """What both sides share after one key agreement, each message under the next nonce.

    The sender seals, the receiver opens and never the other way round, since both would use the
    same nonces; answers are sealed under keys that both export. From `seal_to` or `open_from`.
    """

    suite: Suite
    is_sender: bool
    _schedule: _Schedule
    _cipher: _Cipher = field(init=False)
    _sequence: int = 0

    def __post_init__(self) -> None:
        self._cipher = self.suite.cipher(self._schedule.key)

    def __repr__(self) -> str:
        return f"Context({self.suite.name}, ...)"

    def seal(self, associated: bytes, plain: bytes) -> bytes:
        """Returns `plain` sealed, 16 bytes longer; `associated` is bound to it and not sent."""
        self._check(is_sender=True)
        sealed = self._cipher.encrypt(self._nonce(), plain, associated)
        self._sequence += 1
        return sealed

    def open(self, associated: bytes, sealed: bytes) -> bytes:
        """Returns what was sealed. A message that is refused does not count as one."""
        self._check(is_sender=False)
        try:
            plain = self._cipher.decrypt(self._nonce(), sealed, associated)
        except (InvalidTag, ValueError) as error:
            raise cannot_open(len(sealed)) from error
        self._sequence += 1
        return plain

    def export(self, label: bytes, length: int) -> bytes:
        """Returns a secret for another purpose, the same on both sides (section 5.3)."""
        if not 0 <= length <= _LONGEST_EXPORT:
            raise InputError(
                f"a secret of this length cannot be derived: got {length} bytes; expected "
                f"0..{_LONGEST_EXPORT}; derive a seed, and more from the seed"
            )
        secret = self._schedule.exporter_secret
        return _labeled_expand(secret, _suite_id(self.suite), b"sec", label, length)

    def _nonce(self) -> bytes:
        # 2^96 messages, where the numbers end, are more than anybody can send.
        base = int.from_bytes(self._schedule.base_nonce, "big")
        return (base ^ self._sequence).to_bytes(NONCE_BYTES, "big")

    def _check(self, *, is_sender: bool) -> None:
        if self.is_sender != is_sender:
            tried = "sealing by the receiver" if is_sender else "opening by the sender"
            raise InputError(
                f"context is used in the wrong direction: got {tried}; expected the sender to seal "
                "and the receiver to open; seal answers under a key from export()"
            )


def seal_to(
    public: bytes, info: bytes, suite: Suite = AES_128_GCM, *, ephemeral: PrivateKey | None = None
) -> tuple[bytes, Context]:
    """Agrees on keys with the holder of a public key (SetupBaseS of RFC 9180).

    Args:
        info: what both sides agree that this is for.
        ephemeral: the sender's key of this one use; a fresh one if None. Given by tests only.
    """
    own = ephemeral or PrivateKey.fresh()
    shared = _shared_secret(own.agree(public), own.public, public)
    return own.public, Context(suite, True, _key_schedule(shared, info, suite))


def open_from(private: PrivateKey, enc: bytes, info: bytes, suite: Suite = AES_128_GCM) -> Context:
    """Agrees on keys with anyone who sent `enc` (SetupBaseR of RFC 9180)."""
    shared = _shared_secret(private.agree(enc), enc, private.public)
    return Context(suite, False, _key_schedule(shared, info, suite))


def extract(salt: bytes, secret: bytes) -> bytes:
    """Computes HKDF-Extract with SHA-256 (RFC 5869)."""
    return hmac.digest(salt or bytes(_HASH_BYTES), secret, "sha256")


def expand(key: bytes, info: bytes, length: int) -> bytes:
    """Computes HKDF-Expand with SHA-256 (RFC 5869)."""
    if length <= _HASH_BYTES:  # as almost always: one block
        return hmac.digest(key, info + b"\1", "sha256")[:length]
    blocks, last = [], b""
    for number in range(-(-length // _HASH_BYTES)):
        last = hmac.digest(key, last + info + bytes([number + 1]), "sha256")
        blocks.append(last)
    return b"".join(blocks)[:length]


def cannot_open(length: int) -> MalformedError:
    """Returns the error of every sealed message that does not open: it does not tell why."""
    return MalformedError(
        f"a sealed message cannot be opened: got {length} bytes; expected what was sealed for this "
        "key, unchanged; check that the key configuration is the current one"
    )


def _shared_secret(agreed: bytes, enc: bytes, public: bytes) -> bytes:
    """ExtractAndExpand of the key encapsulation (section 4.1)."""
    kem = b"KEM" + struct.pack(">H", KEM_ID)
    key = _labeled_extract(b"", kem, b"eae_prk", agreed)
    return _labeled_expand(key, kem, b"shared_secret", enc + public, _HASH_BYTES)


def _key_schedule(shared: bytes, info: bytes, suite: Suite) -> _Schedule:
    """KeySchedule of the base mode (section 5.1)."""
    name = _suite_id(suite)
    context = _schedule_context(name, info)
    secret = _labeled_extract(shared, name, b"secret", b"")
    return _Schedule(
        _labeled_expand(secret, name, b"key", context, suite.key_bytes),
        _labeled_expand(secret, name, b"base_nonce", context, NONCE_BYTES),
        _labeled_expand(secret, name, b"exp", context, _HASH_BYTES),
    )


@lru_cache(maxsize=16)  # of few keys and purposes, and public
def _schedule_context(suite_id: bytes, info: bytes) -> bytes:
    no_psk = _labeled_extract(b"", suite_id, b"psk_id_hash", b"")
    return b"\0" + no_psk + _labeled_extract(b"", suite_id, b"info_hash", info)


@lru_cache(maxsize=4)
def _suite_id(suite: Suite) -> bytes:
    return b"HPKE" + struct.pack(">HHH", KEM_ID, KDF_ID, suite.aead_id)


def _labeled_extract(salt: bytes, suite_id: bytes, label: bytes, secret: bytes) -> bytes:
    return extract(salt, b"HPKE-v1" + suite_id + label + secret)


def _labeled_expand(key: bytes, suite_id: bytes, label: bytes, info: bytes, length: int) -> bytes:
    prefix = struct.pack(">H", length) + b"HPKE-v1" + suite_id + label
    return expand(key, prefix + info, length)
