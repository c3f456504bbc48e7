"""Plan: what stays the same in every round of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keyhole.delivery.cost import Delivery
from keyhole.delivery.ways import on_demand
from keyhole.errors import InputError
from keyhole.keys.budget import DeviceClass
from keyhole.primitives.layout import Layout
from keyhole.server.aggregation import Over
from keyhole.training.cohort import Cohorts

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """What stays the same in every round of a run.

    Args:
        cohorts: who takes part.
        keys_per_client: key space -> most keys of a client; a client may choose fewer.
        devices: kinds of device; each client has one for good, and its memory bounds its keys too.
        seed: of everything random.
        trial: which repetition; both arms of a comparison use the same.
        over: what sums are divided by: the cohort (Eq. 5) or those who chose the key.
        deliver: how slices travel.
    """

    cohorts: Cohorts
    keys_per_client: Mapping[str, int]
    devices: tuple[DeviceClass, ...] = ()
    seed: int = 0
    trial: int = 0
    over: Over = "cohort"
    deliver: Delivery = on_demand

    def check(self, layout: Layout) -> None:
        """Raises InputError unless the plan fits the model."""
        sizes = {space.name: space.num_keys for space in layout.spaces}
        if self.keys_per_client.keys() != sizes.keys():
            raise InputError(
                "keys_per_client does not match the cuts",
                got=", ".join(sorted(self.keys_per_client)) or "none",
                allowed=", ".join(sorted(sizes)) or "none",
                fix="give one number for each key space",
            )
        for name, m in self.keys_per_client.items():
            if not 0 <= m <= sizes[name]:
                raise InputError(
                    f"keys_per_client of {name!r} is out of range",
                    got=m,
                    allowed=f"0..{sizes[name]}",
                    fix="a client cannot select more keys than there are",
                )
