"""What the page and `keyhole status` are told of a folder."""

import json
import shutil

import pytest

from keyhole.errors import InputError
from keyhole.experiments.report.reading import read_results
from keyhole.experiments.watch.folder import RunFolder
from keyhole.rounds.record import encode_records
from tests.experiments.watch.watched import COHORT, make_folder, record_of

TOP4, NOISE = "emnist-top4", "emnist-top8-noise"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("watched"))


@pytest.fixture
def folder(made, tmp_path):
    return RunFolder(shutil.copytree(made, tmp_path / "runs"))


def lines(folder):
    return {run["name"]: run for run in folder.overview()["runs"]}


def test_every_run_has_a_line_and_every_folder_of_rounds(folder):
    told = folder.overview()
    assert {run["name"] for run in told["runs"]} == {TOP4, NOISE}
    (round_,) = told["rounds"]
    assert round_["told"] == "round 4: 0 of 3 updates, 3 devices to come"
    assert told["troubles"] == []
    json.dumps(told, allow_nan=False)
    first, other = lines(folder)[TOP4], lines(folder)[NOISE]
    assert (first["trials"], first["finished"], first["rounds"], first["empty"]) == (3, 3, 6, 1)
    assert (first["short"], other["short"]) == ("top4", "top8-noise")
    assert (first["bytes"], first["broadcast_bytes"]) == (2000, 8000)
    assert (first["is_private"], other["is_private"], other["epsilon"]) == (False, True, 3.25)


def test_the_page_tells_what_the_report_tells(folder):
    told = folder.run(TOP4)
    (sweep,) = read_results(folder.root)
    line = next(line for line in sweep.lines if line.arm == TOP4)
    curve = line.curve
    assert told["curves"]["accuracy"]["mean"] == list(curve.mean)
    assert told["curves"]["accuracy"]["high"] == [s.mean + s.half_width for s in curve.spreads]
    assert [t["trial"] for t in told["curves"]["accuracy"]["trials"]] == [0, 1, 2]
    assert (told["bytes_down"], told["bytes_up"]) == (line.costs.bytes_down, line.costs.bytes_up)
    assert told["learned"] == [
        ("server", line.costs.seen_by["server"], line.costs.seen_in_sum["server"])
    ]
    assert told["broadcast_bytes"] == line.trials[0].broadcast_bytes


def test_cohorts_are_told_round_by_round_with_what_went_wrong(folder):
    told = folder.run(NOISE)
    cohorts = told["cohorts"]
    assert cohorts["asked"] == [COHORT] * 6
    assert (cohorts["added"][2:4], cohorts["late"][2], cohorts["lost_before"][2:4]) == (
        [8, 0],
        1,
        [1, 10],
    )
    assert told["privacy"]["epsilon"] == 3.25
    assert [round_ for round_, _ in told["incidents"]] == [4]  # with noise a sum of nobody is one
    rounds = [round_ for round_, _ in folder.run(TOP4)["incidents"]]
    assert rounds == [4, 3]


def test_records_that_grow_are_read_on_and_a_half_line_waits(folder):
    folder.overview()
    path = folder.root / NOISE / "trial-0" / "records.jsonl"
    line = encode_records([record_of(6, 0.9)])
    with path.open("ab") as file:
        file.write(line[:40])
    assert lines(folder)[NOISE]["rounds"] == 6
    with path.open("ab") as file:
        file.write(line[40:])
    assert lines(folder)[NOISE]["rounds"] == 7
    assert folder.run(NOISE)["cohorts"]["round"] == list(range(7))
    whole = path.read_bytes()
    path.unlink()  # a run that goes on replaces the file
    path.write_bytes(whole[: whole.index(b"\n") + 1])
    assert lines(folder)[NOISE]["rounds"] == 1


def test_a_look_without_patience_reads_the_newest_run_and_the_next_look_the_others(folder):
    hasty = RunFolder(folder.root, patience=-1.0)
    assert (hasty.overview()["runs"], hasty.overview()["unread"]) == ([], 2)
    hasty.run(NOISE)
    told = hasty.overview()
    assert ([run["name"] for run in told["runs"]], told["unread"]) == ([NOISE], 1)
    assert folder.overview()["unread"] == 0


def test_records_of_few_trials_stay_in_memory_and_all_runs_are_told(folder, monkeypatch):
    monkeypatch.setattr("keyhole.experiments.watch.folder._KEPT", 1)
    assert {run["empty"] for run in folder.overview()["runs"]} == {0, 1}
    assert len(folder._records) == 1
    assert folder.run(TOP4)["cohorts"]["asked"] == [COHORT] * 6
    path = folder.root / NOISE / "trial-0" / "records.jsonl"
    with path.open("ab") as file:
        file.write(encode_records([record_of(6, 0.9)]))
    assert lines(folder)[NOISE]["rounds"] == 7


def test_a_damaged_run_is_named_and_hides_no_other(folder):
    (folder.root / NOISE / "trial-0" / "run.json").write_text("{")
    told = folder.overview()
    assert [run["name"] for run in told["runs"]] == [TOP4]
    (trouble,) = told["troubles"]
    assert trouble.startswith(f"{NOISE}: {NOISE}/trial-0/run.json is not the set-up of a run")


def test_links_that_lead_out_are_not_followed(folder, tmp_path):
    outside = make_folder(tmp_path / "outside")
    secret = folder.root / "emnist-linked"
    secret.symlink_to(outside / TOP4)
    inner = folder.root / "emnist-inner"
    inner.mkdir()
    (inner / "trial-0").symlink_to(outside / TOP4 / "trial-0")
    files = folder.root / "emnist-files" / "trial-0"
    shutil.copytree(outside / TOP4 / "trial-0", files)
    (files / "records.jsonl").unlink()
    (files / "records.jsonl").symlink_to(outside / TOP4 / "trial-0" / "records.jsonl")
    rounds = folder.root / "linked-rounds"
    rounds.mkdir()
    (rounds / "current.json").symlink_to(outside / "rounds" / "current.json")
    told = folder.overview()
    assert {run["name"] for run in told["runs"]} == {TOP4, NOISE}
    assert len(told["rounds"]) == 1


@pytest.mark.parametrize(
    "name", ["", "..", "../outside/emnist-top4", "/etc", "emnist-top4/trial-0"]
)
def test_a_name_that_is_not_in_the_list_is_refused(folder, tmp_path, name):
    make_folder(tmp_path / "outside")
    with pytest.raises(InputError, match="no such run"):
        folder.run(name)


def test_a_trial_stands_for_its_run_and_an_empty_folder_for_nothing(folder, tmp_path):
    one = RunFolder(folder.root / TOP4 / "trial-0")
    assert [run["label"] for run in one.overview()["runs"]] == [TOP4]
    assert one.run(".")["trials"] == 3
    (tmp_path / "empty").mkdir()
    told = RunFolder(tmp_path / "empty").overview()
    assert (told["runs"], told["rounds"], told["troubles"]) == ([], [], [])
