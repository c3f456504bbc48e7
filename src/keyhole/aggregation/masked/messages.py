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

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from keyhole.aggregation.masked.params import SecAggParams
from keyhole.crypto.shamir import SHARE_BYTES
from keyhole.errors import (
    MalformedError,
    MismatchError,
    ReplayError,
    StaleError,
    ThresholdError,
    ViolationError,
)


def out_of_turn(steps: Sequence[str], step: str, current: str) -> ReplayError | StaleError:
    """A step before or after its turn: one that is over is a replay."""
    kind = ReplayError if steps.index(step) < steps.index(current) else StaleError
    return kind(
        "a step of a secure sum out of its turn",
        got=f"{step} during {current}",
        allowed="every step once, in order",
        fix="take part in a new round",
    )


def not_now(step: str, current: str) -> StaleError:
    """A message before its step, or after it is closed."""
    return StaleError(
        "a message of a secure sum that comes too early or too late",
        got=f"one of {step} during {current}",
        allowed=f"one of {current}",
        fix="wait for the list of the step before, or take part in a new round",
    )


def too_few(members: int, needed: int) -> ThresholdError:
    """Clients have left, and the sum cannot be opened any more."""
    return ThresholdError(
        "too few clients are left for a secure sum",
        got=members,
        allowed=f"{needed} or more",
        fix="start a new round with clients that stay; nothing of this one is released",
    )


def not_invited(place: int) -> StaleError:
    """A client that was not there at the step before."""
    return StaleError(
        "a client that is no longer part of this sum",
        got=f"place {place}",
        allowed="clients that have taken every step so far",
        fix="take part in a new round",
    )


def violation(got: str, allowed: str = "one kind of share of each client") -> ViolationError:
    """The server asks for what is forbidden."""
    return ViolationError(
        "the server of a secure sum asks for what would open an input",
        got=got,
        allowed=allowed,
        fix="do not trust this server; the client has forgotten its secrets",
    )


def closed(place: int) -> MalformedError:
    """Sealed shares that do not open."""
    return MalformedError(
        f"the shares of client {place} do not open",
        got="a wrong tag",
        allowed="shares sealed for this client in this round",
        fix="leave this client out of the next round",
    )


def other_list(place: int) -> MismatchError:
    """A confirmation of another list of survivors, or of none."""
    return MismatchError(
        f"client {place} has not confirmed the same survivors",
        got="a signature over something else",
        allowed="one list of survivors for everyone",
        fix="do not trust this server; no share has been given out",
    )


def other_secret(place: int) -> MismatchError:
    """A secret that was rebuilt and is not the one that was advertised."""
    return MismatchError(
        f"the shares of client {place} do not give the secret that it advertised",
        got="a false share, or a false secret",
        allowed="shares of the secret behind its keys",
        fix="start a new round without this client; nothing of this one is released",
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

Body: TypeAlias = bytes | bytearray | memoryview

SIGNATURE_BYTES = 64
"""Of Ed25519."""

SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Of two shares, of a key and of a seed, under AES-GCM."""

_MAGIC = b"KHS1"
_KINDS: dict[MessageKind, int] = {
    "keys": 1,
    "key list": 2,
    "shares": 3,
    "share list": 4,
    "input": 5,
    "survivor list": 6,
    "confirmation": 7,
    "confirmation list": 8,
    "unmasking": 9,
}
_HEAD = struct.Struct("<4sB3sI16s32s")
_CHECK_BYTES = 16
_CHECK_KEY = b"keyhole-secagg-1"  # everybody knows it

FRAME_BYTES = _HEAD.size + _CHECK_BYTES
"""What a frame adds to its body."""

REFUSAL = _MAGIC + bytes([255]) + bytes(FRAME_BYTES - 5)
"""The answer to every message that cannot be used: it does not tell why."""


class UnmaskRequest(NamedTuple):
    """What the server asks a client for, among the members of its group.

    Args:
        survivors: whose input is in the sum: a share of the seed of their own mask.
        lost: who shared secrets and sent no input: a share of the key of their common masks.
    """

    survivors: frozenset[int]
    lost: frozenset[int]


def keys_bytes(settings: SecAggParams) -> int:
    """What a client advertises: two public keys, a commitment and, if asked for, a signature."""
    return 96 + (SIGNATURE_BYTES if settings.signed else 0)


def body_bytes(kind: MessageKind, settings: SecAggParams, place: int) -> int:
    """The only length that the body of such a message can have."""
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
        return keys_bytes(settings)
    if kind in ("confirmation", "confirmation list"):
        return SIGNATURE_BYTES
    return SHARE_BYTES if kind == "unmasking" else SEALED_BYTES


def seal(kind: MessageKind, settings: SecAggParams, place: int, body: Body) -> bytes:
    """Returns a message.

    Args:
        kind: of the message.
        settings: under which it is sent.
        place: of the client that sends it, or to which the server sends it.
        body: of the length that the settings demand.
    """
    name, digest = settings.round, settings.digest
    head = _HEAD.pack(_MAGIC, _KINDS[kind], bytes(3), place, name, digest)
    return b"".join([head, body, _check(head, body)])


def unseal(
    data: bytes | memoryview, kind: MessageKind, settings: SecAggParams, place: int
) -> memoryview:
    """Returns the body of a message.

    Args:
        data: as it arrived.
        kind: what it must be.
        settings: what it must be under.
        place: of the client it must be from, or for.

    Raises:
        MalformedError: not such a message, or damaged.
        StaleError: of another round, or under other settings.
    """
    view = memoryview(data)
    length = body_bytes(kind, settings, place) + FRAME_BYTES
    if len(view) != length:
        raise malformed(f"{len(view)} bytes", f"{length} bytes")
    head, body = view[: _HEAD.size], view[_HEAD.size : -_CHECK_BYTES]
    if view[-_CHECK_BYTES:] != _check(head, body):
        raise malformed("a wrong check", "the check of its bytes")
    magic, number, zeros, named, round_name, digest = _HEAD.unpack(head)
    if (magic, number, zeros, named) != (_MAGIC, _KINDS[kind], bytes(3), place):
        raise malformed("another head", f"a {kind} of client {place}, of version 1")
    if round_name != settings.round or digest != settings.digest:
        raise StaleError(
            "a message of another secure sum",
            got="another round, or other settings",
            allowed="the round and settings of this sum",
            fix="fetch the settings anew",
        )
    return body


def seal_slots(
    kind: MessageKind, settings: SecAggParams, place: int, slots: Mapping[int, bytes]
) -> bytes:
    """Returns a message about members of a client's group.

    Args:
        kind: of the message.
        settings: under which it is sent.
        place: of the client.
        slots: what it holds about whom.
    """
    group, empty = settings.group(place), bytes(_slot_bytes(kind, settings))
    parts = [slots.get(member, empty) for member in group]
    return seal(kind, settings, place, b"".join([pack_set(group, slots), *parts]))


def open_slots(
    data: bytes | memoryview, kind: MessageKind, settings: SecAggParams, place: int
) -> dict[int, bytes]:
    """Returns what a message holds about whom.

    Raises:
        MalformedError: not such a message, or damaged.
        StaleError: of another round, or under other settings.
    """
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
            raise malformed("bytes about a client that is not named", "zeros")
    return slots


def seal_asked(settings: SecAggParams, place: int, asked: UnmaskRequest) -> bytes:
    """Returns the list of survivors, and of those who were lost, for a client."""
    group = settings.group(place)
    body = pack_set(group, asked.survivors) + pack_set(group, asked.lost)
    return seal("survivor list", settings, place, body)


def open_asked(data: bytes | memoryview, settings: SecAggParams, place: int) -> UnmaskRequest:
    """Returns what a list of survivors asks for.

    Raises:
        MalformedError: not such a message, or damaged.
        StaleError: of another round, or under other settings.
    """
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
        raise malformed("bits beyond the group", "zeros")
    digits = f"{bits:0{len(group)}b}"[::-1]
    return frozenset(place for place, digit in zip(group, digits, strict=True) if digit == "1")


def _check(head: bytes | memoryview, body: Body) -> bytes:
    """GMAC under a key that everybody knows: vectors are long, and this is the fastest check."""
    summed = Cipher(AES(_CHECK_KEY), GCM(bytes(12))).encryptor()
    summed.authenticate_additional_data(bytes(head))
    summed.authenticate_additional_data(body)
    summed.finalize()
    return summed.tag


def malformed(got: str, allowed: str) -> MalformedError:
    """The error of a message that cannot be read."""
    return MalformedError(
        "a message of a secure sum cannot be read",
        got=got,
        allowed=allowed,
        fix="send it as docs/wire.md describes it, under the settings of the sum",
    )
