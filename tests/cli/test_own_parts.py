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
    for page, part, other, same in (
        ("sum", "aggregation", 3.0, 2.0),
        ("delivery", "delivery", "Broadcast", "OnDemand"),
    ):
        write(page, other)
        refused = keyhole(*asked, "--out", tmp_path / "runs")
        assert refused.returncode == InputError.exit_code
        assert f"holds a run with another {part}" in refused.stderr
        write(page, same)
        assert keyhole(*asked, "--out", tmp_path / "runs").stdout == first.stdout
