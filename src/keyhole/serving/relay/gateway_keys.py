"""The file of a gateway's keys."""

from __future__ import annotations

from pathlib import Path

from keyhole.errors import InputError
from keyhole.private.oblivious.key_config import GatewayKey, decode_gateway_keys

__all__ = ["load_gateway_keys"]


def load_gateway_keys(path: Path) -> tuple[GatewayKey, ...]:
    """Reads a file of keys, made by `keyhole token gateway-key`.

    Each line has the number of a key, 0..255, and its secret in hex. Clients are told of all keys
    and use the first; a new one is put in front, and the old one removed a while later.

    Raises:
        InputError: it cannot be read, others may read it, or it holds something else.
    """
    try:
        mode, text = path.stat().st_mode, path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"cannot read the gateway keys of {path.name}",
            got=type(error).__name__,
            allowed="a file of keys",
            fix="make one with `keyhole token gateway-key`",
        ) from error
    if mode & 0o077:
        raise InputError(
            f"{path.name} can be read by others",
            got=f"mode {mode & 0o777:o}",
            allowed="mode 600: its owner alone",
            fix=f"chmod 600 {path.name}, and make a new key if it may have been seen",
        )
    return decode_gateway_keys(text)
