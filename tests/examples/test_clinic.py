"""examples/clinic: eight processes with their own files; one dies, one stops, one comes late."""

import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.shell import without_test_settings


@pytest.mark.slow
def test_clinics_that_nobody_named_train_in_private_and_measure_the_model(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "clinic" / "run.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
        env=without_test_settings(tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rounds = re.findall(r"^round (\d) closed.*: (\d) of \d updates count", done.stdout, re.M)
    assert [int(number) for number, _ in rounds] == [0, 1, 2, 3]
    # Three are the min clients of devices: a round that had fewer at its deadline was not opened.
    opened = [int(count) for _, count in rounds if count != "0"]
    assert min(opened) >= 3
    assert len(opened) >= 2
    assert "who learned what of codes\n  first server: who takes part\n" in done.stdout
    measured = [
        float(value)
        for value in re.findall(r"accuracy (0\.\d+); held_out_share 1\.000$", done.stdout, re.M)
    ]
    assert len(measured) == 2
    assert all(0 < value < 1 for value in measured)
