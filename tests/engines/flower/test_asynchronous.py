"""Asynchronous rounds on Flower: nodes are called whenever others have ended."""

import threading
from collections import Counter

import pytest

from keyhole.delivery.clear import Pregenerated
from keyhole.device.take_part import PopulationClient
from keyhole.engines.flower.messages import assign
from keyhole.errors import CohortError
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.machine import Buffering
from tests.engines.flower.test_same_bytes import grid_of, in_process, rounds_of, run_on
from tests.helpers import LONG
from tests.rounds import toy
from tests.service.small_service import small_service

ROUNDS = 6


def plan_of(*numbers, **rest):
    return toy.make_plan(delivery=Pregenerated(), buffering=Buffering(*numbers, **rest))


def test_one_at_a_time_gives_the_bytes_of_a_run_in_process(tmp_path):
    plan, grid = plan_of(1, 2), grid_of(None, None)
    with small_service(tmp_path) as service:
        run, records = run_on(grid, service, plan, ROUNDS)
    expected, expected_records = in_process(plan, ROUNDS)
    assert [record.clients for record in records] == [r.clients for r in expected_records]
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)


def test_a_slow_client_holds_nobody_up_and_its_update_counts_when_it_comes(tmp_path):
    """The first client that is called answers once three steps have been made."""
    plan = plan_of(4, 2)
    first, go = in_process(plan, 1)[1][0].clients[0], threading.Event()

    def participant_of(client, context):
        if client == first:
            assert go.wait(LONG)
        return PopulationClient(client, lambda _: toy.make_clients(), toy.REHEARSED).participant()

    grid = grid_of(*[None] * 4, participant_of=participant_of)
    with small_service(tmp_path) as service:
        kind = rounds_of(grid, service, seconds=LONG)
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        before = list(run.rounds(3))
        go.set()
        after = []
        while first not in [client for record in after for client in record.clients]:
            after += run.rounds(run.next_round + 1)
        grid.close()
    assert run.state.steps == 3 + len(after)
    assert not any(first in record.clients for record in before)
    where = after[-1].clients.index(first)
    assert after[-1].staleness[where] >= 3


@pytest.mark.parametrize("concurrency", [1, 12])
def test_clients_without_a_node_are_passed_over(tmp_path, concurrency):
    """Five of twenty clients have a node, however many are called at once."""
    plan, there = plan_of(concurrency, 3), {3, 6, 11, 16, 19}
    grid = grid_of(*there)
    with small_service(tmp_path) as service:
        run, (record,) = run_on(grid, service, plan, 1)
    assert run.state.steps == 1
    assert set(record.clients) - set(record.lost_before) <= there
    assert [line.endswith("without a node") for line in record.incidents] == [True]


def test_those_who_are_called_one_by_one_are_shared_out_by_who_is_at_work():
    at_work, nodes = Counter(), dict.fromkeys((10, 11, 12))
    for client in range(9):
        ((node, clients),) = assign([client], nodes, at_work=at_work).items()
        at_work[node] += len(clients)
    assert at_work == {10: 3, 11: 3, 12: 3}
    assert list(assign([9], nodes, silent={10}, at_work=at_work)) == [11]


def test_nodes_for_other_clients_end_the_run_and_say_so(tmp_path):
    plan, grid = plan_of(2, 2), grid_of(20, 21, 22)  # the population has twenty
    with (
        small_service(tmp_path) as service,
        pytest.raises(CohortError, match=r"no node stands for a client.* got 3 nodes"),
    ):
        run_on(grid, service, plan, 1000, node_seconds=0.5)


def test_a_client_whose_code_fails_frees_its_place(tmp_path):
    def participant_of(client, context):
        if client % 2:
            raise ValueError("secret")
        return PopulationClient(client, lambda _: toy.make_clients(), toy.REHEARSED).participant()

    plan, grid = plan_of(3, 3), grid_of(None, participant_of=participant_of)
    with small_service(tmp_path) as service:
        run, records = run_on(grid, service, plan, 2)
    assert run.state.steps == 2
    refused = [client for record in records for client in record.refused]
    assert refused
    assert all(client % 2 for client in refused)


def test_a_run_that_goes_on_elsewhere_calls_those_who_were_at_work(tmp_path):
    plan = plan_of(4, 2)
    with small_service(tmp_path / "rounds") as service:
        for rounds in (2, 4):
            grid = grid_of(None, None)  # another grid, which knows of no message of the first
            kind = rounds_of(grid, service, seconds=LONG)
            begin = start_run if rounds == 2 else resume_run
            run = begin(toy.make_state(), toy.make_clients(), plan, tmp_path / "run", kind)
            records = list(run.rounds(rounds))
            run.close()
            grid.close()
    assert run.state.steps == 4
    assert all(len(record.staleness) == 2 for record in records)
