"""The catalogue: every way of delivery, by its name."""

from __future__ import annotations

from collections.abc import Mapping

from keyhole.delivery.base import DELIVERIES, PIR_SCHEMES, Delivery
from keyhole.delivery.clear import broadcast, on_demand, pregenerated
from keyhole.delivery.enclave.way import Enclave
from keyhole.delivery.exchange import PrivateWay
from keyhole.delivery.pir.way import Pir
from keyhole.delivery.relay.way import BlindRelay
from keyhole.errors import InputError

_CLEAR: Mapping[str, Delivery] = {
    "broadcast": broadcast,
    "on-demand": on_demand,
    "pregenerated": pregenerated,
}


def delivery_named(
    name: str, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
) -> Delivery:
    """Returns a way of delivery.

    Args:
        name: one of `DELIVERIES`.
        keys_per_client: key space -> the most keys that a client may ask for; private ways pad
            every request to it.
        allow_simulation: lets `enclave` run without the hardware that would protect it.

    Raises:
        InputError: there is no such way.
        AttestationError: an enclave without hardware was not allowed.
    """
    if name in _CLEAR:
        return _CLEAR[name]
    for way, scheme in PIR_SCHEMES.items():
        if name == way:
            return PrivateWay(Pir(scheme), keys_per_client)
    if name == "relay":
        return PrivateWay(BlindRelay(), keys_per_client)
    if name == "enclave":
        return PrivateWay(Enclave(allow_simulation), keys_per_client)
    raise InputError(
        "no such way of delivery", got=name, allowed=", ".join(DELIVERIES), fix="choose one of them"
    )
