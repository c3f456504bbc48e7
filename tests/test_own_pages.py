"""docs/own-*.md: the code of each page runs and prints what the page says."""

import re
import subprocess
import sys
from dataclasses import fields

import pytest

from keyhole import keys
from tests.helpers import ROOT

PAGES = [path.stem.removeprefix("own-") for path in sorted((ROOT / "docs").glob("own-*.md"))]
PAGES.remove("model")  # its blocks exclude one another: tests/test_own_model.py
KEYS_PAGE = (ROOT / "docs" / "own-keys.md").read_text()


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


def test_the_choice_of_the_page_on_keys_takes_ten_lines_at_most():
    strategy = re.findall(r"```python\n(.*?)```", KEYS_PAGE, re.S)[0]
    assert "def distinctive" in strategy
    assert len([line for line in strategy.splitlines() if line.strip()]) <= 10


def test_every_choice_and_all_that_it_is_told_are_on_the_page_on_keys():
    facts, brought = KEYS_PAGE.split("## What keyhole brings")
    for name in re.findall(r"^\| `(\w+)", brought, re.M):
        assert hasattr(keys, name), name
    told = {field.name for field in fields(keys.KeyContext)} | {"space"}
    assert set(re.findall(r"^\| `(\w+)", facts, re.M)) == told
    for choice in keys.CHOICES.values():
        assert f"| `{choice.__name__}`" in KEYS_PAGE
