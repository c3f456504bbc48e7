"""Writes and reads public facts that parties agree on before a secret is sent.

There is one text for each meaning. Every message carries a digest of the facts, and facts with two
texts would have two digests. So what is read must be, byte for byte, what it would be written as: a
magic, a number or a filling that differs is refused. Numbers of variable length are those of
RFC 9000, section 16. `Framing` puts a head and a check around messages under such facts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol, TypeAlias, TypeVar

from keyhole.errors import InputError, MalformedError, StaleError


class Facts(Protocol):
    """Terms or settings that travel."""

    def encode(self) -> bytes:
        """Returns the one text that they have."""
        ...


F = TypeVar("F", bound=Facts)


def read_facts(data: bytes, what: str, build: Callable[[bytes], F]) -> F:
    """Returns the facts that `data` holds.

    `build` makes the facts from the bytes and checks their numbers. It need not look at what
    `encode` writes without being told: the magic, and fillings.
    """
    cause: Exception | None = None
    try:
        facts = build(bytes(data))
        if facts.encode() == data:
            return facts
    except (struct.error, IndexError, InputError) as error:
        cause = error
    raise MalformedError(
        f"these are not {what}: got {len(data)} bytes; expected the bytes that docs/wire.md "
        "describes; check that both sides are of one version"
    ) from cause


_LENGTHS = ((6, 1), (14, 2), (30, 4), (62, 8))  # bits of a number, bytes it takes


def encode_varint(number: int) -> bytes:
    """Returns a number in as few bytes as it fits in.

    >>> [encode_varint(n).hex() for n in (37, 15_293, 494_878_333, 151_288_809_941_952_652)]
    ['25', '7bbd', '9d7f3e7d', 'c2197c5eff14e88c']
    """
    if 0 <= number < 1 << 6:
        return bytes((number,))
    for code, (bits, length) in enumerate(_LENGTHS):
        if 0 <= number < 1 << bits:
            return (number | code << (8 * length - 2)).to_bytes(length, "big")
    raise MalformedError(
        f"number does not fit a variable-length integer: got {number}; expected 0..2^62 - 1; send "
        "less at a time"
    )


def prefixed(data: bytes) -> bytes:
    """Returns bytes behind their length."""
    return encode_varint(len(data)) + data


class Reader:
    """Reads from the front of some bytes, and never past their end."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def at_end(self) -> bool:
        """Whether everything has been read."""
        return self._at == len(self._data)

    def take(self, length: int) -> bytes:
        """Returns the next bytes."""
        end = self._at + length
        if end > len(self._data):
            raise MalformedError(
                "message ends too early: got fewer bytes; expected as many as it announces; check "
                "that both sides are of one version"
            )
        found, self._at = self._data[self._at : end], end
        return found

    def varint(self) -> int:
        """Returns the next number; any of its lengths will do."""
        first = self.take(1)
        if first[0] < 1 << 6:
            return first[0]
        length = _LENGTHS[first[0] >> 6][1]
        whole = int.from_bytes(first + self.take(length - 1), "big")
        return whole & ((1 << (8 * length - 2)) - 1)

    def prefixed(self) -> bytes:
        """Returns the next bytes that stand behind their length."""
        return self.take(self.varint())

    def rest(self) -> bytes:
        """Returns whatever is left."""
        return self.take(len(self._data) - self._at)


CHECK_BYTES = 16
"""Bytes of the check at the end of a message."""

Body: TypeAlias = bytes | bytearray | memoryview


class Agreement(Protocol):
    """What a message is sent under: it is of one round, and of the facts that all agreed on."""

    @property
    def round(self) -> bytes:
        """16 bytes, the round's name."""
        ...

    @property
    def digest(self) -> bytes:
        """SHA-256 of the encoded facts."""
        ...


def sha_check(pieces: Iterable[Body]) -> bytes:
    """Returns half of a SHA-256. It finds damage and no forger: messages travel through TLS."""
    whole = sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.digest()[:CHECK_BYTES]


@dataclass(frozen=True)
class Framing:
    """A family of messages: a head, a body whose length follows from the facts, and a check.

    A head is magic (4), kind (u8), and, little-endian, whom it is from or for (u8 and u16 zero, or
    u24 zero and u32 where there may be many), name of the round (16), SHA-256 of the facts (32).
    What arrives is compared with the one length it can have, then with its check, then with the
    facts, before its content is looked at.

    Args:
        magic: four bytes that begin each.
        kinds: name of a kind -> its number.
        what: they are, for errors: "a message of a sum".
        check: pieces -> 16 bytes.
        is_wide: whether heads have room for many parties.
    """

    magic: bytes
    kinds: Mapping[str, int]
    what: str
    check: Callable[[Iterable[Body]], bytes] = sha_check
    is_wide: bool = False

    @property
    def _form(self) -> struct.Struct:
        return _WIDE if self.is_wide else _NARROW

    @property
    def head_bytes(self) -> int:
        """The number of bytes of the head of a message."""
        return self._form.size

    def head(self, facts: Agreement, kind: str, party: int) -> bytes:
        """Returns the head of a message under these facts."""
        place = (bytes(3), party) if self.is_wide else (party, 0)
        return self._form.pack(self.magic, self.kinds[kind], *place, facts.round, facts.digest)

    def seal(self, facts: Agreement, kind: str, party: int, *body: Body) -> bytes:
        """Returns a message."""
        pieces = [self.head(facts, kind, party), *body]
        return b"".join([*pieces, self.check(pieces)])

    def unseal(
        self, facts: Agreement, kind: str, party: int, data: bytes | memoryview, body_bytes: int
    ) -> memoryview:
        """Returns the body of a message; `body_bytes` is the only length that it can have.

        Raises:
            MalformedError: not such a message, or damaged.
            StaleError: of another round, or under other facts.
        """
        view, start = memoryview(data), self.head_bytes
        self.check_length(view, start + body_bytes + CHECK_BYTES)
        head, body = view[:start], view[start:-CHECK_BYTES]
        if view[-CHECK_BYTES:] != self.check([head, body]):
            raise self.malformed("a wrong check", "the check of its bytes")
        self.check_head(facts, kind, party, head)
        return body

    def check_head(self, facts: Agreement, kind: str, party: int, data: Body) -> None:
        """Raises MalformedError for another message, StaleError for one under other facts."""
        found, size = bytes(data[: self.head_bytes]), self.head_bytes - len(facts.digest) - 16
        wanted = self.head(facts, kind, party)
        if found[:size] != wanted[:size]:
            raise self.malformed("another head", f"kind {kind!r}, party {party}, version 1")
        if found != wanted:
            raise StaleError(
                f"{self.what} under other facts: got another round, or other params; expected the "
                "round and params of this one; fetch the params again, and begin again"
            )

    def check_length(self, data: Body, length: int) -> None:
        """Raises MalformedError unless the message is as long as its facts make it."""
        if len(data) != length:
            raise self.malformed(f"{len(data)} bytes", f"{length} bytes")

    def malformed(self, got: str, allowed: str) -> MalformedError:
        """Returns the error of an unreadable message."""
        return MalformedError(
            f"{self.what} cannot be read: got {got}; expected {allowed}; send it as docs/wire.md "
            "describes it, under the params of the round"
        )


_NARROW, _WIDE = struct.Struct("<4sBBH16s32s"), struct.Struct("<4sB3sI16s32s")
