"""Attack: a device sends a million times its update, 1e30, infinity or NaN, and the model is its.

One device of five boosts what it sends, over a real service. The planted hole is a service and a
trainer that do not measure. With the bound, the most that a liar moves the mean is what any honest
client may: C over the cohort, in each round.
"""

import threading

import numpy as np
import pytest

from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts, sample_cohort
from keyhole.server.inputs import InputBound, TakenUpdate, norm, usable
from keyhole.service.inbox import SpoolInbox
from keyhole.service.served import Served
from tests.rounds import toy
from tests.service.living_devices import devices, living, lying
from tests.service.small_service import small_service

COHORT, LIMIT = 5, 0.5
BOOSTS = {
    "a million times": lambda x: x * np.float32(1e6),
    "1e30": lambda x: np.full_like(x, 1e30),
    "infinity": lambda x: np.full_like(x, np.inf),
    "NaN": lambda x: np.full_like(x, np.nan),
    "its longest, named again and again": None,
}


def attack(directory, send, above, **weights):
    """Trains one round with a liar among five devices; returns how long the mean update was.

    Args:
        send: how the liar sends, in place of `device.send`.
    """
    cohorts = Cohorts(len(toy.EXAMPLES), COHORT)
    plan = toy.make_plan(cohorts=cohorts, max_update_norm=LIMIT, above_norm=above, **weights)
    stop = threading.Event()

    with small_service(directory) as service:
        kind = Served(
            service.publisher, SpoolInbox(service.spool), poll=0.005, seconds=60.0, named=True
        )
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, 0)
        liar = asked[2]
        honest = devices(service, [client for client in asked if client != liar])
        with honest, living(lying(service, stop, send, []), [liar], stop):
            (record,) = run.rounds(1)
    return norm(run.state.model()), record


def sending(boost):
    """How a liar sends; without a boost it names one key 256 times."""

    def send(device, told, update, keys):
        if boost is not None:
            return device.send(told, {"x": boost(update["x"])}, keys)
        first = np.repeat(keys["feature"].array[:1], 256)
        rows = np.full(256, LIMIT / 16, np.float32)  # of norm C side by side, 16 C added up
        return device.send(told, {"x": rows}, {"feature": toy.FEATURE.keys(first)})

    return send


def plant_hole(patch):
    """Takes every update of numbers, as a build without a bound would."""

    def take(self, update, keys, weight=None):
        return TakenUpdate(usable(update))

    patch.setattr(InputBound, "take", take)


@pytest.mark.parametrize("above", ["refuse", "clip"])
@pytest.mark.parametrize("how", BOOSTS)
def test_a_liar_moves_the_model_no_further_than_anybody(tmp_path, how, above):
    length, record = attack(tmp_path, sending(BOOSTS[how]), above)
    assert length <= LIMIT * 1.001, "the mean of updates of at most C"
    assert record.above_norm == (how != "NaN")
    assert len(record.refused) == (above == "refuse" or how in ("NaN", "infinity"))
    assert record.closed in ("goal", "everyone"), "nobody waits for who was refused"


@pytest.mark.parametrize("how", ["a million times", "1e30", "its longest, named again and again"])
def test_without_the_bound_the_attack_succeeds(tmp_path, monkeypatch, how):
    plant_hole(monkeypatch)
    length, record = attack(tmp_path, sending(BOOSTS[how]), "refuse")
    assert length > (2 if BOOSTS[how] is None else 1000) * LIMIT
    assert record.above_norm == 0
