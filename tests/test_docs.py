"""Docs cannot rot: generated pages are current, and what pages name exists."""

import ast
import pkgutil
import re
import subprocess
import sys

import pytest

from keyhole.cli.main import keyhole
from tests.helpers import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_generated_pages_are_current():
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def anchors_of(page):
    """What GitHub makes of its headings: words in lower case, dashes between them."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.+)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_links_to_exists(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        found = page.parent / target if target else page
        if found.parent.name == "notebooks":  # the page is made of the notebook
            found = found.with_suffix(".py")
        assert found.exists(), target
        assert not anchor or anchor in anchors_of(found), f"{target}#{anchor}"


# Where paths in pages begin, and the folders that tell a path from a fraction or a URL.
BEGINNINGS = [ROOT, ROOT / "src" / "keyhole", ROOT / "docs", ROOT / "tests"]
FOLDERS = {path.name for start in BEGINNINGS for path in start.iterdir() if path.is_dir()}
PATH = re.compile(r"`([\w-]+)/([\w/.-]+)`")


def paths_of(text):
    """Files and folders of ours that a text names."""
    return {f"{top}/{rest}" for top, rest in PATH.findall(text) if top in FOLDERS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    if page.name == "CHANGELOG.md":
        return  # tells of what was
    for path in paths_of(page.read_text()):
        assert any((start / path).exists() for start in BEGINNINGS), path


def test_what_the_source_names_exists():
    for file in (ROOT / "src").rglob("*.py"):
        text = file.read_text()
        for path in paths_of(text):
            assert any((start / path).exists() for start in BEGINNINGS), f"{file.name}: {path}"
        for name in re.findall(r"`(keyhole(?:\.[a-z_]+)+)", text):
            assert pkgutil.resolve_name(name), file.name


def test_paths_are_found_in_text():
    named = paths_of("`src/keyhole/rounds`, `rounds/round.py`, `1/2` and `records.jsonl`")
    assert named == {"src/keyhole/rounds", "rounds/round.py"}
    assert len(paths_of((ROOT / "docs" / "paper-map.md").read_text())) > 20


def test_every_row_on_a_party_names_its_test():
    """Each says what a party learns or can do: a test holds it, or nothing is claimed."""
    page = (ROOT / "docs" / "trust.md").read_text()
    tables = re.findall(r"^\|[^\n]*\bcurious \|[^\n]*\n\|[-|]+\n((?:\|[^\n]*\n)+)", page, re.M)
    assert len(tables) > 8
    for row in "".join(tables).splitlines():
        assert re.search(r"`[\w/]+/test_\w+\.py`|\bnot protected\b", row), row


def test_every_test_of_the_paper_map_exists():
    page = (ROOT / "docs" / "paper-map.md").read_text()
    for path, name in re.findall(r"`(tests/[\w/.]+)`::`(\w+)`", page):
        assert f"def {name}(" in (ROOT / path).read_text(), name


def test_every_word_of_ours_is_an_identifier():
    page = (ROOT / "docs" / "vocabulary.md").read_text()
    first = re.findall(r"^\| (`.*?`) \|", page, re.M)
    words = {word for cell in first for word in re.findall(r"`(\w+)`", cell)}
    assert len(words) > 40
    used = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            used |= {getattr(node, field, None) for field in ("name", "id", "attr", "arg")}
    assert words <= used


def test_every_record_of_the_architecture_is_where_it_says_and_in_the_vocabulary():
    section = (ROOT / "docs" / "architecture.md").read_text().split("## The records")[1]
    rows = re.findall(r"^\| (`[^|]*`) \| `(\w+/?\w*\.py)` \|", section, re.M)
    assert len(rows) > 10
    words = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "vocabulary.md").read_text()))
    for names, path in rows:
        source = (ROOT / "src" / "keyhole" / path).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class {name}\b|{name}\b.* = )", source, re.M), (name, path)
            assert name in words


def test_every_command_is_documented():
    page = (ROOT / "docs" / "cli.md").read_text()
    for name in keyhole.list_commands(None):
        assert f"## keyhole {name}" in page


def test_every_page_is_in_the_navigation_of_the_site():
    """`make check` builds the site and finds broken links; this is what a new page needs first."""
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert re.search(rf"\s{name}$", site, re.M), f"{name} is not in the nav of mkdocs.yml"


def test_pages_of_the_site_link_to_no_file_outside_it():
    for page in (ROOT / "docs").rglob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", page.read_text()):
            inside = (page.parent / target).resolve().is_relative_to(ROOT / "docs")
            assert inside, f"{page.name}: {target}; write `path/of/the/file` instead"


def run_code_of(page, directory):
    """Runs the Python blocks of a page as one script; returns the code and what it printed."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return code, done.stdout.splitlines()


def test_the_readme_example_runs_in_fifteen_lines(tmp_path):
    code, printed = run_code_of("README.md", tmp_path)
    assert len(code.strip().splitlines()) <= 15
    assert printed == re.findall(r"# prints (.*)", code)


def test_the_training_page_runs(tmp_path):
    _, printed = run_code_of("docs/training.md", tmp_path)
    assert len(printed) == 3


def test_the_page_on_runs_runs(tmp_path):
    _, printed = run_code_of("docs/runs.md", tmp_path)
    assert printed[0].startswith("8 {'mse': ")
    assert printed[1] == "(60,)"
    assert (tmp_path / "mse.png").exists()
    assert any(line.startswith("top5 ") and " ± " in line for line in printed)
    assert (tmp_path / "compared.tex").read_text().startswith(r"\begin{tabular}")
    assert (tmp_path / "kept" / "further" / "trial-2" / "result.json").exists()
