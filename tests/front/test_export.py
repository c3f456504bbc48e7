"""Exported models: the bytes of the run, and what says which run."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import keyhole as kh
from keyhole import tree
from keyhole.cli.main import keyhole
from keyhole.errors import InputError
from keyhole.experiments.opening import open_data
from keyhole.experiments.specs import spec_of
from keyhole.front.export import ABOUT, digest_of

CHANGES = {"keys.movie.count": 5, "rounds": 2, "cohort.size": 4, "seed": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished trial."""
    directory, spec = tmp_path_factory.mktemp("runs") / "trial-0", spec_of("movies", CHANGES)
    assert kh.Experiment(spec, open_data(spec)).run(0, directory)
    return directory


def read(path):
    if path.suffix == ".npz":
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        return arrays, json.loads(str(arrays.pop(ABOUT)))
    open_file = pytest.importorskip("safetensors").safe_open
    with open_file(path, "np") as file:
        return {n: file.get_tensor(n) for n in file.keys()}, json.loads(file.metadata()[ABOUT])  # noqa: SIM118


@pytest.mark.parametrize("name", ["model.npz", "model.safetensors"])
def test_an_exported_model_has_the_bytes_of_the_run_and_says_which(run, tmp_path, name):
    if name.endswith(".safetensors"):
        pytest.importorskip("safetensors")
    to = tmp_path / name
    done = CliRunner().invoke(keyhole, ["export", str(run), "--to", str(to)])
    assert done.exit_code == 0, done.output
    arrays, about = read(to)
    opened = kh.open_run(run)
    expected = tree.flatten(opened.model())
    assert arrays.keys() == expected.keys()
    assert all(arrays[name].tobytes() == expected[name].tobytes() for name in expected)
    assert about["sha256"] == digest_of(arrays)
    assert about["sha256"] in done.output
    assert (about["rounds"], about["spec"]) == (2, opened.spec.describe())
    assert opened.export(tmp_path / f"again-{name}") == about["sha256"]


def test_an_unknown_format_leaves_no_file(run, tmp_path):
    with pytest.raises(InputError, match=r"ends in \.npz or \.safetensors"):
        kh.open_run(run).export(tmp_path / "model.onnx")
    assert not any(tmp_path.iterdir())
