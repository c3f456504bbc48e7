"""A process that notes sums in a ledger is killed at random moments: no entry that it acknowledged
is lost, none is there twice, and the one that was under way is there once or not at all."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from keyhole.aggregation.privacy import ledger as module
from keyhole.aggregation.privacy.ledger import Charge, Ledger, read_ledger
from keyhole.errors import StorageError
from tests.helpers import ROOT


def killed_after(path, first, seconds):
    """A writer that is killed; returns the number of the last entry that it acknowledged, or
    first - 1."""
    command = [sys.executable, "-m", "tests.attacks.ledger_writer", str(path), str(first)]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    line = writer.stdout.readline()  # it is at work
    time.sleep(seconds)
    os.kill(writer.pid, signal.SIGKILL)
    told = [line, *writer.stdout.read().splitlines(keepends=True)]
    writer.stdout.close()
    writer.wait()
    whole = [int(each) for each in told if each.endswith("\n")]
    return max(whole, default=first - 1)


def numbers(path):
    return [int(entry.sum.removeprefix("sum-")) for entry in read_ledger(path)]


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_killed_writer_loses_and_doubles_nothing(tmp_path, kills):
    path, rng, first = tmp_path / "ledger", random.Random(17), 0
    for _ in range(kills):
        acknowledged = killed_after(path, first, rng.uniform(0, 0.2))
        found = numbers(path)
        assert found == list(range(len(found)))  # none lost, none doubled, none out of order
        assert acknowledged < len(found) <= acknowledged + 2  # and at most one more
        # Whoever goes on notes again what it cannot be sure of.
        first = max(0, acknowledged - 1)
    Ledger(path).charge(Charge("sum-last", "population", 1.0, ()))
    assert read_ledger(path)[-1].sum == "sum-last"


def survives(path, cut):
    """Whether a ledger with one entry holds it, and a second one once, after a death in the middle
    of the second."""
    Ledger(path).charge(Charge("sum-0", "population", 1.0, ("device-1",)))
    command = [sys.executable, "-m", "tests.attacks.ledger_writer", str(path), "1", str(cut)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    Ledger(path).charge(Charge("sum-1", "population", 1.0, ("device-1",)))
    return [entry.sum for entry in read_ledger(path)] == ["sum-0", "sum-1"]


@pytest.mark.parametrize("cut", [1, 65, 100])
def test_a_death_in_the_middle_of_a_line_leaves_a_whole_ledger(tmp_path, cut):
    assert survives(tmp_path / "ledger", cut)


def test_a_ledger_that_keeps_torn_lines_is_caught(tmp_path, monkeypatch):
    """The planted hole: what stands behind the last line's end is taken for written."""
    monkeypatch.setattr(module, "_whole_lines", lambda data, is_start, path: len(data))
    with pytest.raises(StorageError, match="is damaged"):
        survives(tmp_path / "ledger", 100)
