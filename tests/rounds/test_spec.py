"""RunSpec: comes back from every form, and says in one line what cannot be read."""

import json
import tomllib

import pytest

from keyhole.errors import InputError
from keyhole.experiments.specs import DEFAULTS, spec_for_device, spec_of
from keyhole.rounds.fields import flatten, nest, spec_fields
from keyhole.rounds.spec import DeviceSpec, RunSpec

SPEC = spec_of(
    "so_word",
    {"keys.word.count": 30, "privacy.noise": 0.5, "privacy.clip": 1.0},
    asynchronous={"concurrency": 3},
)
TOLD = SPEC.describe()


def without(path):
    part, _, name = path.rpartition(".")
    told = json.loads(json.dumps(TOLD))
    (told[part] if part else told).pop(name)
    return told


@pytest.mark.parametrize("task", DEFAULTS)
def test_a_record_comes_back_from_json_and_from_flat_names(task):
    spec = spec_of(task)
    assert RunSpec.read(json.loads(json.dumps(spec.describe()))) == spec
    assert RunSpec.read(nest(flatten(spec.describe()))) == spec


def test_a_record_comes_back_from_toml():
    lines = [f"{name} = {json.dumps(value)}" for name, value in flatten(TOLD).items()]
    assert RunSpec.read(nest(tomllib.loads("\n".join(lines)))) == SPEC


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({**TOLD, "version": 1}, "another version: got version 1; expected 6"),
        ({**TOLD, "version": "6"}, "another version: got version '6', a str; expected 6"),
        ({**TOLD, "version": 5}, "another version: got version 5; expected 6"),
        ({}, "another version: got version unknown"),
        (None, "got a NoneType in place of fields"),
        ([], "got a list in place of fields"),
        ({**TOLD, "steps": 3}, "unknown field `steps`"),
        ({**TOLD, "rounds": "3"}, "Expected `int`, got `str` - at `rounds`"),
        ({**TOLD, "rounds": 0}, "Expected `int` >= 1 - at `rounds`"),
        ({**TOLD, "client": {**TOLD["client"], "lr": -1}}, "at `client.lr`"),
        ({**TOLD, "client": {**TOLD["client"], "momentum": 1}}, "at `client.momentum`"),
        (without("task"), "missing required field `task`"),
        (without("client.batch_size"), "no field client.batch_size"),
        (without("seed"), "no field seed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_the_record_is_one_line(told, said):
    with pytest.raises(InputError) as refused:
        RunSpec.read(told)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_device_trains_with_what_the_run_has_and_learns_no_more():
    told = json.loads(json.dumps(SPEC.for_devices()))
    mine = spec_for_device(DeviceSpec.read(told))
    for name in ("task", "sizes", "client", "keys"):
        assert getattr(mine, name) == getattr(SPEC, name)
    assert not told.keys() & {
        *("cohort", "privacy", "aggregation", "data", "server", "rounds", "seed", "trial")
    }


def test_fixed_keys_are_not_mixed_with_keys_that_each_client_draws():
    spec_of("so_word", {"keys.neuron": {"count": 8, "shared": True}})
    keys = {"word": {"choice": "random"}, "neuron": {"count": 8, "shared": True}}
    with pytest.raises(InputError, match="fixed keys cannot be mixed"):
        spec_of("so_word", keys=keys)


def test_every_field_says_what_it_means():
    fields = list(spec_fields(RunSpec))
    assert all(field.doc.endswith(".") for field in fields if field.path != "keys")
    flags = [field.flag for field in fields if field.flag]
    assert len(set(flags)) == len(flags)
