"""A population with updates of 80 kB: too large for Ray to keep in the driver, so a lost node loses
what was made there."""

import time

import numpy as np

import keyhole as kh
from keyhole.engines.ray.crew import find_ray
from keyhole.rounds.clients import Clients
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState

COUNT = 900
ROW = kh.KeySpace("row", 120)
MODEL = {
    "x": np.random.default_rng(3).normal(size=(120, 500)).astype(np.float32),
    "bias": np.arange(7, dtype=np.float32),
}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"x": 0}))


def choose(client, context):
    m = context.max_keys["row"]
    return {"row": ROW.keys(context.rng.choice(ROW.num_keys, m, replace=False))}


def train(submodel, client, rng):
    scale = np.float32(rng.normal())
    return {name: leaf * scale for name, leaf in submodel.items()}


def make_clients(train=train):
    return Clients(COUNT, lambda client: client, choose, train)


def make_waiting_clients(folder, waiting):
    """Some clients wait for a file named go; the others leave one with their node's name."""

    def train_in_turn(submodel, client, rng):
        if client in waiting:
            while not (folder / "go").exists():
                time.sleep(0.01)
        else:
            (folder / f"{client} {find_ray().get_runtime_context().get_node_id()}").touch()
        return train(submodel, client, rng)

    return make_clients(train_in_turn)


def make_state():
    return ServerState.dense(LAYOUT, MODEL, SGD(0.1))


def make_plan(size):
    return RunParts(Cohorts(COUNT, size), {"row": 40}, seed=5)
