"""Sweeps of your own: what a TOML file asks for, and trials in parallel processes."""

import threading
import time

import pytest

from keyhole.errors import InputError, WorkerError
from keyhole.experiments.grid import read_grid
from keyhole.experiments.parallel import Cell, DataSource, run_cells
from keyhole.experiments.specs import spec_of

GRID = """
task = "emnist_2nn"
rounds = 4
client.lr = [0.1, 0.3]
keys.neuron.count = [5, "none"]

[sizes]
neurons = 40
"""


@pytest.fixture
def grid(tmp_path):
    def read(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return read_grid(path)

    return read


def test_every_combination_is_a_line_in_a_folder_of_its_own(grid):
    sweep = grid(GRID)
    assert (sweep.name, sweep.trials, sweep.x_label) == ("mine", 5, "keys.neuron.count")
    assert [(line.panel, line.label, line.x) for line in sweep.lines] == [
        ("client.lr = 0.1", "keys.neuron.count = 5", 5.0),
        ("client.lr = 0.1", "keys.neuron.count = none", None),
        ("client.lr = 0.3", "keys.neuron.count = 5", 5.0),
        ("client.lr = 0.3", "keys.neuron.count = none", None),
    ]
    assert len({line.arm for line in sweep.lines}) == 4
    first, second = sweep.lines[0].spec, sweep.lines[3].spec
    assert (first.client.lr, first.keys["neuron"].count, first.sizes["neurons"]) == (0.1, 5, 40)
    assert (second.client.lr, second.keys["neuron"].count) == (0.3, None)
    assert second.keys["neuron"].choice == "all"
    described = sweep.describe("", "synthetic")
    assert [line["arm"] for line in described["lines"]] == [line.arm for line in sweep.lines]


def test_a_file_without_a_list_is_one_run(grid):
    (line,) = grid('task = "so_tag"\ntrials = 2\n').lines
    assert line.spec == spec_of("so_tag")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rounds = 3", "names no task"),
        ('task = "so_tga"', "did you mean so_tag?"),
        ('task = "so_tag"\nclient.rl = [1.0]', "did you mean client.lr?"),
        ('task = "so_tag"\nclient.lr = []', "lists no values of client.lr"),
        ('task = "so_tag"\nclient.lr = [1.0, 1.0]', "a value of client.lr twice"),
        ('task = "so_tag"\nclient.lr = [1.0, -1.0]', "client.lr of .* is out of range: got -1.0"),
        ('task = "so_tag"\nkeys.wrod.count = [1]', "no such key space: got wrod"),
        ('task = "so_tag"\ntrials = 0', "no number of trials: got 0"),
        ("task = so_tag", "cannot be read"),
    ],
)
def test_a_mistake_in_the_file_is_named(grid, text, said):
    with pytest.raises(InputError, match=said):
        grid(text)


@pytest.fixture
def cells(tmp_path):
    changes = {"rounds": 1, "cohort.size": 2, "sizes.neurons": 8, "sizes.hidden": 4}
    data = DataSource("emnist_2nn", "tests.experiments.small_writers:make", 0)

    def make(folder, **more):
        spec = spec_of("emnist_2nn", {**changes, "keys.neuron.count": 4, "data": data.name, **more})
        return [Cell(spec, data, t, tmp_path / folder / f"trial-{t}", True) for t in range(2)]

    return make


@pytest.mark.slow
def test_processes_do_not_change_the_result(cells, tmp_path):
    found = {}
    for count in (1, 2):
        done = run_cells(cells(str(count)), count, threading.Event())
        found[count] = {cell.trial: result.metrics for cell, result in done}
        assert found[count].keys() == {0, 1}
    assert found[1] == found[2]
    for trial in (0, 1):
        records = [tmp_path / str(n) / f"trial-{trial}" / "records.jsonl" for n in (1, 2)]
        assert records[0].read_bytes() == records[1].read_bytes()
    before = (tmp_path / "1" / "trial-0" / "result.json").stat().st_mtime_ns
    list(run_cells(cells("1"), 1, threading.Event()))
    assert (tmp_path / "1" / "trial-0" / "result.json").stat().st_mtime_ns == before


def test_what_a_trial_raises_ends_the_sweep(cells):
    with pytest.raises(InputError, match="no client has this many examples"):
        list(run_cells(cells("a", **{"client.min_examples": 10**6}), 1, threading.Event()))


def test_a_sweep_that_is_stopped_begins_no_trial(cells, tmp_path):
    stop = threading.Event()
    stop.set()
    assert list(run_cells(cells("a"), 1, stop)) == []
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_trial_that_is_stopped_keeps_its_rounds(cells, tmp_path):
    stop, records = threading.Event(), tmp_path / "a" / "trial-0" / "records.jsonl"

    def watch():
        while not records.exists() or records.read_bytes().count(b"\n") < 2:
            time.sleep(0.02)
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    done = list(run_cells(cells("a", rounds=100_000), 1, stop))
    assert [(cell.trial, result) for cell, result in done] == [(0, None)]
    made = records.read_bytes().count(b"\n")
    assert 2 <= made < 100_000
    further, _ = cells("a", rounds=made)
    ((_, result),) = run_cells([further], 1, threading.Event())
    assert result.rounds == made


@pytest.mark.slow
def test_a_process_that_dies_is_named(cells):
    cell = cells("a", metrics="tests.experiments.small_writers:die", evaluate_every=1)
    with pytest.raises(WorkerError, match="a process that ran trials has died"):
        list(run_cells(cell, 1, threading.Event()))
