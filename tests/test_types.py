"""What people read and copy has no type errors: the examples, and the code of the pages.

basedpyright is no part of the tools: `pip install basedpyright` runs the test that needs it.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import groupby
from textwrap import dedent

import pytest

from tests.helpers import ROOT

# Optional packages, which a machine need not have to check the rest.
OPTIONAL = ("datasets", "equinox", "flax", "pandas", "peft", "safetensors", "torch", "transformers")
BLOCK = re.compile(r"^( *)```python[^\n]*\n(.*?)^ *```", re.S | re.M)


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder with each page as a program, and the examples beside it."""
    folder = tmp_path_factory.mktemp("code")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
        for tab, program in enumerate(programs_of(page.read_text())):
            (folder / f"{name}_page_{tab}.py").write_text(program)
    for example in sorted((ROOT / "examples").glob("*.py")):
        (folder / example.name).write_text(example.read_text())
    return folder


def programs_of(text):
    """The blocks of a page as one program; as one for each tab where there are tabs, whose blocks
    are indented and stand for each other."""
    found = BLOCK.findall(text)
    groups = [[dedent(b) for _, b in each] for _, each in groupby(found, key=lambda f: bool(f[0]))]
    is_tabbed = [is_tab for is_tab, _ in groupby(found, key=lambda f: bool(f[0]))]
    tabs = max((len(g) for g, is_tab in zip(groups, is_tabbed, strict=True) if is_tab), default=1)
    for tab in range(tabs if found else 0):
        taken = [
            [g[min(tab, len(g) - 1)]] if is_tab else g
            for g, is_tab in zip(groups, is_tabbed, strict=True)
        ]
        yield "\n\n".join(block for group in taken for block in group)


def test_each_tab_of_a_page_is_a_program():
    tab = "=== tab\n    ```python title=x\n    {}\n    ```\n"
    text = "```python\na = 1\n```\n" + tab.format("b = 2") + tab.format("b = 3")
    assert list(programs_of(text)) == ["a = 1\n\n\nb = 2\n", "a = 1\n\n\nb = 3\n"]
    assert list(programs_of("no code")) == []


@pytest.mark.slow
def test_basedpyright_finds_no_error(code):
    if find_spec("basedpyright") is None:
        pytest.skip("needs basedpyright: pip install basedpyright")
    paths = {"extraPaths": [str(ROOT / "src")], "enableTypeIgnoreComments": True}
    paths["reportMissingTypeArgument"] = False  # settings: dict = {...} is no wrong type
    paths["reportMissingSuperCall"] = False  # modules of flax and equinox call none
    (code / "pyrightconfig.json").write_text(json.dumps({"include": ["."], **paths}))
    command = [sys.executable, "-m", "basedpyright", "--level", "error", "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable],
        cwd=code,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    found = [
        f"{each['file'].rpartition('/')[2]}:{each['range']['start']['line'] + 1}: {each['message']}"
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error" and not _is_optional(each["message"])
    ]
    assert found == [], "\n".join(found)


def _is_optional(message):
    return any(message.startswith(f'Import "{name}') for name in OPTIONAL)


@pytest.mark.slow
def test_mypy_finds_no_error(code):
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--ignore-missing-imports",
        "--disable-error-code=no-redef",
    ]
    done = subprocess.run(
        [
            *command,
            "--config-file",
            "",
            "--cache-dir",
            str(ROOT / ".mypy_cache"),
            *code.glob("*.py"),
        ],
        cwd=code,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert errors == [], "\n".join(errors)
