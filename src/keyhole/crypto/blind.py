"""Signs what the signer cannot read: RSABSSA-SHA384-PSS-Deterministic of RFC 9474.

Somebody who may have a signature blinds a message and has it signed; what comes out of `finish` is
a plain RSA-PSS signature of the message. Hidden from the signer: the message, and which of its
signatures this became, whatever it can compute: what it sees is uniform, and independent of message
and signature. Not hidden: for whom, when and how many it signed. A signer that uses a key of its
own for somebody can tell them by it: the key must be known to be the same for all. Nobody else can
make a signature, if one-more RSA inversion is hard. Python's integers do not take constant time, so
the signer hides what it is given by a factor of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha384
from math import gcd

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_private_key,
    load_der_public_key,
)

from keyhole.crypto.prg import Prg, new_rsa_key
from keyhole.errors import MalformedError

BITS = 2048
"""Bits of a modulus, as for the tokens of RFC 9578."""

SIGNATURE_BYTES = BITS // 8
"""Bytes of a signature, and of a blinded message."""

_HASH = 48  # bytes, and of a salt


@dataclass(frozen=True)
class BlindPublic:
    """The key that everybody knows."""

    key: RSAPublicKey

    @staticmethod
    def decode(data: bytes) -> BlindPublic:
        """Returns the key of a SubjectPublicKeyInfo; raises MalformedError for any other."""
        try:
            key = load_der_public_key(data)
        except ValueError as error:
            raise _malformed(f"{len(data)} bytes") from error
        if not isinstance(key, RSAPublicKey) or key.key_size != BITS:
            raise _malformed("a key of another kind")
        return BlindPublic(key)

    @cached_property
    def encoded(self) -> bytes:
        """The key as SubjectPublicKeyInfo."""
        return self.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    @cached_property
    def numbers(self) -> tuple[int, int]:
        """Modulus and exponent."""
        known = self.key.public_numbers()
        return known.n, known.e

    def is_signed(self, message: bytes, signature: bytes) -> bool:
        """Returns whether a signature is one of a message, as for any RSA-PSS."""
        try:
            self.key.verify(signature, message, PSS(MGF1(SHA384()), _HASH), SHA384())
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, repr=False)
class Blinded:
    """A message on its way to be signed; `sent` is what the signer sees."""

    public: BlindPublic
    message: bytes
    sent: bytes
    inverse: int

    def __repr__(self) -> str:
        return f"Blinded({len(self.sent)} bytes)"

    def finish(self, answer: bytes) -> bytes:
        """Returns the signature of the message; raises MalformedError where it is none."""
        n, _ = self.public.numbers
        signature = _octets(_number(answer, n) * self.inverse % n, n)
        if not self.public.is_signed(self.message, signature):
            raise _malformed("an answer that does not become a signature")
        return signature


def blind(
    public: BlindPublic, message: bytes, *, salt: bytes | None = None, inverse: int | None = None
) -> Blinded:
    """Blinds a message (section 4.2); `salt` and `inverse` are given by tests only."""
    n, e = public.numbers
    salt = Prg.fresh().bytes(_HASH) if salt is None else salt
    encoded = _encode(message, salt, n.bit_length() - 1)
    if gcd(encoded, n) != 1:
        raise _malformed("a key whose factors a message shows")
    factor = _unit(n) if inverse is None else pow(inverse, -1, n)
    sent = _octets(encoded * pow(factor, e, n) % n, n)
    return Blinded(public, message, sent, pow(factor, -1, n))


class BlindSigner:
    """Signs what it cannot read (section 4.3). Threads may share it."""

    def __init__(self, key: RSAPrivateKey) -> None:
        self._key, self.public = key, BlindPublic(key.public_key())
        known = key.private_numbers()
        self._primes, self._exponents = (known.p, known.q), (known.dmp1, known.dmq1)
        self._coefficient = known.iqmp

    def __repr__(self) -> str:
        return "BlindSigner(...)"

    @staticmethod
    def fresh() -> BlindSigner:
        """Returns a signer with a new key."""
        return BlindSigner(new_rsa_key(BITS))

    @staticmethod
    def decode(data: bytes) -> BlindSigner:
        """Returns the signer whose secret bytes `encode` gave; raises MalformedError for others."""
        try:
            found = load_der_private_key(data, None)
        except (TypeError, ValueError) as error:  # TypeError: a key behind a password
            raise _malformed(f"{len(data)} bytes") from error
        if not isinstance(found, RSAPrivateKey) or found.key_size != BITS:
            raise _malformed("a key of another kind")
        return BlindSigner(found)

    def encode(self) -> bytes:
        """Returns the secret key, as PKCS 8."""
        return self._key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())

    def sign(self, sent: bytes) -> bytes:
        """Returns the answer to a blinded message."""
        n, e = self.public.numbers
        blinded, own = _number(sent, n), _unit(n)
        hidden = blinded * pow(own, e, n) % n
        (p, q), (dp, dq) = self._primes, self._exponents
        low = pow(hidden % q, dq, q)
        high = (pow(hidden % p, dp, p) - low) * self._coefficient % p
        made = (low + high * q) * pow(own, -1, n) % n
        if pow(made, e, n) != blinded:  # a fault here would show the factors
            raise AssertionError("a signature that does not verify")
        return _octets(made, n)


def _encode(message: bytes, salt: bytes, bits: int) -> int:
    """EMSA-PSS of RFC 8017, section 9.1.1, with SHA-384 for hash and mask."""
    length = -(-bits // 8)
    digest = sha384(bytes(8) + sha384(message).digest() + salt).digest()
    block = bytes(length - len(salt) - _HASH - 2) + b"\1" + salt
    masked = bytes(a ^ b for a, b in zip(block, _mask(digest, len(block)), strict=True))
    return int.from_bytes(masked + digest + b"\xbc") & ((1 << bits) - 1)


def _mask(seed: bytes, length: int) -> bytes:
    """MGF1 of RFC 8017, appendix B.2.1."""
    blocks = (sha384(seed + count.to_bytes(4)).digest() for count in range(-(-length // _HASH)))
    return b"".join(blocks)[:length]


def _unit(n: int) -> int:
    """A number that has an inverse mod n, uniform but for one part in 2^128."""
    wide = Prg.fresh().bytes(n.bit_length() // 8 + 16)
    found = int.from_bytes(wide) % n
    return found if gcd(found, n) == 1 else _unit(n)


def _number(data: bytes, n: int) -> int:
    found = int.from_bytes(data)
    if len(data) != -(-n.bit_length() // 8) or not 0 < found < n:
        raise _malformed(f"{len(data)} bytes")
    return found


def _octets(number: int, n: int) -> bytes:
    return number.to_bytes(-(-n.bit_length() // 8))


def _malformed(got: str) -> MalformedError:
    return MalformedError(
        f"not a message of blind signatures: got {got}; expected a number below the modulus of an "
        f"RSA key of {BITS} bits; fetch the key of the round again"
    )
