"""docs/own-device.md: its code runs and prints what it says."""

import re

from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "own-device.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_page_runs_and_prints_what_it_says(capsys):
    scope = {}
    for code in BLOCKS:
        exec(compile(code, "own-device.md", "exec"), scope)
    expected = re.findall(r"# prints (.*)", PAGE)
    assert capsys.readouterr().out.splitlines() == expected
    assert len(expected) == 3
