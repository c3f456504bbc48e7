"""How slices travel from the server to the clients of a round, in process, and what it costs."""

from typing import TYPE_CHECKING

from keyhole.lazy import names_on_demand

if TYPE_CHECKING:
    from keyhole.delivery.catalogue import delivery_named
    from keyhole.delivery.cost import Cost, Delivered
    from keyhole.delivery.leakage import Learned
    from keyhole.delivery.names import DELIVERIES
    from keyhole.delivery.plan.need import Need
    from keyhole.delivery.plan.planner import best, break_even
    from keyhole.delivery.plan.prices import Price, price_all
    from keyhole.delivery.private_way import PrivateWay
    from keyhole.delivery.records import Coding
    from keyhole.delivery.ways import Coded, broadcast, on_demand, pregenerated

__all__ = [
    "DELIVERIES",
    "Coded",
    "Coding",
    "Cost",
    "Delivered",
    "Learned",
    "Need",
    "Price",
    "PrivateWay",
    "best",
    "break_even",
    "broadcast",
    "delivery_named",
    "on_demand",
    "pregenerated",
    "price_all",
]

__getattr__ = names_on_demand(__name__, __file__)
