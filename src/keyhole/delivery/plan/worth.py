"""Whether a private way is worth its bytes for a whole model: broadcast hides everything too."""

from __future__ import annotations

from collections.abc import Mapping

from keyhole.delivery.assembly import most_keys_of
from keyhole.delivery.names import DeliveryName
from keyhole.delivery.plan.lengths import traffic_of
from keyhole.delivery.plan.need import Need
from keyhole.delivery.plan.planner import refuse_dearer
from keyhole.delivery.records import PLAIN, Coding, records_of
from keyhole.primitives.layout import Layout

__all__ = ["check_model_worth"]


def check_model_worth(
    way: DeliveryName, layout: Layout, keys_per_client: Mapping[str, int], coding: Coding = PLAIN
) -> None:
    """Refuses a way that sends more than the whole model, as `PrivateWay` would deliver it.

    Args:
        way: of delivery.
        layout: the model and its cuts.
        keys_per_client: key space -> the most keys of a client.
        coding: of the cut parts.

    Raises:
        CostlyError: it is dearer than broadcast.
    """
    sent = whole = 0
    most = most_keys_of(layout, keys_per_client)
    for part, records, m in zip(layout.parts, records_of(layout, coding), most, strict=True):
        table = part.space.num_keys * records.record_bytes
        if 0 < m < part.space.num_keys:
            need = Need(part.space.num_keys, m, records.record_bytes, cohort=1)
            sent += traffic_of(way, need).total
        elif m:
            sent += table
        whole += table
    refuse_dearer(way, sent, whole)
