"""Heads and checks of messages to and between the two servers of a sum.

The head is magic (4), kind (u8), server (u8, 0 in what both get), zero (u16), name of the round
(16), SHA-256 of the terms (32). The check is the first half of the SHA-256 of all before it. It
finds damage and no forger: messages travel through TLS.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from keyhole.errors import MalformedError, StaleError

__all__ = ["CHECK_BYTES", "HEAD_BYTES", "Framing", "malformed"]

CHECK_BYTES = 16
_HEAD = struct.Struct("<4sBBH16s32s")
HEAD_BYTES = _HEAD.size


class Named(Protocol):
    """Terms of a sum."""

    @property
    def round(self) -> bytes:
        """16 bytes, its name."""
        ...

    @property
    def digest(self) -> bytes:
        """SHA-256 of the encoded terms."""
        ...


@dataclass(frozen=True)
class Framing:
    """A family of messages.

    Args:
        magic: four bytes that begin each.
        kinds: name of a kind -> its number.
    """

    magic: bytes
    kinds: Mapping[str, int]

    def head(self, terms: Named, kind: str, party: int) -> bytes:
        """Of a message under these terms."""
        return _HEAD.pack(self.magic, self.kinds[kind], party, 0, terms.round, terms.digest)

    def check_head(self, terms: Named, kind: str, party: int, data: bytes | memoryview) -> None:
        """Raises MalformedError for another message, StaleError for one of another sum."""
        magic, number, server, zero, name, digest = _HEAD.unpack_from(data)
        if (magic, number, server, zero) != (self.magic, self.kinds[kind], party, 0):
            kind_wanted = f"a message of kind {kind!r}, server {party}, version 1"
            raise malformed("another head", kind_wanted)
        if name != terms.round or digest != terms.digest:
            raise StaleError(
                "a message of another sum",
                got="another round, or other terms",
                allowed="the round and terms of this sum",
                fix="fetch the terms anew and share the update again",
            )

    @staticmethod
    def sealed(*pieces: bytes) -> bytes:
        """A message of these pieces, with its check."""
        message = b"".join(pieces)
        return message + sha256(message).digest()[:CHECK_BYTES]

    @staticmethod
    def check_seal(data: bytes | memoryview) -> None:
        """Raises MalformedError unless the check is that of the message."""
        body, check = memoryview(data)[:-CHECK_BYTES], bytes(data[-CHECK_BYTES:])
        if sha256(body).digest()[:CHECK_BYTES] != check:
            raise malformed("a wrong check", "the check of its bytes")

    @staticmethod
    def check_length(data: bytes | memoryview, length: int) -> None:
        """Raises MalformedError unless the message is as long as its terms make it."""
        if len(data) != length:
            raise malformed(f"{len(data)} bytes", f"{length} bytes")


def malformed(got: str, allowed: str) -> MalformedError:
    """The error of a message that cannot be read."""
    return MalformedError(
        "a message of a sum cannot be read",
        got=got,
        allowed=allowed,
        fix="send it as docs/wire.md describes it, under the terms of the sum",
    )
