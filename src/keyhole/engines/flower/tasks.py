"""The tasks of keyhole as a Flower app: what the components of a project name.

[tool.flwr.app.components]
serverapp = "my_project.server:app"      # from keyhole.engines.flower.tasks import server_app
clientapp = "my_project.client:app"      # from keyhole.engines.flower.tasks import client_app
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Context

from keyhole.device.take_part import DeviceSettings, Participant, PopulationClient
from keyhole.engines.flower.client_app import make_client_app
from keyhole.engines.flower.config import NodeConfig, RoundsConfig, read_spec
from keyhole.engines.flower.server_app import make_server_app
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import open_data
from keyhole.experiments.specs import spec_for_device
from keyhole.rounds.clients import Clients
from keyhole.rounds.cores import start_jax
from keyhole.rounds.record import RoundRecord
from keyhole.service.served import Served

_LOG = logging.getLogger("flwr.keyhole")


def train_task(rounds: Served, config: RoundsConfig, context: Context) -> None:
    """Trains the task of the run config; a `Train` of `make_server_app`."""
    start_jax()
    spec = read_spec(context.run_config)
    experiment = Experiment(spec, open_data(spec, seed=0))
    experiment.check()
    result = experiment.run(spec.trial, config.run, kind=rounds, on_round=_tell)
    if result is not None:
        _LOG.info("done: %s", ", ".join(f"{k} {v:.4f}" for k, v in result.metrics.items()))


def _tell(record: RoundRecord) -> None:
    sent = len(record.staleness)
    _LOG.info("round %d: %d of %d updates counted", record.round, sent, len(record.clients))


@dataclass
class TaskClients:
    """Clients of the task of the run config; a `ParticipantOf` of `make_client_app`.

    One that lives as long as its process: clients of one node share the data and what is compiled.
    """

    _made: dict[str, Clients] = field(default_factory=dict, repr=False)

    def __call__(self, client: int, context: Context) -> Participant:
        """What a client of the population does in a round."""
        spec = read_spec(context.run_config)
        node = NodeConfig.of(context.node_config)
        data = node.data or spec.data.name
        # The app brings the modules that the run config names, so devices know them.
        modules = {ref.name.partition(":")[0] for _, ref in spec.parts() if ref.is_own}

        def population(told: DeviceSettings) -> Clients:
            mine = spec_for_device(told.run, modules)
            name = json.dumps([data, told.spec], sort_keys=True)
            if name not in self._made:
                start_jax()
                self._made = {name: Experiment(mine, open_data(mine, data, node.seed or 0)).clients}
            return self._made[name]

        rehearsed = None if node.seed is None else (node.seed, 0)
        states = None if node.states is None else Path(node.states) / str(client)
        return PopulationClient(client, population, rehearsed, states).participant()


server_app = make_server_app(train_task)
client_app = make_client_app(TaskClients())
