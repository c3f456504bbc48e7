"""`keyhole privacy`: a table of 80 columns, and the same as JSON."""

import json

import pytest
from click.testing import CliRunner

from keyhole.aggregation.privacy.ledger import Charge, Ledger, default_ledger
from keyhole.cli.aggregator import aggregator
from keyhole.cli.device import device
from keyhole.cli.privacy import privacy
from keyhole.errors import InputError, StorageError

pytest.importorskip("dp_accounting")


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path / "sums" / "ledger")
    made.charge(Charge("a", "trainer-1", 1.0, ("device-1", "device-2")))
    made.charge(Charge("b", "trainer-2", 1.0, ("device-2",)))
    made.charge(Charge("c", "trainer-2", 0.0, tuple(f"device-{n}" for n in range(30, 60))))
    return tmp_path / "sums" / "ledger"


def run(*args):
    done = CliRunner().invoke(privacy, [str(each) for each in args], env={"COLUMNS": "80"})
    if isinstance(done.exception, InputError | StorageError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_it_shows_populations_and_devices_the_dearest_first(ledger):
    shown = run(ledger)
    assert all(len(line) <= 80 for line in shown.splitlines())
    cells = [" ".join(line.replace("│", " ").split()) for line in shown.splitlines()]
    lines = [line for line in cells if line.startswith(("trainer", "device-"))]
    assert lines[:3] == ["trainer-2 2 no bound", "trainer-1 1 4.887", "device-30 1 no bound"]
    assert shown.rstrip().endswith("at delta 1e-06; 12 more devices: --all")
    assert "device-59" in run(ledger, "--all")


def test_the_directory_of_an_aggregator_has_its_ledger(ledger):
    assert run(ledger.parent) == run(ledger)


def test_json_has_the_numbers(ledger):
    told = json.loads(run(ledger, "--json"))
    spent = {each["name"]: (each["sums"], each["epsilon"]) for each in told["devices"]}
    assert spent["device-1"] == (1, pytest.approx(4.887, abs=1e-3))
    assert spent["device-2"] == (2, pytest.approx(7.286, abs=1e-3))
    assert spent["device-30"] == (1, None)
    assert [each["name"] for each in told["populations"]] == ["trainer-2", "trainer-1"]
    assert told["composition"].startswith("Gaussians")


def test_one_device_and_another_delta(ledger):
    told = json.loads(run(ledger, "--json", "--device", "device-1", "--delta", "1e-5"))
    assert [each["name"] for each in told["devices"]] == ["device-1"]
    assert told["devices"][0]["epsilon"] == pytest.approx(4.377, abs=1e-3)
    with pytest.raises(InputError, match="no such device: got nobody"):
        run(ledger, "--device", "nobody")


def test_a_directory_without_a_ledger_is_one_error(tmp_path):
    with pytest.raises(StorageError, match="cannot read ledger"):
        run(tmp_path)


def test_without_an_argument_it_shows_the_ledger_of_this_users_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_ledger() == tmp_path / "keyhole" / "ledger"
    Ledger(default_ledger()).charge(Charge("a", "trainer-1", 1.0, ("device-1",)))
    assert "device-1" in run()
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_ledger() == tmp_path / ".local" / "state" / "keyhole" / "ledger"
    with pytest.raises(StorageError, match="cannot read ledger"):
        run()


def test_a_budget_of_a_device_goes_with_aggregators(tmp_path):
    args = ["http://127.0.0.1:9", "--task", "so_tag", "--max-epsilon", "3"]
    done = CliRunner().invoke(device, args)
    assert "--max-epsilon goes with --aggregators" in done.output


def test_an_aggregator_has_a_budget():
    assert {"--max-epsilon", "--delta"} <= {name for p in aggregator.params for name in p.opts}
