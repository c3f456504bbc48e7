"""The server: begins a run, or goes on with the one that is there."""

import logging

from flower_example.model import CLIENTS, LAYOUT, RATINGS, loss, make_clients, make_model
from keyhole.engines.flower.server_app import make_server_app
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState

LOG = logging.getLogger("flwr.example")


def train(rounds, config, context):
    """Trains with the rounds that Flower's devices make."""
    state = ServerState.dense(LAYOUT, make_model(), SGD(1.0))
    plan = RunParts(Cohorts(CLIENTS, CLIENTS), keys_per_client={"item": RATINGS})
    begin = resume_run if (config.run / "state").exists() else start_run
    run = begin(state, make_clients(), plan, config.run, rounds)
    for record in run.rounds(context.run_config["rounds"]):
        LOG.info("round %d: loss %.4f", record.round, loss(run.state.model()))
    run.close()


app = make_server_app(train)
