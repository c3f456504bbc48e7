"""Own parts by "module:NAME": a killed command goes on; another part is refused."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from keyhole.cli.publish import publish
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import own_dataset
from keyhole.experiments.specs import spec_for_device, spec_of
from keyhole.experiments.trial import read_result
from keyhole.identity import Ref
from keyhole.keys.structured import CHOICE
from keyhole.parts import pick, resolve
from keyhole.rounds.spec import DeviceSpec
from keyhole.server.optimizers import SGD
from tests.seams import own_parts, own_task

TASK = "tests.seams.own_task:FILMS"
PARTS = {
    "data": "tests.seams.own_task:few_ratings",
    "keys.film.choice": "tests.seams.own_parts:some",
    "server.optimizer": "tests.seams.own_parts:Damped",
    "engine": "tests.seams.own_parts:Reversed",
    "metrics": "tests.seams.own_parts:norm",
}


def experiment(**changes):
    return Experiment(spec_of(TASK, PARTS | changes), own_dataset(PARTS["data"], 0))


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The trials of a run that was killed and resumed, and of one that was not."""
    directory = tmp_path_factory.mktemp("commands")
    command = [sys.executable, "-m", "tests.seams.killed_commands", str(directory)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [next(Path(directory, name).glob("*/trial-0")) for name in ("killed", "whole")]


@pytest.mark.slow
def test_a_killed_command_goes_on_to_the_same_bytes(kept):
    killed, whole = kept
    for name in ("records.jsonl", "run.json", "state/snapshot-000000000004.khs"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    results = [json.loads((path / "result.json").read_text())["metrics"] for path in kept]
    assert results[0] == results[1]
    assert set(results[0]) == {"mean", "norm"}


def test_a_record_says_which_parts_are_ones_own(kept):
    told = json.loads((kept[0] / "run.json").read_text())["spec"]
    assert told["task"]["name"] == TASK
    assert told["task"]["identity"]
    found = {name: told[name]["name"] for name in ("data", "engine", "metrics")}
    found["keys.film.choice"] = told["keys"]["film"]["choice"]["name"]
    found["server.optimizer"] = told["server"]["optimizer"]["name"]
    assert found == PARTS


@dataclass(frozen=True)
class Damped(SGD):
    """Another optimizer of that name."""

    def step(self, slab, slots, rows, now):
        return super().step(slab, slots, -rows, now)


class Reversed(own_parts.Reversed):
    """Another engine of that name."""

    def __call__(self, clients, jobs):
        return [job.run(clients) for job in jobs]


OTHERS = {
    "task": (own_task, "SCALE", 2.0),
    "data": (own_task, "PEOPLE", 9),
    "keys.film.choice": (own_parts, "SHIFT", 1),
    "server.optimizer": (own_parts, "Damped", Damped),
    "engine": (own_parts, "Reversed", Reversed),
    "metrics": (own_parts, "DIGITS", 2),
}


@pytest.mark.parametrize("path", OTHERS)
def test_another_part_of_the_same_name_is_refused(kept, monkeypatch, path):
    asked = experiment(rounds=4)
    assert read_result(kept[0], asked.describe(0)) is not None
    monkeypatch.setattr(*OTHERS[path])
    name = (PARTS | {"task": TASK})[path]
    with pytest.raises(InputError, match=f"the code or fields of {name} are not those that"):
        read_result(kept[0], experiment(rounds=4).describe(0))
    with pytest.raises(InputError, match=rf"{name} \({path}\) are not those that the run was"):
        Experiment(asked.spec, own_dataset(PARTS["data"], 0))


def test_a_run_may_go_on_with_an_engine_of_another_name(kept):
    asked = experiment(rounds=4, engine="local")
    assert read_result(kept[0], asked.describe(0)) is not None


def test_a_part_by_object_is_the_part_by_name():
    named, given = (
        experiment(),
        Experiment(
            spec_of(TASK, {"data": PARTS["data"]}),
            own_dataset(PARTS["data"], 0),
            {path: resolve(name) for path, name in PARTS.items() if path != "data"},
        ),
    )
    assert given.spec == named.spec
    results = given.run(0), named.run(0)
    assert results[0]
    assert results[1]
    assert results[0].metrics == results[1].metrics


def test_the_state_of_an_own_optimizer_is_published(kept, tmp_path):
    done = CliRunner().invoke(publish, [str(kept[0]), str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "12 slices" in done.output


def test_a_device_imports_only_what_its_operator_trusts():
    told = DeviceSpec.read(experiment().spec.for_devices())
    with pytest.raises(InputError, match=r"as task: got tests.seams.own_task:FILMS"):
        spec_for_device(told)
    with pytest.raises(InputError, match=r"--trust"):
        spec_for_device(told, ["tests.seams.own_task"])
    spec = spec_for_device(told, ["tests.seams.own_task", "tests.seams.own_parts"])
    assert spec.keys == experiment().spec.keys


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tests.seams.own_task:FILM", "did you mean FILMS?"),
        ("tests.seams.nothing:FILMS", "no module tests.seams.nothing"),
        ("so_tga", "did you mean so_tag?"),
        ("math:pi", "no task: got a float"),
    ],
)
def test_a_name_that_is_not_there_is_answered_with_the_nearest(name, says):
    with pytest.raises(InputError) as error:
        spec_of(name)
    assert says in str(error.value)


def test_names_of_the_library_are_plain_text_in_the_record():
    assert spec_of("so_tag").describe()["task"] == "so_tag"
    assert Ref("top") == "top"
    assert pick(CHOICE, "TOP", {"top": 1}) == 1
