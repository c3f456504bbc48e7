"""Token files: what operators of other services hand out."""

from __future__ import annotations

from pathlib import Path

from keyhole.errors import InputError

__all__ = ["read_secret"]

_MOST_SECRET = 4096  # bytes of a file that holds one


def read_secret(path: Path) -> str:
    """The token in a file.

    Raises:
        InputError: it holds none.
    """
    try:
        found = path.read_bytes()[:_MOST_SECRET].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if not found or " " in found:
        raise InputError(
            "no token can be read",
            got=f"file {path}",
            allowed="a file with one token",
            fix="ask the operator for one: `keyhole token` makes them",
        )
    return found
