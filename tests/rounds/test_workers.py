"""Worker processes: the same bytes for any number of them, also when some die on the way."""

import os
import signal
from pathlib import Path

import pytest

from keyhole.errors import InputError, WorkerError
from keyhole.rounds.clients import ClientJob, Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.workers import Workers
from tests.helpers import with_slow
from tests.rounds import toy


def run(execute=None, clients=None):
    made = start_run(toy.make_state(), clients or toy.make_clients(), toy.make_plan())
    settings = {"execute": execute} if execute else {}
    list(made.rounds(4, **settings))
    return toy.model_bytes(made.state)


@pytest.mark.parametrize("count", with_slow([1, 2, 5], fast=[2]))
def test_any_number_of_workers_trains_the_bytes_of_none(count):
    with Workers(toy.make_clients, count) as workers:
        assert run(workers) == run()


def test_a_dead_worker_is_replaced_and_its_clients_are_done_again():
    expected = run()
    with Workers(toy.make_clients, 2) as workers:
        made = start_run(toy.make_state(), toy.make_clients(), toy.make_plan())
        for record in made.rounds(4, execute=workers):
            if record.round == 1:
                for pid in workers.pids:
                    os.kill(pid, signal.SIGKILL)
        assert toy.model_bytes(made.state) == expected
        assert len(workers.pids) == 2


def make_suicidal_clients():
    """Kills its worker in the middle of its first job; a file remembers that it did."""

    def train(submodel, examples, rng):
        mark = Path(os.environ["KEYHOLE_TEST_MARK"])
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return toy.train(submodel, examples, rng)

    return Clients(len(toy.EXAMPLES), toy.get_examples, toy.choose, train, toy.localize)


def make_deadly_clients():
    def train(submodel, examples, rng):
        os.kill(os.getpid(), signal.SIGKILL)

    return Clients(len(toy.EXAMPLES), toy.get_examples, toy.choose, train, toy.localize)


def make_failing_clients():
    def train(submodel, examples, rng):
        raise InputError("it broke: got 1; expected 0; mend it")

    return Clients(len(toy.EXAMPLES), toy.get_examples, toy.choose, train, toy.localize)


def test_a_worker_that_dies_in_a_job_loses_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("KEYHOLE_TEST_MARK", str(tmp_path / "killed"))
    with Workers(make_suicidal_clients, 2) as workers:
        assert run(workers) == run()
    assert (tmp_path / "killed").exists()


def test_work_that_kills_every_worker_is_named():
    with Workers(make_deadly_clients, 1) as workers, pytest.raises(WorkerError, match="client"):
        run(workers)


def test_an_error_of_a_client_arrives_as_it_was_and_the_workers_live_on():
    with Workers(make_failing_clients, 2) as workers:
        for _ in range(2):
            with pytest.raises(InputError, match="it broke"):
                run(workers)
        assert len(workers.pids) == 2


class StubbornError(Exception):
    """Comes out of a pickle only if it is made with two arguments."""

    def __init__(self, one, two):
        super().__init__(one)


def make_clients_of_whom_one_fails():
    def train(submodel, examples, rng):
        if len(submodel["x"]) == MIN:
            raise StubbornError(1, 2)
        return toy.train(submodel, examples, rng)

    return Clients(len(toy.EXAMPLES), toy.get_examples, toy.choose, train, toy.localize)


MIN = min(len(toy.chosen(e)["feature"]) for e in toy.EXAMPLES)


def test_after_a_failed_call_the_next_one_gets_its_own_answers():
    clients = make_clients_of_whom_one_fails()
    jobs = [
        ClientJob.of(0, 0, 0, c, z := toy.chosen(e), toy.make_state().select(z))
        for c, e in enumerate(toy.EXAMPLES)
    ]
    good = [job for job in jobs if len(job.keys["feature"]) != MIN]
    with Workers(make_clients_of_whom_one_fails, 2) as workers:
        with pytest.raises(WorkerError, match="does not pickle"):
            workers(clients, jobs)
        for job, report in zip(good, workers(clients, good), strict=True):
            assert report.update["x"].tobytes() == job.run(clients).update["x"].tobytes()


def test_no_workers_at_all_are_refused():
    with pytest.raises(InputError, match="1 or more"):
        Workers(toy.make_clients, 0)
