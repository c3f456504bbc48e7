"""The docs site is built offline, strictly, and its pages fetch nothing from other hosts."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.helpers import LONG, ROOT

RUN_PAGES = [
    page
    for folder in ("concepts", "sharp-edges")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    if "```python\n" in page.read_text()
]
# Readers run pages with JAX as it comes, not with the strict promotion of these tests.
AS_READERS = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
BLOCK = re.compile(r'^=== "([^"]+)"$|^( *)```python\n(.*?)^\2```', re.M | re.S)


def code_of(page, tab=None):
    """The Python blocks of a page, those of one tab where there are tabs."""
    blocks, current = [], None
    for label, indent, code in BLOCK.findall(page.read_text()):
        current = label or (current if indent else None)
        if code and current in (None, tab):
            blocks.append(re.sub(rf"^{indent}", "", code, flags=re.M))
    return "\n".join(blocks)


@pytest.mark.parametrize(
    "page",
    [  # one compiles JAX
        pytest.param(page, marks=pytest.mark.slow if "recompiles" in page.stem else ())
        for page in RUN_PAGES
    ],
    ids=lambda page: page.stem,
)
def test_the_code_of_a_page_prints_what_it_says(page, capsys):
    code = code_of(page)
    exec(compile(code, page.name, "exec"), {"__name__": page.stem})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# prints (.*)", code)


@pytest.mark.slow
@pytest.mark.parametrize("tab", ["JAX", "PyTorch"])
def test_the_quickstart_runs_in_every_tab(tab, tmp_path):
    if tab == "PyTorch" and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    page = ROOT / "docs" / "quickstart.md"
    done = subprocess.run(
        [sys.executable, "-c", code_of(page, tab)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=AS_READERS,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert [row.split()[0] for row in said] == ["run", "all-films", "20-films"]
    assert "1.1%" in said[2]
    assert (tmp_path / "accuracy.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("first_run", "largest sub-model: 5 of 300"),
        ("own_keys", "m=8   distinctive  accuracy 1.00"),
        ("private_round", "same model: True"),
    ],
)
def test_a_notebook_runs_and_becomes_a_page(name, said, tmp_path):
    notebook = ROOT / "docs" / "notebooks" / f"{name}.py"
    command = [sys.executable, ROOT / "docs" / "percent.py", notebook, tmp_path]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env=AS_READERS
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / f"{name}.md").read_text()
    assert page.startswith("# ")
    assert said in page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hello_select", "scaffold", "algorithm2_by_hand"])
def test_the_gallery_shows_what_an_example_prints(name):
    """Those that print the same everywhere: the command of the page gives the lines of the page."""
    page = (ROOT / "docs" / "gallery.md").read_text()
    _, _, shown = page.partition(f"$ python examples/{name}.py")
    command = [sys.executable, ROOT / "examples" / f"{name}.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, env=AS_READERS
    )
    lines = shown.partition("```")[0].strip().splitlines()
    assert done.stdout.rstrip().splitlines()[: len(lines) - 1] == lines[:-1]


def test_pictures_are_current():
    command = [sys.executable, ROOT / "docs" / "pictures.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG)
    assert done.returncode == 0, done.stderr


# What a browser fetches by itself: a link in the text is followed by nobody but the reader.
FETCHED = re.compile(
    r"<(?:link|script|img|iframe|source|video)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)"
    r"|url\(\"?((?:https?:)?//[^)\"]+)|@import \"?((?:https?:)?//[^\"]+)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", place]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place


@pytest.mark.slow
def test_no_page_fetches_from_another_host(site):
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 60
    for page in pages:
        found = [address for match in FETCHED.findall(page.read_text()) for address in match]
        assert not any(found), f"{page.name}: {found}"


@pytest.mark.slow
def test_the_reference_shows_docstrings_and_their_examples(site):
    page = (site / "reference" / "primitives.html").read_text()
    assert 'id="keyhole.KeySpace"' in page
    assert page.count('class="gp"') > 20  # prompts, highlighted
    for name in ("data", "keys", "errors"):
        assert (site / "reference" / f"{name}.html").read_text().count("doc-heading") > 10
