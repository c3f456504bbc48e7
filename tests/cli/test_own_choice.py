"""`keyhole train --keys module:NAME`: a choice of one's own, as docs/own-keys.md says."""

import json
import sys

import pytest

from keyhole.errors import InputError

CHOICE = """
def last(counts, keys_per_client, rng):
    return counts.space.all_keys().array[{}]
"""
TINY = ("--size", "neurons=16", "--size", "hidden=8", "--cohort", "3", "--rounds", "2")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes the module `mine_of_a_test`, as if it had been edited since it was last imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(which):
        sys.modules.pop("mine_of_a_test", None)
        (tmp_path / "mine_of_a_test.py").write_text(CHOICE.format(which))

    yield write
    sys.modules.pop("mine_of_a_test", None)


def test_an_own_choice_trains_and_is_told_from_another_of_its_name(
    keyhole, few_writers, mine, tmp_path
):
    options = ("--keys", "mine_of_a_test:last", "--m", 5, "--out", tmp_path / "runs", "--json")
    asked = ("train", "emnist_2nn", *TINY, "--data", few_writers, *options)
    mine("-keys_per_client:")
    first = keyhole(*asked)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)[0]["client_size"] == 5 * 793 + 566
    assert keyhole(*asked).stdout == first.stdout
    mine(":keys_per_client")
    other = keyhole(*asked)
    assert other.returncode == InputError.exit_code
    assert "holds a run with another choices.neuron" in other.stderr
