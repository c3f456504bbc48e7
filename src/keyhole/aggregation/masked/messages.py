"""Encodes the messages of a masked sum, and says how one is refused.

Errors name places and counts, and nothing that a client holds.

A frame is a head (what it is, from or to which client, of which round, under which settings), a
body whose length follows from the settings, and a check over all of it. What arrives is compared
with the one length it can have, then with its check, then with the settings, before its content is
looked at. Whatever is wrong, a server answers with the same bytes.

Most bodies are about the group of a client: those with which it shares masks, and itself. They hold
a bit for every member, lowest first, then as many bytes for every member, zeros if its bit is not
set: so a length never tells who is gone.

The check finds damage. It does not stop a forger: that is what TLS is for, and signatures if the
server itself is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, NamedTuple, TypeAlias, get_args

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from keyhole.aggregation.masked.params import SecAggParams
from keyhole.crypto.codec import CHECK_BYTES, Body, Framing
from keyhole.crypto.prg import Prg
from keyhole.crypto.shamir import SHARE_BYTES
from keyhole.crypto.signatures import SIGNATURE_BYTES, public_of, sign
from keyhole.errors import (
    InputError,
    MalformedError,
    MismatchError,
    ReplayError,
    StaleError,
    ThresholdError,
)


def out_of_turn(steps: Sequence[str], step: str, current: str) -> ReplayError | StaleError:
    """Returns the error of a step before or after its turn: one that is over is a replay."""
    kind = ReplayError if steps.index(step) < steps.index(current) else StaleError
    return kind(
        f"a step of a secure sum out of its turn: got {step} during {current}; "
        "expected every step once, in order; take part in a new round"
    )


def too_few(members: int, needed: int) -> ThresholdError:
    """Returns the error where clients have left, and the sum cannot be opened any more."""
    return ThresholdError(
        f"too few clients are left for a secure sum: got {members}; expected {needed} or more; "
        "start a new round with clients that stay; nothing of this one is released"
    )


def other_list(place: int) -> MismatchError:
    """Returns the error of a confirmation of another list of survivors, or of none."""
    return MismatchError(
        f"client {place} has not confirmed the same survivors: got a signature over something "
        "else; expected one list of survivors for everyone; do not trust this server; no share has "
        "been given out"
    )


MessageKind: TypeAlias = Literal[
    "keys",
    "key list",
    "shares",
    "share list",
    "input",
    "survivor list",
    "confirmation",
    "confirmation list",
    "unmasking",
]
"""What travels, in the order of the protocol: a client sends the first, the server the next."""

KEYS_BYTES = 96
"""Bytes of two public keys and a commitment; a signature may follow."""

SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Bytes of two shares, of a key and of a seed, under AES-GCM."""

_KINDS = {kind: number for number, kind in enumerate(get_args(MessageKind), 1)}
_CHECK_KEY = b"keyhole-secagg-1"  # everybody knows it


def _check(pieces: Iterable[Body]) -> bytes:
    """GMAC under a key that everybody knows: vectors are long, and this is the fastest check."""
    summed = Cipher(AES(_CHECK_KEY), GCM(bytes(12))).encryptor()
    for piece in pieces:
        summed.authenticate_additional_data(piece)
    summed.finalize()
    return summed.tag


FRAMING = Framing(b"KHS1", _KINDS, "a message of a secure sum", _check, is_wide=True)

FRAME_BYTES = FRAMING.head_bytes + CHECK_BYTES
"""What a frame adds to its body."""

REFUSAL = FRAMING.magic + bytes([255]) + bytes(FRAME_BYTES - 5)
"""The answer to every unusable message: it does not tell why."""


class UnmaskRequest(NamedTuple):
    """What the server asks a client for, among the members of its group.

    Args:
        survivors: whose input is in the sum: a share of the seed of their own mask.
        lost: who shared secrets and sent no input: a share of the key of their common masks.
    """

    survivors: frozenset[int]
    lost: frozenset[int]


def body_bytes(kind: MessageKind, settings: SecAggParams, place: int) -> int:
    """Returns the only length that the body of such a message can have."""
    members = len(settings.group(place))
    bits = -(-members // 8)
    if kind == "survivor list":
        return 2 * bits
    if kind == "input":
        return settings.length * settings.dtype.itemsize
    if kind in ("keys", "confirmation"):
        return _slot_bytes(kind, settings)
    return bits + members * _slot_bytes(kind, settings)


def _slot_bytes(kind: MessageKind, settings: SecAggParams) -> int:
    if kind in ("keys", "key list"):
        return KEYS_BYTES + settings.signed * SIGNATURE_BYTES
    if kind in ("confirmation", "confirmation list"):
        return SIGNATURE_BYTES
    return SHARE_BYTES if kind == "unmasking" else SEALED_BYTES


def seal(kind: MessageKind, settings: SecAggParams, place: int, body: Body) -> bytes:
    """Returns a message of the client at a place, or of the server to it."""
    return FRAMING.seal(settings, kind, place, body)


def unseal(
    data: bytes | memoryview, kind: MessageKind, settings: SecAggParams, place: int
) -> memoryview:
    """Returns the body of a message of the client at a place, or to it."""
    return FRAMING.unseal(settings, kind, place, data, body_bytes(kind, settings, place))


def seal_slots(
    kind: MessageKind, settings: SecAggParams, place: int, slots: Mapping[int, bytes]
) -> bytes:
    """Returns a message about members of a client's group."""
    group, empty = settings.group(place), bytes(_slot_bytes(kind, settings))
    parts = [slots.get(member, empty) for member in group]
    return seal(kind, settings, place, b"".join([pack_set(group, slots), *parts]))


def open_slots(
    data: bytes | memoryview, kind: MessageKind, settings: SecAggParams, place: int
) -> dict[int, bytes]:
    """Returns what a message holds about whom."""
    body = bytes(unseal(data, kind, settings, place))
    group, width = settings.group(place), _slot_bytes(kind, settings)
    start = -(-len(group) // 8)
    members = _read_set(body[:start], group)
    empty, slots = bytes(width), {}
    for member in group:
        slot = body[start : start + width]
        start += width
        if member in members:
            slots[member] = slot
        elif slot != empty:
            raise FRAMING.malformed("bytes about a client that is not named", "zeros")
    return slots


def seal_asked(settings: SecAggParams, place: int, asked: UnmaskRequest) -> bytes:
    """Returns the list of survivors, and of those who were lost, for a client."""
    group = settings.group(place)
    body = pack_set(group, asked.survivors) + pack_set(group, asked.lost)
    return seal("survivor list", settings, place, body)


def open_asked(data: bytes | memoryview, settings: SecAggParams, place: int) -> UnmaskRequest:
    """Returns what a list of survivors asks for."""
    body, group = unseal(data, "survivor list", settings, place), settings.group(place)
    half = len(body) // 2
    return UnmaskRequest(_read_set(body[:half], group), _read_set(body[half:], group))


def pack_set(group: tuple[int, ...], members: Iterable[int]) -> bytes:
    """Returns a bit for every member of a group, lowest first."""
    named = set(members)
    bits = sum(1 << at for at, place in enumerate(group) if place in named)
    return bits.to_bytes(-(-len(group) // 8), "little")


def _read_set(data: Body, group: tuple[int, ...]) -> frozenset[int]:
    bits = int.from_bytes(data, "little")
    if bits >> len(group):
        raise FRAMING.malformed("bits beyond the group", "zeros")
    digits = f"{bits:0{len(group)}b}"[::-1]
    return frozenset(place for place, digit in zip(group, digits, strict=True) if digit == "1")


_PRIME = 2**255 - 19  # of the coordinates of X25519


@dataclass(frozen=True, repr=False)
class Identity:
    """What a client signs with, and the keys of all clients as it knows them from elsewhere.

    The keys must not come from the server that adds up: it could then put its own in their place,
    and signatures would prove nothing.

    Args:
        secret: private key of Ed25519, 32 bytes.
        everyone: public key of each place, 32 bytes each.
    """

    secret: bytes
    everyone: tuple[bytes, ...]

    def __post_init__(self) -> None:
        lengths = {len(key) for key in (self.secret, *self.everyone)}
        # A client that holds one key at two places would be counted twice among those who sign.
        if lengths != {32} or len(set(self.everyone)) < len(self.everyone):
            raise InputError(
                "keys of identities of another length, or one of them twice: got "
                f"{len(self.everyone)} public keys, {len(set(self.everyone))} distinct; expected "
                "32 bytes each, of Ed25519, one a place; make them with Identity.all_of"
            )

    def __repr__(self) -> str:
        return f"Identity(..., {len(self.everyone)} public keys)"

    @staticmethod
    def all_of(cohort: int, prg: Prg | None = None) -> tuple[Identity, ...]:
        """Returns identities that know each other, for simulations and tests."""
        prg = prg or Prg.fresh()
        secrets = [prg.bytes(32) for _ in range(cohort)]
        everyone = tuple(public_of(secret) for secret in secrets)
        return tuple(Identity(secret, everyone) for secret in secrets)

    def sign(self, text: bytes) -> bytes:
        """Returns 64 bytes of Ed25519."""
        return sign(self.secret, text)


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
    signature: bytes = b""

    def encode(self) -> bytes:
        """Returns the keys as they travel."""
        return b"".join(self)

    @staticmethod
    def decode(data: bytes | memoryview) -> PublicKeys:
        """Returns the keys that 96 or 160 bytes hold."""
        data = bytes(data)
        return PublicKeys(data[:32], data[32:64], data[64:96], data[96:])


def check_keys(place: int, keys: PublicKeys, seen: set[bytes]) -> None:
    """Refuses public keys that are not written in the one way there is, or are among those `seen`
    so far, to which they are added. Points of low order are found where a secret is agreed."""
    both = {keys.cipher, keys.mask}
    if max(int.from_bytes(key, "little") for key in both) >= _PRIME:
        raise bad_keys(place, "a public key that is not reduced")
    if len(both) < 2 or not seen.isdisjoint(both):
        raise bad_keys(place, "a public key that occurs twice")
    seen |= both


def bad_keys(place: int, got: str) -> MalformedError:
    """Returns the error of unusable keys."""
    return MalformedError(
        f"the keys of client {place} cannot be used: got {got}; expected public keys of X25519 of "
        "its own, made for this round; leave this client out of the next round"
    )


def commitment_of(settings: SecAggParams, place: int, seed: bytes) -> bytes:
    """Returns 32 bytes that fix a seed without showing it, if SHA-256 is one-way.

    The seed has 128 bits and is used once, so that nobody can try them all.
    """
    text = b"keyhole secagg seed" + settings.digest + place.to_bytes(4, "little") + seed
    return sha256(text).digest()


def keys_text(settings: SecAggParams, place: int, keys: PublicKeys) -> bytes:
    """Returns what a client signs about its keys: they hold for this sum and this place alone."""
    where = settings.digest + place.to_bytes(4, "little")
    return b"keyhole secagg keys" + where + keys.cipher + keys.mask + keys.commitment


def survivors_text(settings: SecAggParams, survivors: frozenset[int]) -> bytes:
    """Returns what a client signs about the list of survivors that it was shown."""
    everyone = pack_set(tuple(range(settings.cohort)), survivors)
    return b"keyhole secagg survivors" + settings.digest + everyone
