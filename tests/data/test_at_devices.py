"""Data that devices hold: declared at the trainer, read at each device."""

import json

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.at_devices import at_devices, own_examples
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.trial import begin_trial, read_result
from keyhole.identity import identity_of
from keyhole.server.state import ServerState
from tests.front.test_train import ITEMS, SETTINGS, make_model, make_task

DECLARED = at_devices(inputs={"item": "item"}, target="label")
ROWS = {"item": [7, 3, 7], "label": [1, 0, 1]}


def write_csv(path, rows):
    lines = [",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_jsonl(path, rows):
    lines = (dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl", "npz", "parquet", "folder", "function"])
def test_a_device_brings_its_examples_in_any_file_of_a_table(tmp_path, kind, monkeypatch):
    path = tmp_path / f"mine.{kind}"
    if kind == "csv":
        write_csv(path, ROWS)
    elif kind == "jsonl":
        write_jsonl(path, ROWS)
    elif kind == "npz":
        np.savez(path, **ROWS)
    elif kind == "parquet":
        pytest.importorskip("pyarrow")
        pytest.importorskip("pandas").DataFrame(ROWS).to_parquet(path)
    elif kind == "folder":
        path.mkdir()
        write_csv(path / "monday.csv", {name: column[:1] for name, column in ROWS.items()})
        write_csv(path / "tuesday.csv", {name: column[1:] for name, column in ROWS.items()})
        (path / "notes.txt").write_text("not mine")
    else:
        (tmp_path / "my_rows.py").write_text(f"def mine():\n    return {ROWS!r}\n")
        monkeypatch.syspath_prepend(tmp_path)
        path = "my_rows:mine"
    found = own_examples(str(path), DECLARED)
    own = found.splits["train"].client(0)
    assert {name: column.tolist() for name, column in own.items()} == ROWS
    assert (len(found.splits["train"]), found.inputs) == (1, {"item": "item"})


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"item": [1]}, "expected label as well"),
        ({"item": ["Heat"], "label": [1]}, "number in its own way"),
        ({"item": [-1], "label": [1]}, "names no key"),
    ],
)
def test_examples_that_are_not_what_the_task_declares_are_refused(tmp_path, rows, said):
    with pytest.raises(InputError, match=said):
        own_examples(str(write_csv(tmp_path / "mine.csv", rows)), DECLARED)


@pytest.mark.parametrize("source", ["nowhere.csv", "", "os:name"])
def test_what_holds_no_examples_is_named(tmp_path, source):
    with pytest.raises(InputError, match=r"no examples|no file|names no"):
        own_examples(source or str(tmp_path), DECLARED)


def test_a_trainer_without_examples_has_a_model_and_draws_nobody():
    task = kh.Task(make_model(), DECLARED, name="shop")
    spec = task.defaults.changed({"cohort": {"sampling": "check-in", "size": 3}})
    experiment = Experiment(spec, task.data, {"task": task.kind})
    experiment.check()
    assert experiment.run_parts(0).cohorts.asked == 3
    assert experiment.task.metrics == {}
    with pytest.raises(InputError, match="nobody knows who holds the data"):
        Experiment(task.defaults, task.data, {"task": task.kind}).check()


def test_keys_of_a_device_are_held_to_the_model(tmp_path):
    task = kh.Task(make_model(), DECLARED, name="shop")
    rows = {"item": [ITEMS], "label": [1]}
    found = own_examples(str(write_csv(tmp_path / "mine.csv", rows)), task.data)
    with pytest.raises(InputError, match="beyond key space"):
        _ = Experiment(task.defaults, found, {"task": task.kind}).task


def test_the_only_example_of_a_device_is_not_held_out(tmp_path):
    rows = {name: column[:1] for name, column in ROWS.items()}
    found = own_examples(str(write_csv(tmp_path / "mine.csv", rows)), DECLARED, 0.2)
    assert [len(found.splits[split]) for split in ("train", "test")] == [1, 0]


def test_the_identity_of_a_task_does_not_follow_its_data(tmp_path):
    """A device and the trainer compare their code; each has data of its own."""
    here = kh.Task(make_model(), DECLARED, name="shop")
    mine = own_examples(str(write_csv(tmp_path / "mine.csv", ROWS)), DECLARED)
    there = kh.Task(make_model(), mine, name="shop")
    assert identity_of(here.kind) == identity_of(there.kind)


def mse(outputs, examples):
    return float(np.mean((outputs - examples["label"]) ** 2))


def held_out_by(path, **metrics):
    """A run whose trainer has examples of its own to measure with."""
    task = kh.Task(make_model(), DECLARED, name="shop", metrics=metrics)
    spec = task.defaults.changed({"held_out": str(path), "cohort.sampling": "check-in"})
    return Experiment(spec, task.data, {"task": task.kind})


def test_a_trainer_measures_on_a_file_of_its_own_and_trains_on_none(tmp_path):
    """The model predicts 0 for all: the error is the mean of the squared labels."""
    made = held_out_by(write_jsonl(tmp_path / "held.jsonl", ROWS), mse=mse)
    layout, start = made.task.model.layout, made.task.model.init(0)
    state = ServerState.dense(layout, start, made.algorithm.server)
    assert made.measuring.on("test")(state) == {"mse": pytest.approx(2 / 3)}
    assert (made.dataset.is_at_devices, made.task.clients) == (True, 0)


def test_held_out_examples_may_move_and_must_not_change(tmp_path):
    first, moved, other = (tmp_path / f"{name}.csv" for name in ("first", "moved", "other"))
    for path in (first, moved):
        write_csv(path, ROWS)
    write_csv(other, {**ROWS, "label": [0, 0, 0]})
    begin_trial(tmp_path / "run", held_out_by(first, mse=mse).describe(0))
    assert read_result(tmp_path / "run", held_out_by(moved, mse=mse).describe(0)) is None
    with pytest.raises(InputError, match=r"holds a run with another dataset\.held_out"):
        read_result(tmp_path / "run", held_out_by(other, mse=mse).describe(0))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda path: held_out_by(path).check(), "nothing to measure on held-out examples"),
        (lambda path: held_out_by(path / "none.csv", mse=mse), "no examples: got no file"),
        (
            lambda path: kh.train(make_task(), rounds=1, held_out=str(path), **SETTINGS),
            "held-out examples go with data at devices",
        ),
    ],
)
def test_held_out_examples_that_do_nothing_are_refused(tmp_path, made, said):
    with pytest.raises(InputError, match=said):
        made(write_csv(tmp_path / "held.csv", ROWS))
