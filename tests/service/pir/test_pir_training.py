"""Training with slices that are fetched in private: the bytes of a run in the clear."""

import threading
import time
from contextlib import suppress

import pytest

from keyhole.delivery.pir.one_server import OneServerPir
from keyhole.device.private import QueryFetch
from keyhole.device.take_part import PopulationClient, take_part
from keyhole.errors import TooLateError
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts, sample_cohort
from keyhole.service.inbox import SpoolInbox
from keyhole.service.served import Served
from keyhole.wire.assignment import device_name
from tests.helpers import LONG
from tests.rounds import toy
from tests.service.pir.pair import ONE, TWO, pair

ROUNDS = 2


def train_over(both, fetch, plan):
    """A run whose devices fetch so; each of a round takes part after the other."""
    stop = threading.Event()
    inbox = SpoolInbox(both.service.spool)
    kind = Served(both.service.publisher, inbox, poll=0.005, stop=stop)
    run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)

    def make_rounds():
        with suppress(KeyboardInterrupt):  # a device has failed, and nobody waits for the rest
            list(run.rounds(ROUNDS))

    training = threading.Thread(target=make_rounds)
    training.start()
    try:
        for t in range(ROUNDS):
            for client in sample_cohort(plan.cohorts, plan.seed, plan.trial, t):
                take_part_in(t, client, both, fetch)
    except BaseException:
        stop.set()
        raise
    finally:
        training.join()
    return run


def take_part_in(t, client, both, fetch):
    """Checks in until round t is open, as often as a device that waits may ask."""
    one = PopulationClient(client, lambda settings: toy.make_clients())
    with both.device(device_name(client)) as device:
        deadline = time.monotonic() + LONG
        while time.monotonic() < deadline:
            with suppress(TooLateError):  # closed since it was read: a device checks in again
                if getattr(take_part(device, one.participant(fetch)), "number", None) == t:
                    return
            time.sleep(0.02)
    pytest.fail(f"round {t} did not open")


@pytest.mark.parametrize("roles", [TWO, ONE], ids=["two servers", "one server"])
def test_devices_that_fetch_in_private_make_the_same_model(tmp_path, roles):
    plan = toy.make_plan(cohorts=Cohorts(len(toy.EXAMPLES), 2), keys_per_client={"feature": 8})
    with pair(tmp_path, roles) as both:
        fetch = QueryFetch(OneServerPir()) if roles is ONE else both.fetch()
        run = train_over(both, fetch, plan)
        assert both.metric(0, "keyhole_private_queries_total") == 2 * ROUNDS
        assert both.metric(0, "keyhole_keys_total") == 0  # no slice was asked for by its key
        if roles is TWO:
            fetch.others[0].close()
    expected = start_run(toy.make_state(), toy.make_clients(), plan)
    list(expected.rounds(ROUNDS))
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
