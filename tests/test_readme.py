"""README.md: the commands by hand are run as printed, in an empty folder."""

import re

import pytest

import keyhole as kh
from tests.helpers import ROOT
from tests.shell import run_as_typed

SECTION = (ROOT / "README.md").read_text().split("## Over a network")[1].split("\n## ")[0]
(BY_HAND,) = [
    block for block in re.findall(r"```\n(.*?)```", SECTION, re.S) if "keyhole serve" in block
]


@pytest.mark.slow
def test_a_service_and_devices_started_by_hand_train_a_model(tmp_path):
    code, printed = run_as_typed(BY_HAND, tmp_path)
    (folder,) = (tmp_path / "keyhole-runs").iterdir()
    records = kh.open_run(folder).records()
    assert [len(record.staleness) for record in records] == [2] * 5, printed
    assert code == 0, printed
