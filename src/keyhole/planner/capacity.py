"""Capacity: how many servers a round takes, and which resource runs out first.

A pure function of public numbers. Devices of a round come one after the other over some seconds, as
the coordinator's pace spreads them; in that time every party must send, receive and compute what
the round asks of it. A resource is planned to be busy for a share of the time only, since devices
do not come evenly. `benchmarks/internet_scale.py` holds these numbers to a simulated round.

What is counted: bytes of slices, updates and protocols, requests and TLS handshakes of `keyhole
serve`, the work of a delivery or a sum. Not counted: a proxy in front, TCP and IP, disks, and what
is made before anybody asks (`building` of a price). A table is held whole by each server, devices
check in at one machine, and one process of the trainer adds up in the clear: where such a thing
does not fit, more servers do not help, and `fits` is False.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from types import MappingProxyType
from typing import Literal, TypeAlias

from keyhole.aggregation import all_aggregations
from keyhole.aggregation.base import Aggregation, SumPrice
from keyhole.delivery.base import Price
from keyhole.errors import InputError
from keyhole.parts import PartKind
from keyhole.pricing import ServiceSpeeds, Workload, measured

Resource: TypeAlias = Literal["line", "CPU", "memory"]
"""What a server can run out of."""

_TOLD_BYTES = 4_000  # of a manifest and the answer to a check-in
_COORDINATOR, _TRAINER = "coordinator", "trainer"


@dataclass(frozen=True)
class Fleet:
    """Servers, all alike, and the time that they have.

    Args:
        seconds: over which the devices of a round come, `--spread` of the service.
        gbit: of its line, gigabits a second in each direction.
        busy: share of the time that a resource is planned to be in use.
        new_connections: whether every device opens a new connection, with TLS.
    """

    seconds: float
    cores: int = 32
    gbit: float = 25.0
    memory: float = 512e9
    busy: float = 0.7
    new_connections: bool = True

    def __post_init__(self) -> None:
        numbers = (self.seconds, self.cores, self.gbit, self.memory)
        if not (all(0 < number < inf for number in numbers) and 0 < self.busy <= 1):
            raise InputError(
                f"servers that could do nothing: got {self.cores} cores, {self.gbit:g} Gbit/s, "
                f"{self.memory:g} bytes, {self.seconds:g} s, {self.busy:g} busy; expected numbers "
                "above 0, and a share of at most 1; name servers as they are"
            )


@dataclass(frozen=True)
class PartyNeed:
    """What one party of a round needs.

    Args:
        gbit: a second in the busier direction, while devices come.
        cores: that are at work, on average, while devices come.
        requests: a second.
        memory: bytes of one server.
        by: resource -> servers that it alone asks for.
        is_single: whether it is one machine, or one process, whatever it needs.
    """

    party: str
    gbit: float
    cores: float
    requests: float
    memory: int
    by: Mapping[Resource, float] = field(hash=False)
    is_single: bool = False

    @property
    def servers(self) -> int:
        """As many as the line and the CPU ask for."""
        return max(1, ceil(max(self.by["line"], self.by["CPU"])))

    @property
    def fits(self) -> bool:
        """Whether one server holds what it must, and does all where there is one only."""
        return self.by["memory"] <= 1 and (self.servers == 1 or not self.is_single)

    @property
    def first(self) -> Resource:
        """Which resource runs out first: memory where it does not fit, else what asks for most."""
        if self.by["memory"] > 1:
            return "memory"
        return "line" if self.by["line"] > self.by["CPU"] else "CPU"


def delivery_needs(
    price: Price, need: Workload, fleet: Fleet, speeds: ServiceSpeeds | None = None
) -> tuple[PartyNeed, ...]:
    """Returns what each party of a delivery needs to answer a cohort in the time there is; `price`
    is that of the delivery for this need.

    >>> from keyhole.planner.prices import price_of
    >>> need = Workload(10**9, 1_000, 256, cohort=10**6)
    >>> found = delivery_needs(price_of("pregenerated", need), need, Fleet(seconds=600))
    >>> [(one.party, one.servers, one.first) for one in found]
    [('slice server', 1, 'line')]
    """
    needs = []
    servers, front = price.about.servers, price.passed_on_by
    out = need.cohort * price.bytes_down // servers
    inward = need.cohort * price.bytes_up // servers
    requests = need.cohort * price.requests
    connections = need.cohort * fleet.new_connections
    for party, work in price.seconds_by.items():
        if party == front:  # a relay: what comes in from one side goes out at the other
            load = _Load(out + inward, out + inward, 2 * requests, connections, work, 0)
        else:
            direct = 0 if front else connections
            load = _Load(out, inward, requests, direct, work, price.server_memory)
        needs.append(_of_party(party, load, fleet, speeds))
    return tuple(needs)


def checkin_need(need: Workload, fleet: Fleet, speeds: ServiceSpeeds | None = None) -> PartyNeed:
    """Returns what check-ins and manifests take of the one machine that devices ask for a round,
    whatever the delivery; one check-in of each device, so `--again` is to be long."""
    cohort = need.cohort
    load = _Load(cohort * _TOLD_BYTES, 0, 2 * cohort, cohort * fleet.new_connections, 0.0, 0)
    return _of_party(_COORDINATOR, load, fleet, speeds)


_PRICED = PartKind("aggregation with a price", "own-sum", {"price": Callable})


def price_sums(load: Workload, own: Sequence[Aggregation] = ()) -> tuple[SumPrice, ...]:
    """Returns the price of every aggregation whose messages and rings can hold the load, and of
    your own.

    >>> load = Workload(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50)
    >>> [price.bytes_up for price in price_sums(load)][:2]  # in the clear: sparse, dense
    [2008048, 20000000]
    """
    found = []
    for each in own:
        _PRICED.check(type(each).__name__, each)
    for each in (*all_aggregations(), *own):
        try:
            found.append(each.price(load))
        except InputError:  # a load is checked when it is made: this is a limit of the aggregation
            continue
    return tuple(found)


def sum_needs(
    price: SumPrice, need: Workload, fleet: Fleet, speeds: ServiceSpeeds | None = None
) -> tuple[PartyNeed, ...]:
    """Returns what each party needs that takes updates in and adds them up, as fast as they come.

    In the clear those are the coordinator, which stores them, and the trainer, one process that
    reads its files. Devices open a new connection for their update: they have trained meanwhile.
    """
    speeds, sent = speeds or measured(ServiceSpeeds), need.cohort * price.bytes_up
    connections = need.cohort * fleet.new_connections
    if _TRAINER in price.seconds_by:
        storing = sent / speeds.receiving + need.cohort * speeds.store_seconds
        added = sum(price.seconds_by.values())
        loads = {
            _COORDINATOR: _Load(0, sent, need.cohort, connections, storing, 0),
            _TRAINER: _Load(0, 0, 0, 0, added, price.server_memory),
        }
        return tuple(_of_party(party, load, fleet, speeds) for party, load in loads.items())
    needs = []
    # The first of two servers passes on what is public, which is nearly all.
    passed_on = sent if len(price.seconds_by) > 1 else 0
    requests, memory = need.cohort * price.requests, price.server_memory
    for party, work in price.seconds_by.items():
        out = need.cohort * price.bytes_down + passed_on
        load = _Load(out, sent, requests, connections, work, memory)
        passed_on = 0
        needs.append(_of_party(party, load, fleet, speeds))
    return tuple(needs)


@dataclass(frozen=True)
class _Load:
    """What a party does in a round: bytes out and in, requests, connections, CPU seconds."""

    out: int
    inward: int
    requests: int
    connections: int
    work: float
    memory: int


def _of_party(
    party: str, load: _Load, fleet: Fleet, speeds: ServiceSpeeds | None = None
) -> PartyNeed:
    speeds = speeds or measured(ServiceSpeeds)
    cpu = load.work + load.requests * speeds.request_seconds + load.out / speeds.sending
    cpu += load.connections * speeds.handshake_seconds
    gbit = 8e-9 * max(load.out, load.inward) / fleet.seconds
    cores = cpu / fleet.seconds
    by: dict[Resource, float] = {
        "line": gbit / fleet.gbit / fleet.busy,
        "CPU": cores / (1 if party == _TRAINER else fleet.cores) / fleet.busy,
        "memory": load.memory / fleet.memory,
    }
    requests = load.requests / fleet.seconds
    is_single = party in (_COORDINATOR, _TRAINER)
    return PartyNeed(party, gbit, cores, requests, load.memory, MappingProxyType(by), is_single)
