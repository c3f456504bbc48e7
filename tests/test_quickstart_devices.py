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
