"""Makes and checks Ed25519 signatures (RFC 8032): keys, texts and signatures are bytes.

Hidden: the private key. Not hidden: texts. Rests on Ed25519 as the `cryptography` package has it.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_BYTES, SIGNATURE_BYTES = 32, 64


def new_private() -> bytes:
    """Returns a new private key, which is 32 random bytes."""
    from keyhole.crypto.prg import Prg  # compiled code: a device that only checks never loads it

    return Prg.fresh().bytes(KEY_BYTES)


def public_of(private: bytes) -> bytes:
    """Returns the public half of a key."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(private: bytes, text: bytes) -> bytes:
    """Returns the signature of a text.

    >>> key = new_private()
    >>> is_signed(public_of(key), b"one", sign(key, b"one"))
    True
    >>> is_signed(public_of(key), b"two", sign(key, b"one"))
    False
    """
    return Ed25519PrivateKey.from_private_bytes(private).sign(text)


def is_signed(public: bytes, text: bytes, signature: bytes) -> bool:
    """Returns whether a signature is that of a text by the owner of a key."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
