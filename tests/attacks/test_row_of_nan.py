"""Attack: a trainer signs a model in which one row is NaN, and looks whose update is missing.

Nobody sees a key: devices fetch the whole model and send shares to two aggregators. But an update
that comes of NaN cannot be added up, and a device that then sends nothing has told that it has the
key. So has one that finds no example left for the keys that it may choose. The planted hole is a
device that fails so.
"""

import threading
from contextlib import ExitStack

import numpy as np
import pytest

from keyhole import tree
from keyhole.device import take_part as take_part_module
from keyhole.device.sums import SumSend
from keyhole.device.take_part import PopulationClient, fetch_at_home, keep_taking_part
from keyhole.errors import KeyholeError, NoExamplesError
from keyhole.primitives.report import Report
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.wire.assignment import device_name
from keyhole.wire.sockets import Clock
from tests.helpers import with_slow
from tests.service.living_devices import living
from tests.service.small_service import small_service
from tests.service.sums import private_run
from tests.service.sums.aggregators import aggregators

DEVICES, HAS_IT = 4, 2  # device number c has key c, and no other


def train(submodel, data, rng):
    update = tree.map_leaves(lambda leaf: leaf * np.float32(0.5) + 1, submodel)
    return Report(update, weight=1.0)


def train_on_what_is_left(submodel, data, rng):
    """As a task whose examples need more keys than the trainer lets devices have."""
    if data == HAS_IT:
        raise NoExamplesError("no examples: got 0; expected 1 or more; leave it out")
    return train(tree.map_leaves(np.zeros_like, submodel), data, rng)


def train_in_64_bits(submodel, data, rng):
    """What comes of a row that is large is finite, and no number of a sum."""
    update = train(submodel, data, rng).update
    large = tree.map_leaves(lambda leaf: np.nan_to_num(leaf.astype(np.float64), nan=1e39), update)
    return Report(large, weight=1.0)


WHY = {
    "a row is NaN": train,
    "a row is large": train_in_64_bits,
    "no example is left": train_on_what_is_left,
}


def clients(why):
    def choose(data, context):
        return private_run.ROW.keys(np.array([data]))

    return Clients(DEVICES, lambda client: client, choose, WHY[why])


def state():
    rows = np.zeros_like(private_run.MODEL["w"])
    rows[HAS_IT] = np.nan
    model = {**private_run.MODEL, "w": rows}
    return ServerState.dense(private_run.LAYOUT, model, SGD(1.0))


def lost(folder, why, **how):
    """Whose updates the trainer misses, and what it learns of the bias."""
    plan = private_run.make_plan(
        cohorts=Cohorts(DEVICES, DEVICES), keys_per_client={"row": 1}, **how
    )
    stop = threading.Event()
    with ExitStack() as stack:
        service = stack.enter_context(small_service(folder / "rounds"))
        pair = stack.enter_context(aggregators(folder / "sums"))

        def live(client):
            name, one = (
                device_name(client),
                PopulationClient(client, lambda _: clients(why), (3, 0)),
            )
            clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.02)))
            with ExitStack() as own:
                lines = [own.enter_context(pair.device(party, name)) for party in (0, 1)]
                send = SumSend(*lines, (pair.public(0), pair.public(1)))
                pinned = {"trainer_key": service.trainer.public, "stop": stop, "clock": clock}
                device = own.enter_context(service.device(name=name, **pinned))
                try:
                    keep_taking_part(device, one.participant(fetch_at_home, send))
                except (KeyholeError, RuntimeWarning):
                    return  # it ends

        stack.enter_context(living(live, range(DEVICES), stop))
        kind = private_run.served(service, pair, seconds=8.0)
        run = start_run(state(), clients(why), plan, kind=kind)
        (record,) = run.rounds(1)
        return record.lost_before + record.lost_after, run.state.model()["bias"]


HOW = {"alike": {}, "by examples": {"over": "examples", "max_weight": 1.0}}


@pytest.mark.parametrize("why", WHY)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_nobody_is_missing(tmp_path, how, why):
    missing, bias = lost(tmp_path, why, **how)
    assert list(missing) == []
    count = DEVICES - 1 if how else DEVICES  # zeros of no weight leave a weighted mean alone
    np.testing.assert_allclose(bias, -(DEVICES - 1) / count, rtol=1e-3)


@pytest.mark.parametrize("why", with_slow(WHY, fast=["a row is NaN"]))
def test_a_device_that_fails_tells_its_key(tmp_path, monkeypatch, why):
    monkeypatch.setattr(take_part_module, "or_zeros", lambda train, *_: train())
    missing, _ = lost(tmp_path, why)
    assert list(missing) == [HAS_IT]
