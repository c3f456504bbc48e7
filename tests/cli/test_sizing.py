"""Sizing in docs/deploy.md: tables are what the planner prints, the simulation what was run."""

import json
import re

import pytest

from keyhole.cli import main as cli
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "deploy.md").read_text()
PLANS = re.findall(r"^```sh\n(keyhole plan .*?)^```\n\n```text\n(.*?)^```$", PAGE, re.M | re.S)
CELLS = json.loads((ROOT / "benchmarks/results/internet_scale.json").read_text())["cells"]


@pytest.mark.parametrize(("command", "shown"), PLANS, ids=["1e9", "1e6", "few"])
def test_tables_are_what_the_planner_prints(command, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli.main(command.split()[1:])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(printed).strip() == shown.strip()


def test_the_simulation_on_the_page_is_that_of_the_results():
    (found,) = [cell for cell in CELLS if "planned_seconds" in cell]
    outcome = found["outcome"]
    assert f"after {outcome['seconds']:.0f} s" in PAGE
    assert f"{100 * outcome['late']:.1f} % late, {100 * outcome['lost']:.1f} % lost" in PAGE
    assert f"{outcome['requests_per_second']:,} requests" in PAGE
    assert f"goal of {outcome['taken']:,} updates" in PAGE
    for cell in [cell for cell in CELLS if "needed" in cell]:
        line = f"slice servers of {cell['cores']} cores, {cell['gbit']:g} Gbit/s"
        row = next(row for row in PAGE.splitlines() if line in row)
        assert f"{cell['needed']} keep up" in row
        assert f"{cell['planned']}: {cell['first']} |" in row
    (herd,) = [cell["herd"] for cell in CELLS if "herd" in cell]
    assert f"check-ins in {herd['checkin_waits'][1]:.0f} s" in PAGE
