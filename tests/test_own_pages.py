"""docs/own-*.md: the code of each page runs and prints what the page says."""

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

PAGES = ("algorithm", "data", "delivery", "engine", "metric", "optimizer", "sum", "task")


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs_and_prints_what_it_says(page, capsys, monkeypatch, tmp_path):
    if page == "sum":
        pytest.importorskip("dp_accounting")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / f"own-{page}.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    # A module of its own: identities follow code outside the library.
    exec(compile(code, f"own-{page}.md", "exec"), {"__name__": f"own_{page}"})
    expected = re.findall(r"# prints (.*)", code)
    assert capsys.readouterr().out.splitlines() == expected
    assert len(expected) >= 2


@pytest.mark.parametrize("page", ["data", pytest.param("task", marks=pytest.mark.slow)])
def test_the_train_commands_of_the_page_work_as_printed(page, tmp_path):
    text = (ROOT / "docs" / f"own-{page}.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", text, re.S) if "Dataset(" in c]
    (tmp_path / "mine.py").write_text(f"import numpy as np\n{code}")
    commands = re.findall(r"^keyhole (train .*)$", text, re.M)
    assert commands
    for command in commands:
        entry = "from keyhole.cli.main import main; main()"
        words = [sys.executable, "-c", entry, *command.split()]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("*/*/trial-0/result.json"))) == len(commands)
