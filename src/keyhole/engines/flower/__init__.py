"""Rounds with real devices: control messages by Flower, slices and updates by the slice service.

# client.py of a Flower project
app = make_client_app(participant_of)

# server.py
app = make_server_app(train)
"""

from typing import TYPE_CHECKING

from keyhole.lazy import names_on_demand

if TYPE_CHECKING:
    from keyhole.engines.flower.client_app import join, make_client_app
    from keyhole.engines.flower.nodes import Nodes
    from keyhole.engines.flower.run_config import RoundsConfig
    from keyhole.engines.flower.server_app import make_server_app, rounds_on
    from keyhole.engines.flower.summons import Addresses, FlowerSummons

__all__ = [
    "Addresses",
    "FlowerSummons",
    "Nodes",
    "RoundsConfig",
    "join",
    "make_client_app",
    "make_server_app",
    "rounds_on",
]

__getattr__ = names_on_demand(__name__, __file__)
