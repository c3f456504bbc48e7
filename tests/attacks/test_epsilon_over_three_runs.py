"""Three runs, each within its own budget, add up: the ledger of an aggregator, and that of a
device, refuses the third. A trainer that starts anew does not start a new account of anybody."""

import time
from dataclasses import replace

import pytest

from keyhole.aggregation.privacy.ledger import Budget, Ledger, read_ledger
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.errors import BudgetError, InputError
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from keyhole.service.directory import read_current
from keyhole.service.sum_services import SumServices
from keyhole.service.sums import Sums
from tests.service.small_service import small_service
from tests.service.sums.aggregators import aggregators
from tests.service.sums.private_run import (
    POPULATION,
    devices,
    make_clients,
    make_plan,
    make_state,
    served,
)

pytest.importorskip("dp_accounting")

LONG = 120.0  # seconds
# One round with z = 2 is 2.25 at delta 1e-6, two are 3.31 and three 4.15.
ALLOWED = Budget(3.5)
PRIVACY = Privacy(clip=2.0, noise=2.0, delta=1e-6, budget=3.0)
EVERYBODY = make_plan(cohorts=Cohorts(POPULATION, POPULATION), privacy=PRIVACY)


def train(directory, pair, number, to=None):
    """One run of one round, at a service of its own, with a salt and a name of its own, as a new
    trainer has."""
    lines = [pair.trainer(party, f"trainer-{number}") for party in (0, 1)]
    inbox = SumServices(*lines, salt=bytes([number]) * 16)
    with (
        small_service(directory / f"rounds-{number}") as service,
        devices(service, pair, to=to) as met,
    ):
        kind = served(service, pair, seconds=LONG, named=False)
        kind.inbox = inbox
        if to is not None:  # devices that refuse send nothing: then nobody is waited for
            kind.on_arrival = lambda _: len(met) == POPULATION and setattr(kind, "clock", late)
        run = start_run(make_state(), make_clients(), EVERYBODY, kind=kind)
        (record,) = run.rounds(1)
    return record, met


def uploads(directory):
    return sorted((directory / "sums").rglob("uploads/*/device*"))


def late():
    return time.monotonic() + 2 * LONG


def test_aggregators_refuse_the_third_run(tmp_path):
    with aggregators(tmp_path / "sums", budget=ALLOWED) as pair:
        for number in range(2):
            record, _ = train(tmp_path, pair, number)
            assert record.not_opened is None
            assert record.privacy["epsilon"] < PRIVACY.budget  # each run keeps to its own budget
        with pytest.raises(InputError, match="more privacy than the ledger allows"):
            train(tmp_path, pair, 2)
        assert read_current(tmp_path / "rounds-2") is None  # no device has seen a round of it
    for party in (0, 1):
        entries = read_ledger(tmp_path / "sums" / str(party) / "ledger")
        assert [len(entry.devices) for entry in entries] == [POPULATION, POPULATION]
        assert [entry.noise for entry in entries] == [2.0, 2.0]
        assert [entry.population for entry in entries] == ["trainer-0", "trainer-1"]


@pytest.mark.slow
def test_an_aggregator_without_a_ledger_would_serve_the_third_run(tmp_path, monkeypatch):
    """The planted hole: sums are opened and added up without a look at the ledger."""
    monkeypatch.setattr(Ledger, "check", lambda ledger, entry: None)
    monkeypatch.setattr(Sums, "charge", lambda sums, round_id, names: None)
    with aggregators(tmp_path / "sums", budget=ALLOWED) as pair:
        found = [train(tmp_path, pair, number)[0] for number in range(3)]
    assert [record.not_opened for record in found] == [None] * 3


def test_devices_refuse_the_third_run(tmp_path):
    """These aggregators have no budget; the devices have, each its own."""
    ledgers = {c: Ledger(tmp_path / f"ledger-{c}", ALLOWED) for c in range(POPULATION)}

    def with_ledger(client, send):
        return replace(send, ledger=ledgers[client], name=f"device-{client}")

    with aggregators(tmp_path / "sums") as pair:
        for number in range(2):
            record, _ = train(tmp_path, pair, number, with_ledger)
            assert record.not_opened is None
        before = uploads(tmp_path)
        record, met = train(tmp_path, pair, 2, with_ledger)
        assert set(uploads(tmp_path)) <= set(before)  # nothing was sent
    assert record.not_opened is not None
    assert len(met) == POPULATION
    assert all(isinstance(error, BudgetError) for error in met)
    for client in range(POPULATION):
        entries = read_ledger(tmp_path / f"ledger-{client}")
        assert len({entry.population for entry in entries}) == len(entries) == 2
