"""Runs of `keyhole train`: drawn and tabulated without a sweep, with what their parts declare."""

import math
from dataclasses import dataclass, replace

import pytest

from keyhole.aggregation.plain import PLAIN
from keyhole.data.open import make_synthetic
from keyhole.delivery.clear import OnDemand
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.report.figures import draw_runs
from keyhole.experiments.report.page import write_page, write_section
from keyhole.experiments.report.reading import read_results
from keyhole.experiments.report.tables import make_table, to_json
from keyhole.experiments.report.writing import write_kilobytes
from keyhole.experiments.specs import name_of, spec_of
from tests.experiments.report.runs import write_sweep, write_trial


@dataclass(frozen=True)
class Post:
    """A delivery outside the library."""

    inner: OnDemand

    @property
    def about(self):
        return replace(self.inner.about, name="post", title="Slices by post", is_served=False)

    def for_run(self, keys_per_client, *, allow_simulation=False):
        return self

    def deliver(self, state, keys):
        return self.inner.deliver(state, keys)


@dataclass(frozen=True)
class Counted:
    """A sum outside the library."""

    about = replace(PLAIN.about, name="counted", title="Counted twice")

    def add(self, request):
        return PLAIN.add(request)


POST, COUNTED = Post(OnDemand()), Counted()
OWN = {"delivery": f"{__name__}:POST", "aggregation.name": f"{__name__}:COUNTED"}


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Two runs as `keyhole train --out` keeps them: one with own parts, one as it comes."""
    out = tmp_path_factory.mktemp("runs")
    dataset = make_synthetic("writers", 0, writers=12)
    for changes in ({}, OWN):
        small = {"rounds": 2, "evaluate_every": 1, "cohort.size": 2, "keys.neuron.count": 10}
        spec = spec_of("emnist_2nn", small | changes)
        assert Experiment(spec, dataset).run(0, out / name_of(spec) / "trial-0")
    return out


@pytest.fixture(scope="module")
def runs(out):
    (found,) = read_results(out)
    return found


def test_each_run_is_a_line_of_its_task(runs):
    assert (runs.name, runs.title, len(runs.lines)) == ("emnist-2nn-runs", "Runs of emnist_2nn", 2)
    assert runs.lines[0].label == "independent10-neurons"
    assert all(runs.is_complete(line) for line in runs.lines)


def test_own_parts_are_told_by_the_titles_that_they_declare(runs):
    table = make_table(runs)
    assert table.header[:3] == ("run", "delivery", "aggregation")
    assert [cells[1:3] for cells in table.cells] == [
        ("on demand", "plain sum"),
        ("Slices by post", "Counted twice"),
    ]


def test_the_table_has_costs_and_who_learned_what(runs):
    table = make_table(runs)
    down, up = (table.cells[0][table.header.index(name)] for name in ("KB down", "KB up"))
    costs = runs.lines[0].costs
    assert (down, up) == (write_kilobytes(costs.bytes_down), write_kilobytes(costs.bytes_up))
    both, party, of_keys, of_updates = table.learned[1]
    assert both == ", ".join(line.label for line in runs.lines)
    assert (party, of_keys) == ("server", "keys and whose they are")
    assert of_updates == "each update, its keys and whose they are"
    assert to_json(table)["runs"][1]["delivery"] == "Slices by post"


def test_metrics_are_drawn_over_rounds_and_against_bytes(runs):
    left, right = draw_runs(runs).axes
    assert (left.get_xlabel(), left.get_ylabel()) == ("rounds", "test accuracy (%)")
    assert right.get_xlabel() == "KB per client and round, down and up"
    widths = [line.get_linewidth() for line in left.lines]
    assert widths[0] > widths[1], "lines that coincide are both seen"
    marks = {"o", "s"}
    points = [tuple(line.get_xydata()[0]) for line in right.lines if line.get_marker() in marks]
    assert points == [(line.costs.kilobytes, line.test.mean) for line in runs.lines]


def test_the_page_shows_them_without_the_paper(runs, tmp_path):
    section, _ = write_section(runs, tmp_path)
    page = write_page("runs", [section], tmp_path).read_text()
    assert "Slices by post" in page
    assert "Who learned what" in page
    assert "The paper has no such experiment" not in page


@pytest.mark.parametrize("place", ["", "arm", "arm/trial-0"])
def test_a_run_is_found_from_its_folder_its_arm_and_itself(tmp_path, place):
    write_trial(tmp_path, "arm", 0)
    (runs,) = read_results(tmp_path / place)
    assert [line.label for line in runs.lines] == ["arm"]


def test_runs_of_one_name_in_several_folders_are_told_apart(tmp_path):
    for folder in ("a", "b"):
        write_trial(tmp_path / folder, "arm", 0)
    (runs,) = read_results(tmp_path)
    assert [line.label for line in runs.lines] == ["a/arm", "b/arm"]


def test_several_folders_are_one_report(tmp_path):
    for folder in ("a", "b"):
        write_trial(tmp_path / folder, "arm", 0)
    write_trial(tmp_path / "c", "alone", 0)
    write_sweep(tmp_path / "c", "s", [("", "a", None, "alone")])
    folders = tmp_path / "b", tmp_path / "a" / "arm", tmp_path / "c"
    sweep, runs = read_results(*folders)
    assert (sweep.name, [line.label for line in runs.lines]) == ("s", ["a/arm", "b/arm"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty holds no sweep and no run"):
        read_results(*folders, tmp_path / "empty")


def test_runs_beside_a_sweep_come_after_it(tmp_path):
    write_sweep(tmp_path, "s", [("", "a", None, "in-sweep")])
    for arm in ("in-sweep", "alone"):
        write_trial(tmp_path, arm, 0)
    sweep, runs = read_results(tmp_path)
    assert (sweep.name, [line.arm for line in runs.lines]) == ("s", ["alone"])


def test_an_unfinished_run_is_drawn_with_what_it_has(tmp_path):
    write_trial(tmp_path, "arm", 0, (0.2,), None)
    (runs,) = read_results(tmp_path)
    figure = draw_runs(runs)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["arm *"]
    assert "unfinished after 10 of 20 rounds" in make_table(runs).notes[0]


def test_an_epsilon_without_bound_is_said(runs):
    costs = replace(runs.lines[0].costs, epsilon=math.inf)
    row = replace(make_table(runs).rows[0], costs=costs)
    assert row.priced[2] == "no bound"


def test_own_task_and_long_names_fit_into_files_and_legend(tmp_path):
    for i in range(7):
        write_trial(tmp_path, f"mine.FILMS-top50-words-mydelivery.A_RATHER_LONG_NAME_OF_{i}", 0)
        run = tmp_path / f"mine.FILMS-top50-words-mydelivery.A_RATHER_LONG_NAME_OF_{i}"
        path = run / "trial-0" / "run.json"
        path.write_text(path.read_text().replace('"emnist_cnn"', '"mine:FILMS"'))
    (runs,) = read_results(tmp_path)
    _, files = write_section(runs, tmp_path / "report")
    assert files[0].name == "mine.FILMS-runs-overview.png"
    figure = draw_runs(runs)
    figure.canvas.draw()
    (legend,) = figure.legends
    inside, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= inside.x0
    assert inside.x1 <= whole.x1
    assert legend.get_texts()[0].get_text() == "mydelivery.A_RATHER_LONG_NAME_OF_0"


def test_the_table_says_in_what_runs_differ_and_has_all_metrics(tmp_path):
    changes = {"server.lr": 0.5, "data": "mine:few"}
    write_trial(tmp_path, "a", 0)
    path = write_trial(tmp_path, "b", 0, changes=changes) / "result.json"
    path.write_text(path.read_text().replace('{"accuracy"', '{"norm": 3.0, "accuracy"'))
    (runs,) = read_results(tmp_path)
    table = make_table(runs)
    told = [dict(zip(table.header, cells, strict=True)) for cells in table.cells]
    assert [(row["data"], row["server.lr"], row["test norm"]) for row in told] == [
        ("synthetic", str(runs.lines[0].trials[0].spec.server.lr), "-"),
        ("mine:few", "0.5", "3.000"),
    ]
    assert "client.lr" not in table.header


def test_a_run_shorter_than_the_steps_of_evaluation_says_so(tmp_path):
    write_trial(tmp_path, "arm", 0, ())
    (runs,) = read_results(tmp_path)
    left, _ = draw_runs(runs).axes
    assert left.texts[0].get_text().startswith("no evaluation within")
    assert "evaluated every 10" in left.texts[0].get_text()


def test_points_that_coincide_stand_side_by_side_and_are_counted(tmp_path):
    for i, (test, moved) in enumerate([(0.5, 9), (0.5, 9), (0.5, 9), (0.4, 1), (0.3, 9)]):
        write_trial(tmp_path, f"arm-{i}", 0, test=test, bytes_down=[1000 * moved], bytes_up=[1])
    (runs,) = read_results(tmp_path)
    right = draw_runs(runs).axes[-1]
    points = [line for line in right.lines if line.get_marker() in "os^Dv"]
    drawn = [line.get_transform().transform(line.get_xydata())[0, 0] for line in points]
    true = [right.transData.transform(line.get_xydata())[0, 0] for line in points]
    assert drawn[0] < drawn[1] == true[1] < drawn[2], "around their place"
    assert drawn[1] - drawn[0] > points[0].get_markersize(), "no mark hides another"
    assert drawn[3:] == true[3:]
    assert [text.get_text() for text in right.texts] == ["3 runs here"]


def test_an_own_metric_is_drawn_under_its_name_and_on_no_split(tmp_path):
    spec = {"metrics": "mine:norm"}
    arm = write_trial(tmp_path, "arm", 0, changes=spec, bytes_down=[9], bytes_up=[1])
    path = arm / "records.jsonl"
    path.write_text(path.read_text().replace('"accuracy":', '"weight_norm":1.5,"accuracy":'))
    (runs,) = read_results(tmp_path)
    labels = [axes.get_ylabel() for axes in draw_runs(runs).axes]
    assert labels == ["validation accuracy (%)", "weight norm", "test accuracy (%)"]
