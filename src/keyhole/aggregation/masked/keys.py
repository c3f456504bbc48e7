"""Checks what a client advertises: two public keys, a commitment, and who signed them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from keyhole.aggregation.masked.messages import pack_set
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.crypto.hpke import PrivateKey
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, MalformedError

_PRIME = 2**255 - 19  # of the coordinates of X25519


@dataclass(frozen=True, repr=False)
class Identity:
    """What a client signs with, and the keys of all clients as it knows them from elsewhere.

    The keys must not come from the server that adds up: it could then put its own in their place,
    and signatures would prove nothing.

    Args:
        secret: private key of Ed25519, 32 bytes.
        everyone: public key of each place, 32 bytes each.

    Raises:
        InputError: a key of another length, or one that two places have.
    """

    secret: bytes
    everyone: tuple[bytes, ...]

    def __post_init__(self) -> None:
        lengths = {len(key) for key in (self.secret, *self.everyone)}
        # A client that holds one key at two places would be counted twice among those who sign.
        if lengths != {32} or len(set(self.everyone)) < len(self.everyone):
            raise InputError(
                "keys of identities of another length, or one of them twice",
                got=f"{len(self.everyone)} public keys, {len(set(self.everyone))} distinct",
                allowed="32 bytes each, of Ed25519, one a place",
                fix="make them with Identity.all_of",
            )

    def __repr__(self) -> str:
        return f"Identity(..., {len(self.everyone)} public keys)"

    @staticmethod
    def all_of(cohort: int, prg: Prg | None = None) -> tuple[Identity, ...]:
        """Returns identities that know each other, for simulations and tests."""
        prg = prg or Prg.fresh()
        secrets = [prg.bytes(32) for _ in range(cohort)]
        pairs = (Ed25519PrivateKey.from_private_bytes(secret) for secret in secrets)
        everyone = tuple(pair.public_key().public_bytes_raw() for pair in pairs)
        return tuple(Identity(secret, everyone) for secret in secrets)

    def sign(self, text: bytes) -> bytes:
        """Returns 64 bytes of Ed25519."""
        return Ed25519PrivateKey.from_private_bytes(self.secret).sign(text)


class PublicKeys(NamedTuple):
    """What a client advertises.

    Args:
        cipher: public key of X25519 under which shares are sent to it, 32 bytes.
        mask: public key of X25519 from which masks are agreed, 32 bytes.
        commitment: to the seed of its own mask, 32 bytes.
        signature: over all of it, 64 bytes, or none.
    """

    cipher: bytes
    mask: bytes
    commitment: bytes
    signature: bytes

    def encode(self) -> bytes:
        """Returns the keys as they travel."""
        return b"".join(self)

    @staticmethod
    def decode(data: bytes | memoryview) -> PublicKeys:
        """Returns the keys that 96 or 160 bytes hold."""
        data = bytes(data)
        return PublicKeys(data[:32], data[32:64], data[64:96], data[96:])


def check_keys(place: int, keys: PublicKeys, seen: set[bytes]) -> None:
    """Refuses public keys that are not written in the one way there is, or that occur twice.

    Points of low order are found where a secret is agreed with them.

    Args:
        place: of the client.
        keys: that it advertises.
        seen: public keys so far; those of this client are added.

    Raises:
        MalformedError: naming the place.
    """
    both = {keys.cipher, keys.mask}
    if max(int.from_bytes(key, "little") for key in both) >= _PRIME:
        raise bad_keys(place, "a public key that is not reduced")
    if len(both) < 2 or not seen.isdisjoint(both):
        raise bad_keys(place, "a public key that occurs twice")
    seen |= both


def bad_keys(place: int, got: str) -> MalformedError:
    """The error of keys that cannot be used."""
    return MalformedError(
        f"the keys of client {place} cannot be used",
        got=got,
        allowed="public keys of X25519 of its own, made for this round",
        fix="leave this client out of the next round",
    )


def check_order(place: int, keys: PublicKeys, probe: PrivateKey) -> None:
    """Refuses points of low order.

    Args:
        place: of the client.
        keys: that it advertises.
        probe: any private key: with a point of low order nobody can agree on a secret.

    Raises:
        MalformedError: naming the place.
    """
    for key in (keys.cipher, keys.mask):
        try:
            probe.agree(key)
        except MalformedError as error:
            raise bad_keys(place, "a point of low order") from error


def commitment_of(settings: SecAggParams, place: int, seed: bytes) -> bytes:
    """Returns 32 bytes that fix a seed without showing it, if SHA-256 is one-way.

    The seed has 128 bits and is used once, so that nobody can try them all.
    """
    text = b"keyhole secagg seed" + settings.digest + place.to_bytes(4, "little") + seed
    return sha256(text).digest()


def keys_text(settings: SecAggParams, place: int, keys: PublicKeys) -> bytes:
    """What a client signs about its keys: they hold for this sum and this place alone."""
    where = settings.digest + place.to_bytes(4, "little")
    return b"keyhole secagg keys" + where + keys.cipher + keys.mask + keys.commitment


def survivors_text(settings: SecAggParams, survivors: frozenset[int]) -> bytes:
    """What a client signs about the list of survivors that it was shown."""
    everyone = pack_set(tuple(range(settings.cohort)), survivors)
    return b"keyhole secagg survivors" + settings.digest + everyone


def is_signed(public: bytes, text: bytes, signature: bytes) -> bool:
    """Whether the holder of a public key of Ed25519 has signed a text."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True
