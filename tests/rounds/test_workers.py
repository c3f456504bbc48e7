"""Worker processes: the same bytes for any number of them, also when some die on the way."""

import os
import signal
from contextlib import suppress
from functools import cache, partial

import pytest

from keyhole.errors import InputError, WorkerError
from keyhole.rounds.clients import ClientJob, Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.workers import Workers
from tests.rounds import toy


def run(execute=None, clients=None):
    made = start_run(toy.make_state(), clients or toy.make_clients(), toy.make_plan())
    settings = {"execute": execute} if execute else {}
    list(made.rounds(4, **settings))
    return toy.model_bytes(made.state)


class StubbornError(Exception):
    """Comes out of a pickle only if it is made with two arguments."""

    def __init__(self, one, two):
        super().__init__(one)


MIN = min(len(toy.chosen(e)["feature"]) for e in toy.EXAMPLES)


def make_moody_clients(moods):
    """The toy's clients, unless a file in `moods` tells them to die or to fail."""

    def train(submodel, examples, rng):
        with suppress(FileNotFoundError):
            (moods / "die once").unlink()  # of all workers one finds it
            os.kill(os.getpid(), signal.SIGKILL)
        if (moods / "fail").exists():
            raise InputError("it broke: got 1; expected 0; mend it")
        if (moods / "one fails").exists() and len(submodel["x"]) == MIN:
            raise StubbornError(1, 2)
        return toy.train(submodel, examples, rng)

    return Clients(len(toy.EXAMPLES), toy.get_examples, toy.choose, train, toy.localize)


def make_deadly_clients():
    def train(submodel, examples, rng):
        os.kill(os.getpid(), signal.SIGKILL)

    return Clients(len(toy.EXAMPLES), toy.get_examples, toy.choose, train, toy.localize)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two workers that all tests of this module use, and the folder of their clients' moods."""
    moods = tmp_path_factory.mktemp("moods")
    with Workers(partial(make_moody_clients, moods), 2) as workers:
        yield workers, moods


@pytest.fixture
def workers(two):
    return two[0]


@pytest.fixture
def in_mood(two):
    """Puts a mood into the clients until the test ends."""

    def put(name):
        (two[1] / name).touch()

    yield put
    for path in two[1].iterdir():
        path.unlink()


@cache
def run_alone():
    return run()


def test_two_workers_train_the_bytes_of_none(workers):
    assert run(workers) == run_alone()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5])
def test_any_number_of_workers_trains_the_bytes_of_none(count):
    with Workers(toy.make_clients, count) as workers:
        assert run(workers) == run_alone()


def test_a_dead_worker_is_replaced_and_its_clients_are_done_again(workers):
    made = start_run(toy.make_state(), toy.make_clients(), toy.make_plan())
    for record in made.rounds(4, execute=workers):
        if record.round == 1:
            for pid in workers.pids:
                os.kill(pid, signal.SIGKILL)
    assert toy.model_bytes(made.state) == run_alone()
    assert len(workers.pids) == 2


def test_a_worker_that_dies_in_a_job_loses_nothing(workers, in_mood, two):
    in_mood("die once")
    assert run(workers) == run_alone()
    assert not (two[1] / "die once").exists()


def test_work_that_kills_every_worker_is_named():
    with Workers(make_deadly_clients, 1) as workers, pytest.raises(WorkerError, match="client"):
        run(workers)


def test_an_error_of_a_client_arrives_as_it_was_and_the_workers_live_on(workers, in_mood):
    in_mood("fail")
    for _ in range(2):
        with pytest.raises(InputError, match="it broke"):
            run(workers)
    assert len(workers.pids) == 2


def test_after_a_failed_call_the_next_one_gets_its_own_answers(workers, in_mood):
    clients = toy.make_clients()
    jobs = [
        ClientJob.of(0, 0, 0, c, z := toy.chosen(e), toy.make_state().select(z))
        for c, e in enumerate(toy.EXAMPLES)
    ]
    good = [job for job in jobs if len(job.keys["feature"]) != MIN]
    in_mood("one fails")
    with pytest.raises(WorkerError, match="does not pickle"):
        workers(clients, jobs)
    for job, report in zip(good, workers(clients, good), strict=True):
        assert report.update["x"].tobytes() == job.run(clients).update["x"].tobytes()


def test_no_workers_at_all_are_refused():
    with pytest.raises(InputError, match="1 or more"):
        Workers(toy.make_clients, 0)
