"""Experiments: directories that explain themselves, resume, and refuse what does not fit."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from keyhole.data.federated import hold_out
from keyhole.errors import InputError
from keyhole.tasks.arms import arm_of
from keyhole.tasks.experiment import Experiment, read_result
from keyhole.tasks.sweeps import SWEEPS, sweep_named
from keyhole.training.record import read_records
from tests.tasks.small import writers


def arm(rounds=3, m=8, **rest):
    changes = {"rounds": rounds, "cohort": 4, "evaluate_every": 1, "client_lr": 0.05}
    return arm_of(
        "emnist_2nn",
        sizes={"neurons": 16, "hidden": 8},
        keys_per_client={"neuron": m},
        changes=changes,
        **rest,
    )


def test_a_finished_run_explains_itself(tmp_path):
    result = Experiment(arm(), writers()).run(0, tmp_path / "run")
    asked = json.loads((tmp_path / "run" / "run.json").read_text())
    assert asked["task"] == "emnist_2nn"
    assert asked["settings"]["client_lr"] == 0.05
    # A neuron has 784 weights and a bias in, 8 weights out; 8 + 8 * 62 + 62 numbers are broadcast.
    assert asked["size"] == {"server": 16 * 793 + 566, "client": 8 * 793 + 566}
    assert asked["versions"].keys() >= {"keyhole", "numpy", "jax", "python"}
    assert read_result(tmp_path / "run") == result
    records = read_records(tmp_path / "run" / "records.jsonl")
    assert [list(record.metrics) for record in records] == [["accuracy"]] * 3


def test_a_stopped_run_goes_on_to_the_same_end(tmp_path):
    whole = Experiment(arm(), writers()).run(0, tmp_path / "whole")
    stop = threading.Event()
    stop.set()
    assert Experiment(arm(), writers()).run(0, tmp_path / "cut", stop=stop) is None
    assert read_result(tmp_path / "cut") is None
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
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["rounds"] == 4


def test_another_arm_in_the_same_directory_is_refused(tmp_path):
    Experiment(arm(), writers()).run(0, tmp_path / "run")
    with pytest.raises(InputError, match="another keys_per_client"):
        Experiment(arm(m=4, rounds=4), writers()).run(0, tmp_path / "run")


def test_both_arms_of_a_trial_meet_the_same_clients():
    cohorts = []
    for shared in (False, True):
        seen = []
        made = Experiment(arm(shared_keys=shared), writers())
        made.run(1, on_round=lambda record, seen=seen: seen.append(record.clients))
        cohorts.append(seen)
    assert cohorts[0] == cohorts[1]


def test_trials_differ_in_start_and_cohorts():
    made = Experiment(arm(), writers())
    first, second = (made.start(trial, None).state.model() for trial in (0, 1))
    assert not np.array_equal(first["dense1"]["kernel"], second["dense1"]["kernel"])


def test_clients_with_few_examples_can_be_left_out():
    data = writers()
    few = arm_of("emnist_2nn", changes={"min_examples": 13})
    assert Experiment(arm(), data).task.clients == 6
    assert Experiment(few, data).task.clients == 0


def test_tuning_keeps_a_fifth_of_the_writers_out_of_training():
    task = Experiment(arm(is_tuning=True), writers(count=10)).task
    assert task.clients == 8
    assert task.metrics.keys() == {"test", "validation"}


def test_held_out_clients_are_others():
    data = writers(count=10).splits["train"]
    kept, held = hold_out(data, 0.2, np.random.default_rng(1))
    assert sorted([*kept.client_ids, *held.client_ids]) == sorted(data.client_ids)


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", SWEEPS)
def test_every_sweep_names_its_arms_apart(name, scale):
    sweep = sweep_named(name, scale)
    arms = {line.arm.name: line.arm for line in sweep.lines}
    assert all(arms[line.arm.name] == line.arm for line in sweep.lines)
    assert len({(line.panel, line.label) for line in sweep.lines}) == len(sweep.lines)
    assert sweep.describe(scale, "x")["lines"]


def test_the_paper_scale_has_the_paper_s_settings():
    for name in ("emnist-cnn", "tag-recall"):
        sweep = sweep_named(name, "paper")
        assert sweep.trials == 5
        assert {line.arm.settings.cohort for line in sweep.lines} == {50}
        assert {line.arm.settings.rounds for line in sweep.lines} == {1500}
