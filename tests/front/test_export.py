"""Exported models: the bytes of the run, what says which run, and graphs that say the same."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

import keyhole as kh
from keyhole import tree
from keyhole.cli.main import keyhole
from keyhole.data.open import make_synthetic
from keyhole.errors import InputError
from keyhole.experiments import all_tasks
from keyhole.experiments.opening import open_data
from keyhole.experiments.specs import spec_of
from keyhole.front.export import ABOUT, digest_of, export_model
from keyhole.server.state import ServerState
from tests.experiments.test_two_rounds import SIZES, SYNTHETIC
from tests.helpers import with_slow

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


def test_a_run_of_one_trial_is_exported_by_its_own_name_and_one_of_two_trials_is_asked_for(
    run, tmp_path
):
    kept, to = tmp_path / "kept", tmp_path / "model.npz"
    shutil.copytree(run, kept / "trial-0")
    done = CliRunner().invoke(keyhole, ["export", str(kept), "--to", str(to)])
    assert done.exit_code == 0, done.output
    assert read(to)[1]["sha256"] == digest_of(tree.flatten(kh.open_run(run).model()))
    shutil.copytree(run, kept / "trial-1")
    done = CliRunner().invoke(keyhole, ["export", str(kept), "--to", str(to)])
    assert done.exit_code != 0
    assert " has 2 trials" in str(done.exception), done.output
    assert f"name {kept / 'trial-'}" in str(done.exception)


def test_an_unknown_format_leaves_no_file(run, tmp_path):
    with pytest.raises(InputError, match=r"ends in \.npz or \.safetensors or \.onnx"):
        kh.open_run(run).export(tmp_path / "model.pt")
    assert not any(tmp_path.iterdir())


def test_a_model_without_onnx_form_is_refused_in_one_line(run, tmp_path):
    """A user's taste is fitted, by a linear system, to ratings that no example has."""
    pytest.importorskip("onnx")
    to = tmp_path / "model.onnx"
    done = CliRunner().invoke(keyhole, ["export", str(run), "--to", str(to)])
    assert done.exit_code != 0
    assert "no ONNX form: got KeyError 'is_known' in its predict" in str(done.exception)
    assert "all tasks here but movies" in str(done.exception)
    assert not any(tmp_path.iterdir())


def test_onnx_that_is_not_installed_is_refused_with_its_extra(run, tmp_path, monkeypatch):
    monkeypatch.setattr("keyhole.extras.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'keyhole\[onnx\]'"):
        kh.open_run(run).export(tmp_path / "model.onnx")
    assert not any(tmp_path.iterdir())


def perturbed(experiment):
    """A server's state whose parameters are all of them other than 0."""
    model, rng = experiment.task.model, np.random.default_rng(0)
    params = tree.map_leaves(
        lambda a: (a + rng.normal(0, 0.05, a.shape)).astype(a.dtype), model.init(0)
    )
    return ServerState.dense(model.layout, params, experiment.algorithm.server)


def says(path, batch):
    """What the graph of a file says of examples, and what stands beside it."""
    onnx = pytest.importorskip("onnx")
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
    file = onnx.load(path)
    (about,) = [each.value for each in file.metadata_props if each.key == ABOUT]
    graph = evaluator(file)
    (found,) = graph.run(None, {name: batch[name] for name in graph.input_names})
    return found, json.loads(about), file


@pytest.mark.parametrize("name", with_slow(sorted(SIZES.keys() - {"movies"}), fast=["so_tag"]))
def test_a_graph_says_of_other_examples_what_the_task_says(name, tmp_path):
    pytest.importorskip("onnx")
    changes = {f"sizes.{size}": value for size, value in SIZES[name].items()}
    spec = spec_of(name, changes)
    kind = all_tasks()[name].kind
    experiment = kh.Experiment(spec, make_synthetic(kind, 0, **SYNTHETIC[kind]))
    task, state, path = experiment.task, perturbed(experiment), tmp_path / "model.onnx"
    digest = export_model(state, path, spec, task)
    every = {space.name: space.all_keys() for space in task.model.layout.spaces}
    batch = task.localize(task.data(1), every)
    batch = {name: column[:5] for name, column in batch.items()}  # 8 were those it was checked on
    found, about, file = says(path, batch)
    expected = np.asarray(jax.jit(task.model.predict)(state.model(), batch))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected).max() > 0.1, "says something"
    assert about == {"spec": spec.describe(), "rounds": 0, "sha256": digest}
    held = {each.name: each.raw_data for each in file.graph.initializer}
    assert all(held[n] == a.tobytes() for n, a in tree.flatten(state.model()).items())


def test_a_graph_of_your_own_model_takes_its_columns(tmp_path):
    """Rows that a column of keys names, in a model whose parameter has the column's name."""
    pytest.importorskip("onnx")
    film = kh.KeySpace("film", 30)
    model = kh.Model(
        init=lambda seed: {"film": np.arange(90, dtype=np.float32).reshape(30, 3)},
        loss=lambda params, batch, mask: params["film"][batch["film"]].mean(where=mask[:, None]),
        predict=lambda params, batch: jnp.tanh(params["film"][batch["film"]] / 50).sum(1),
        cuts=(kh.Cut(film, {"film": 0}),),
    )
    columns = {"who": np.repeat(np.arange(4), 3), "film": np.arange(12), "liked": np.ones(12)}
    data = kh.data.from_arrays(columns, client="who", inputs={"film": "film"}, target="liked")
    run = kh.train(kh.Task(model, data.hold_out(0.3)), rounds=1, cohort=2, m=4, progress=False)
    run.export(tmp_path / "model.onnx")
    asked = {"film": np.array([3, 29, 0], np.int32)}
    found, about, file = says(tmp_path / "model.onnx", asked)
    np.testing.assert_allclose(found, model.predict(run.model(), asked), rtol=1e-6)
    assert [each.name for each in file.graph.input] == ["film"]
    assert about["rounds"] == 1


def test_a_graph_of_a_torch_module_says_what_the_module_says(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from tests.front.torch_own import TASK

    run = kh.train(TASK, rounds=1, cohort=2, m=5, progress=False)
    run.export(tmp_path / "model.onnx")
    asked = {"item": np.array([7, 0, 39, 7, 1])}
    found, _, file = says(tmp_path / "model.onnx", asked)
    expected = TASK.model.predict(run.model(), asked)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert [each.name for each in file.graph.input] == ["item"]
