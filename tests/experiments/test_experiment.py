"""Experiments: directories that explain themselves, resume, and refuse what does not fit."""

import json
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest

from keyhole.data.federated import hold_out
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import name_of, spec_of
from keyhole.experiments.sweeps import SWEEPS, sweep_named
from keyhole.rounds.record import read_records
from tests.experiments.small import writers


def arm(m=8, **changes):
    usual = {"rounds": 3, "evaluate_every": 1, "cohort.size": 4, "client.lr": 0.05}
    sizes, keys = {"neurons": 16, "hidden": 8}, {"neuron": {"count": m}}
    return spec_of("emnist_2nn", {**usual, **changes}, sizes=sizes, keys=keys)


def test_a_finished_run_explains_itself(tmp_path):
    result = Experiment(arm(), writers()).run(0, tmp_path / "run")
    asked = json.loads((tmp_path / "run" / "run.json").read_text())
    assert asked["spec"]["task"] == "emnist_2nn"
    assert asked["spec"]["client"]["lr"] == 0.05
    # A neuron has 784 weights and a bias in, 8 weights out; 8 + 8 * 62 + 62 numbers are broadcast.
    assert asked["size"] == {"server": 16 * 793 + 566, "client": 8 * 793 + 566}
    assert asked["versions"].keys() >= {"keyhole", "numpy", "jax", "python"}
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == asdict(result)
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert [list(record.metrics) for record in records] == [["accuracy"]] * 3


def test_a_stopped_run_goes_on_to_the_same_end(tmp_path):
    whole = Experiment(arm(), writers()).run(0, tmp_path / "whole")
    stop = threading.Event()
    stop.set()
    assert Experiment(arm(), writers()).run(0, tmp_path / "cut", stop=stop) is None
    assert not (tmp_path / "cut" / "result.json").exists()
    resumed = Experiment(arm(), writers()).run(0, tmp_path / "cut")
    assert replace(resumed, seconds=0) == replace(whole, seconds=0)
    first, second = ((tmp_path / name / "records.jsonl").read_bytes() for name in ("whole", "cut"))
    assert first == second


def test_memory_and_disk_give_the_same_numbers(tmp_path):
    kept = Experiment(arm(), writers()).run(0, tmp_path / "run")
    passing = Experiment(arm(), writers()).run(0)
    assert kept.metrics == passing.metrics


def test_a_finished_run_is_not_run_again(tmp_path):
    first = Experiment(arm(), writers()).run(0, tmp_path / "run")
    made = []
    again = Experiment(arm(), writers()).run(0, tmp_path / "run", on_round=made.append)
    assert again == first
    assert not made


def test_more_rounds_extend_a_run(tmp_path):
    Experiment(arm(rounds=2), writers()).run(0, tmp_path / "run")
    longer = Experiment(arm(rounds=4), writers()).run(0, tmp_path / "run")
    straight = Experiment(arm(rounds=4), writers()).run(0, tmp_path / "straight")
    assert longer.metrics == straight.metrics
    assert json.loads((tmp_path / "run" / "run.json").read_text())["spec"]["rounds"] == 4


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"m": 4}, "run"),
        ({"rounds": 4, "m": 4}, "run"),
        ({"seed": 5}, "seed"),
        ({"mean_over": "choosers"}, "run"),
        ({"client.batch_size": 3}, r"client\.batch_size"),
    ],
)
def test_another_arm_in_the_same_directory_is_refused(tmp_path, other, named):
    Experiment(arm(), writers()).run(0, tmp_path / "run")
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(InputError, match=f"another {named}"):
        Experiment(arm(**other), writers()).run(0, tmp_path / "run")
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_other_data_in_the_same_directory_is_refused(tmp_path):
    Experiment(arm(), writers()).run(0, tmp_path / "run")
    with pytest.raises(InputError, match="another data"):
        Experiment(arm(), writers(count=7)).run(0, tmp_path / "run")


def test_a_stopped_run_is_not_the_result_of_fewer_rounds(tmp_path):
    stop, longer = threading.Event(), Experiment(arm(rounds=9), writers())

    def stop_later(record):
        if record.round == 2:
            stop.set()

    assert longer.run(0, tmp_path, stop=stop, on_round=stop_later) is None
    with pytest.raises(InputError, match="more rounds than are asked for: got 1"):
        Experiment(arm(rounds=1), writers()).run(0, tmp_path)
    assert longer.run(0, tmp_path).rounds == 9


@pytest.mark.parametrize(("rounds", "keep_state"), [(2, True), (2, False), (4, False)])
def test_a_finished_run_of_another_length_is_never_lost(tmp_path, rounds, keep_state):
    Experiment(arm(), writers()).run(0, tmp_path / "run", keep_state=keep_state)
    kept = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")}
    with pytest.raises(InputError, match="another length"):
        Experiment(arm(rounds=rounds), writers()).run(0, tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json*")} == kept


def test_a_start_that_was_killed_is_started_anew(tmp_path):
    """Killed after `run.json`, while the store was being made: there is no snapshot yet."""
    made = Experiment(arm(), writers())
    (tmp_path / "run" / "state").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps(made.describe(0)))
    assert made.run(0, tmp_path / "run").rounds == 3


def test_both_arms_of_a_trial_meet_the_same_clients():
    cohorts = []
    for shared in (False, True):
        seen = []
        made = Experiment(arm(**{"keys.neuron.shared": shared}), writers())
        made.run(1, on_round=lambda record, seen=seen: seen.append(record.clients))
        cohorts.append(seen)
    assert cohorts[0] == cohorts[1]


def test_trials_differ_in_start_and_cohorts():
    made = Experiment(arm(), writers())
    first, second = (made.start(trial, None).state.model() for trial in (0, 1))
    assert not np.array_equal(first["dense1"]["kernel"], second["dense1"]["kernel"])
    cohorts = [[record.clients for record in made.start(trial, None).rounds(3)] for trial in (0, 1)]
    assert cohorts[0] != cohorts[1]


def test_clients_with_few_examples_can_be_left_out():
    data = writers()
    train = data.splits["train"]
    train = replace(train, stops=train.stops - np.array([5, 0, 0, 6, 0, 0]))  # 7, 12, 12, 6, ...
    data = replace(data, splits={**data.splits, "train": train})
    for minimum, clients in ((6, 6), (7, 5), (8, 4), (12, 4)):
        few = spec_of("emnist_2nn", client={"min_examples": minimum})
        assert Experiment(few, data).task.clients == clients
    with pytest.raises(InputError, match=r"got min_examples 13; expected at most 12"):
        Experiment(spec_of("emnist_2nn", client={"min_examples": 13}), data).check()


def test_tuning_keeps_a_fifth_of_the_writers_out_of_training():
    data = writers(count=10)
    task = Experiment(arm(tuning=True), data).task
    assert task.metrics.keys() == {"test", "validation"}
    kept, held = hold_out(data.splits["train"], 0.2, np.random.default_rng(1))
    trained = {task.data(i)["label"].tobytes() for i in range(task.clients)}
    assert (len(kept), len(held)) == (8, 2)
    labels = {held.client(i)["label"].astype(np.int32).tobytes() for i in range(2)}
    assert len(trained) == 8
    assert not trained & labels


def test_held_out_clients_are_others():
    data = writers(count=10).splits["train"]
    kept, held = hold_out(data, 0.2, np.random.default_rng(1))
    assert sorted([*kept.client_ids, *held.client_ids]) == sorted(data.client_ids)


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_names_its_arms_apart(name, scale):
    sweep = sweep_named(name, scale)
    arms = {name_of(line.spec): line.spec for line in sweep.lines}
    assert all(arms[name_of(line.spec)] == line.spec for line in sweep.lines)
    assert len({(line.panel, line.label) for line in sweep.lines}) == len(sweep.lines)
    assert sweep.describe(scale, "x")["lines"]


def test_the_paper_scale_has_the_paper_s_settings():
    for name in SWEEPS:
        sweep = sweep_named(name, "paper")
        assert sweep.trials == 5
        assert {line.spec.cohort.size for line in sweep.lines} == {50}
        expected = 3000 if sweep.task == "so_word" else 1500
        assert {line.spec.rounds for line in sweep.lines} == {expected}
        assert all(line.spec.sizes.get("ink", 0) == 0 for line in sweep.lines)
