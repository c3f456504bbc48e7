"""Faults on Ray while a round is under way: the run goes on, the record says so, nothing hangs."""

import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from keyhole.engines.ray.crew import connected
from keyhole.engines.ray.engine import RayEngine
from keyhole.engines.ray.schedule import tasks_of_sums
from keyhole.errors import WorkerError
from keyhole.rounds.loop import start_run
from keyhole.rounds.record import encode_records
from keyhole.rounds.round import run_round
from keyhole.sampling import sample_cohort
from tests.engines import crowd, wide
from tests.engines.ray.clusters import cluster_of
from tests.helpers import LONG
from tests.rounds import toy

pytestmark = pytest.mark.slow


def train(execute=None):
    made = start_run(toy.make_state(), crowd.make_clients(), crowd.make_plan())
    settings = {"execute": execute} if execute else {}
    list(made.rounds(2, **settings))
    return toy.model_bytes(made.state), made.records


def train_and_break(engine, mark, act):
    """Does `act` soon after the first client has begun. Nothing takes longer than 90 seconds."""

    def wait_and_act():
        while not mark.exists():
            time.sleep(0.01)
        time.sleep(0.3)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    started = time.monotonic()
    trained = train(engine)
    thread.join()
    assert time.monotonic() - started < LONG
    return trained


def without_incidents(records):
    return encode_records([replace(record, incidents=[]) for record in records])


def test_a_killed_worker_costs_its_block_alone(own_ray, tmp_path):
    mark = tmp_path / "begun"
    with RayEngine(partial(crowd.make_slow_clients, mark), 2) as engine:
        pid = engine.pids[0]
        model, records = train_and_break(engine, mark, lambda: os.kill(pid, signal.SIGKILL))
    alone = train()
    assert model == alone[0]
    assert without_incidents(records) == encode_records(alone[1])
    crowd.check_one_loss(records[0].incidents)
    assert records[1].incidents == []


def test_a_killed_node_is_done_without(tmp_path):
    mark = tmp_path / "begun"
    with cluster_of(3) as cluster:
        victim = sorted(cluster.worker_nodes, key=lambda node: node.node_id)[0]
        slow = partial(crowd.make_slow_clients, mark)
        with RayEngine(slow, address=cluster.address) as engine:
            assert victim.node_id in engine.nodes
            kill = partial(cluster.remove_node, victim, allow_graceful=False)
            model, records = train_and_break(engine, mark, kill)
            engine._crew.await_ready(3)
            assert victim.node_id not in engine.nodes
            assert len(engine.nodes) == 3, "another node has taken its place"
    alone = train()
    assert model == alone[0]
    assert without_incidents(records) == encode_records(alone[1])
    (first, *_) = records[0].incidents
    assert "lost" in first
    assert "trained again" in first


def test_results_that_are_lost_with_a_node_are_made_again(tmp_path):
    """Half of a block has trained there, and who trains the other half finds nothing to go on
    from."""
    plan, alone = wide.make_plan(50), wide.make_clients()
    asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, 0)
    with cluster_of(3, first_cpus=0) as cluster:
        waiting = partial(wide.make_waiting_clients, tmp_path, asked[25:])

        def lose_first_half():
            while len(done := list(tmp_path.iterdir())) < 25:
                time.sleep(0.01)
            time.sleep(1)  # it is added up
            name = done[0].name.split()[1]
            (victim,) = (node for node in cluster.worker_nodes if node.node_id == name)
            cluster.remove_node(victim, allow_graceful=False)
            (tmp_path / "go").touch()

        with RayEngine(waiting, address=cluster.address) as engine:
            thread = threading.Thread(target=lose_first_half, daemon=True)
            thread.start()
            found, record = run_round(0, wide.make_state(), alone, plan, engine)
            thread.join()
    expected, record_alone = run_round(0, wide.make_state(), alone, plan)
    assert [part.rows.tobytes() for part in found] == [part.rows.tobytes() for part in expected]
    assert without_incidents([record]) == encode_records([record_alone])
    assert "results lost: 50 clients trained again" in record.incidents


def test_sums_of_many_blocks_are_merged_on_their_nodes():
    size, clients = 850, wide.make_clients()
    plan = wide.make_plan(size)
    with (
        cluster_of(3) as cluster,
        RayEngine(wide.make_clients, address=cluster.address) as engine,
    ):
        kinds = [step.kind for step in tasks_of_sums(size, engine.nodes)]
        assert kinds.count("merge") >= 6
        assert kinds.count("train_and_add") >= 6
        found, record = run_round(0, wide.make_state(), clients, plan, engine)
    expected, record_alone = run_round(0, wide.make_state(), clients, plan)
    assert [part.rows.tobytes() for part in found] == [part.rows.tobytes() for part in expected]
    assert encode_records([record]) == encode_records([record_alone])


class Other:
    """Somebody else's work on the cluster."""

    def is_here(self):
        return True


def test_a_cluster_without_room_is_named():
    with cluster_of(1) as cluster, connected(cluster.address) as ray:
        other = ray.remote(Other).options(num_cpus=1).remote()
        ray.get(other.is_here.remote())
        with pytest.raises(WorkerError, match="no room for the workers: got 0 of 1"):
            RayEngine(crowd.make_clients, address=cluster.address, patience=5)
