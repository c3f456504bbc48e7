"""Tables: golden text, what is lacking, escaping.

Renew the golden files with KEYHOLE_RENEW_GOLDEN=1.
"""

import csv
import io
import json
import os

import numpy as np
import pytest
from scipy import stats

from keyhole.experiments.report.paper import FINDINGS, find_number
from keyhole.experiments.report.reading import read_results
from keyhole.experiments.report.tables import (
    make_table,
    to_csv,
    to_html,
    to_json,
    to_latex,
    to_markdown,
)
from tests.experiments.report.runs import write_sweep, write_trial
from tests.helpers import ROOT

GOLDEN = ROOT / "tests" / "golden" / "report"


def golden(name, text):
    path = GOLDEN / name
    if os.environ.get("KEYHOLE_RENEW_GOLDEN") == "1":
        path.write_text(text)
    return path.read_text()


@pytest.fixture
def cnn(tmp_path):
    """Table 2 in small: complete, unfinished, missing and empty lines."""
    lines = [("CNN", f"m = {m}", m, f"cnn-m{m}") for m in (4, 8, 16, 32, 64)]
    write_sweep(tmp_path, "emnist-cnn", lines)
    sizes = {m: (1_690_046, 33_150 + 25_889 * m) for m in (4, 8, 16, 32, 64)}
    for trial, test in enumerate((0.74, 0.75, 0.79)):
        write_trial(tmp_path, "cnn-m4", trial, test=test, size=sizes[4], seconds=60 + 30 * trial)
    for trial, test in enumerate((0.80, 0.82, None)):
        write_trial(tmp_path, "cnn-m8", trial, (0.2,), test, size=sizes[8])
    write_trial(tmp_path, "cnn-m16", 1, test=0.84, size=sizes[16])
    write_trial(tmp_path, "cnn-m32", 0, (), None, size=sizes[32])
    (sweep,) = read_results(tmp_path)
    return make_table(sweep)


def test_the_table_is_the_golden_one(cnn):
    assert to_markdown(cnn) == golden("emnist-cnn.md", to_markdown(cnn))


def test_the_html_table_is_the_golden_one(cnn):
    assert to_html(cnn) == golden("emnist-cnn.html", to_html(cnn))


def test_the_json_of_a_table_is_the_golden_one(cnn):
    text = json.dumps(to_json(cnn), indent=2) + "\n"
    assert text == golden("emnist-cnn.json", text)


def test_a_row_by_hand(cnn):
    """0.74, 0.75, 0.79: mean 0.76, squares 4 + 1 + 9 = 14 e-4, over 2 = 7 e-4, root 0.02646.
    The interval: 4.3027, of Student's t with 2 degrees of freedom, x 0.02646 / 1.7321 = 0.0657.
    The reference is m = 16, of which trial 1 is finished: 0.75 - 0.84 = -0.09.
    Size: (33,150 + 25,889 x 4) / 1,690,046 = 0.0809. Minutes: (60 + 90 + 120) / 3 / 60 = 1.5."""
    assert cnn.cells[0] == (
        "CNN",
        "m = 4",
        "0.08",
        "76.0 ± 6.6",
        "2.65",
        "-9.000",
        "-",
        "3",
        "20",
        "1.5",
        "75.02 ± 0.92",
        "0.08",
    )


@pytest.fixture
def compared(tmp_path):
    """Arms that share clients, one that does not, and the reference, whose clients hold most."""
    lines = [("", name, None, name) for name in ("a", "b_2", "other seed", "whole")]
    write_sweep(tmp_path, "mine", lines)
    for trial in range(4):
        write_trial(tmp_path, "a", trial, test=A[trial])
        write_trial(tmp_path, "b_2", trial, test=B[trial])
        write_trial(tmp_path, "other seed", trial, test=A[trial], changes={"seed": 8})
        write_trial(tmp_path, "whole", trial, test=WHOLE[trial], size=(1000, 1000))
    (sweep,) = read_results(tmp_path)
    return make_table(sweep)


A, B, WHOLE = (0.5, 0.52, 0.49, 0.51), (0.55, 0.58, 0.53, 0.57), (0.6, 0.63, 0.58, 0.61)


def test_differences_are_paired_and_those_of_scipy(compared):
    rows = list(csv.DictReader(io.StringIO(to_csv(compared))))
    assert [row["line"] for row in rows] == ["a", "b_2", "other seed", "whole"]
    assert {row["against"] for row in rows} == {"whole"}
    for row, values in zip(rows, (A, B), strict=False):
        low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
        assert [float(row[name]) for name in ("low", "high")] == pytest.approx([low, high])
        known = stats.ttest_rel(values, WHOLE)
        assert float(row["p_value"]) == pytest.approx(known.pvalue, rel=1e-6)
        ends = [float(row[f"difference_{end}"]) for end in ("low", "high")]
        assert ends == pytest.approx(list(known.confidence_interval(0.95)))
    assert rows[2]["difference"] == rows[3]["difference"] == ""


def test_the_reference_is_named_and_arms_with_other_clients_have_no_difference(compared):
    place = compared.header.index("difference (points)")
    told = [cells[place : place + 2] for cells in compared.cells]
    assert told == [
        ("-10.0 ± 1.3", "<0.001"),
        ("-4.75 ± 0.80", "<0.001"),
        ("-", "-"),
        ("reference", "-"),
    ]


def test_the_latex_table_has_the_cells_of_the_table(compared):
    text = to_latex(compared)
    assert "b\\_2 & 0.10 & 55.8 $\\pm$ 3.5 & 2.22 & $-$4.75 $\\pm$ 0.80 & $<$0.001" in text
    assert len({line.count("&") for line in text.splitlines() if "&" in line}) == 1


def test_a_grid_of_rates_is_no_comparison(tmp_path):
    lines = [("", name, None, name) for name in ("a", "b")]
    write_sweep(tmp_path, "mine", lines, figures=["grid"])
    for trial in range(2):
        write_trial(tmp_path, "a", trial, changes={"client.lr": 1.0})
        write_trial(tmp_path, "b", trial, changes={"client.lr": 2.0})
    (sweep,) = read_results(tmp_path)
    assert "difference (points)" not in make_table(sweep).header


def test_what_is_lacking_is_said(cnn):
    trials = [row.trials for row in cnn.rows]
    assert trials == [
        "3",
        "2 of 3 (1 unfinished)",
        "1 of 3 (2 missing)",
        "0 of 3 (1 unfinished, 2 missing)",
        "0 of 3 (3 missing)",
    ]
    assert [note.split(":")[0] for note in cnn.notes] == [
        "CNN, m = 8",
        "CNN, m = 16",
        "CNN, m = 32",
        "CNN, m = 64",
    ]
    assert "trial 2 is unfinished after 10 of 20 rounds" in cnn.notes[0]
    assert "missing: trial 0, 2" in cnn.notes[1]


def table_with(tmp_path, label, **trial):
    write_sweep(tmp_path, "s", [("p", label, None, "arm")])
    write_trial(tmp_path, "arm", 0, **trial)
    (sweep,) = read_results(tmp_path)
    return make_table(sweep)


def test_html_is_escaped(tmp_path):
    table = table_with(tmp_path, '<script>"&')
    assert "<td>&lt;script&gt;&quot;&amp;</td>" in to_html(table)
    assert "<script" not in to_html(table)


def test_markdown_is_escaped(tmp_path):
    text = to_markdown(table_with(tmp_path, "a|b *c* <i> `d` [e](f)"))
    row = text.splitlines()[2]
    assert r"a\|b \*c\* &lt;i&gt; \`d\` \[e\](f)" in row
    assert row.replace(r"\|", "").count("|") == text.splitlines()[0].count("|")


def test_one_trial_shows_no_deviation(tmp_path):
    assert table_with(tmp_path, "a", test=0.5).cells[0][3] == "50.00"


def test_a_run_that_diverged_is_told_and_stays_json(tmp_path):
    table = table_with(tmp_path, "a", test=float("nan"))
    assert table.cells[0][3] == "not finite"
    assert to_json(table)["rows"][0]["test"]["mean"] is None
    json.dumps(to_json(table), allow_nan=False)


def test_trials_that_were_set_up_differently_get_a_note(tmp_path):
    write_sweep(tmp_path, "s", [("p", "a", None, "arm")])
    for trial in range(2):
        write_trial(tmp_path, "arm", trial, rounds=20 + trial)
    (sweep,) = read_results(tmp_path)
    assert "trials differ in rounds" in make_table(sweep).notes[0]


def test_without_numbers_of_the_paper_there_is_no_column_for_them(tmp_path):
    assert not any("paper" in name for name in table_with(tmp_path, "m = 4").header)


@pytest.mark.parametrize(
    ("sweep", "panel", "label", "number"),
    [
        ("emnist-cnn", "CNN", "m = 64", "86.71 ± 0.06"),
        ("emnist-2nn", "", "m = 10", "14.17 ± 0.78"),
        ("emnist-2nn-fixed", "m = 100", "independent", "63.97 ± 0.32"),
        ("emnist-2nn-fixed", "m = 100", "fixed", "None"),
        ("divisor", "m = 10", "over the cohort", "14.17 ± 0.78"),
        ("divisor", "m = 10", "over those who chose the key", "None"),
        ("emnist-cnn", "CNN", "m = 5", "None"),
        ("tag-recall", "n = 10,000", "m = 100", "None"),
        ("unknown", "", "m = 4", "None"),
    ],
)
def test_the_papers_number_is_found_by_sweep_and_label(sweep, panel, label, number):
    assert str(find_number(sweep, panel, label)) == number


def test_the_paper_is_told_for_every_sweep():
    names = "tag-recall tag-keys emnist-cnn emnist-2nn emnist-cnn-fixed emnist-2nn-fixed"
    assert set(FINDINGS) == {*names.split(), "word-alpha", "divisor", "rates"}
    assert all(finding.source and finding.text for finding in FINDINGS.values())


def test_more_trials_than_were_asked_for_are_all_counted(tmp_path):
    write_sweep(tmp_path, "s", [("p", "a", None, "arm"), ("p", "b", None, "other")], trials=1)
    for trial in range(2):
        write_trial(tmp_path, "arm", trial)
    write_trial(tmp_path, "other", 0)
    (sweep,) = read_results(tmp_path)
    table = make_table(sweep)
    assert [row.trials for row in table.rows] == ["2", "1"]
    assert table.notes == ()


def test_a_table_without_panels_has_no_column_for_them(tmp_path):
    write_sweep(tmp_path, "s", [("", "a", None, "arm")])
    write_trial(tmp_path, "arm", 0)
    (sweep,) = read_results(tmp_path)
    assert make_table(sweep).header[0] == "line"
    assert to_markdown(make_table(sweep)).splitlines()[1].startswith("| --- | ---: |")
