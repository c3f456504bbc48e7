"""Cohorts on Ray: the bytes of one process, whoever dies; no error without a way out."""

import os
import signal
import socket
import sys
import threading
import time
from functools import partial

import pytest

from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.robust import NormAlarm, TrimmedMean
from keyhole.engines.ray import crew
from keyhole.engines.ray.engine import RayEngine
from keyhole.errors import InputError, WorkerError
from keyhole.rounds.adding import add_up_jobs
from keyhole.rounds.loop import start_run
from keyhole.rounds.round import Engine, in_process
from keyhole.server.row_sums import pair_up
from tests.engines import crowd
from tests.helpers import LONG
from tests.rounds import toy

JOBS = crowd.make_jobs()
SLOW = pytest.mark.slow


def train(execute=None, rounds=2, on_round=lambda record: None):
    """A short run; returns its model and its records."""
    made = start_run(toy.make_state(), crowd.make_clients(), crowd.make_plan())
    settings = {"execute": execute} if execute else {}
    records = []
    for record in made.rounds(rounds, **settings):
        records.append(record)
        on_round(record)
    return toy.model_bytes(made.state), records


@pytest.fixture(scope="module")
def alone():
    """What a single process makes of the same run."""
    return train()


@pytest.fixture(scope="module")
def engine(crowd_on_ray):
    return crowd_on_ray.engine


def in_time(do):
    started = time.monotonic()
    done = do()
    assert time.monotonic() - started < LONG
    return done


def test_a_ray_of_ones_own_is_not_to_be_reached_from_other_machines(own_ray):
    (node,) = own_ray.nodes()
    assert node["NodeManagerAddress"] == "127.0.0.1"


def test_updates_are_those_of_one_process_and_can_be_written_to(engine):
    assert isinstance(engine, Engine)
    clients = crowd.make_clients()
    for job, report in zip(JOBS, engine(clients, JOBS), strict=True):
        assert report.update["x"].tobytes() == job.run(clients).update["x"].tobytes()
        assert report.update["x"].flags.writeable


@pytest.mark.parametrize(
    "count", [1, 65, 260, *(pytest.param(n, marks=SLOW) for n in (30, 64, 130))]
)
def test_sums_are_those_of_one_process(engine, count):
    clients, jobs = crowd.make_clients(), JOBS[:count]
    blocks = (add_up_jobs(clients, jobs[at : at + 64], toy.LAYOUT) for at in range(0, count, 64))
    for one, other in zip(pair_up(blocks), engine.add_up(clients, jobs, toy.LAYOUT), strict=True):
        assert (one.clients, one.refused, one.span) == (other.clients, other.refused, other.span)
        for mine, theirs in zip(one.parts, other.parts, strict=True):
            assert mine.keys.tobytes() == theirs.keys.tobytes()
            assert mine.rows.tobytes() == theirs.rows.tobytes()


def test_rows_of_a_large_model_travel_with_the_clients_that_chose_them(engine, alone, monkeypatch):
    monkeypatch.setattr("keyhole.engines.ray.parcels._WHOLE", 0)
    assert train(engine) == alone


@pytest.mark.parametrize(
    "changes",
    [
        {"max_update_norm": 0.05},
        {"aggregate": NormAlarm(PLAIN, 1.01)},
        {"aggregate": TrimmedMean(0.3)},
    ],
    ids=["bound", "alarm", "trimmed mean"],
)
def test_bounds_alarms_and_robust_sums_are_those_of_one_process(engine, changes):
    runs = []
    for execute in (in_process, engine):
        run = start_run(toy.make_state(), crowd.make_clients(), crowd.make_plan(**changes))
        runs.append((list(run.rounds(1, execute=execute)), toy.model_bytes(run.state)))
    assert runs[0] == runs[1]
    assert (runs[0][0][0].outliers > 0) == isinstance(changes.get("aggregate"), NormAlarm)


def test_no_jobs_are_no_updates(engine):
    assert engine(crowd.make_clients(), []) == []
    assert engine.add_up(crowd.make_clients(), [], toy.LAYOUT) == []


def test_killed_workers_are_replaced_and_the_record_says_so(engine, alone):
    def kill(record):
        if record.round == 0:
            for pid in engine.pids:
                os.kill(pid, signal.SIGKILL)

    model, records = in_time(lambda: train(engine, on_round=kill))
    assert model == alone[0]
    assert records[0] == alone[1][0]
    assert sorted({i.split(":")[0] for i in records[1].incidents}) == ["worker lost"]
    engine._crew.await_ready(2)
    assert len(engine.pids) == 2


def test_an_error_of_a_client_arrives_as_it_was_and_the_workers_live_on(crowd_on_ray, alone):
    engine, pids = crowd_on_ray.engine, crowd_on_ray.engine.pids
    crowd_on_ray.broken.touch()
    for _ in range(2):
        with pytest.raises(InputError, match="it broke"):
            train(engine)
    crowd_on_ray.broken.unlink()
    assert train(engine) == alone
    assert engine.pids == pids


@SLOW
def test_work_that_kills_every_worker_is_named_by_count(own_ray):
    with (
        RayEngine(crowd.make_deadly_clients, 1) as engine,
        pytest.raises(WorkerError, match="30 clients, 3 times"),
    ):
        in_time(lambda: engine.add_up(crowd.make_clients(), JOBS[:30], toy.LAYOUT))


def test_a_population_that_cannot_be_built_says_why(own_ray):
    with pytest.raises(InputError, match="there are no clients"):
        RayEngine(crowd.make_nobody, 1)


@SLOW
def test_a_worker_that_dies_in_a_job_loses_nothing(own_ray, alone, tmp_path):
    mark = tmp_path / "killed"
    with RayEngine(partial(crowd.make_suicidal_clients, mark), 2) as engine:
        model, records = in_time(lambda: train(engine))
    assert mark.exists()
    assert model == alone[0]
    crowd.check_one_loss(records[0].incidents)


@SLOW
def test_a_worker_that_is_silent_counts_as_lost(own_ray, alone, tmp_path):
    with RayEngine(partial(crowd.make_sleepy_clients, tmp_path / "m"), 2, patience=40) as engine:
        model, records = in_time(lambda: train(engine))
    assert model == alone[0]
    crowd.check_one_loss(records[0].incidents)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"workers": 0}, "number of workers is out of range"),
        ({"patience": 0}, "patience is out of range"),
        ({"address": "203.0.113.1:6379"}, "connected to another Ray"),
    ],
)
def test_wrong_settings_are_refused_before_a_worker_starts(own_ray, settings, said):
    with pytest.raises(InputError, match=said):
        RayEngine(crowd.make_clients, **settings)


def test_a_cluster_without_a_cpu_is_refused(own_ray, monkeypatch):
    monkeypatch.setattr("keyhole.engines.ray.crew.living_nodes", lambda ray: {"a": 0.0})
    with pytest.raises(WorkerError, match="the Ray cluster has no CPU: got 0 CPUs"):
        RayEngine(crowd.make_clients)


@pytest.mark.parametrize(
    ("address", "kind", "said"),
    [
        ("127.0.0.1:1", WorkerError, "Ray does not answer: got 127.0.0.1:1"),
        ("ray://127.0.0.1:10001", InputError, "not the address of a Ray cluster"),
        ("localhost", InputError, "not the address of a Ray cluster"),
        ("127.0.0.1:many", InputError, "not the address of a Ray cluster"),
    ],
)
def test_a_cluster_that_is_not_there_is_named_at_once(address, kind, said, monkeypatch):
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(kind, match=said):
        in_time(lambda: RayEngine(crowd.make_clients, address=address))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_a_port_that_answers_and_is_not_ray_is_named_in_time(answer, monkeypatch):
    """It speaks something else, hangs up, or says nothing at all."""
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("keyhole.engines.ray.crew._ANSWER_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def serve():
            with listener.accept()[0] as caller:
                caller.recv(1000)
                caller.sendall(answer or b"")
                if answer is None:
                    caller.recv(1000)  # until it gives up

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(WorkerError, match=f"Ray does not answer: got {address}"):
            in_time(lambda: RayEngine(crowd.make_clients, address=address))
        thread.join(LONG)


@SLOW
def test_workers_that_die_at_their_start_do_not_hide_behind_an_empty_crew(own_ray, tmp_path):
    """Both die once before they are ready: others take their place before a round begins."""
    with RayEngine(partial(crowd.make_clients_at_second_try, tmp_path), 2) as engine:
        assert len(engine.pids) == 2
        assert len(engine(crowd.make_clients(), JOBS[:10])) == 10


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'keyhole\[ray\]'"):
        RayEngine(crowd.make_clients)


@pytest.mark.parametrize("slow_starts", [1, 4])
def test_a_ray_that_starts_slowly_is_started_again(monkeypatch, slow_starts):
    """Ray gives its own programs 30 s, and then raises a bare Exception: so a busy machine does."""

    class SlowRay:
        starts = 0

        def is_initialized(self):
            return False

        def init(self, *_, **__):
            self.starts += 1
            if self.starts <= slow_starts:
                raise Exception("The current node timed out during startup.")

        def shutdown(self):
            pass

    slow = SlowRay()
    monkeypatch.setattr(crew, "find_ray", lambda: slow)
    if slow_starts == 1:
        with crew.connected() as ray:
            assert ray is slow
    else:
        with (
            pytest.raises(WorkerError, match="this machine: The current node timed out"),
            crew.connected(),
        ):
            pass
    assert slow.starts == min(slow_starts + 1, 4)
