"""Writes and reads public facts that parties agree on before a secret is sent.

There is one text for each meaning. Every message carries a digest of the facts, and facts with two
texts would have two digests. So what is read must be, byte for byte, what it would be written as: a
magic, a number or a filling that differs is refused. Numbers of variable length are those of
RFC 9000, section 16.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol, TypeVar

from keyhole.errors import InputError, MalformedError


class Facts(Protocol):
    """Terms or settings that travel."""

    def encode(self) -> bytes:
        """Returns the one text that they have."""
        ...


F = TypeVar("F", bound=Facts)


def read_facts(data: bytes, what: str, build: Callable[[bytes], F]) -> F:
    """Returns the facts that `data` holds.

    Args:
        build: makes the facts from the bytes and checks their numbers. It need not look at what
            `encode` writes without being told: the magic, and fillings.
    """
    try:
        facts = build(bytes(data))
    except (struct.error, IndexError, InputError) as error:
        raise _not_facts(what, len(data)) from error
    if facts.encode() != data:
        raise _not_facts(what, len(data))
    return facts


def _not_facts(what: str, length: int) -> MalformedError:
    return MalformedError(
        f"these are not {what}: got {length} bytes; expected the bytes that docs/wire.md "
        "describes; check that both sides are of one version"
    )


_LENGTHS = ((6, 1), (14, 2), (30, 4), (62, 8))  # bits of a number, bytes it takes


def encode_varint(number: int) -> bytes:
    """Returns a number in as few bytes as it fits in.

    >>> [encode_varint(n).hex() for n in (37, 15_293, 494_878_333, 151_288_809_941_952_652)]
    ['25', '7bbd', '9d7f3e7d', 'c2197c5eff14e88c']
    """
    for code, (bits, length) in enumerate(_LENGTHS):
        if 0 <= number < 1 << bits:
            return (number | code << (8 * length - 2)).to_bytes(length, "big")
    raise MalformedError(
        f"a number that has no variable length: got {number}; expected 0..2^62 - 1; send less at a "
        "time"
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
            raise _cut()
        found, self._at = self._data[self._at : end], end
        return found

    def varint(self) -> int:
        """Returns the next number; any of its lengths will do."""
        first = self.take(1)
        length = _LENGTHS[first[0] >> 6][1]
        whole = int.from_bytes(first + self.take(length - 1), "big")
        return whole & ((1 << (8 * length - 2)) - 1)

    def prefixed(self) -> bytes:
        """Returns the next bytes that stand behind their length; raises as `take` does."""
        return self.take(self.varint())

    def rest(self) -> bytes:
        """Returns whatever is left."""
        return self.take(len(self._data) - self._at)


def _cut() -> MalformedError:
    return MalformedError(
        "a message that ends too early: got fewer bytes; expected as many as it announces; check "
        "that both sides are of one version"
    )
