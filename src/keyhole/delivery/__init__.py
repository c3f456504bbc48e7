"""How slices travel from the server to the clients of a round, in process, and what it costs."""

from keyhole.delivery.cost import Cost, Delivered
from keyhole.delivery.records import Coding
from keyhole.delivery.ways import Coded, broadcast, on_demand, pregenerated

__all__ = ["Coded", "Coding", "Cost", "Delivered", "broadcast", "on_demand", "pregenerated"]
