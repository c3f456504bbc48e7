"""`keyhole train` with the sum and the delivery of docs/own-sum.md and docs/own-delivery.md."""

import json
import re
import sys

import pytest

from keyhole.errors import InputError
from tests.helpers import ROOT

TINY = ("--size", "neurons=16", "--size", "hidden=8", "--cohort", "3", "--rounds", "1")
LAST = {"sum": "PART = Clamped({})", "delivery": "PART = Metered({}())"}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the class of a page and a part as a module, which is then imported anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = {f"own_{page}_of_a_test" for page in LAST}

    def write(page, setting):
        (code,) = re.findall(
            r"```python\n(.*?\n)\n\n(?:class Undeclared|word, zeros)",
            (ROOT / "docs" / f"own-{page}.md").read_text(),
            re.S,
        )
        sys.modules.pop(f"own_{page}_of_a_test", None)
        path = tmp_path / f"own_{page}_of_a_test.py"
        path.write_text(f"{code}\n\n{LAST[page].format(setting)}\n")

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_parts_of_a_page_train_and_are_told_from_others_of_their_name(
    keyhole, few_writers, write, tmp_path
):
    own = ("--aggregation", "own_sum_of_a_test:PART", "--delivery", "own_delivery_of_a_test:PART")
    asked = ("train", "emnist_2nn", *TINY, "--m", 5, "--data", few_writers, *own, "--json")
    write("sum", 2.0)
    write("delivery", "OnDemand")
    first = keyhole(*asked, "--out", tmp_path / "runs")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)[0]["seen_by"] == {"server": "keys and whose they are"}
    for page, other, same in (("sum", 3.0, 2.0), ("delivery", "Broadcast", "OnDemand")):
        write(page, other)
        refused = keyhole(*asked, "--out", tmp_path / "runs")
        assert refused.returncode == InputError.exit_code
        says = f"the code or fields of own_{page}_of_a_test:PART are not those that the run in"
        assert says in refused.stderr
        write(page, same)
        assert keyhole(*asked, "--out", tmp_path / "runs").stdout == first.stdout


def test_a_tracker_of_your_own_is_named_on_the_command_line(
    keyhole, few_writers, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "tracker_of_a_test.py").write_text(
        "class Told:\n"
        "    def start(self, spec, run):\n"
        "        self.file = open('told.txt', 'a')\n"
        "    def log(self, round, numbers):\n"
        "        print(round, *numbers, file=self.file)\n"
        "    def finish(self):\n"
        "        self.file.close()\n"
    )
    asked = ("train", "emnist_2nn", *TINY, "--m", 5, "--data", few_writers, "--json")
    done = keyhole(*asked, "--track", "tracker_of_a_test:Told")
    assert done.returncode == 0, done.stderr
    first, last = (tmp_path / "told.txt").read_text().splitlines()
    assert first.startswith("1 ")
    assert last == "1 test/accuracy"
    refused = keyhole(*asked, "--track", "mlfow")
    assert refused.returncode == 2
    assert "did you mean mlflow?" in refused.stderr


NEED = ("--num-keys", 1000, "--keys-per-client", 10, "--slice-bytes", 64, "--cohort", 10)


@pytest.mark.slow
def test_every_command_finds_modules_of_the_folder(program, tmp_path):
    """In a process of its own, whose Python path does not hold the folder."""
    (tmp_path / "mine.py").write_text(
        "from keyhole.delivery.clear import OnDemand\n"
        "from keyhole.aggregation.plain import PLAIN as SUM\n"
        "METERED, NUMBER = OnDemand(), 3\n"
    )
    own = ("--delivery", "mine:METERED", "--aggregation", "mine:SUM", "--json")
    planned = program("plan", *NEED, *own, cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    for args in (
        ("sweep", "tag-recall", "--data", "mine:NUMBER"),
        ("plan", *NEED, "--delivery", "mine:NUMBER"),
        ("serve", tmp_path, "--open-queries", "--pir", "mine:NUMBER/0"),
    ):
        refused = program(*args, cwd=tmp_path)
        assert refused.returncode == InputError.exit_code
        (line,) = refused.stderr.splitlines()
        assert "mine:NUMBER is no d" in line
        assert "see docs/own-d" in line


def test_a_metric_that_is_not_finite_leaves_json(keyhole, few_writers, tmp_path, monkeypatch):
    (tmp_path / "nan_of_a_test.py").write_text(
        "def lost(state):\n    return {'nan': float('nan'), 'one': 1}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ("--metrics", "nan_of_a_test:lost", "--evaluate-every", 1, "--out", tmp_path / "runs")
    asked = ("train", "emnist_2nn", *TINY, "--m", 5, "--data", few_writers, *own)
    told = keyhole(*asked, "--json")
    assert told.returncode == 0, told.stderr
    (trial,) = (tmp_path / "runs").glob("*/trial-0")
    files = [(trial / name).read_text() for name in ("result.json", "records.jsonl")]
    for text in (*files, told.stdout.strip()[1:-1]):
        metrics = json.loads(text, parse_constant=pytest.fail)["metrics"]
        assert (metrics["nan"], metrics["one"]) == (None, 1.0)
    again = keyhole(*asked)  # reads what was written
    assert again.returncode == 0, again.stderr
    assert " nan " in again.stdout
