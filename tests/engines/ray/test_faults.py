"""Faults on Ray while a round is under way: the run goes on, the record says so, nothing hangs."""

import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from keyhole.engines.ray.engine import RayEngine
from keyhole.engines.ray.session import connected
from keyhole.errors import WorkerError
from keyhole.training.loop import start_run
from keyhole.training.record import encode_records
from tests.engines import crowd
from tests.engines.crowd import ONE_PIECE
from tests.engines.ray.clusters import cluster_of
from tests.training import toy

pytestmark = pytest.mark.slow


def train(execute=None):
    made = start_run(toy.make_state(), crowd.make_clients(), crowd.make_plan())
    settings = {"execute": execute} if execute else {}
    list(made.rounds(2, **settings))
    return toy.model_bytes(made.state), made.records


def train_and_break(engine, mark, act):
    """Trains; does `act` once clients of the first round are at work. Not longer than a minute."""

    def wait_and_act():
        while not mark.exists():
            time.sleep(0.01)
        time.sleep(0.3)
        act()

    thread = threading.Thread(target=wait_and_act, daemon=True)
    thread.start()
    started = time.monotonic()
    model, records = train(engine)
    thread.join()
    assert time.monotonic() - started < 90
    return model, records


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
    assert records[0].incidents[0] in ONE_PIECE
    assert [len(record.incidents) for record in records] == [1, 0]


def test_a_killed_node_is_done_without(tmp_path):
    mark = tmp_path / "begun"
    with cluster_of(3) as cluster:
        victim = sorted(cluster.worker_nodes, key=lambda node: node.node_id)[0]
        slow = partial(crowd.make_slow_clients, mark)
        with RayEngine(slow, address=cluster.address) as engine:
            assert victim.node_id in engine.nodes
            kill = partial(cluster.remove_node, victim, allow_graceful=False)
            model, records = train_and_break(engine, mark, kill)
            assert victim.node_id not in engine.nodes
            assert len(engine.nodes) == 3, "another node has taken its place"
    alone = train()
    assert model == alone[0]
    assert without_incidents(records) == encode_records(alone[1])
    (first, *_) = records[0].incidents
    assert "lost" in first
    assert "trained again" in first


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
