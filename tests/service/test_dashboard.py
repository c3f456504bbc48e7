"""The dashboard for Grafana: every metric that it draws is shown by a service, trainer or relay."""

import json
import re

import pytest

from keyhole.service.metrics import Metrics
from keyhole.service.status import RoundStatus
from keyhole.service.telling import TrainerTelling, round_gauges
from tests.helpers import ROOT

DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text())
PANELS = DASHBOARD["panels"]
METRIC = re.compile(r"\bkeyhole_\w+")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The names of all metrics, each with the names of its labels."""
    everything = RoundStatus("0-x", 0, "open", *range(4), 5, 6.0, checked_in=7, waiting=8)
    metrics = Metrics()
    metrics.route("slices").count(200, 0.1)
    metrics.refuse("ProtocolError")
    metrics.show(lambda: round_gauges({"": everything}))
    trainer = TrainerTelling(tmp_path_factory.mktemp("rounds"), tmp_path_factory.mktemp("run"))
    page = (metrics.page() + trainer.page()).decode()
    samples = re.findall(r"^(keyhole_\w+?)(?:\{(.*?)\})? \S+$", page, re.M)
    return {name: set(re.findall(r"(\w+)=", labels)) for name, labels in samples}


def queries():
    return [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]


@pytest.mark.parametrize(("title", "query"), queries())
def test_a_panel_draws_metrics_that_exist_by_labels_that_they_have(shown, title, query):
    names = METRIC.findall(query)
    assert names
    assert set(names) <= shown.keys(), title
    asked = {word for group in re.findall(r"by \((.*?)\)", query) for word in group.split(", ")}
    known = set().union(*(shown[name] for name in names)) | {"instance", "job"}
    assert asked <= known, title


def test_all_gauges_of_a_round_are_drawn(shown):
    drawn = {name for _, query in queries() for name in METRIC.findall(query)}
    rounds = {name for name in shown if name.startswith(("keyhole_round_", "keyhole_rounds_"))}
    assert rounds <= drawn


def test_panels_have_places_and_numbers_of_their_own():
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert all(panel["datasource"]["uid"] == "${source}" for panel in PANELS)
    asked = next(each for each in DASHBOARD["templating"]["list"] if each["name"] == "job")
    assert METRIC.findall(asked["query"]) == ["keyhole_round_number"]


def test_metrics_of_the_operators_page_exist(shown):
    page = (ROOT / "docs" / "operate.md").read_text()
    named = set(re.findall(r"`(keyhole_[a-z_]+)`", page))
    assert len(named) > 5
    assert not [name for name in named if not any(one.startswith(name) for one in shown)]
