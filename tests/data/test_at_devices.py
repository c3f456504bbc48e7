"""Data that devices hold: declared at the trainer, read at each device."""

import json

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.at_devices import at_devices, own_examples
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.identity import identity_of
from tests.front.test_train import ITEMS, make_model

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


def test_the_identity_of_a_task_does_not_follow_its_data(tmp_path):
    """A device and the trainer compare their code; each has data of its own."""
    here = kh.Task(make_model(), DECLARED, name="shop")
    mine = own_examples(str(write_csv(tmp_path / "mine.csv", ROWS)), DECLARED)
    there = kh.Task(make_model(), mine, name="shop")
    assert identity_of(here.kind) == identity_of(there.kind)
