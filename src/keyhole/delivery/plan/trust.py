"""Trust: what a delivery may be asked to keep, and from whom."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias

__all__ = ["TRUSTS", "Trust"]

Trust: TypeAlias = Literal["open", "unlinked", "hidden", "hidden-one-server", "hidden-enclave"]
"""What a delivery must keep from whom."""

TRUSTS: Mapping[Trust, str] = MappingProxyType(
    {
        "open": "a server may learn each client's keys",
        "unlinked": "nobody learns whose keys are whose",
        "hidden": "nobody learns a key, if two operators do not work together",
        "hidden-one-server": "nobody learns a key, by cryptography and with one operator",
        "hidden-enclave": "nobody learns a key, with one operator and hardware that is trusted",
    }
)
"""Trust -> what it asks for."""
