"""Asynchronous rounds over the service: as in process where devices end in the same order."""

from dataclasses import asdict

import pytest

from keyhole.delivery import pregenerated
from keyhole.serving.inbox import SpoolInbox
from keyhole.serving.served import Served
from keyhole.training.buffering import Buffering
from keyhole.training.loop import start_run
from tests.serving.in_turn import InTurn
from tests.serving.small_service import small_service
from tests.training import toy

ROUNDS = 8
# Known in process when clients start, here when they end.
COSTS = ("select_calls", "cache_hits", "seen_by")


def slow(rng):
    return rng.exponential()


def at_once(rng):
    return 0.0


def in_few_moments(rng):
    """Many end at the same time."""
    return float(rng.integers(1, 4))


def plan_of(*numbers, **rest):
    return toy.make_plan(deliver=pregenerated, buffering=Buffering(*numbers, **rest))


def served(service, summons, **options):
    inbox = SpoolInbox(service.spool)
    return Served(service.publisher, inbox, summons, poll=0.0, **options)


def comparable(records):
    return [{n: v for n, v in asdict(r).items() if n not in COSTS} for r in records]


@pytest.mark.parametrize(
    ("numbers", "duration"),
    [
        ((3, 2), at_once),
        ((5, 5), at_once),
        ((1, 2), slow),
        ((8, 3), slow),
        ((20, 4), slow),
        ((3, 2), in_few_moments),
        ((12, 3), in_few_moments),
    ],
)
def test_bytes_are_those_of_a_run_in_process_in_which_clients_end_in_the_same_order(
    tmp_path, numbers, duration
):
    plan = plan_of(*numbers, duration=duration)
    with small_service(tmp_path) as service:
        kind = served(service, InTurn(service, plan))
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        records = list(run.rounds(ROUNDS))
    expected = start_run(toy.make_state(), toy.make_clients(), plan)
    assert comparable(records) == comparable(expected.rounds(ROUNDS))
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)


def test_updates_are_taken_while_their_round_trails_and_counts(tmp_path):
    """Two steps old at most: an older update is refused when it is sent, and is not waited for."""
    plan = plan_of(10, 2, most_staleness=2, duration=slow)
    with small_service(tmp_path) as service:
        summons = InTurn(service, plan)
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=served(service, summons))
        records = list(run.rounds(20))
    assert max(age for record in records for age in record.staleness) == 2
    assert max(summons.trailing) == 2
    assert any(record.lost_before for record in records)
    assert all(len(record.staleness) == 2 for record in records)
