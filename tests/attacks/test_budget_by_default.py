"""A trainer asks one device for more than its budget: run after run, start after start.

A device that is told a budget and no ledger keeps one all the same, in its user's state directory.
One that forgets what it spent when it is started anew is the planted hole. Devices of one machine
share that file: each is charged for its own part of a sum.
"""

import pytest

pytest.importorskip("dp_accounting")

from contextlib import closing

from keyhole.aggregation.privacy import ledger as ledgers
from keyhole.aggregation.privacy.ledger import Charge, Ledger, default_ledger, read_ledger
from keyhole.cli.sums import send_of
from keyhole.device.device import Device
from keyhole.errors import BudgetError
from keyhole.service.access import Keyring

OPTIONS = {
    "aggregators": tuple(f"http://127.0.0.1:{port}#" + "ab" * 32 for port in (8, 9)),
    "aggregator_tokens": (),
    "aggregation": None,
    "trainer_key": None,
    "trust_service": True,
    "min_clients": None,
    "min_noise": None,
    "min_clients_per_key": None,
    "ledger": None,
    "max_bytes": None,
    "token_file": None,
    "max_epsilon": 5.0,  # one sum with noise 1 costs 4.887, two 7.286
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def start(client=3, **options):
    """What `keyhole device` sends by, as one start of it makes that."""
    given = {**OPTIONS, "client": client, **options}
    return send_of(given, lambda name, url, token: Device(url))


def spend(send, round_id):
    """A sum with noise 1, as `SumSend` notes it before anything leaves."""
    with closing(send.ledger):
        return send.ledger.charge(Charge(round_id, "https://slices.example", 1.0, (send.name,)))


def test_a_budget_holds_over_two_starts_without_a_word_on_ledgers():
    assert spend(start(), "0-a")
    with pytest.raises(BudgetError, match="more privacy than the ledger allows"):
        spend(start(), "1-b")
    assert [entry.sum for entry in read_ledger(default_ledger())] == ["0-a"]
    assert default_ledger().stat().st_mode & 0o077 == 0


def test_a_device_that_starts_from_nothing_spends_twice(tmp_path, monkeypatch):
    """The hole."""
    assert spend(start(), "0-a")
    monkeypatch.setattr(ledgers, "default_ledger", lambda: tmp_path / "another")
    assert spend(start(), "1-b")


def test_devices_that_share_the_file_are_charged_each():
    assert spend(start(3), "0-a")
    assert spend(start(4), "0-a")
    assert not spend(start(4), "0-a")  # a share that is sent again
    with pytest.raises(BudgetError):
        spend(start(4), "1-b")
    with closing(Ledger(default_ledger())) as kept:
        assert {name: spent.sums for name, spent in kept.totals.devices.items()} == {
            "device-3": 1,
            "device-4": 1,
        }
        assert kept.totals.populations["https://slices.example"].sums == 1


def test_so_are_devices_with_examples_of_their_own(tmp_path):
    ring = Keyring((b"k" * 32,))
    for name in ("ann", "ben"):
        (tmp_path / name).write_text(ring.issue("device", name, now=0.0, seconds=60.0))
        assert spend(start(None, token_file=tmp_path / name), "0-a")
    with closing(Ledger(default_ledger())) as kept:
        assert {name: spent.sums for name, spent in kept.totals.devices.items()} == {
            "ann": 1,
            "ben": 1,
        }
