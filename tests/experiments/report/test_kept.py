"""Finished runs are kept in one file, and read as from their folders."""

import json
from dataclasses import replace

import numpy as np
import pytest

from keyhole.errors import InputError
from keyhole.experiments.report.figures import draw_sweep
from keyhole.experiments.report.kept import keep_sweeps, read_kept, write_kept
from keyhole.experiments.report.reading import read_results
from keyhole.experiments.report.style import save_svg
from keyhole.experiments.report.tables import make_table
from tests.experiments.report.runs import rising, write_sweep, write_trial

COMMANDS = {"mine": "keyhole sweep mine.toml"}
COSTS = {"bytes_down": [100, 300], "bytes_up": [50, 150]}


def finish(directory):
    """Adds what `keyhole sweep` writes into result.json beyond what a report reads."""
    path = directory / "result.json"
    more = {"client_size": 10.0, "bytes_down": 200.0, "bytes_up": 100.0, "records": 2, "notes": []}
    path.write_text(json.dumps(json.loads(path.read_text()) | more | {"run": "ab" * 8}))


def make(out, trials=2):
    """A sweep of two lines; the second trial of the second line is unfinished."""
    write_sweep(out, "mine", [("", "m = 4", 4, "arm4"), ("", "m = 8", 8, "arm8")], trials=2)
    for arm, count in (("arm4", 4), ("arm8", 8)):
        for trial in range(trials):
            test = None if (arm, trial) == ("arm8", 1) else 0.5 + trial / 100 + count / 1000
            made = write_trial(
                *(out, arm, trial, rising(0.5, trial, points=2)),
                test=test,
                changes={"keys.filter.count": count},
                **COSTS,
            )
            if test is not None:
                finish(made)
    return out


def keep(out, to):
    (sweep,) = keep_sweeps(out, "c0ffee", COMMANDS)
    return write_kept(sweep, to)


def test_a_kept_sweep_has_the_table_of_its_runs(tmp_path):
    make(tmp_path / "out")
    (read,) = read_results(tmp_path / "out")
    kept = read_kept(keep(tmp_path / "out", tmp_path)).results
    assert [row.last.mean for row in make_table(kept).rows] == pytest.approx(
        [row.last.mean for row in make_table(read).rows], abs=1e-5
    )
    assert [replace(row, last=None) for row in make_table(kept).rows] == [
        replace(row, last=None, unfinished=0) for row in make_table(read).rows
    ]
    assert kept.lines[1].trials[0].spec == read.lines[1].trials[0].spec
    assert np.allclose(kept.lines[0].curve.mean, read.lines[0].curve.mean, atol=1e-5)


def test_a_run_says_how_to_make_it_again(tmp_path):
    kept = read_kept(keep(make(tmp_path / "out"), tmp_path))
    assert kept.command == "keyhole sweep mine.toml"
    run = kept.runs[0]
    assert (run.commit, run.run, len(run.date)) == ("c0ffee", "ab" * 8, 10)
    assert kept.spec["seed"] == 7
    assert kept.lines[1].changes == {"keys.filter.count": 8}


def test_a_figure_is_redrawn_with_the_same_bytes_without_the_runs(tmp_path):
    path = keep(make(tmp_path / "out"), tmp_path)
    drawn = []
    for name in ("one.svg", "two.svg"):
        figure = draw_sweep(replace(read_kept(path).results, figures=("bytes",)))["bytes"]
        drawn.append(save_svg(figure, tmp_path / name).read_bytes())
    assert drawn[0] == drawn[1]
    assert b"<dc:date>" not in drawn[0]


def test_keeping_again_writes_the_same_bytes(tmp_path):
    out = make(tmp_path / "out")
    first = keep(out, tmp_path).read_bytes()
    assert keep(out, tmp_path).read_bytes() == first


def test_runs_whose_folder_is_gone_stay(tmp_path):
    path = keep(make(tmp_path / "out"), tmp_path)
    before = read_kept(path)
    again = tmp_path / "again"
    write_sweep(again, "mine", [("", "m = 8", 8, "arm8"), ("", "m = 4", 4, "arm4")], trials=2)
    made = write_trial(again, "arm8", 1, test=0.9, changes={"keys.filter.count": 8}, **COSTS)
    finish(made)
    after = read_kept(keep(again, tmp_path))
    assert [(run.arm, run.trial) for run in after.runs] == [
        *(("arm8", trial) for trial in (0, 1)),
        *(("arm4", trial) for trial in (0, 1)),
    ]
    assert after.results.lines[1].trials[0].spec == before.results.lines[0].trials[0].spec


def test_a_record_without_a_field_that_came_later_is_read(tmp_path):
    path = keep(make(tmp_path / "out"), tmp_path)
    sweep = read_kept(path)
    older = {name: value for name, value in sweep.spec.items() if name != "mean_over"}
    path.write_text(path.read_text().replace(json.dumps(sweep.spec), json.dumps(older)))
    assert read_kept(path).results.lines[0].trials[0].spec.mean_over == "cohort"


def test_runs_of_another_record_are_dropped(tmp_path):
    keep(make(tmp_path / "out"), tmp_path)
    again = tmp_path / "again"
    write_sweep(again, "mine", [("", "m = 4", 4, "arm4")])
    finish(write_trial(again, "arm4", 0, changes={"client.lr": 0.7}, **COSTS))
    assert len(read_kept(keep(again, tmp_path)).runs) == 1


def test_a_folder_without_a_sweep_and_a_damaged_file_are_refused(tmp_path):
    with pytest.raises(InputError, match="holds no sweep"):
        keep_sweeps(tmp_path, "c0ffee", {})
    path = keep(make(tmp_path / "out"), tmp_path)
    path.write_text(path.read_text().replace('"trials": 2', '"trials": -2'))
    with pytest.raises(InputError, match="is no kept sweep"):
        read_kept(path)


def test_runs_of_an_older_version_are_kept(tmp_path):
    """A field that records did not have then is at its default."""
    for path in make(tmp_path / "out").rglob("run.json"):
        run = json.loads(path.read_text())
        del run["spec"]["best"]
        path.write_text(json.dumps(run))
    kept = read_kept(keep(tmp_path / "out", tmp_path))
    assert kept.results.lines[0].trials[0].spec.best is None
