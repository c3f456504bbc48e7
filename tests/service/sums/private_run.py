"""A run whose devices send shares to two aggregators: a model of which clients touch few rows."""

import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np

import keyhole as kh
from keyhole import tree
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.device.sums import SumPolicy, SumSend
from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.rounds.clients import Clients
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.served import Served
from keyhole.service.sum_services import SumServices
from keyhole.wire.assignment import device_name
from keyhole.wire.sockets import Clock
from tests.service.living_devices import living

ROW = kh.KeySpace("row", 500)
MODEL = {"bias": np.zeros(3, np.float32), "w": np.zeros((500, 12), np.float32)}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))
SALT = bytes(range(16))
POPULATION = 8


def choose(data, context):
    m = context.max_keys["row"]
    return ROW.keys(context.rng.choice(ROW.num_keys, m, replace=False))


def train(submodel, data, rng):
    """Multiples of 1/1024: no rounding of a ring of 32 bits touches them."""
    return tree.map_leaves(
        lambda leaf: (rng.integers(-4096, 4096, leaf.shape) / 1024).astype(np.float32), submodel
    )


def make_clients():
    return Clients(POPULATION, lambda client: client, choose, train)


def make_plan(**changes):
    given = {
        "cohorts": Cohorts(POPULATION, 5),
        "keys_per_client": {"row": 4},
        "seed": 3,
        "aggregate": TwoServers(Rounding(), min_clients=2),
    }
    return RunParts(**{**given, **changes})


def make_state():
    return ServerState.dense(LAYOUT, MODEL, SGD(1.0))


def model_bytes(state):
    return b"".join(leaf.tobytes() for leaf in tree.flatten(state.model()).values())


def services(pair, **options):
    return SumServices(pair.trainer(0), pair.trainer(1), salt=SALT, **options)


def served(service, pair, seconds=120.0, stop=None, clock=time.monotonic, named=True, **options):
    """Rounds of devices, which answer long before the deadline, if they answer; cohorts are those
    of the run in process."""
    stop = stop or threading.Event()
    inbox = services(pair, stop=stop, **options)
    return Served(
        service.publisher,
        inbox,
        poll=0.01,
        seconds=seconds,
        stop=stop,
        clock=clock,
        named=named,
    )


@contextmanager
def devices(service, pair, clients=range(POPULATION), policy=None, to=None, population=None):
    """Devices that take part until the block ends, each in a thread; what they met is yielded."""
    stop, met = threading.Event(), []

    def live(client):
        name = device_name(client)
        one = PopulationClient(client, lambda settings: (population or make_clients)(), (3, 0))
        clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.02)))
        with ExitStack() as stack:
            lines = [stack.enter_context(pair.device(party, name)) for party in (0, 1)]
            keys = pair.public(0), pair.public(1)
            send = SumSend(*lines, keys, policy or SumPolicy())
            send = send if to is None else to(client, send)
            own = {"stop": stop, "clock": clock, "trainer_key": service.trainer.public}
            device = stack.enter_context(service.device(name=name, **own))
            try:
                keep_taking_part(device, one.participant(send=send), on_miss=met.append)
            except kh.KeyholeError as error:
                met.append(error)

    with living(live, clients, stop):
        yield met


def with_nan(client):
    """Clients of which one makes updates that cannot be added."""
    clients = make_clients()

    def spoiled(submodel, data, rng):
        update = train(submodel, data, rng)
        return tree.map_leaves(lambda leaf: leaf * np.nan, update) if data == client else update

    return replace(clients, train=spoiled)
