"""A small sparse problem for tests of the simulator: the oracle's clients, as a run."""

import numpy as np

import keyhole as kh
from keyhole.keys.choice import ClientContext
from keyhole.rounds.clients import Clients
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.helpers import load_example

oracle = load_example("algorithm2_by_hand")

FEATURE = kh.KeySpace("feature", 60)
EXAMPLES = oracle.make_clients(20, FEATURE.num_keys, seed=5)
REHEARSED = (3, 0)  # seed and trial of `make_plan`, which devices know from their operator
LAYOUT = kh.Layout.of({"x": np.zeros(60, np.float32)}, kh.Cut(FEATURE, {"x": 0}))


def choose(examples, context):
    """A client's own features, as many as it may hold."""
    return FEATURE.keys(oracle.own_features(examples)[: context.max_keys["feature"]])


def chosen(examples):
    """What a client chooses without a limit, as rounds pass it on."""
    return {"feature": choose(examples, ClientContext({"feature": 60}, np.random.default_rng(0)))}


def localize(examples, keys):
    """Features as places among the client's keys; those that were not selected are left out."""
    place = {k: i for i, k in enumerate(keys["feature"])}
    return [([place[f] for f in features if f in place], label) for features, label in examples]


def train(submodel, examples, rng):
    """The oracle's client, in an order of its own."""
    shuffled = [examples[i] for i in rng.permutation(len(examples))]
    y = submodel["x"].tolist()
    update = oracle.sgd_client(0.5)(y, shuffled, range(len(y)))
    return {"x": np.array(update, np.float32)}


def get_examples(client):
    return EXAMPLES[client]


def make_clients():
    return Clients(len(EXAMPLES), get_examples, choose, train, localize)


def make_state(optimizer=None):
    return ServerState.dense(LAYOUT, {"x": np.zeros(60, np.float32)}, optimizer or SGD(1.0))


def make_plan(**changes):
    cohorts = changes.pop("cohorts", None) or Cohorts(len(EXAMPLES), 5)
    return RunParts(cohorts, **{"keys_per_client": {"feature": 60}, "seed": 3, **changes})


def model_bytes(state):
    return state.model()["x"].tobytes()


def metrics(state):
    return {"accuracy": oracle.accuracy(state.model()["x"].tolist(), EXAMPLES)}
