"""Whole deployments in processes: the bytes of a run in process, and what survives being killed."""

import time
from dataclasses import replace

import pytest

from keyhole.delivery.clear import Pregenerated
from keyhole.rounds.loop import start_run
from tests.engines.flower.deployment import deployment
from tests.engines.flower.toy_app import plan_of
from tests.helpers import LONG
from tests.rounds import toy
from tests.service.fronts import certificate
from tests.service.small_service import at_service

pytestmark = pytest.mark.slow

ONE_BY_ONE = {"cohort": 3, "rounds": 2, "over-selection": 1.0}


def in_process(config):
    plan = replace(plan_of(config), delivery=Pregenerated())
    run = start_run(toy.make_state(), toy.make_clients(), plan)
    records = list(run.rounds(config["rounds"]))
    return toy.model_bytes(run.state).hex(), at_service(records)


def begun(made, count=1):
    """Whether so many clients have their slices and wait."""
    return lambda: len(list(made.run.glob("begun-*"))) >= count


def hold(made):
    made.run.mkdir(exist_ok=True)
    (made.run / "hold").touch()


def release(made):
    (made.run / "hold").unlink()
    for path in made.run.glob("begun-*"):
        path.unlink()


def service_with_tls(made):
    certificate(made.directory)
    made.serve("--tls-cert", made.directory / "tls.crt", "--tls-key", made.directory / "tls.key")
    return {"service": f"https://localhost:{made.service_port}"}


def test_a_deployment_gives_the_bytes_and_records_of_a_run_in_process(tmp_path):
    """Over TLS, with an authority that nodes know by their own configuration alone."""
    nodes = [{"ca": f'"{tmp_path}/tls.crt"'}] * 3
    with deployment(tmp_path, nodes, before=service_with_tls, **ONE_BY_ONE) as made:
        made.start_run()
        model = made.wait_for_model()
        records = made.records()
    assert (model, records) == in_process(ONE_BY_ONE)


def test_a_killed_supernode_is_missed_until_the_deadline_and_no_longer(tmp_path):
    with deployment(tmp_path, 3, **ONE_BY_ONE, **{"round-seconds": 40.0}) as made:
        hold(made)
        made.start_run()
        made.wait(begun(made, 3))
        began = time.monotonic()
        made.kill("node-1")
        release(made)
        made.wait(lambda: len(made.records()) == 1, LONG)
        assert time.monotonic() - began < LONG
        made.wait_for_model()
        first, second = made.records()
    assert first.closed == "time"
    assert len(first.lost_before) + len(first.lost_after) == 1
    assert len(first.staleness) == 2
    # The others stand in for it.
    assert len(second.staleness) == 3
    assert first.incidents == ["1 node did not answer"]
    assert second.incidents == []


def test_a_killed_client_app_is_lost_and_its_node_is_not(tmp_path):
    with deployment(tmp_path, 2, cohort=2, rounds=2, **{"round-seconds": 40.0}) as made:
        hold(made)
        made.start_run()
        made.wait(begun(made, 2))
        made.kill_task("node-0", "flwr-clientapp")
        release(made)
        made.wait_for_model(300.0)
        first, second = made.records()
    assert first.closed == "time"
    assert len(first.staleness) == 1
    assert first.incidents == ["1 node did not answer"]
    assert len(second.staleness) == 2


def test_a_killed_slice_service_that_comes_back_loses_nothing(tmp_path):
    with deployment(tmp_path, 3, **ONE_BY_ONE) as made:
        hold(made)
        made.start_run()
        made.wait(begun(made, 3))
        made.kill("service")
        release(made)
        time.sleep(2.0)  # updates are sent meanwhile, and find nobody
        made.serve()
        model = made.wait_for_model()
        records = made.records()
    assert (model, records) == in_process(ONE_BY_ONE)


def test_a_killed_server_app_goes_on_with_the_same_round(tmp_path):
    with deployment(tmp_path, 3, **ONE_BY_ONE) as made:
        hold(made)
        made.start_run()
        made.wait(begun(made, 3))
        made.kill_task("superlink", "flwr-serverapp")
        release(made)
        made.start_run("again")
        model = made.wait_for_model()
        records = made.records()
    assert (model, records) == in_process(ONE_BY_ONE)


def test_a_killed_superlink_that_comes_back_goes_on_with_the_same_round(tmp_path):
    with deployment(tmp_path, 3, **ONE_BY_ONE) as made:
        hold(made)
        made.start_run()
        made.wait(begun(made, 3))
        made.kill("superlink")
        release(made)
        made.superlink()
        made.start_run("again")
        model = made.wait_for_model(240.0)
        records = made.records()
    assert (model, records) == in_process(ONE_BY_ONE)
