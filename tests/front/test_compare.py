"""Runs beside each other: intervals, paired differences, bytes beside broadcast, a figure."""

import csv
import io

import numpy as np
import pytest
from scipy import stats

import keyhole as kh
from keyhole.errors import InputError
from keyhole.experiments.report.page import Section, make_page
from keyhole.experiments.report.reading import read_results
from keyhole.experiments.report.tables import make_table
from tests.front.test_train import ITEMS, SETTINGS, make_task

EACH_ROUND = {**SETTINGS, "evaluate_every": 1}


@pytest.fixture(scope="module")
def arms(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    return [
        kh.train(make_task(), rounds=5, m=m, trials=3, out=out / name, **EACH_ROUND)
        for name, m in {"full": "all", "top_5": 5}.items()
    ]


def finals(run):
    return [trial.result.metrics["mse"] for trial in run.trials]


def test_numbers_are_those_of_scipy(arms):
    full, few = arms
    first, second = csv.DictReader(io.StringIO(kh.compare(full, few).to_csv()))
    assert (first["run"], second["run"], second["metric"]) == ("full", "top_5", "mse")
    low, high = stats.t.interval(0.95, 2, np.mean(finals(few)), stats.sem(finals(few)))
    assert [float(second[name]) for name in ("low", "high")] == pytest.approx([low, high])
    known = stats.ttest_rel(finals(few), finals(full))
    assert float(second["p_value"]) == pytest.approx(known.pvalue, rel=1e-9)
    ends = [float(second[f"difference_{end}"]) for end in ("low", "high")]
    assert ends == pytest.approx(list(known.confidence_interval(0.95)))
    assert (second["pairs"], first["difference"], first["p_value"]) == ("3", "", "")


def test_bytes_stand_beside_broadcast(arms):
    """60 float32 down and up; of 5 keys a client moves 40 bytes of rows, and names them."""
    full, few = kh.compare(*arms).rows
    assert full.broadcast_bytes == few.broadcast_bytes == 2 * 4 * ITEMS
    assert full.bytes_per_round == pytest.approx(full.broadcast_bytes, rel=0.05)
    assert 40 <= few.bytes_per_round < full.bytes_per_round / 3


def test_tables_name_what_a_run_started_from(arms, tmp_path):
    full, few = arms
    on = kh.train(make_task(), rounds=1, trials=3, start=full, out=tmp_path / "on", **EACH_ROUND)
    found = kh.compare(few, on)
    lines = str(found).splitlines()
    assert lines[0].split()[:3] == ["run", "start", "mse"]
    assert [line.split()[1] for line in lines[1:]] == ["-", "full"]
    assert [row["start"] for row in csv.DictReader(io.StringIO(found.to_csv()))] == ["", "full"]
    (runs,) = read_results(few.directory, on.directory)
    table = make_table(runs)
    at = table.header.index("start")
    assert {row[0].split("/")[-1]: row[at] for row in table.cells} == {"top_5": "-", "on": "full"}
    assert "full" in make_page("runs", [Section(runs, table, {})])


def test_the_table_prints_and_is_latex(arms, tmp_path):
    found = kh.compare(*arms)
    lines = str(found).splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:2] == ["run", "mse"]
    assert "mse - full" in lines[0]
    assert repr(found) == str(found)
    text = found.to_latex(tmp_path / "tables" / "mse.tex")
    assert (tmp_path / "tables" / "mse.tex").read_text() == text
    assert r"top\_5 & " in text
    assert r"$\pm$" in text
    assert r"100.0\%" in text
    widths = {row.count("&") for row in text.splitlines() if "&" in row}
    assert len(widths) == 1


def test_directories_and_names_do(arms):
    full, few = arms
    found = kh.compare(full.directory, few=few, again=str(few.directory))
    assert list(found.runs) == ["full", "few", "again"]
    assert found.rows[1].metrics == found.rows[2].metrics
    assert list(kh.compare(few, few).runs) == ["top_5", "top_5 (2)"]


def test_runs_in_memory_are_called_by_their_keys():
    runs = [kh.train(make_task(), rounds=1, m=m, **EACH_ROUND) for m in ("all", 5)]
    found = kh.compare(*runs)
    assert list(found.runs) == ["all keys", "m = 5"]
    assert found.rows[1].differences["mse"].p_value is None
    assert " ± " not in str(found)


def test_arms_of_different_seeds_are_not_paired(arms):
    other = kh.train(make_task(), rounds=5, m=5, trials=3, seed=9, **EACH_ROUND)
    assert kh.compare(arms[0], other).rows[1].differences == {}


def test_only_trials_that_both_have_are_paired(arms):
    one = kh.open_run(arms[1].directory / "trial-2")
    found = kh.compare(arms[0], one).rows[1].differences["mse"]
    assert found.spread.trials == 1
    assert found.spread.mean == pytest.approx(finals(arms[1])[2] - finals(arms[0])[2])


def test_a_figure_has_a_line_and_a_band_for_each_run(arms, tmp_path):
    figure = kh.compare(*arms).plot("mse", against="bytes", path=tmp_path / "mse.png")
    (axes,) = figure.axes
    assert len(axes.lines) == len(axes.collections) == 2
    ends = [line.get_xdata()[-1] for line in axes.lines]
    assert ends[1] < ends[0] / 3
    widths = [line.get_linewidth() for line in axes.lines]
    assert widths[0] > widths[1]
    assert (tmp_path / "mse.png").stat().st_size > 1000


def test_one_run_is_no_comparison(arms):
    with pytest.raises(InputError, match="expected two or more"):
        kh.compare(arms[0])
