"""Runs stored, resumed, killed and stopped end with the bytes of an uninterrupted run."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from keyhole.errors import KeyholeError
from keyhole.server.optimizers import Adam
from keyhole.training.buffered import Buffered, Buffering
from keyhole.training.cohort import Cohorts
from keyhole.training.loop import Evaluation, resume_run, start_run, stop_on_signals
from keyhole.training.record import read_records
from tests.helpers import ROOT
from tests.training import toy

ROUNDS = 12


def plan():
    return toy.make_plan(cohorts=Cohorts(20, 5, lost_before=0.5, lost_after=0.3))


def slow(rng):
    return rng.exponential()


def kind_of(name):
    return Buffered(Buffering(6, 3, duration=slow)) if name == "buffered" else None


def start(directory, kind="synchronous"):
    made = toy.make_state(Adam(0.1)), toy.make_clients(), plan()
    return start_run(*made, directory, kind_of(kind))


def resume(directory, kind="synchronous"):
    made = toy.make_state(Adam(0.1)), toy.make_clients(), plan()
    return resume_run(*made, directory, kind_of(kind))


def rounds(run, until=ROUNDS, **settings):
    return list(
        run.rounds(until, evaluation=Evaluation(toy.metrics, 3), snapshot_every=4, **settings)
    )


def outcome(run):
    return toy.model_bytes(run.state), run.records


@pytest.fixture(params=["synchronous", "buffered"])
def kind(request):
    return request.param


def test_a_run_in_pieces_is_the_run_in_one(kind, tmp_path):
    whole = start(None, kind)
    rounds(whole)
    rounds(first := start(tmp_path, kind), until=3)
    first.close()
    for until in (4, 5, 9, ROUNDS):
        part = resume(tmp_path, kind)
        rounds(part, until=until)
        part.close()
    assert toy.model_bytes(part.state) == toy.model_bytes(whole.state)
    assert [r.round for r in read_records(tmp_path / "records.jsonl")] == list(range(ROUNDS))


def test_a_run_without_evaluation_in_between_resumes_to_the_same_records(kind, tmp_path):
    whole = start(None, kind)
    list(whole.rounds(ROUNDS))
    list(start_and_close(tmp_path, kind))
    resumed = resume(tmp_path, kind)
    list(resumed.rounds(ROUNDS))
    assert outcome(resumed) == outcome(whole)
    assert read_records(tmp_path / "records.jsonl") == whole.records


def start_and_close(directory, kind):
    run = start(directory, kind)
    yield from run.rounds(5)
    run.close()


def test_a_record_that_was_not_written_comes_back_from_the_store(tmp_path):
    rounds(run := start(tmp_path), until=6)
    run.close()
    expected = read_records(tmp_path / "records.jsonl")
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    rounds(again := resume(tmp_path), until=6)
    assert again.records == expected
    assert read_records(tmp_path / "records.jsonl") == expected


def test_a_directory_with_a_run_is_not_started_over(tmp_path):
    start(tmp_path).close()
    with pytest.raises(KeyholeError, match="holds a run already"):
        start(tmp_path)


def test_a_directory_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(KeyholeError, match="no snapshot"):
        resume(tmp_path)


def test_a_run_is_open_once(tmp_path):
    run = start(tmp_path)
    with pytest.raises(KeyholeError, match="in use"):
        resume(tmp_path)
    run.close()


def test_a_signal_finishes_the_round_and_stops(tmp_path):
    run = start(tmp_path)
    with stop_on_signals() as stop:
        made = []
        for record in run.rounds(ROUNDS, stop=stop):
            made.append(record)
            if record.round == 2:
                os.kill(os.getpid(), signal.SIGTERM)
    assert len(made) == 4
    run.close()
    rounds(again := resume(tmp_path))
    rounds(whole := start(None))
    assert toy.model_bytes(again.state) == toy.model_bytes(whole.state)


CHILD = """
import sys
from pathlib import Path
from tests.training import test_loop
directory, kind = Path(sys.argv[1]), sys.argv[2]
known = (directory / "state").exists()
run = test_loop.resume(directory, kind) if known else test_loop.start(directory, kind)
evaluation = test_loop.Evaluation(test_loop.toy.metrics, 3)
for record in run.rounds(150, evaluation=evaluation, snapshot_every=4):
    print("round", flush=True)
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_bytes(kind, tmp_path):
    whole = start(None, kind)
    list(whole.rounds(150, evaluation=Evaluation(toy.metrics, 3)))
    dice, kills = random.Random(0), 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    while True:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), kind],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert child.stdout.readline() in ("round\n", "done\n"), "the run did not come back"
        time.sleep(dice.uniform(0, 0.3))
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
        if "done" in rest:
            break
        kills += 1
    assert kills >= 2
    again = resume(tmp_path, kind)
    assert toy.model_bytes(again.state) == toy.model_bytes(whole.state)
    assert again.records == whole.records
