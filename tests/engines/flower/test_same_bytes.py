"""Flower gives the bytes of a run in process where all devices answer, and records as there."""

import time

import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from keyhole.delivery.clear import Pregenerated
from keyhole.device.take_part import PopulationClient
from keyhole.engines.flower.client_app import make_client_app
from keyhole.engines.flower.messages import Nodes
from keyhole.engines.flower.server_app import Addresses, FlowerSummons
from keyhole.errors import CohortError
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from keyhole.service.inbox import SpoolInbox
from keyhole.service.served import Served
from tests.engines.flower.in_process_grid import InProcessGrid
from tests.helpers import LONG
from tests.rounds import toy
from tests.service.small_service import at_service, small_service

ROUNDS = 3


def app(participant_of=None):
    return make_client_app(participant_of or rehearsing)


def rehearsing(client, context):
    return PopulationClient(client, lambda _: toy.make_clients(), toy.REHEARSED).participant()


def grid_of(*clients, participant_of=None):
    """A node for each entry: a client's number, or None for a node that stands in for all."""
    configs = [{} if client is None else {"client": client} for client in clients]
    return InProcessGrid({10 + i: (app(participant_of), c, {}) for i, c in enumerate(configs)})


def rounds_of(grid, service, seconds=LONG, minimum=1, node_seconds=LONG, keyring="service", **rest):
    ring = service.keyring if keyring == "service" else keyring
    summons = FlowerSummons(
        grid,
        Nodes(grid, minimum, node_seconds, poll=0.01),
        Addresses(service.url),
        ring,
        every=0.01,
        clock=grid.clock,
        **rest,
    )
    of_rounds = {"seconds": seconds, "poll": 0.005, "clock": grid.clock}
    return Served(service.publisher, SpoolInbox(service.spool), summons, named=True, **of_rounds)


def run_on(grid, service, plan, rounds=ROUNDS, **options):
    kind = rounds_of(grid, service, **options)
    run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
    records = list(run.rounds(rounds))
    grid.close()
    return run, records


def in_process(plan, rounds=ROUNDS):
    run = start_run(toy.make_state(), toy.make_clients(), plan)
    return run, list(run.rounds(rounds))


@pytest.mark.parametrize("nodes", [[None], [None] * 3, [*range(20)], [3, 7, None]], ids=len)
def test_state_and_records_are_those_of_a_run_in_process(tmp_path, nodes):
    plan, grid = toy.make_plan(delivery=Pregenerated()), grid_of(*nodes)
    with small_service(tmp_path) as service:
        run, records = run_on(grid, service, plan)
    expected, expected_records = in_process(plan)
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
    assert records == at_service(expected_records)


def test_clients_that_are_called_twice_count_once(tmp_path):
    plan, grid = toy.make_plan(delivery=Pregenerated()), grid_of(None, None)
    grid.twice = True
    with small_service(tmp_path) as service:
        run, records = run_on(grid, service, plan)
    expected, expected_records = in_process(plan)
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
    assert records == at_service(expected_records)


def test_messages_stay_small_whatever_the_model(tmp_path):
    """A round id, a URL, a client's number and a token each: no slices, no update."""
    plan, grid = toy.make_plan(), grid_of(*[None] * 5)
    with small_service(tmp_path) as service:
        run_on(grid, service, plan)
    assert len(grid.sizes) == 2 * (5 + 5 * ROUNDS)
    assert max(grid.sizes) < 1500


def test_messages_live_as_long_as_their_round(tmp_path):
    plan, grid = toy.make_plan(), grid_of(None)
    with small_service(tmp_path) as service:
        run_on(grid, service, plan, rounds=1, seconds=2 * LONG)
    assert [(kind, ttl) for _, kind, ttl in grid.pushed] == [
        ("query.keyhole", LONG),
        ("train.keyhole", 2 * LONG),
    ]


def test_a_node_is_asked_once_whom_it_stands_for(tmp_path):
    plan, grid = toy.make_plan(), grid_of(None, None)
    with small_service(tmp_path) as service:
        run_on(grid, service, plan)
    assert [kind for _, kind, _ in grid.pushed].count("query.keyhole") == 2


def test_a_round_closes_with_the_first_that_answer(tmp_path):
    """Over-selection: seven are called at a node each, one of which never answers."""
    plan = toy.make_plan(cohorts=Cohorts(len(toy.EXAMPLES), 5, over_selection=1.3))
    grid = grid_of(*[None] * 7)
    with small_service(tmp_path) as service:
        kind = rounds_of(grid, service)
        kind.summons.nodes.for_round([0])
        grid.silent = {12}
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        (record,) = run.rounds(1)
        grid.close()
    assert record.closed == "goal"
    assert len(record.clients) == 7
    assert len(record.staleness) == 5
    assert record.lost_before == record.lost_after == []
    assert record.incidents == []


@pytest.mark.parametrize("tells_expiry", [True, False], ids=["told", "untold"])
def test_a_silent_node_costs_its_clients_and_no_more_than_the_deadline(tmp_path, tells_expiry):
    plan, grid = toy.make_plan(), grid_of(*[None] * 5)
    grid.tells_expiry, ahead = tells_expiry, 0.0
    grid.clock = lambda: time.monotonic() + ahead

    def wait(waiting):
        nonlocal ahead
        if waiting.round == 0 and waiting.here == 4:  # nobody but the silent one is missing
            ahead = LONG

    with small_service(tmp_path) as service:
        kind = rounds_of(grid, service)
        kind.on_arrival = wait
        kind.summons.nodes.for_round([0])
        grid.silent = {12}
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        first, second = run.rounds(2)
        grid.close()
    assert (first.closed, len(first.lost_before), len(first.staleness)) == ("time", 1, 4)
    assert (first.incidents, second.incidents) == (["1 node did not answer"], [])
    # From then on others stand in for it.
    assert (second.closed, len(second.staleness)) == ("goal", 5)
    assert [node for node, _, _ in grid.pushed].count(12) == 2


def test_a_client_whose_code_fails_is_told_apart_without_its_words(tmp_path):
    def participant_of(client, context):
        if client % 2:
            raise ValueError(f"secret of client {client}")
        return PopulationClient(client, lambda _: toy.make_clients(), toy.REHEARSED).participant()

    plan, grid, reports = toy.make_plan(), grid_of(None, participant_of=participant_of), []
    with small_service(tmp_path) as service:
        kept = {"on_report": lambda round_id, report: reports.append(report)}
        _, (record,) = run_on(grid, service, plan, rounds=1, **kept)
    odd = [client for client in record.clients if client % 2]
    assert record.refused == odd
    assert odd
    (report,) = reports
    assert {reason for reason in report.reasons if reason} == {
        "the client's own code failed with ValueError: see the node's log"
    }
    count = f"{len(odd)} client{'s' * (len(odd) > 1)}"
    assert record.incidents == [
        f"{count} failed: the client's own code failed with ValueError: see the node's log"
    ]


def test_a_node_that_fails_is_told_by_the_kind_of_its_error_alone(tmp_path):
    plan, grid = toy.make_plan(), grid_of(*[None] * 5)
    with small_service(tmp_path) as service:
        kind = rounds_of(grid, service)
        kind.summons.nodes.for_round([0])
        for node, config in ((11, {"delivery": "pir"}), (12, {"client": "secret"})):
            grid.nodes[node] = (app(), config, {})
        grid.nodes[13] = (lambda message, context: _crash(message), {}, {})
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        (record,) = run.rounds(1)
        grid.close()
    assert (record.closed, len(record.lost_before), len(record.staleness)) == ("everyone", 3, 2)
    assert record.incidents == [
        "1 node failed: InputError",
        "1 node failed: NotAdmittedError",
        "1 node failed: client app raised exception",
    ]


def _crash(message):
    words = "<class 'ValueError'>:<'secret'>"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, words), reply_to=message)


def test_a_node_that_stays_silent_after_its_round_is_told_in_a_later_one(tmp_path):
    """The goal is reached without it; its message expires while the next round is under way."""
    plan = toy.make_plan(cohorts=Cohorts(len(toy.EXAMPLES), 5, over_selection=1.3))
    grid = grid_of(*[None] * 7)
    with small_service(tmp_path) as service:
        kind = rounds_of(grid, service, seconds=20.0)
        kind.summons.nodes.for_round([0])
        grid.silent = {12}
        run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
        next(iter(run.rounds(1)))
        grid.expire(12)
        (second,) = run.rounds(2)
        grid.close()
    assert second.incidents == ["1 node did not answer in an earlier round"]
    assert len(second.staleness) == 5


def test_clients_without_a_node_are_counted(tmp_path):
    plan = toy.make_plan()
    asked = in_process(plan, 1)[1][0].clients
    grid = grid_of(*asked[:3])
    with small_service(tmp_path) as service:
        _, (record,) = run_on(grid, service, plan, rounds=1)
    assert record.incidents == [f"{len(asked) - 3} clients without a node"]
    assert sorted(record.lost_before) == sorted(asked[3:])


def test_nodes_for_other_clients_end_the_run_and_say_so(tmp_path):
    plan = toy.make_plan()
    asked = in_process(plan, 1)[1][0].clients
    grid = grid_of(*[c for c in range(20) if c not in asked][:3])
    with (
        small_service(tmp_path) as service,
        pytest.raises(CohortError, match=r"no node stands for a client.* got 3 nodes"),
    ):
        run_on(grid, service, plan, node_seconds=0.5)


def test_too_few_nodes_end_the_run_after_a_bounded_wait(tmp_path):
    plan, grid = toy.make_plan(), grid_of(None)
    grid.nodes[11] = grid.nodes[10]
    grid.silent = {11}
    with (
        small_service(tmp_path) as service,
        pytest.raises(CohortError, match=r"after 0.5 seconds: got 1 nodes .* expected 3 or more"),
    ):
        run_on(grid, service, plan, minimum=3, node_seconds=0.5)


def test_a_service_without_a_good_token_takes_no_update(tmp_path):
    plan, grid = toy.make_plan(), grid_of(None)
    with small_service(tmp_path) as service:
        _, (record,) = run_on(grid, service, plan, rounds=1, keyring=None)
    assert record.is_skipped
    assert sorted(record.refused) == sorted(record.clients)
    assert record.closed == "everyone"
