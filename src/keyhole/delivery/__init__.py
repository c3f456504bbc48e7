"""How slices travel from the server to the clients of a round, in process, and what it costs."""

from keyhole.delivery.cost import Cost, Delivered
from keyhole.delivery.ways import broadcast, on_demand, pregenerated

__all__ = ["Cost", "Delivered", "broadcast", "on_demand", "pregenerated"]
