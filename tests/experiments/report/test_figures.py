"""Figures: what they show, and that the same results give the same bytes."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from keyhole.errors import InputError, StorageError
from keyhole.experiments.report.figures import KINDS, draw_curves, draw_sweep
from keyhole.experiments.report.reading import read_results
from keyhole.experiments.report.results import FIGURES, OVERVIEW, mean_curve
from keyhole.experiments.report.style import save_figure, series_styles
from tests.experiments.report.runs import rising, write_sweep, write_trial
from tests.helpers import with_slow

RATES = (0.01, 0.1, 1.0)


def make_sweep(out, figures, lines, **more):
    write_sweep(out, "s", lines, figures=figures, **more)
    (sweep,) = read_results(out)
    return sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("runs")
    lines = []
    for i, panel in enumerate(("structured", "random", "mixed")):
        for j, m in enumerate((10, 100, 1000)):
            arm = f"{panel}-{m}"
            lines.append((panel, f"m = {m:,}", m, arm))
            for trial in range(2):
                last = 0.5 + 0.1 * j - 0.05 * i
                rates = {"client.lr": RATES[j], "server.lr": RATES[i]}
                curve = rising(last, trial)
                size = (2000, m + 50 * i)
                write_trial(
                    tmp_path,
                    arm,
                    trial,
                    curve,
                    last + 0.01 * trial,
                    rounds=200,
                    size=size,
                    changes=rates,
                )
    return make_sweep(tmp_path, list(FIGURES), lines)


def texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_every_kind_can_be_asked_for():
    assert tuple(KINDS) == (*FIGURES, OVERVIEW)


@pytest.mark.parametrize("kind", FIGURES)
def test_axes_are_labelled(sweep, kind):
    figure = KINDS[kind](sweep)
    assert all(axes.get_xlabel() for axes in figure.axes)
    assert figure.axes[0].get_ylabel()


def test_curves_have_a_panel_each_and_every_label_in_the_legend(sweep):
    figure = KINDS["curves"](sweep)
    assert [axes.get_title() for axes in figure.axes] == ["structured", "random", "mixed"]
    assert texts(figure) == ["m = 10", "m = 100", "m = 1,000"]
    assert [len(axes.lines) for axes in figure.axes] == [3, 3, 3]
    assert [len(axes.collections) for axes in figure.axes] == [3, 3, 3]
    assert figure.axes[0].get_ylabel() == "validation accuracy (%)"


def test_curves_draw_the_mean(sweep):
    line = KINDS["curves"](sweep).axes[0].lines[0]
    np.testing.assert_allclose(line.get_ydata(), sweep.lines[0].curve.mean)
    np.testing.assert_array_equal(line.get_xdata(), sweep.lines[0].curve.rounds)


def test_shares_are_in_percent(sweep):
    axis = KINDS["curves"](sweep).axes[0].yaxis
    assert axis.get_major_formatter()(0.25, 0) == "25"


@pytest.mark.parametrize("kind", ["final", "frontier"])
def test_panels_are_the_series(sweep, kind):
    assert texts(KINDS[kind](sweep)) == ["structured", "random", "mixed"]


def test_x_that_spans_decades_is_on_a_log_axis(sweep):
    left, right = KINDS["final"](sweep).axes
    assert left.get_xscale() == right.get_xscale() == left.get_yscale() == "log"
    assert left.get_xlabel() == "keys per client m"


def test_lines_without_x_stand_under_their_labels(tmp_path):
    for arm in ("a", "b"):
        write_trial(tmp_path, arm, 0)
    lines = [("", "Top", None, "a"), ("", "Random", None, "b")]
    figure = draw_sweep(make_sweep(tmp_path, ["final"], lines))["final"]
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["Top", "Random"]


def test_labels_of_the_frontier_do_not_overlap(sweep):
    figure = KINDS["frontier"](sweep)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 9
    pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i]]
    assert not any(a.overlaps(b) for a, b in pairs)


def test_points_that_coincide_carry_their_label_once(tmp_path):
    write_trial(tmp_path, "whole", 0)
    lines = [(panel, "all keys", 1, "whole") for panel in ("structured", "random")]
    figure = draw_sweep(make_sweep(tmp_path, ["frontier"], lines))["frontier"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["all keys"]


def test_the_grid_prints_its_values_and_frames_the_best(tmp_path):
    lines = []
    for i, client in enumerate(RATES):
        for j, server in enumerate(RATES):
            lines.append(("", f"{client}, {server}", None, f"arm-{i}-{j}"))
            value = 0.1 * (i + j)
            rates = {"client.lr": client, "server.lr": server}
            write_trial(tmp_path, f"arm-{i}-{j}", 0, (value,), 0.9, changes=rates)
    (axes,) = draw_sweep(make_sweep(tmp_path, ["grid"], lines))["grid"].axes
    printed = {text.get_position(): text.get_text() for text in axes.texts}
    assert printed[(2, 1)] == "30.00", "validation, not test, chooses rates"
    assert axes.patches[0].get_xy() == (1.52, 1.52)
    assert axes.get_xlabel() == "client learning rate"


def test_two_arms_in_one_cell_are_refused(tmp_path):
    for arm in ("a", "b"):
        write_trial(tmp_path, arm, 0)
    lines = [("", "a", None, "a"), ("", "b", None, "b")]
    with pytest.raises(InputError, match="arm b has no cell of its own"):
        draw_sweep(make_sweep(tmp_path, ["grid"], lines))


def test_a_panel_without_a_curve_says_so(tmp_path):
    write_trial(tmp_path, "arm", 0, (), None)
    figure = draw_sweep(make_sweep(tmp_path, ["curves"], [("p", "a", 1, "arm")]))["curves"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["not evaluated yet"]


def test_a_finished_sweep_has_no_empty_panel_or_says_why(tmp_path):
    write_trial(tmp_path, "short", 0, ())
    lines = [("p", "a", 1, "short"), ("q", "a", 2, "long")]
    figure = draw_sweep(make_sweep(tmp_path, ["curves"], lines[:1]))["curves"]
    (why,) = figure.axes[0].texts
    assert why.get_text() == "no evaluation within 0 rounds\n(evaluated every 10)"
    write_trial(tmp_path, "long", 0)
    figure = draw_sweep(make_sweep(tmp_path, ["curves"], lines))["curves"]
    assert [axes.get_title() for axes in figure.axes] == ["q"]


@pytest.mark.parametrize("kind", FIGURES)
def test_lines_without_trials_are_drawn_as_lacking(tmp_path, kind):
    write_trial(tmp_path, "begun", 0, (0.5,), None)
    lines = [("p", "begun", 1, "begun"), ("p", "not begun", 2, "nowhere")]
    figure = draw_sweep(make_sweep(tmp_path, [kind], lines))[kind]
    figure.draw_without_rendering()
    notes = [legend.get_title().get_text() for legend in figure.legends]
    assert "missing or unfinished" in " ".join([*notes, figure.get_suptitle()])


@pytest.mark.parametrize("kind", with_slow(FIGURES, fast=["final"]))
def test_the_same_results_give_the_same_bytes(sweep, kind, tmp_path):
    one = [path.read_bytes() for path in save_figure(KINDS[kind](sweep), tmp_path / "one")]
    two = [path.read_bytes() for path in save_figure(KINDS[kind](sweep), tmp_path / "two")]
    assert one == two
    assert b"<metadata>" not in one[1], "it would hold the date"
    assert int.from_bytes(one[0][16:20], "big") == 1200, "pixels wide, from the header of the PNG"


def test_drawing_leaves_the_settings_of_matplotlib_alone(sweep, tmp_path):
    before = dict(mpl.rcParams)
    save_figure(KINDS["curves"](sweep), tmp_path / "figure")
    assert dict(mpl.rcParams) == before


def test_a_figure_from_records_in_memory(tmp_path):
    curves = {"no select": mean_curve([{1: 0.1, 2: 0.2}]), "$top$ _m": mean_curve([{1: 0.1}])}
    figure = draw_curves({"": curves}, "recall_at_5", split="test")
    assert texts(figure) == ["no select", "$top$ _m"]
    assert figure.axes[0].get_ylabel() == "test recall@5 (%)"
    png, svg = save_figure(figure, tmp_path / "demo.v1")
    assert (png.name, svg.name) == ("demo.v1.png", "demo.v1.svg")


def test_series_differ_in_grey_scale_in_marker_and_in_dashes():
    styles = list(series_styles(["a", "b", "c", "d", "e"]).values())
    greys = [np.dot(to_rgb(style.color), (0.299, 0.587, 0.114)) for style in styles]
    assert all(np.diff(greys) > 0.07)
    assert len({style.marker for style in styles}) == 5
    assert len({str(style.dashes) for style in styles[:4]}) == 4


def test_a_figure_that_cannot_be_written_is_one_error(tmp_path):
    figure = draw_curves({"": {"a": mean_curve([{1: 0.1}])}}, "loss")
    with pytest.raises(StorageError, match=r"cannot write figure\.png"):
        save_figure(figure, tmp_path / "nowhere" / "figure")
