"""Holds rounds to what the operator of a device allows, before anything is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from keyhole.delivery.base import Delivery
from keyhole.delivery.popular import shares_of_round
from keyhole.device.device import Assignment, Device, DeviceKeys
from keyhole.device.fetch import KnownRound, Submodel
from keyhole.device.take_part import DeviceSettings, Fetch
from keyhole.errors import ViolationError
from keyhole.wire.settings import DELIVERY_SETTING


@dataclass(frozen=True)
class Allowed:
    """A delivery that a device allows, and how it fetches by it."""

    delivery: Delivery
    fetch: Fetch


@dataclass(frozen=True)
class AllowedFetch:
    """Fetches as each round says, if the operator of the device allows it.

    Args:
        by_name: the deliveries that are allowed, by their names.
        usual: that of rounds which do not say.
        max_bytes: a round in which slices, what is sent for them, and an update in the clear could
            take more is refused; shares of an update are for `SumPolicy`.
    """

    by_name: Mapping[str, Allowed]
    usual: str
    max_bytes: float = inf

    def __call__(self, device: Device, round: Assignment, keys: DeviceKeys) -> Submodel:
        """Fetches; raises ViolationError where the round says another delivery, or could take more
        bytes: nothing was asked for."""
        known = device.known(round)
        name = known.manifest.settings.get(DELIVERY_SETTING) or self.usual
        if not isinstance(name, str) or name not in self.by_name:
            raise ViolationError(
                f"the round is fetched in a way that this device does not allow: got {name!r}; "
                f"expected {' or '.join(sorted(self.by_name))}; nothing was asked for; if its "
                "operator agrees, start the device with that --delivery and the URLs of its parties"
            )
        allowed = self.by_name[name]
        if self.max_bytes < inf:
            self._check_bytes(known, allowed.delivery)
        return allowed.fetch(device, round, keys)

    def _check_bytes(self, known: KnownRound, delivery: Delivery) -> None:
        """Holds the public max of the round against what the operator gives."""
        from keyhole.planner.prices import max_bytes

        counts = DeviceSettings.of(known).keys_per_client
        needed = known.layout.client_bytes(**counts)
        popular = shares_of_round(known.manifest.settings)
        needed += sum(max_bytes(delivery, known.layout, counts, popular=popular))
        if needed > self.max_bytes:
            raise ViolationError(
                f"the round could take more bytes than this device gives: got {needed:,}; expected "
                f"at most {self.max_bytes:,.0f}; nothing was asked for; raise --max-bytes, or let "
                "the trainer choose fewer keys"
            )
