"""docs/torch.md: its code runs and prints what it says."""

import re

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "torch.md").read_text()


def test_the_page_runs_and_prints_what_it_says(capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
    scope = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(code, "torch.md", "exec"), scope)
    expected = re.findall(r"# prints (.*)", PAGE)
    assert capsys.readouterr().out.splitlines() == expected
    assert len(expected) == 3
