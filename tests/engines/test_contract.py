"""One contract for every engine: same seed, same cohort, same bytes of state and records.

An engine is a way to run a cohort's clients. Whatever a plan asks for, it changes nothing.
"""

from contextlib import contextmanager, nullcontext
from functools import cache

import numpy as np
import pytest

from keyhole.aggregation import aggregation_named
from keyhole.rounds.cores import Cores
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.rounds.record import encode_records
from keyhole.rounds.round import in_process
from keyhole.rounds.workers import Workers
from tests.engines import crowd
from tests.rounds import toy

ROUNDS = 3


def slowly(rng):
    return float(rng.exponential())


LOSSES = {"size": 90, "over_selection": 1.3, "lost_before": 0.05, "lost_after": 0.1}
PLANS = {
    "plain": {},
    "one block": {"cohorts": {"size": 20}},
    "whole blocks": {"cohorts": {"size": 128}},
    "dropouts and over-selection": {"cohorts": LOSSES},
    "over those who chose": {"over": "choosers"},
    "weighted by examples": {"over": "examples"},
    "nobody is left": {"cohorts": {"size": 2, "lost_after": 0.9}},
    "poisson": {"cohorts": {"size": 70, "sampling": "poisson"}},
    "asynchronous": {"buffering": Buffering(80, 70, duration=slowly), "cohorts": {"size": 70}},
    "secure-dense": {"aggregation": "secure-dense", "cohorts": {"size": 12, "lost_after": 0.1}},
    "secure-sparse": {"aggregation": "secure-sparse", "cohorts": {"size": 12}},
}
FAST = ("dropouts and over-selection", "weighted by examples", "asynchronous", "secure-sparse")
assert crowd.COUNT > 3 * 64, "several blocks"


def plan_named(name):
    changes = dict(PLANS[name])
    if aggregation := changes.pop("aggregation", None):
        changes["aggregate"] = aggregation_named(aggregation)
    return crowd.make_plan(**changes)


def train(name, execute, directory=None):
    """The state and the records of a short run."""
    made = start_run(toy.make_state(), crowd.make_clients(), plan_named(name), directory)
    list(made.rounds(ROUNDS, execute=execute))
    made.close()
    return toy.model_bytes(made.state), encode_records(made.records)


@cache
def train_alone(name):
    return train(name, in_process)


@contextmanager
def ray_nodes(count):
    """Ray with so many nodes on this machine, one CPU each."""
    from keyhole.engines.ray.engine import RayEngine
    from tests.engines.ray.clusters import cluster_of

    with cluster_of(count) as cluster, RayEngine(crowd.make_clients, address=cluster.address) as e:
        assert len(set(e.nodes)) == count
        yield e


ENGINES = {
    "cores": lambda: nullcontext(Cores(2)),
    "two workers": lambda: Workers(crowd.make_clients, 2),
    "five workers": lambda: Workers(crowd.make_clients, 5),
    "ray": None,  # the one that tests share
    "ray with three nodes": lambda: ray_nodes(3),
}
SLOW = {"five workers", "ray with three nodes"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in ENGINES],
)
def engine(request):
    if request.param == "ray":
        yield request.getfixturevalue("crowd_on_ray").engine
        return
    with ENGINES[request.param]() as engine:
        yield engine


@pytest.mark.parametrize("name", FAST)
def test_an_engine_changes_no_byte_of_state_and_records(engine, name):
    assert train(name, engine) == train_alone(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PLANS.keys() - set(FAST)))
def test_it_changes_none_of_other_plans(engine, name):
    assert train(name, engine) == train_alone(name)


def test_a_run_that_was_stopped_goes_on_elsewhere(engine, tmp_path):
    """Half of the rounds in process, the rest on the engine, from the directory."""
    name = "dropouts and over-selection"
    made = start_run(toy.make_state(), crowd.make_clients(), plan_named(name), tmp_path)
    list(made.rounds(ROUNDS - 1))
    made.close()
    again = resume_run(toy.make_state(), crowd.make_clients(), plan_named(name), tmp_path)
    list(again.rounds(ROUNDS, execute=engine))
    again.close()
    assert toy.model_bytes(again.state) == train_alone(name)[0]
    assert (tmp_path / "records.jsonl").read_bytes() == train_alone(name)[1]


def test_the_contract_has_clients_of_every_fate():
    """Else the rows above would say less than they seem to."""
    from keyhole.rounds.record import decode_records

    records = decode_records(train_alone("dropouts and over-selection")[1])
    for outcome in ("lost_before", "lost_after", "late", "refused"):
        assert any(getattr(record, outcome) for record in records), outcome
    assert any(record.is_skipped for record in decode_records(train_alone("nobody is left")[1]))
    stale = decode_records(train_alone("asynchronous")[1])
    assert any(np.any(record.staleness) for record in stale)
