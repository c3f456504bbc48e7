"""Defines a delivery: what it declares, what it gives clients, and what it costs.

`docs/trust.md` says at length what each party learns, with what is not covered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from keyhole.about import About, Leak
from keyhole.arrays import Tree
from keyhole.pricing import Speeds, Workload
from keyhole.primitives.layout import KeysBySpace, RowSource

if TYPE_CHECKING:
    from keyhole.server.state import ServerState

NOTHING = Leak()
WHO_TAKES_PART = Leak(whose=True)
KEYS_OF_SOMEBODY = Leak(keys=True)
KEYS_AND_WHOSE = Leak(keys=True, whose=True, how_many=True)

Basis: TypeAlias = Literal["nothing", "no collusion", "cryptography", "hardware"]
"""What must hold for parties to learn no more than they are said to: nothing; that two of them do
not work together; that a problem is hard, with one server alone; that hardware keeps its promise.
"""

DeviceRoute: TypeAlias = Literal["whole", "slices", "queries", "sealed requests"]
"""What a device asks the service for: the whole model; slices by their keys; replies to private
queries; answers to sealed requests that another party passes on."""


@dataclass(frozen=True, kw_only=True)
class DeliveryAbout(About):
    """What a delivery declares.

    Args:
        basis: the kind of assumption that `rests_on` spells out.
        route: what a device asks the service for; None where devices cannot use it.
        connects_to: parties beside the service that a device connects to, as the options of a
            device name them.
    """

    basis: Basis = "nothing"
    route: DeviceRoute | None = "slices"
    connects_to: tuple[str, ...] = ()


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

    bytes_down: Mapping[int, int]
    bytes_up: Mapping[int, int]
    select_calls: int
    cache_hits: int
    distinct_slices: int
    seen_by: Mapping[str, Leak]


@dataclass(frozen=True)
class Delivered:
    """Sub-models on the clients, and their cost.

    Args:
        submodels: of each client; may be computed when it is read, so read before the next step.
        keys: those that the sub-model holds, in order: what the client asked for, but for keys that
            a private delivery could not place in its query. The client trains without those.
        cost: of the round.
        source: where the rows of sub-models are read, so that they can be selected elsewhere; None
            where what a client received is not a function of its keys.
    """

    submodels: Mapping[int, Tree]
    keys: Mapping[int, KeysBySpace]
    cost: Cost
    source: RowSource | None = None


@dataclass(frozen=True)
class Price:
    """What one delivery costs in a round. Bytes are exact, seconds are estimates of one core.

    Args:
        about: the delivery.
        bytes_down: that a client receives, from all servers together.
        bytes_up: that a client sends, to all servers together.
        seconds_by: party -> CPU seconds of one core for answering the whole cohort.
        client_seconds: CPU seconds of one client.
        server_memory: bytes that one server holds.
        slices_generated: at the server side.
        building_by: party -> CPU seconds of one core for what it makes before anybody asks, once a
            round; parties that make nothing are not in it.
        is_cacheable: whether the same bytes serve many clients, so that caches can give them out.
        requests: of a device at each party, those for params and hints among them.
        passed_on_by: the party that passes everything on to the others, which devices then do not
            connect to; empty if there is none.
    """

    about: DeliveryAbout
    bytes_down: int
    bytes_up: int
    seconds_by: Mapping[str, float] = field(hash=False)
    client_seconds: float
    server_memory: int
    slices_generated: int
    building_by: Mapping[str, float] = field(hash=False, default_factory=dict)
    is_cacheable: bool = False
    requests: int = 1
    passed_on_by: str = ""

    @property
    def way(self) -> str:
        """The name of the delivery."""
        return self.about.name

    @property
    def bytes_total(self) -> int:
        """Both directions, of one client."""
        return self.bytes_down + self.bytes_up

    @property
    def server_seconds(self) -> float:
        """CPU seconds of all parties but the clients, together: building and answering."""
        return sum(self.seconds_by.values()) + sum(self.building_by.values())


class Delivery(Protocol):
    """How slices travel from the server to clients."""

    @property
    def about(self) -> DeliveryAbout:
        """What it declares."""
        ...

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> Delivery:
        """Returns the delivery with what a run says.

        Args:
            keys_per_client: key space -> the most keys that a client may ask for; private
                deliveries pad every request to it.
            allow_simulation: whether hardware may be simulated, which protects nothing.

        Raises:
            AttestationError: hardware would be simulated, and that is not allowed.
        """
        ...

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Returns what a round costs.

        Raises:
            InputError: the load is beyond what messages of this delivery can hold.
        """
        ...

    def deliver(self, state: ServerState, keys: Mapping[int, KeysBySpace]) -> Delivered:
        """Delivers one round to the clients that have chosen `keys`."""
        ...


def making_seconds(load: Workload, speeds: Speeds) -> float:
    """CPU seconds for making all slices."""
    return load.table_bytes / speeds.gather
