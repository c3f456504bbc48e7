"""The best model of a run is kept beside the last, and a run that gets no better ends."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import InputError
from keyhole.experiments.report.reading import read_results
from keyhole.experiments.report.tables import make_table, to_markdown
from keyhole.rounds.best import Goal
from keyhole.rounds.record import RoundRecord, read_records
from tests.front.test_train import SETTINGS, make_data, make_model

MAIN = "from keyhole.cli.main import main; main()"
MOMENTS, KILLED_IN = ["before_the_model", "before_the_record", "after_the_record"], 3
HOW = {**SETTINGS, "client_lr": 2.0, "evaluate_every": 1, "rounds": 40, "patience": 3}


def nearness(outputs, examples):
    """Rises until predictions are 1 on average, and falls again on their way to 3."""
    return -abs(float(np.mean(outputs)) - 1.0)


def rising_and_falling():
    return kh.Task(make_model(), make_data(), metrics={"nearness": nearness})


def measured(*values):
    return [RoundRecord(t, t, [], metrics={"loss": v}) for t, v in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "goal", "rounds", "waited"),
    [
        ([3.0, 2.0, 2.0, 2.5], Goal("loss", is_max=False), 2, 2),
        ([3.0, 2.0, 4.0], Goal("loss"), 3, 0),
        ([3.0, 2.9, 2.8, 2.7], Goal("loss", is_max=False, min_delta=0.25), 4, 0),
        ([3.0, 2.9, 2.8], Goal("loss", is_max=False, min_delta=0.25), 3, 2),
        ([float("nan"), 1.0, float("inf")], Goal("loss"), 2, 1),
        ([], Goal("loss"), None, 0),
    ],
)
def test_best_is_the_best_value_and_waiting_counts_from_the_last_improvement(
    values, goal, rounds, waited
):
    found = goal.progress(measured(*values))
    assert (found.rounds, found.waited) == (rounds, waited)


def test_rounds_that_were_not_measured_are_not_waited_for():
    records = [*measured(1.0, 2.0), *[RoundRecord(t, t, []) for t in range(2, 9)]]
    assert Goal("loss", is_max=False).progress(records).waited == 1


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "stopped"
    return kh.train(rising_and_falling(), out=out, **HOW)


def curve(run):
    return [record.metrics["nearness"] for record in run.records()]


def test_a_run_that_gets_no_better_ends_and_says_why(stopped):
    values = curve(stopped)
    best = int(np.argmax(values)) + 1
    assert 1 < best == len(values) - 3 < 37
    result = json.loads((stopped.directory / "trial-0" / "result.json").read_text())
    assert result["best"] == {
        "rounds": best,
        "metric": "nearness",
        "value": max(values),
        "metrics": {"nearness": pytest.approx(max(values))},
    }
    assert result["rounds"] == best + 3
    assert "no better nearness in 3 evaluations" in result["stopped"]


def test_the_best_model_is_that_of_a_run_of_so_many_rounds(stopped):
    best = stopped.trials[0].result.best.rounds
    short = kh.train(rising_and_falling(), **{**HOW, "rounds": best})
    in_memory = kh.train(rising_and_falling(), **HOW)
    for run in (stopped, in_memory, kh.open_run(stopped.directory, task=rising_and_falling())):
        assert np.array_equal(run.model(best=True)["score"], short.model()["score"])
        assert not np.array_equal(run.model()["score"], short.model()["score"])
        assert run.evaluate(best=True) == {"nearness": pytest.approx(max(curve(stopped)))}


def test_a_finished_run_stays_as_it_is_and_more_patience_goes_on(stopped, tmp_path):
    before = (stopped.directory / "trial-0" / "result.json").read_bytes()
    again = kh.train(rising_and_falling(), out=stopped.directory, **{**HOW, "rounds": 60})
    assert (again.rounds, again.directory) == (stopped.rounds, stopped.directory)
    assert (stopped.directory / "trial-0" / "result.json").read_bytes() == before
    first = kh.train(rising_and_falling(), out=tmp_path / "run", **HOW)
    further = kh.train(rising_and_falling(), out=tmp_path / "run", **{**HOW, "patience": 5})
    assert further.rounds == first.rounds + 2
    assert np.array_equal(further.model(best=True)["score"], first.model(best=True)["score"])


def test_tables_say_which_round_was_best_and_why_a_run_ended(stopped):
    whole = kh.train(rising_and_falling(), **{**HOW, "patience": None, "best_metric": "nearness"})
    table = kh.compare(stopped, whole)
    assert [row.best_rounds for row in table.rows] == [(stopped.rounds - 3,)] * 2
    first, second = str(table).splitlines()[1:]
    assert "no better nearness in 3 evaluations" in first
    assert "no better" not in second
    (found,) = read_results(stopped.directory.parent)
    assert f"best nearness {max(curve(stopped)):.4g} after" in to_markdown(make_table(found))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"best_metric": "nearnes"}, "got 'nearnes'; expected nearness; did you mean nearness?"),
        ({"best_mode": "most"}, "best_mode is not known: got 'most'; expected auto, max, min; "),
        ({"patience": None, "min_delta": 0.1}, "min_delta does nothing alone: "),
    ],
)
def test_what_cannot_be_best_is_refused(given, said):
    with pytest.raises(InputError) as caught:
        kh.train(rising_and_falling(), **{**HOW, **given})
    assert said in str(caught.value)


def test_a_run_without_a_best_model_says_so():
    run = kh.train(rising_and_falling(), **{**HOW, "patience": None, "rounds": 1})
    with pytest.raises(InputError, match="has kept no best model"):
        run.model(best=True)


def run_keyhole(*args):
    command = [sys.executable, "-c", MAIN, *args]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_commands_keep_and_export_the_best_model(tmp_path):
    out = tmp_path / "runs"
    command = f"train emnist_2nn --rounds 6 --evaluate-every 1 --cohort 4 --patience 1 --out {out}"
    assert "best accuracy" in run_keyhole(*command.split())
    (trial,) = out.glob("*/trial-0")
    for flags in ([], ["--best"]):
        to = tmp_path / f"model{len(flags)}.npz"
        run_keyhole("export", str(trial), "--to", str(to), *flags)
    told = json.loads((trial / "result.json").read_text())
    about = json.loads(str(np.load(tmp_path / "model1.npz")["keyhole"]))
    assert about["rounds"] == told["best"]["rounds"]


@pytest.mark.slow
def test_a_run_that_is_killed_at_its_best_keeps_the_same_bytes(tmp_path):
    command = [sys.executable, "-m", "tests.front.killed_best", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    whole, *killed = [Path(tmp_path, name, "trial-0") for name in ("whole", *MOMENTS)]
    for trial in killed:
        assert (trial / "best.khs").read_bytes() == (whole / "best.khs").read_bytes()
        assert read_records(trial / "records.jsonl") == read_records(whole / "records.jsonl")
        told, expected = (json.loads((t / "result.json").read_text()) for t in (trial, whole))
        assert told["best"]["rounds"] > KILLED_IN
        assert told | {"seconds": 0} == expected | {"seconds": 0}
