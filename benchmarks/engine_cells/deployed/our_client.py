"""A ClientApp of keyhole: fetches slices from the service, trains in NumPy, sends its update."""

from __future__ import annotations

from engine_cells.deployed.devices import make_clients
from keyhole.device.take_part import PopulationClient
from keyhole.engines.flower.client_app import make_client_app

app = make_client_app(lambda client, _: PopulationClient(client, make_clients).participant())
