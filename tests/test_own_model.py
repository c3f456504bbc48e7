"""docs/own-model.md: its code runs, prints what it says, and stays short."""

import importlib.util
import re

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.federated import Dataset, FederatedData
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "own-model.md").read_text()
BLOCKS = re.findall(r"```python ?(\w*)\n(.*?)```", PAGE, re.S)
JAX = [code for kind, code in BLOCKS if not kind]
TORCH = [code for kind, code in BLOCKS if kind == "torch"]
MODULES = {kind: code for kind, code in BLOCKS if kind not in ("", "torch")}


def run(blocks, capsys):
    scope = {}
    for code in blocks:
        exec(compile(code, "own-model.md", "exec"), scope)
    expected = re.findall(r"# prints (.*)", "".join(blocks))
    assert capsys.readouterr().out.splitlines() == expected
    assert expected
    return scope


def test_the_jax_model_runs(capsys):
    run(JAX, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linen", "nnx", "equinox"])
def test_modules_of_other_libraries_train(kind, capsys):
    package = {"linen": "flax", "nnx": "flax"}.get(kind, kind)
    pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    model = run([*JAX, MODULES[kind]], capsys)["model"]
    columns = {"film": np.arange(80) * 7, "stars": np.ones(80, np.float32)}
    people = FederatedData.of([f"u{i}" for i in range(8)], [10] * 8, columns)
    splits = {"train": people, "test": people}
    task = kh.Task(model, Dataset("stars", "stars", splits, {}, inputs={"film": "film"}))
    trained = kh.train(task, rounds=1, m=5, cohort=4, progress=False)  # it has an identity
    assert trained.rounds == 1


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed: pip install 'keyhole[torch]'",
)
def test_the_torch_module_runs(capsys):
    run(JAX + TORCH, capsys)


@pytest.mark.parametrize("code", [JAX[0], TORCH[0]], ids=["jax", "torch"])
def test_each_takes_about_twenty_lines(code):
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
