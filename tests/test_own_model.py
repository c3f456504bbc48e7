"""docs/own-model.md: its code runs, prints what it says, and stays short."""

import importlib.util
import re

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "own-model.md").read_text()
BLOCKS = re.findall(r"```python( torch)?\n(.*?)```", PAGE, re.S)
JAX = [code for is_torch, code in BLOCKS if not is_torch]
TORCH = [code for is_torch, code in BLOCKS if is_torch]


def run(blocks, capsys):
    scope = {}
    for code in blocks:
        exec(compile(code, "own-model.md", "exec"), scope)
    expected = re.findall(r"# prints (.*)", "".join(blocks))
    assert capsys.readouterr().out.splitlines() == expected
    assert expected


def test_the_jax_model_runs(capsys):
    run(JAX, capsys)


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed: pip install 'keyhole[torch]'",
)
def test_the_torch_module_runs(capsys):
    run(JAX + TORCH, capsys)


@pytest.mark.parametrize("code", [JAX[0], TORCH[0]], ids=["jax", "torch"])
def test_each_takes_about_twenty_lines(code):
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
