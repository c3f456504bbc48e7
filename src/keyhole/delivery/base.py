"""What a party learns of the keys that a client asks for: an output of every delivery.

What a delivery costs and who sees what: reported with the slices, by every way alike.

The names of all ways of delivery.

Parties: who takes part in each way of delivery, what each learns, and what that rests on.

`docs/trust.md` says the same at length, with what is not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

from keyhole.arrays import ClientId, Tree
from keyhole.delivery.pir.database import Scheme
from keyhole.primitives.layout import RowSource
from keyhole.primitives.placement import ClientValue
from keyhole.server.state import ServerState


@dataclass(frozen=True)
class Learned:
    """What one party learns.

    Args:
        keys: which keys are asked for.
        whose: which client asks; with `keys`, which client asks for which.
        how_many: how many keys that client asks for, rather than a public maximum.

    >>> str(Learned(keys=True, whose=True, how_many=True))
    'keys and whose they are'
    >>> str(Learned(whose=True))
    'who takes part'
    """

    keys: bool = False
    whose: bool = False
    how_many: bool = False

    def __str__(self) -> str:
        if self.keys:
            return "keys and whose they are" if self.whose else "keys, not whose they are"
        if self.how_many:
            return "who takes part, and how many keys each asks for"
        return "who takes part" if self.whose else "nothing"


NOTHING = Learned()
WHO_TAKES_PART = Learned(whose=True)
KEYS_OF_SOMEBODY = Learned(keys=True)
KEYS_AND_WHOSE = Learned(keys=True, whose=True, how_many=True)


@dataclass(frozen=True)
class Cost:
    """The cost of delivering one round.

    Args:
        bytes_down: bytes of slices that each client received.
        bytes_up: bytes of keys that each client sent to receive them.
        select_calls: slices that were computed, one for each call of the select function.
        cache_hits: slices that were asked for and found computed.
        distinct_slices: how many different slices of cut parts the cohort asked for.
        seen_by: party -> what it learns of a client's keys while slices are delivered.
    """

    bytes_down: Mapping[ClientId, int]
    bytes_up: Mapping[ClientId, int]
    select_calls: int
    cache_hits: int
    distinct_slices: int
    seen_by: Mapping[str, Learned]


@dataclass(frozen=True)
class Delivered:
    """Sub-models on the clients, and their cost.

    Args:
        submodels: of each client; may be computed when it is read, so read before the next step.
        keys: those that the sub-model holds, in order: what the client asked for, but for keys that
            a private way could not place in its query. The client trains without those.
        cost: of the round.
        source: where the rows of sub-models are read, so that they can be selected elsewhere; None
            where what a client received is not a function of its keys.
    """

    submodels: ClientValue[Tree]
    keys: ClientValue[Any]
    cost: Cost
    source: RowSource | None = None


Delivery: TypeAlias = Callable[[ServerState, ClientValue[Any]], Delivered]
"""`deliver(state, keys)`: keys are each client's `Keys`, one for each key space."""


DeliveryName: TypeAlias = Literal[
    "broadcast",
    "on-demand",
    "pregenerated",
    "relay",
    "pir",
    "pir-one-server",
    "enclave",
]
"""A way of delivery: the paper's options 1, 2 and 3, and the private ways over option 3."""

DELIVERIES: tuple[DeliveryName, ...] = get_args(DeliveryName)
"""All of them, the plain ones first."""

PRIVATE_DELIVERIES: tuple[DeliveryName, ...] = DELIVERIES[3:]
"""Those that keep something from somebody, and ask for slices all the same."""

PIR_SCHEMES: Mapping[DeliveryName, Scheme] = MappingProxyType(
    {"pir": "two-server", "pir-one-server": "one-server"}
)
"""Way -> its scheme of private information retrieval; the other ways have none."""


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
