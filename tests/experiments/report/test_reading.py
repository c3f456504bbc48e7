"""Reading runs: what is there, what is lacking, and what is refused; means by hand."""

import json
import math

import pytest

from keyhole.errors import InputError
from keyhole.experiments.report.reading import read_results
from keyhole.experiments.report.results import mean_curve
from keyhole.experiments.statistics import Spread, spread_of
from tests.experiments.report.runs import write_sweep, write_trial

LINE = ("CNN", "m = 4", 4, "arm")


def read_one(out):
    (sweep,) = read_results(out)
    return sweep


def test_trials_of_a_line_are_read_and_averaged(tmp_path):
    write_sweep(tmp_path, "s", [LINE])
    write_trial(tmp_path, "arm", 0, curve=(0.2, 0.4), test=0.5, seconds=60)
    write_trial(tmp_path, "arm", 1, curve=(0.4, 0.6), test=0.6, seconds=120)
    (line,) = read_one(tmp_path).lines
    assert line.curve.rounds == (10, 20)
    assert line.curve.mean == pytest.approx((0.3, 0.5))
    assert line.test.mean == pytest.approx(0.55)
    assert line.relative_size == pytest.approx(0.1)
    assert line.minutes == pytest.approx(1.5)
    assert line.trials[0].settings["client.lr"] == 0.1


def test_unfinished_trials_are_counted_and_not_averaged(tmp_path):
    write_sweep(tmp_path, "s", [LINE])
    write_trial(tmp_path, "arm", 0, curve=(0.2, 0.4), test=0.5)
    write_trial(tmp_path, "arm", 1, curve=(0.9,), test=None)
    sweep = read_one(tmp_path)
    (line,) = sweep.lines
    assert line.test.trials == 1
    assert line.curve.mean == (0.2, 0.4)
    assert [trial.number for trial in line.unfinished] == [1]
    assert line.unfinished[0].rounds_done == 10
    assert not sweep.is_complete(line)


def test_a_line_without_a_finished_trial_shows_the_curve_so_far(tmp_path):
    write_sweep(tmp_path, "s", [LINE])
    write_trial(tmp_path, "arm", 0, curve=(0.2, 0.4), test=None)
    write_trial(tmp_path, "arm", 1, curve=(0.4,), test=None)
    (line,) = read_one(tmp_path).lines
    assert line.test is None
    assert line.curve.rounds == (10,)
    assert line.curve.mean == pytest.approx((0.3,))


def test_trials_that_other_lines_have_are_missed(tmp_path):
    write_sweep(tmp_path, "s", [LINE, ("CNN", "m = 8", 8, "other"), ("CNN", "m = 16", 16, "none")])
    for trial in range(3):
        write_trial(tmp_path, "arm", trial)
    write_trial(tmp_path, "other", 2)
    sweep = read_one(tmp_path)
    assert sweep.trials == 3
    assert [sweep.is_complete(line) for line in sweep.lines] == [True, False, False]


def test_the_number_of_trials_that_was_asked_for_counts(tmp_path):
    write_sweep(tmp_path, "s", [LINE], trials=5)
    write_trial(tmp_path, "arm", 0)
    assert read_one(tmp_path).trials == 5


def test_a_directory_without_a_run_was_not_begun(tmp_path):
    write_sweep(tmp_path, "s", [LINE])
    (tmp_path / "arm" / "trial-0").mkdir(parents=True)
    assert read_one(tmp_path).lines[0].trials == ()


def test_sweeps_share_an_arm(tmp_path):
    write_sweep(tmp_path, "a", [LINE])
    write_sweep(tmp_path, "b", [LINE])
    write_trial(tmp_path, "arm", 0)
    first, second = read_results(tmp_path)
    assert first.lines[0].trials is second.lines[0].trials


def test_an_unfinished_last_line_of_records_is_left_out(tmp_path):
    write_sweep(tmp_path, "s", [LINE])
    path = write_trial(tmp_path, "arm", 0, curve=(0.2, 0.4), test=None) / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert read_one(tmp_path).lines[0].curve.rounds == (10,)


def test_a_directory_without_sweeps_says_so(tmp_path):
    with pytest.raises(InputError, match="holds no sweep"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sweep": "../other"}, "sweep '../other'"),
        ({"title": "two\nlines"}, "title is not printable"),
        ({"metric": 3}, "at `metric`"),
        ({"metric": "loss"}, "trial 0 of arm"),
        ({"figures": ["pie"]}, "'pie' - at `figures"),
        ({"lines": []}, "at `lines`"),
        ({"lines": [3]}, r"at `lines\[0\]`"),
        (
            {"lines": [{"label": "a", "arm": "../x"}]},
            r"arm is not the .* at `lines\[0\]`",
        ),
        (
            {"lines": [{"label": "a", "arm": ".."}]},
            r"arm is not the .* at `lines\[0\]`",
        ),
        ({"lines": [{"label": "a", "arm": "arm", "x": "b"}]}, r"at `lines\[0\].x`"),
        ({"lines": [{"label": "a", "arm": "arm"}] * 2}, "two lines of a panel are alike"),
    ],
)
def test_a_damaged_sweep_is_named_with_its_field(tmp_path, change, message):
    write_sweep(tmp_path, "s", [LINE], **change)
    write_trial(tmp_path, "arm", 0)
    with pytest.raises(InputError, match=message):
        read_results(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\udcff", '{"a": 1}'])
def test_a_foreign_file_is_named_and_left_out(tmp_path, text):
    (tmp_path / "s.json").write_text(text, errors="surrogateescape")
    write_sweep(tmp_path, "t", [LINE])
    skipped = []
    assert [sweep.name for sweep in read_results(tmp_path, on_skip=skipped.append)] == ["t"]
    assert skipped == [f"{tmp_path}/s.json is left out: it is no sweep of `keyhole sweep`"]


def test_a_file_with_the_name_of_a_sweep_alone_is_one_error(tmp_path):
    (tmp_path / "s.json").write_text('{"sweep": "s"}')
    with pytest.raises(InputError, match=r"s\.json is not a sweep") as refused:
        read_results(tmp_path)
    assert "\n" not in str(refused.value)


def test_sweeps_are_found_beside_their_runs_at_any_depth(tmp_path):
    for folder in ("small", "a/b/c"):
        write_sweep(tmp_path / folder, folder[-1], [LINE])
        write_trial(tmp_path / folder, "arm", 0)
    write_trial(tmp_path / "x/y/z", "alone", 0)
    skipped = []
    found = read_results(tmp_path, on_skip=skipped.append)
    assert [sweep.name for sweep in found] == ["c", "l", "emnist-cnn-runs"]
    assert [len(sweep.lines[0].trials) for sweep in found] == [1, 1, 1]
    assert skipped == []


def test_a_second_sweep_of_one_name_is_named_and_left_out(tmp_path):
    for folder in ("paper", "small"):
        write_sweep(tmp_path / folder, "s", [LINE])
        write_trial(tmp_path / folder, "arm", 0)
    skipped = []
    assert [sweep.name for sweep in read_results(tmp_path, on_skip=skipped.append)] == ["s"]
    assert [text.partition(" is left out")[0] for text in skipped] == [f"{tmp_path}/small/s.json"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("run.json", "{}"),
        ("run.json", '{"size": {"server": 0, "client": 1}, "spec": {"version": 1}}'),
        ("result.json", '{"rounds": 3}'),
        ("result.json", '{"rounds": 3, "seconds": 1, "metrics": {"accuracy": "high"}}'),
        ("records.jsonl", "not json\n"),
        ("records.jsonl", '{"round": "x", "step": 1, "clients": []}\n'),
        ("records.jsonl", '{"round": 1, "step": 1, "clients": [], "metrics": 3}\n'),
    ],
)
def test_a_damaged_file_of_a_trial_is_named(tmp_path, file, text):
    write_sweep(tmp_path, "s", [LINE])
    (write_trial(tmp_path, "arm", 0) / file).write_text(text)
    with pytest.raises(InputError, match=f"arm/trial-0/{file}"):
        read_results(tmp_path)


def test_a_trial_in_the_wrong_directory_is_refused(tmp_path):
    write_sweep(tmp_path, "s", [LINE])
    directory = write_trial(tmp_path, "arm", 0)
    directory.rename(directory.with_name("trial-1"))
    with pytest.raises(InputError, match=r"spec\.trial 0 in another"):
        read_results(tmp_path)


def test_trials_that_were_set_up_differently_are_told(tmp_path):
    write_sweep(tmp_path, "s", [LINE])
    write_trial(tmp_path, "arm", 0, changes={"client.lr": 0.1})
    write_trial(tmp_path, "arm", 1, changes={"client.lr": 0.2})
    assert read_one(tmp_path).lines[0].differing == ("client.lr",)


def test_a_run_that_diverged_is_read(tmp_path):
    write_sweep(tmp_path, "s", [LINE])
    write_trial(tmp_path, "arm", 0, test=math.nan)
    assert math.isnan(read_one(tmp_path).lines[0].test.mean)


def test_a_run_that_goes_on_beyond_its_result_is_unfinished(tmp_path):
    write_sweep(tmp_path, "s", [LINE])
    write_trial(tmp_path, "arm", 0, curve=(0.2, 0.4, 0.5), rounds=20)
    (line,) = read_one(tmp_path).lines
    assert (len(line.finished), len(line.unfinished)) == (0, 1)
    assert line.unfinished[0].rounds_done == 30


def test_the_split_of_the_curves_is_told_only_if_runs_agree(tmp_path):
    write_sweep(tmp_path, "s", [LINE, ("CNN", "m = 8", 8, "other")])
    write_trial(tmp_path, "arm", 0)
    assert read_one(tmp_path).split == "validation"
    path = write_trial(tmp_path, "other", 0) / "run.json"
    path.write_text(path.read_text().replace('"curve": "validation"', '"curve": "test"'))
    assert read_one(tmp_path).split == ""


@pytest.mark.parametrize(
    ("share", "word"), [(1.0, "held-out"), (0.0, "training"), (0.5, "devices'"), (None, "devices'")]
)
def test_what_devices_measured_on_is_told_in_place_of_a_split(tmp_path, share, word):
    write_sweep(tmp_path, "s", [LINE])
    by_devices = {"cohort.sampling": "check-in", "cohort.evaluators": 2}
    arm = write_trial(tmp_path, "arm", 0, changes=by_devices)
    lines = [json.loads(line) for line in (arm / "records.jsonl").read_text().splitlines()]
    for line in lines:
        line["metrics"] |= {} if share is None else {"held_out_share": share}
    (arm / "records.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = read_one(tmp_path)
    assert (found.split, found.tested_on) == (word, word)
    assert "held_out_share" not in found.lines[0].trials[0].curves


def test_the_deviation_is_the_sample_standard_deviation():
    """0.70, 0.74, 0.81: mean 0.75, squares 0.0025 + 0.0001 + 0.0036 = 0.0062, over 2 = 0.0031."""
    spread = spread_of([0.70, 0.74, 0.81])
    assert spread.mean == pytest.approx(0.75)
    assert spread.deviation == pytest.approx(math.sqrt(0.0031))
    assert spread.trials == 3


def test_one_trial_has_no_deviation():
    assert spread_of([0.3]) == Spread(0.3, None, 1)


def test_no_trial_has_no_spread():
    assert spread_of([]) is None


def test_a_trial_that_diverged_is_not_left_out():
    spread = spread_of([0.5, math.nan, 0.6])
    assert math.isnan(spread.mean)
    assert spread.trials == 3


def test_a_curve_is_over_the_rounds_that_all_trials_have():
    curve = mean_curve([{10: 0.1, 20: 0.4, 30: 0.9}, {10: 0.3, 20: 0.2}])
    assert curve.rounds == (10, 20)
    assert curve.mean == pytest.approx((0.2, 0.3))
    assert [s.deviation for s in curve.spreads] == pytest.approx([math.sqrt(0.02)] * 2)
    assert [spread.trials for spread in curve.spreads] == [2, 2]


def test_a_curve_of_one_trial_has_no_shade():
    assert mean_curve([{1: 0.5}]).spreads[0].half_width is None


def test_a_curve_of_no_trial_is_empty():
    assert mean_curve([]).rounds == ()
