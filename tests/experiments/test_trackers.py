"""Trackers: every round once, whatever happens; what they are is no part of a run.

Those of MLflow and W&B write real files with the real packages, and are skipped without them.
"""

import json
import sys
import warnings

import pytest

import keyhole as kh
from keyhole.errors import InputError
from keyhole.experiments.trackers import trackers_of
from tests.front.test_train import SETTINGS, make_task
from tests.helpers import eventually

EACH_ROUND = {**SETTINGS, "evaluate_every": 1}


class Notes:
    """A tracker of one's own."""

    def __init__(self):
        self.told, self.runs, self.data = [], [], ""

    def start(self, spec, run):
        self.runs.append((spec.trial, run))
        self.data = spec.data.name

    def log(self, round, numbers):
        self.told.append((round, dict(numbers)))

    def finish(self):
        self.told.append("finished")


class Failing(Notes):
    """One that fails in its second round."""

    def log(self, round, numbers):
        if round == 2:
            raise OSError("disk full")
        super().log(round, numbers)


def test_a_tracker_is_told_every_round_the_result_and_the_end():
    notes = Notes()
    run = kh.train(make_task(), rounds=3, m=5, trials=2, tracker=notes, **EACH_ROUND)
    rounds = [1, 2, 3, 3, "finished"]
    assert [t if isinstance(t, str) else t[0] for t in notes.told] == 2 * rounds
    assert notes.told[1][1]["metrics/mse"] == run.records()[1].metrics["mse"]
    assert notes.told[1][1]["cost/bytes_down"] == sum(run.records()[1].bytes_down)
    assert notes.told[3][1] == {"test/mse": run.trials[0].result.metrics["mse"]}
    assert [trial for trial, _ in notes.runs] == [0, 1]
    assert notes.runs[0][1] != notes.runs[1][1]
    assert notes.data == "mine"  # the name of the data, which were an object


def test_a_tracker_is_no_part_of_a_run(tmp_path):
    first, second = Notes(), Notes()
    usual = {"m": 5, "out": tmp_path / "kept", **EACH_ROUND}
    kh.train(make_task(), rounds=2, tracker=first, **usual)
    before = (tmp_path / "kept" / "trial-0" / "run.json").read_bytes()
    kh.train(make_task(), rounds=2, tracker=[second], **usual)  # finished: told all the same
    assert second.told == first.told
    assert second.runs == first.runs
    run = kh.train(make_task(), rounds=4, **usual)
    assert run.rounds == 4
    assert b"racker" not in before


def test_a_tracker_that_fails_is_told_of_once_and_the_run_goes_on():
    failing, notes = Failing(), Notes()
    with pytest.warns(
        RuntimeWarning, match="Failing has failed in log.*OSError: disk full"
    ) as said:
        run = kh.train(make_task(), rounds=4, m=5, tracker=[failing, notes], **EACH_ROUND)
    assert run.rounds == 4
    assert len(said) == 1
    assert len(notes.told) == 6
    plain = kh.train(make_task(), rounds=4, m=5, **EACH_ROUND)
    assert plain.metrics == run.metrics


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("mlfow", "no such tracker: got 'mlfow'.*did you mean mlflow"),
        (3, "tracker is no tracker: got an int without start, log and finish"),
        (Notes, "got the class Notes"),
        ("math:pi", "math:pi is no tracker"),
    ],
)
def test_what_is_no_tracker_is_refused_before_a_round_is_made(given, said, tmp_path):
    with pytest.raises(InputError, match=said):
        kh.train(make_task(), rounds=1, m=5, tracker=given, out=tmp_path / "kept", **EACH_ROUND)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("name", "package"), [("tensorboard", "tensorboardX"), ("mlflow", "mlflow"), ("wandb", "wandb")]
)
def test_without_its_package_the_extra_is_named(name, package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"no {package}; .*keyhole\[{name}\]"):
        trackers_of(name, tmp_path)


def resumed(tmp_path, tracker):
    """Four rounds in two pieces, with a tracker in both; then once more, finished."""
    usual = {"m": 5, "out": tmp_path / "kept", **EACH_ROUND}
    with warnings.catch_warnings():  # of foreign packages
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*has failed")
        kh.train(make_task(), rounds=2, tracker=tracker(), **usual)
        run = kh.train(make_task(), rounds=4, tracker=tracker(), **usual)
        kh.open_run(tmp_path / "kept", task=make_task()).resume(tracker=tracker())
    return [record.metrics["mse"] for record in run.records()], run.metrics["mse"]


def test_event_files_hold_each_round_once(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs keyhole[tensorboard]")
    resumed(tmp_path, lambda: "tensorboard")
    (events,) = (tmp_path / "tensorboard").rglob("events.out.tfevents.*")
    data = events.read_bytes()
    assert data.count(b"metrics/mse") == data.count(b"staleness/mean") == 4
    assert data.count(b"test/mse") == 1
    assert events.parent.name == "trial-0"


@pytest.mark.slow
def test_mlflow_holds_each_round_once(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs keyhole[mlflow]")
    curve, test = resumed(tmp_path, lambda: kh.trackers.MLflow(tmp_path / "flow"))
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/flow/mlflow.db")
    known = client.get_experiment_by_name("keyhole")
    (found,) = client.search_runs([known.experiment_id])
    points = client.get_metric_history(found.info.run_id, "metrics/mse")
    assert [(p.step, p.value) for p in points] == list(enumerate(curve, 1))
    ends = client.get_metric_history(found.info.run_id, "test/mse")
    assert [p.step for p in ends] == [2, 4]
    assert ends[-1].value == test
    assert found.info.status == "FINISHED"
    assert found.data.params["cohort.size"] == str(SETTINGS["cohort"])


def wandb_records(data):
    """The records of a W&B file: after 7 bytes, LevelDB's log format, in blocks of 32 KB of pieces
    with a checksum, a length and a kind (1 whole, 2 first, 3 middle, 4 last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, at, parts = 1 << 15, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # too little is left of a block
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.slow
def test_wandb_writes_offline_files_with_each_round_once(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs keyhole[wandb]")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    curve, test = resumed(tmp_path, lambda: kh.trackers.WandB(tmp_path))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")

    def rows_written():
        return [
            {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            for record in wandb_records(file.read_bytes())
            if record.WhichOneof("record_type") == "history"
        ]

    assert eventually(lambda: len(rows_written()) >= 4)  # a process of W&B's writes them
    rows = rows_written()
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert [row["metrics/mse"] for row in rows] == pytest.approx(curve)
    assert rows[-1]["test/mse"] == pytest.approx(test)
