"""A run with an own part is killed and goes on to the same bytes; another part is refused."""

import subprocess
import sys

import pytest

from keyhole.errors import InputError
from keyhole.rounds.loop import start_run
from keyhole.tree import flatten
from tests.seams import killed
from tests.seams.own import part

SEAMS = ["optimizer", "choice", "data", "task", "sum", "engine", "metric"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """For each seam the directory of a run that was killed in its third round."""
    directory = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.seams.killed", str(directory), *SEAMS]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: directory / name for name in SEAMS}


@pytest.mark.parametrize("name", ["optimizer", "choice", "task", "sum"])
def test_another_part_of_the_same_name_is_refused(kept, name):
    with pytest.raises(InputError, match="another"):
        killed.resume(name, kept[name], variant=1)


@pytest.mark.parametrize("name", SEAMS)
def test_a_killed_run_with_an_own_part_goes_on_to_the_same_bytes(kept, name):
    state, clients, plan, how = part(name)
    whole = start_run(state, clients, plan)
    list(whole.rounds(killed.ROUNDS, **how))
    resumed = killed.resume(name, kept[name])
    assert resumed.records == whole.records
    expected, found = flatten(whole.state.model()), flatten(resumed.state.model())
    for path, leaf in expected.items():
        assert leaf.any()
        assert found[path].tobytes() == leaf.tobytes()
