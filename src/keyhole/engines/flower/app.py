"""The tasks of keyhole as a Flower app: what the components of a project name.

[tool.flwr.app.components]
serverapp = "my_project.server:app"      # from keyhole.engines.flower.app import server_app
clientapp = "my_project.client:app"      # from keyhole.engines.flower.app import client_app
"""

from __future__ import annotations

from keyhole.engines.flower.client_app import make_client_app
from keyhole.engines.flower.config import TaskClients, train_task
from keyhole.engines.flower.server_app import make_server_app

server_app = make_server_app(train_task)
client_app = make_client_app(TaskClients())
