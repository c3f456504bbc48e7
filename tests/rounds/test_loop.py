"""Runs stored, resumed, killed and stopped end with the bytes of an uninterrupted run."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from keyhole.errors import InputError, KeyholeError
from keyhole.rounds.loop import Evaluation, resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.rounds.record import read_records
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import Adam
from keyhole.signals import stop_on_signals
from tests.helpers import ROOT
from tests.rounds import toy

ROUNDS = 12


def plan(kind):
    buffering = Buffering(6, 3, duration=slow) if kind == "buffered" else None
    cohorts = Cohorts(20, 5, lost_before=0.5, lost_after=0.3)
    return toy.make_plan(cohorts=cohorts, buffering=buffering)


def slow(rng):
    return rng.exponential()


def start(directory, kind="synchronous"):
    return start_run(toy.make_state(Adam(0.1)), toy.make_clients(), plan(kind), directory)


def resume(directory, kind="synchronous"):
    return resume_run(toy.make_state(Adam(0.1)), toy.make_clients(), plan(kind), directory)


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
    assert outcome(part) == outcome(whole)
    assert read_records(tmp_path / "records.jsonl") == whole.records


def test_a_record_that_was_not_written_comes_back_from_the_store(tmp_path):
    rounds(run := start(tmp_path), until=6)
    run.close()
    expected = read_records(tmp_path / "records.jsonl")
    lines = (tmp_path / "records.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    rounds(again := resume(tmp_path), until=6)
    assert again.records == expected
    assert read_records(tmp_path / "records.jsonl") == expected


def test_records_that_are_lost_for_good_are_noted_and_no_round_is_made_twice(tmp_path):
    rounds(run := start(tmp_path), until=6)
    run.close()
    (tmp_path / "records.jsonl").write_bytes(b"")
    rounds(again := resume(tmp_path))
    assert "records of 5 rounds are lost" in again.notes[0]
    rounds(whole := start(None))
    assert toy.model_bytes(again.state) == toy.model_bytes(whole.state)
    assert again.records == [whole.records[5], *whole.records[6:]]


def test_another_plan_is_refused_by_the_name_of_what_differs(tmp_path):
    start(tmp_path).close()
    for other, message in [
        (replace(plan("synchronous"), seed=99), "another seed: got 99; expected 3"),
        (replace(plan("synchronous"), shared_keys=True), "another shared_keys: got True"),
    ]:
        with pytest.raises(InputError, match=message):
            resume_run(toy.make_state(Adam(0.1)), toy.make_clients(), other, tmp_path)
    resume(tmp_path).close()


def test_a_metric_that_fails_does_not_make_a_round_twice(tmp_path):
    def fail(state):
        raise RuntimeError("no metric")

    run = start(tmp_path)
    with pytest.raises(RuntimeError, match="no metric"):
        list(run.rounds(3, evaluation=Evaluation(fail)))
    list(run.rounds(3))
    list((whole := start(None)).rounds(3))
    assert outcome(run) == outcome(whole)


def test_metrics_of_numpy_types_are_stored(tmp_path):
    run = start(tmp_path)
    list(run.rounds(1, evaluation=Evaluation(lambda state: {"loss": np.float32(0.5)})))
    assert read_records(tmp_path / "records.jsonl")[0].metrics == {"loss": 0.5}


@pytest.mark.parametrize(
    "act",
    [lambda: Evaluation(toy.metrics, 0), lambda: next(start(None).rounds(1, snapshot_every=0))],
)
def test_never_is_no_interval(act):
    with pytest.raises(InputError, match="expected a whole number from 1"):
        act()


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
from tests.rounds import test_loop
directory, kind = Path(sys.argv[1]), sys.argv[2]
known = any((directory / "state").glob("snapshot-*.khs"))
run = test_loop.resume(directory, kind) if known else test_loop.start(directory, kind)
evaluation = test_loop.Evaluation(test_loop.toy.metrics, 3)
for record in run.rounds(600, evaluation=evaluation, snapshot_every=4):
    print("round", flush=True)
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_run_killed_again_and_again_ends_with_the_same_bytes(kind, tmp_path):
    whole = start(None, kind)
    list(whole.rounds(600, evaluation=Evaluation(toy.metrics, 3)))
    dice, kills = random.Random(0), 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    while True:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path), kind],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        if kills % 3:  # every third life may end before its first round
            assert child.stdout.readline() in ("round\n", "done\n"), "the run did not come back"
        time.sleep(dice.uniform(0, 0.3 if kills % 3 else 1.5))
        child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
        if "done" in rest:
            break
        kills += 1
    assert kills >= 2
    again = resume(tmp_path, kind)
    assert toy.model_bytes(again.state) == toy.model_bytes(whole.state)
    assert again.records == whole.records
