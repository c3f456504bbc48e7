"""SCAFFOLD and a personal head: killed in a round, they go on to the same bytes and states."""

import subprocess
import sys

import pytest

import keyhole as kh
from keyhole.experiments.experiment import Experiment
from keyhole.server.client_states import ClientStates
from keyhole.tree import flatten
from tests.helpers import load_example
from tests.seams import killed_algorithms as killed


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The directory of runs that were killed."""
    directory = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.seams.killed_algorithms", str(directory)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize("name", killed.EXAMPLES)
def test_a_killed_run_goes_on_to_the_same_model_and_states(kept, tmp_path, name):
    data = load_example(name).make_data()
    whole = killed.train(name, data, tmp_path)
    expected = {path: leaf.tobytes() for path, leaf in flatten(whole.model()).items()}
    states = ClientStates(tmp_path / "trial-0/clients")
    held = {client: states.get(client) for client in range(60)}
    assert sum(state is not None for state in held.values()) > 20
    resumed = killed.train(name, data, kept / name)
    assert resumed.records() == whole.records()
    found = {path: leaf.tobytes() for path, leaf in flatten(resumed.model()).items()}
    assert found == expected
    states = ClientStates(kept / name / "trial-0/clients")
    assert {client: states.get(client) for client in range(60)} == held
    files = list((kept / name / "trial-0/clients").iterdir())
    assert len(files) == sum(state is not None for state in held.values())


def test_a_run_that_keeps_no_state_keeps_none_of_its_clients(tmp_path):
    example = load_example("scaffold")
    task = kh.Task(example.Scaffold(), example.make_data())
    spec = task.defaults.changed({"rounds": 1, "cohort.size": 3})
    Experiment(spec, task.data, {"task": task.kind}).run(0, tmp_path, keep_state=False)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == []
