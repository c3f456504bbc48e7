"""Public facts that parties agree on before a secret is sent: one text for each meaning.

Every message carries a digest of them. Facts with two texts would have two digests, so what is read
must be, byte for byte, what it would be written as: a magic, a number or a filling that differs is
refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol, TypeVar

from keyhole.errors import InputError, MalformedError

__all__ = ["Facts", "read_facts"]


class Facts(Protocol):
    """Terms or settings that travel."""

    def encode(self) -> bytes:
        """Returns the one text that they have."""
        ...


F = TypeVar("F", bound=Facts)


def read_facts(data: bytes, what: str, build: Callable[[bytes], F]) -> F:
    """Returns the facts that `data` holds.

    Args:
        data: as it arrived.
        what: it should be, for the error.
        build: makes the facts from the bytes and checks their numbers. It need not look at what
            `encode` writes without being told: the magic, and fillings.

    Raises:
        MalformedError: they are not facts of this kind and version.
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
        f"these are not {what}",
        got=f"{length} bytes",
        allowed="the bytes that docs/wire.md describes",
        fix="check that both sides are of one version",
    )
