"""A ClientApp of keyhole: fetches slices from the service, trains in NumPy, sends its update."""

from __future__ import annotations

from engine_cells.deployed.devices import make_clients
from keyhole.engines.flower.client_app import make_client_app
from keyhole.serving.device.population import PopulationClient

app = make_client_app(lambda client, _: PopulationClient(client, make_clients).participant())
