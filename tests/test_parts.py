"""Parts by name: where modules are found, and one line for what is of another kind."""

import subprocess
import sys

import numpy as np
import pytest

from keyhole.aggregation import aggregation_named
from keyhole.delivery import delivery_named
from keyhole.delivery.clear import OnDemand
from keyhole.errors import InputError
from keyhole.experiments.experiment import DATASET, KINDS, Experiment
from keyhole.experiments.opening import own_dataset
from keyhole.experiments.specs import spec_of
from keyhole.identity import Ref
from keyhole.keys.structured import choice_named, top
from keyhole.parts import resolve
from keyhole.planner.prices import price_of
from keyhole.pricing import Workload
from keyhole.rounds.loop import Evaluation
from keyhole.rounds.spec import KeySpec, RunSpec
from tests.seams import own_parts, own_task

HERE = "tests.test_parts"
NUMBER = 3
FILMS = "tests.seams.own_task:FILMS"


class Silent:
    """A delivery that declares nothing."""

    about = None
    for_run = OnDemand.for_run
    deliver = OnDemand.deliver


class Unpriced(Silent):
    """A delivery that runs, of which no price is known."""

    about = OnDemand().about


def older(counts, keys_per_client, rng):
    """A choice of keys as it was written before there was a context."""


SILENT, UNPRICED = Silent(), Unpriced()
LOAD = Workload(num_keys=10, keys_per_client=2, slice_bytes=8, cohort=3)


def test_resolve_finds_what_is_named():
    assert resolve("keyhole.keys.structured:top") is top
    for wrong in ("top", "keyhole.keys.structured:", "keyhole.none:top", "keyhole.keys:none"):
        with pytest.raises(InputError, match="names nothing"):
            resolve(wrong)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory that is not on the Python path."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("a_module_of_a_test", "a_broken_module_of_a_test"):
        sys.modules.pop(name, None)


def test_modules_of_the_working_directory_are_found(folder):
    (folder / "a_module_of_a_test.py").write_text("PART = 7")
    assert resolve("a_module_of_a_test:PART") == 7
    with pytest.raises(InputError, match=r"did you mean a_module_of_a_test\?$"):
        resolve("a_modul_of_a_test:PART")


def test_a_module_that_lacks_another_is_not_told_its_own_name(folder):
    (folder / "a_broken_module_of_a_test.py").write_text("import no_such_module")
    with pytest.raises(InputError, match=r"got no module no_such_module; .*imports it: install it"):
        resolve("a_broken_module_of_a_test:PART")


@pytest.mark.parametrize(
    ("find", "name", "says"),
    [
        (choice_named, "NUMBER", "is no choice of keys: got an int; expected a function of contex"),
        (choice_named, "older", "is no choice of keys: got a function of counts, keys_per_client "),
        (delivery_named, "OnDemand", "is no delivery: got the class OnDemand; expected an inst"),
        (delivery_named, "SILENT", "is no delivery: got a Silent without about"),
        (lambda name: price_of(name, LOAD), "UNPRICED", "is no delivery with a price"),
        (aggregation_named, "NUMBER", "is no aggregation: got an int without add; .*own-sum.md"),
        (lambda name: own_dataset(name, 0), "NUMBER", "is no data set: got an int; .*own-data.md"),
    ],
)
def test_a_part_of_another_kind_is_refused_in_one_line(find, name, says):
    with pytest.raises(InputError, match=f"{HERE}:{name} {says}"):
        find(f"{HERE}:{name}")


WRONG = {path: 3 for path in KINDS if path != "keys"} | {"keys.film.choice": 3}


@pytest.mark.parametrize("path", WRONG)
def test_an_experiment_refuses_parts_of_another_kind(path):
    data = own_task.few_ratings(0)
    with pytest.raises(InputError, match=f"{path} is no .*: got an int.*; see docs/own-"):
        Experiment(spec_of(FILMS), data, {path: WRONG[path]})
    if path != "task":
        with pytest.raises(InputError, match=f"{HERE}:NUMBER is no .*; see docs/own-"):
            Experiment(spec_of(FILMS, {path: f"{HERE}:NUMBER"}), data)


def test_an_experiment_refuses_other_data_and_an_engine_that_runs_nothing():
    with pytest.raises(InputError, match="dataset is no data set: got a dict; expected Dataset"):
        Experiment(spec_of(FILMS), {"data": 3})
    made = Experiment(spec_of(FILMS, engine=f"{HERE}:Silent"), own_task.few_ratings(0))
    with pytest.raises(InputError, match=r"is no engine: got a Silent; .*own-engine.md"):
        _ = made.engine


def test_what_fits_is_taken():
    DATASET.check("data", own_task.few_ratings(0))
    for path, part in (("keys", own_parts.some), ("metrics", own_parts.norm), ("keys", top)):
        KINDS[path].check("part", part)
    KINDS["server.optimizer"].check("part", own_parts.Damped)
    KINDS["metrics"].check("part", np.max)  # of which Python tells other arguments, all optional


def test_a_metric_that_is_no_number_is_refused():
    with pytest.raises(InputError, match=r"metric 'a' is no number: got a str; .*own-metric.md"):
        Evaluation(lambda state: {"b": 1, "a": "hello"}).of(None)


def test_a_name_in_place_of_a_ref_is_taken_as_one():
    usual = spec_of("so_tag")
    keys = {"word": KeySpec(choice="top", count=5)}
    made = RunSpec(**usual.values() | {"task": "so_tag", "keys": keys, "delivery": "on-demand"})
    assert [type(ref) for _, ref in made.parts()] == [Ref] * 5
    assert made == usual.changed({"keys.word.count": 5, "delivery": "on-demand"})


def test_the_script_that_python_runs_names_its_parts_as_a_module_that_imports_it(tmp_path):
    text = "from keyhole.parts import own_name\n\ndef mine():\n    pass\n\nprint(own_name(mine))\n"
    (tmp_path / "exp.py").write_text(text)
    for way in (["exp.py"], ["-c", "import exp"]):
        made = subprocess.run(
            [sys.executable, *way], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert made.stdout == "exp:mine\n"
