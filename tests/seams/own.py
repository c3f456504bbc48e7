"""Own parts, each as a user writes it outside the library; `PARTS` plugs them into the toy run."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.models.client_update import ClientUpdate
from keyhole.models.dense import masked_mean
from keyhole.models.local_training import LocalSgd
from keyhole.models.model import Model
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import Evaluation
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.rounds import toy
from tests.seams.own_parts import Damped, Reversed, norm
from tests.seams.toys import scaled_sum


def rarest(m):
    """A choice of keys: some of the client's own features, drawn anew in each round."""

    def choose(examples, context):
        own = np.array(toy.oracle.own_features(examples))
        return toy.FEATURE.keys(context.rng.choice(own, min(m, len(own)), replace=False))

    return choose


@dataclass(frozen=True)
class Stream:
    """A data set: examples are made when they are read, from a seed and the client's number."""

    seed: int

    def __call__(self, client):
        rng = np.random.default_rng([self.seed, client])
        return [(rng.choice(60, 4, replace=False).tolist(), int(rng.integers(2))) for _ in "abc"]


def squares(scale):
    """A task: a model of its own, its loss, its data and how keys are counted in them."""
    film = kh.KeySpace("film", 12)

    def predict(params, batch):
        return scale * params["taste"][batch["film"], 0]

    def loss(params, batch, mask):
        return masked_mean((predict(params, batch) - batch["stars"]) ** 2, mask)

    def init(seed):
        return {"taste": np.zeros((12, 1), np.float32)}

    def localize(own, keys):
        place = {key: at for at, key in enumerate(keys["film"])}
        return {**own, "film": np.array([place[f] for f in own["film"].tolist()], np.int32)}

    model = Model(init, loss, predict, cuts=(kh.Cut(film, {"taste": 0}),))
    clients = Clients(
        8,
        lambda c: {"film": np.arange(c, c + 3), "stars": np.full(3, 1.0 + c, np.float32)},
        lambda own, context: film.keys(own["film"][: context.max_keys["film"]]),
        LocalSgd(model, ClientUpdate(0.1, batch_size=2)),
        localize,
    )
    state = ServerState.dense(model.layout, model.init(0), SGD(1.0))
    return state, clients, kh.RunParts(Cohorts(8, 3), {"film": 3})


def part(name, variant=0) -> tuple[ServerState, Clients, kh.RunParts, dict[str, Any]]:
    """Returns state, clients, plan and how rounds are made, with one own part plugged in.

    Variant 1 gives another part of the same name.
    """
    state, clients, plan, how = toy.make_state(), toy.make_clients(), toy.make_plan(), {}
    if name == "optimizer":
        state = toy.make_state(Damped(1.0, factor=(0.5, 0.25)[variant]))
    elif name == "choice":
        clients = replace(clients, choose=rarest((5, 6)[variant]))
    elif name == "data":
        clients = replace(clients, data=Stream((1, 2)[variant]))
    elif name == "task":
        state, clients, plan = squares((1.0, 2.0)[variant])
    elif name == "sum":
        plan = toy.make_plan(aggregate=scaled_sum((2, 3)[variant]))
    elif name == "engine":
        how = {"execute": Reversed()}
    elif name == "metric":
        how = {"evaluation": Evaluation(norm)}
    return state, clients, plan, how
