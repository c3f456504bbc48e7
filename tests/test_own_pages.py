"""docs/own-*.md: the code of each page runs and prints what the page says."""

import re

import pytest

from tests.helpers import ROOT

PAGES = ("data", "delivery", "engine", "metric", "optimizer", "sum")


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
