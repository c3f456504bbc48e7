"""`keyhole report`: files, JSON, one line and exit code 2."""

import json
import subprocess
import sys

import pytest

import keyhole as kh
from keyhole.cli import main as cli
from tests.experiments.report.runs import write_sweep, write_trial
from tests.front.test_train import SETTINGS, make_task
from tests.helpers import LONG


def keyhole(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(arg) for arg in args])
    printed = capsys.readouterr()
    return ended.value.code or 0, printed.out, printed.err


@pytest.fixture
def out(tmp_path):
    write_sweep(tmp_path / "runs", "emnist-cnn", [("CNN", "m = 4", 4, "cnn")], figures=["final"])
    write_trial(tmp_path / "runs", "cnn", 0)
    return tmp_path / "runs"


def test_files_are_written_and_named(out, capsys):
    code, printed, _ = keyhole(capsys, "report", out)
    endings = ("-final.png", "-final.svg", ".md", ".csv", ".tex")
    names = [*(f"emnist-cnn{ending}" for ending in endings), "index.html"]
    assert code == 0
    assert printed.splitlines() == [str(out / "report" / name) for name in names]
    assert sorted(path.name for path in (out / "report").iterdir()) == sorted(names)
    text = (out / "report" / "emnist-cnn.md").read_text()
    assert text.startswith("The paper (Figure 5 (left) and Table 2): ")
    assert "| CNN | m = 4 | 0.10 | 50.00 | - | 1 | 20 | 1.5 | 75.02 ± 0.92 | 0.08 |" in text


def test_sweeps_stand_in_the_order_of_the_paper(out, capsys):
    write_sweep(out, "a-sweep-of-ours", [("", "a", 1, "cnn")], figures=[])
    write_sweep(out, "tag-recall", [("", "a", 1, "cnn")], figures=[])
    _, printed, _ = keyhole(capsys, "report", out, "--json")
    names = [table["sweep"] for table in json.loads(printed)]
    assert names == ["tag-recall", "emnist-cnn", "a-sweep-of-ours"]


def test_json_holds_the_tables_and_files_are_written_elsewhere(out, tmp_path, capsys):
    code, printed, _ = keyhole(capsys, "report", out, "--to", tmp_path / "a" / "b", "--json")
    (table,) = json.loads(printed)
    assert code == 0
    assert table["rows"][0]["test"] == {"mean": 0.5, "deviation": None, "trials": 1}
    assert table["rows"][0]["paper"]["mean"] == 75.02
    assert (tmp_path / "a" / "b" / "index.html").exists()
    assert not (out / "report").exists()


def test_a_report_can_be_made_again(out, capsys):
    keyhole(capsys, "report", out)
    first = (out / "report" / "index.html").read_bytes()
    assert keyhole(capsys, "report", out)[0] == 0
    assert (out / "report" / "index.html").read_bytes() == first


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, out, capsys):
    (tmp_path / "empty").mkdir()
    code, _, said = keyhole(capsys, "report", tmp_path / "empty")
    assert (code, said.count("\n")) == (2, 1)
    assert "holds no sweep and no run" in said
    (out / "broken.json").write_text('{"sweep": "broken"}')
    code, _, said = keyhole(capsys, "report", out)
    assert code == 2
    assert said.startswith("keyhole: broken.json is not a sweep: got ")
    assert keyhole(capsys, "report", tmp_path / "nowhere")[0] == 2
    assert "privacy stands alone" in keyhole(capsys, "report", out, "privacy")[2]
    assert keyhole(capsys, "report", out, "--to", out / "emnist-cnn.json")[0] == 2


def test_help_does_not_import_matplotlib():
    code = (
        "import sys, keyhole.cli.main as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('matplotlib' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"report" in done.stdout


def test_runs_of_the_front_door_are_drawn(tmp_path, capsys):
    kept, to = tmp_path / "kept", tmp_path / "report"
    for name, m in {"full": "all", "few": 5}.items():
        settings = {**SETTINGS, "evaluate_every": 1, "out": kept / name}
        kh.train(make_task(), rounds=2, m=m, trials=2, **settings)
    few, full = kept / "few", kept / "full"
    for places, labels in (([few, full], ["few", "full"]), ([few], ["few"])):
        code, printed, said = keyhole(capsys, "report", *places, "--to", to, "--json")
        assert code == 0, said
        (table,) = json.loads(printed)
        assert [row["label"] for row in table["rows"]] == labels
        assert all(row["test"]["trials"] == 2 for row in table["rows"])
    assert (to / "task-runs-overview.png").stat().st_size > 1000
