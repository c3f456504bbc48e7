"""Parties: who takes part in each way of delivery, what each learns, and what that rests on.

`docs/trust.md` says the same at length, with what is not covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from keyhole.delivery.leakage import (
    KEYS_AND_WHOSE,
    KEYS_OF_SOMEBODY,
    NOTHING,
    WHO_TAKES_PART,
    Learned,
)
from keyhole.delivery.names import DeliveryName

__all__ = ["PARTIES", "Basis", "Parties"]

Basis: TypeAlias = Literal["nothing", "no collusion", "cryptography", "hardware"]
"""What must hold for parties to learn no more than they are said to: nothing; that two of them do
not work together; that a problem is hard, with one server alone; that hardware keeps its promise.
"""


@dataclass(frozen=True)
class Parties:
    """Those beside the clients.

    Args:
        seen_by: party -> what it learns.
        basis: what that rests on.
        assumption: the same, in a sentence.
    """

    seen_by: Mapping[str, Learned] = field(hash=False)
    basis: Basis
    assumption: str


_TWO_SERVERS = MappingProxyType({"first server": WHO_TAKES_PART, "second server": WHO_TAKES_PART})
_CACHED = MappingProxyType({"slice server": KEYS_AND_WHOSE, "CDN": KEYS_AND_WHOSE})

PARTIES: Mapping[DeliveryName, Parties] = MappingProxyType(
    {
        "broadcast": Parties(
            MappingProxyType({"server": NOTHING}),
            "nothing",
            "None: everyone receives the same bytes.",
        ),
        "on-demand": Parties(
            MappingProxyType({"server": KEYS_AND_WHOSE}),
            "nothing",
            "None is made: the server is trusted with every client's keys.",
        ),
        "pregenerated": Parties(
            _CACHED,
            "nothing",
            "None is made: whoever gives out slices is trusted with every client's keys.",
        ),
        "relay": Parties(
            MappingProxyType({"relay": WHO_TAKES_PART, "gateway": KEYS_OF_SOMEBODY}),
            "no collusion",
            "Relay and gateway do not work together, requests of many clients are mixed, and HPKE "
            "holds.",
        ),
        "pir": Parties(
            _TWO_SERVERS,
            "no collusion",
            "The two servers do not work together; AES under a fixed key hides seeds.",
        ),
        "pir-chor": Parties(
            _TWO_SERVERS,
            "no collusion",
            "The two servers do not work together; AES-128 in counter mode is pseudo-random.",
        ),
        "pir-one-server": Parties(
            MappingProxyType({"server": WHO_TAKES_PART}),
            "cryptography",
            "Learning with errors is hard for dimension 1,024 and modulus 2^32.",
        ),
        "enclave": Parties(
            MappingProxyType({"enclave host": WHO_TAKES_PART}),
            "hardware",
            "The enclave's hardware, its maker's signatures and HPKE hold, and nothing leaks by "
            "timing.",
        ),
    }
)
"""Way -> its parties."""
