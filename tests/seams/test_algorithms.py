"""SCAFFOLD and a personal head: killed in a round, they go on to the same bytes and states."""

import subprocess
import sys

import pytest

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
    for moment in killed.MOMENTS:
        resumed = killed.train(name, data, kept / name / moment)
        assert resumed.records() == whole.records()
        found = {path: leaf.tobytes() for path, leaf in flatten(resumed.model()).items()}
        assert found == expected
        states = ClientStates(kept / name / moment / "trial-0/clients")
        assert {client: states.get(client) for client in range(60)} == held
        files = list((kept / name / moment / "trial-0/clients").iterdir())
        assert len(files) == sum(state is not None for state in held.values())
