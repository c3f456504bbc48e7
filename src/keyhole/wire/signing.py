"""Signs manifests: the trainer's word for a round, which no service, cache or mirror can give.

The trainer signs the SHA-256 of the manifest under a context of its own with Ed25519. Devices that
pin its public key take no round without that signature. The roots in the manifest bind all slices,
so a signed name is all that a device needs to believe.

Hidden: nothing. Not hidden: the manifest. Rests on Ed25519, and on the trainer's key file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from keyhole.crypto.signatures import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    is_signed,
    new_private,
    public_of,
    sign,
)
from keyhole.errors import AccessError, InputError
from keyhole.files import storage_errors
from keyhole.wire.manifest import digest_of

SIGNATURE = "keyhole-signature"
"""The header beside a manifest: 128 hex digits."""

_CONTEXT = b"keyhole manifest 1\0"
# The first word of a key's file: what is public must not be taken for what is secret.
_PRIVATE, _PUBLIC = "keyhole-signing-key", "keyhole-trainer-key"


@dataclass(frozen=True, repr=False)
class SigningKey:
    """A trainer's key; its file has a word that says so, and 64 hex digits."""

    _key: bytes

    def __repr__(self) -> str:
        return "SigningKey()"

    @staticmethod
    def fresh() -> SigningKey:
        """Returns a new key, from the system's generator."""
        return SigningKey(new_private())

    @staticmethod
    def load(path: Path) -> SigningKey:
        """Returns the key in a file; refuses it if others may read it, and a public key."""
        with storage_errors(path, "read"):
            mode = path.stat().st_mode
        if mode & 0o077:
            raise InputError(
                f"{path.name} can be read by others: got mode {mode & 511:o}; expected mode 600: "
                f"its owner alone; chmod 600 {path.name}, and make a new key if it may have been "
                "seen"
            )
        return SigningKey(_read(path, "a signing key", _PRIVATE))

    @property
    def public(self) -> TrainerKey:
        """What devices pin."""
        return TrainerKey(public_of(self._key))

    def encode(self) -> str:
        """Returns the content of its file."""
        return f"{_PRIVATE} {self._key.hex()}\n"

    def sign(self, round_id: str) -> bytes:
        """Returns the signature of the manifest that a round is named after."""
        return sign(self._key, _CONTEXT + digest_of(round_id))


@dataclass(frozen=True)
class TrainerKey:
    """The public key of a trainer."""

    raw: bytes

    @staticmethod
    def load(path: Path) -> TrainerKey:
        """Returns the key in a file: a word that says so, and 64 hex digits; refuses a private
        key."""
        return TrainerKey(_read(path, "a trainer's public key", _PUBLIC))

    def encode(self) -> str:
        """Returns the content of its file."""
        return f"{_PUBLIC} {self.raw.hex()}\n"

    def check(self, round_id: str, signature: bytes | None) -> None:
        """Raises AccessError unless the trainer signed the manifest that a round is named after."""
        text = _CONTEXT + digest_of(round_id)
        if signature is None or not is_signed(self.raw, text, signature):
            got = "no signature" if signature is None else "a signature of another key or manifest"
            raise AccessError(
                f"the round is not the trainer's: got {got}; expected the manifest signed with the "
                "key that this device pins; nothing was fetched; publish with --signing-key, or "
                "give the device the trainer's own key (--trainer-key)"
            )


def read_signature(text: str | None) -> bytes | None:
    """Returns the signature in a header; None where there is none that could be one."""
    try:
        found = bytes.fromhex(text or "")
    except ValueError:
        return None
    return found if len(found) == SIGNATURE_BYTES else None


def _read(path: Path, what: str, word: str) -> bytes:
    with storage_errors(path, "read"):
        text = path.read_text("ascii", errors="replace").strip()
    found, _, digits = text.partition(" ")
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        key = b""
    if found != word or len(key) != KEY_BYTES:
        other = {_PRIVATE: "a private key", _PUBLIC: "a public key"}.get(found, "something else")
        raise InputError(
            f"{path.name} does not hold {what}: got {other}; expected `{word}` and 64 hex digits; "
            "make a pair with `keyhole token signing-key`"
        )
    return key
