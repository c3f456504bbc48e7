"""docs/own-keys.md: its code runs, prints what it says, and the choice takes ten lines."""

import re
from dataclasses import fields

from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "own-keys.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_page_runs_and_prints_what_it_says(capsys):
    scope = {}
    for code in BLOCKS:
        exec(compile(code, "own-keys.md", "exec"), scope)
    expected = re.findall(r"# prints (.*)", PAGE)
    assert capsys.readouterr().out.splitlines() == expected
    assert len(expected) == 8


def test_the_choice_takes_ten_lines_at_most():
    strategy = BLOCKS[0]
    assert "def distinctive" in strategy
    assert len([line for line in strategy.splitlines() if line.strip()]) <= 10


def test_every_choice_and_all_that_it_is_told_are_on_the_page():
    from keyhole import keys

    facts, brought = PAGE.split("## What keyhole brings")
    for name in re.findall(r"^\| `(\w+)", brought, re.M):
        assert hasattr(keys, name), name
    told = {field.name for field in fields(keys.KeyContext)} | {"space"}
    assert set(re.findall(r"^\| `(\w+)", facts, re.M)) == told
    for choice in keys.CHOICES.values():
        assert f"| `{choice.__name__}`" in PAGE
