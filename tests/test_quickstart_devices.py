"""docs/quickstart-devices.md: its files and its commands, as printed, end with a trained model."""

import re

import pytest

import keyhole as kh
from tests.helpers import ROOT
from tests.shell import run_as_typed

PAGE = (ROOT / "docs" / "quickstart-devices.md").read_text()
FILES = dict(
    zip(("films.py", "likes.py"), re.findall(r"```python\n(.*?)```", PAGE, re.S), strict=True)
)
(COMMANDS,) = re.findall(r"```sh\n(.*?)```", PAGE, re.S)


def test_there_are_at_most_eight_commands():
    assert len(COMMANDS.splitlines()) <= 8


@pytest.mark.slow
def test_the_page_trains_a_model_on_three_devices(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    code, printed = run_as_typed(COMMANDS, tmp_path)
    assert code == 0, printed
    (folder,) = (tmp_path / "keyhole-runs").iterdir()
    run = kh.open_run(folder)
    assert [len(record.staleness) for record in run.records()] == [3] * 5


METRIC = (
    'TASK = kh.Task(model, data, name="films", metrics={"mean": lambda o, e: float(np.mean(o))})'
)
MEASURED = " --evaluate-every 2 --held-out ann.csv --evaluators 2\nkill %1 %2 %3 %4\n"


@pytest.mark.slow
def test_a_trainer_measures_beside_its_devices(tmp_path, monkeypatch):
    films = FILES["films.py"].replace('TASK = kh.Task(model, data, name="films")', METRIC)
    assert METRIC in films
    for name, text in {**FILES, "films.py": films}.items():
        (tmp_path / name).write_text(text)
    commands = COMMANDS.replace("--rounds 5 &", "&").rstrip() + MEASURED
    code, printed = run_as_typed(commands, tmp_path)
    assert code == 0, printed
    (folder,) = (tmp_path / "keyhole-runs").iterdir()
    records = kh.open_run(folder).records()
    measured = {"mean", "held_out_mean", "held_out_share"}
    assert [set(record.metrics) for record in records] == [set(), measured] * 2 + [set()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (trial,) = kh.open_run(folder).trials
    assert set(trial.result.metrics) == measured
    assert trial.result.metrics["held_out_share"] == 0
    found = kh.open_run(folder).evaluate()
    assert found == {"mean": pytest.approx(trial.result.metrics["held_out_mean"])}
