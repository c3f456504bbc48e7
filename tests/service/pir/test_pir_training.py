"""Training with slices that are fetched in private: the bytes of a run in the clear."""

import threading
import time
from contextlib import suppress

import pytest

from keyhole.delivery.clear import Pregenerated
from keyhole.delivery.pir.one_server import OneServerPir
from keyhole.device.private import QueryFetch
from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.planner.prices import max_bytes
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts, sample_cohort
from keyhole.service.inbox import SpoolInbox
from keyhole.service.served import Served
from keyhole.wire.assignment import device_name
from keyhole.wire.sockets import Clock
from tests.helpers import LONG
from tests.rounds import toy
from tests.service.pir.pair import ONE, TWO, pair

ROUNDS = 2


def train_over(both, fetch, plan):
    """A run whose devices fetch so; each of a round takes part after the other."""
    stop = threading.Event()
    inbox = SpoolInbox(both.service.spool)
    fetched = fetch.delivery if isinstance(fetch, QueryFetch) else Pregenerated()
    kind = Served(both.service.publisher, inbox, poll=0.005, stop=stop, named=True, fetched=fetched)
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
    """Takes part as a device does, in the first round that the service has for it.

    No round closes before the update of everyone in its cohort: nobody may be told of one that is
    over, or that an update came too late.
    """
    one = PopulationClient(client, lambda settings: toy.make_clients(), toy.REHEARSED)
    clock = Clock(sleep=lambda seconds: time.sleep(min(seconds, 0.02)))
    taken, missed, waited = [], [], []
    with both.device(device_name(client), clock=clock) as device:

        def wait(seconds):
            waited.append(time.monotonic())
            if waited[-1] - waited[0] > LONG:
                device.stop.set()

        keep_taking_part(
            device,
            one.participant(fetch),
            rounds=1,
            on_round=taken.append,
            on_miss=missed.append,
            on_wait=wait,
        )
    assert ([each.number for each in taken], missed) == ([t], [])


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
    down, up = max_bytes(fetch.delivery, run.state.layout, plan.keys_per_client)
    for record in run.records:  # what was fetched has one length for all
        assert record.are_maxima
        assert (set(record.bytes_down), min(record.bytes_up) > up) == ({down}, True)
        assert record.seen_by == {p: str(leak) for p, leak in fetch.delivery.about.leaks.items()}
