"""A trainer asks for noise that is there in name only.

With a noise multiplier of 1e-160 the cost of a sum is no number: a ledger that noted the sum before
it knew what it cost could never be opened again, at a device and at an aggregator. With 1e-9 a sum
of two of six counted as hidden by noise, and one of the two is the trainer's.
"""

import json
from contextlib import closing
from math import inf

import pytest
from click.testing import CliRunner

from keyhole.aggregation.privacy.ledger import Budget, Charge, Ledger, describe, read_ledger
from keyhole.aggregation.shares import HIDING_NOISE, SumFacts
from keyhole.cli.privacy import privacy
from keyhole.errors import BudgetError, InputError
from tests.attacks.secure_sums import (
    COHORT,
    OWN,
    SEEDS,
    VICTIM,
    round_name,
    what_remains,
)
from tests.service.sums.aggregators import aggregators, plain_sum, rows_of, terms_of

pytest.importorskip("dp_accounting")

ROUND, TINY = round_name(), (1e-154, 1e-155, 1e-160, 5e-324)


def charge(noise, name="evil"):
    return Charge(name, "trainer", noise, (VICTIM, COHORT[1]))


def noted(path, *noises, budget=None):
    """The ledger after these sums, opened anew for each, as a process that is started again."""
    for number, noise in enumerate(noises):
        with closing(Ledger(path, budget or Budget())) as ledger:
            assert ledger.charge(charge(noise, f"{number}"))
    return read_ledger(path)


@pytest.mark.parametrize("noise", TINY)
def test_a_ledger_opens_again_whatever_noise_it_was_told(tmp_path, noise):
    path = tmp_path / "ledger"
    assert [each.noise for each in noted(path, noise, 1.0, noise)] == [noise, 1.0, noise]
    shown = CliRunner().invoke(privacy, [str(path), "--json"])
    told = json.loads(shown.output, parse_constant=pytest.fail)  # no Infinity, which is no JSON
    assert shown.exit_code == 0
    assert {each["sums"] for each in told["devices"]} == {3}
    if noise < TINY[0]:
        assert {each["epsilon"] for each in told["devices"]} == {None}
        assert "no bound" in CliRunner().invoke(privacy, [str(path)]).output


@pytest.mark.parametrize("noise", TINY)
def test_a_budget_refuses_it_and_nothing_is_written(tmp_path, noise):
    path, budget = tmp_path / "ledger", Budget(1e300)
    noted(path, 1.0, budget=budget)
    before = path.read_bytes()
    with closing(Ledger(path, budget)) as ledger:
        for attempt in (ledger.check, ledger.charge):
            with pytest.raises(BudgetError, match="for 2 of 2 devices"):
                attempt(charge(noise))
        assert path.read_bytes() == before
        assert ledger.charge(charge(1.0, "honest"))


def test_a_cost_that_cannot_be_computed_is_never_written(tmp_path, monkeypatch):
    """Should a cost ever fail again, the file stays one that opens."""
    path = tmp_path / "ledger"
    noted(path, 1.0)
    before = path.read_bytes()
    with monkeypatch.context() as patched, closing(Ledger(path)) as ledger:
        patched.setattr(Charge, "cost", property(lambda self: self.noise**-2))
        with pytest.raises(OverflowError):
            ledger.charge(charge(1e-160))
    assert path.read_bytes() == before


def test_with_a_cost_that_overflows_a_ledger_never_opens_again(tmp_path, monkeypatch):
    """The hole: the cost raises where it is infinite. A ledger that it left opens now."""
    path = tmp_path / "ledger"
    noted(path, 1e-160)
    with monkeypatch.context() as patched:
        patched.setattr(Charge, "cost", property(lambda self: self.noise**-2))
        with pytest.raises(OverflowError):
            Ledger(path)
    with closing(Ledger(path)) as ledger:
        assert ledger.totals.devices[VICTIM].cost == inf
        assert describe(ledger.totals)["devices"][0]["epsilon"] is None


def terms(multiplier):
    """Of a sum that is released with two of six; the norm is 1."""
    return terms_of(minimum=2, clip=1.0, norm=1.0, noise=multiplier, room=20)


def released(pair, of):
    """The victim and one device of the trainer send; returns what is left of the sum without the
    trainer's, less the victim's update: the noise that hides it, in the units of the norm."""
    pair.open(ROUND, of)
    for name in (VICTIM, OWN[0]):
        pair.share(ROUND, of, name, SEEDS[name])
    pair.close(ROUND)
    pair.wait(ROUND, ("ready",))
    left = what_remains(of, pair.combined(ROUND, of), [OWN[0]])
    update = plain_sum(of, [rows_of(of, SEEDS[VICTIM])])
    pairs = zip(left, update, strict=True)
    return max(abs((a - b).view("i4")).max() for a, b in pairs) / of.fixed_point.scale


@pytest.mark.parametrize("multiplier", [1e-160, 1e-9, 0.1, HIDING_NOISE * 0.999])
def test_little_noise_lifts_no_minimum(tmp_path, multiplier):
    with aggregators(tmp_path, min_clients=None) as pair:
        for party in (0, 1):
            with pytest.raises(InputError, match="expected at least 4 of 6"):
                pair.trainer(party).open(ROUND, terms(multiplier).encode(), COHORT)


def test_noise_without_a_norm_to_hide_lifts_no_minimum(tmp_path):
    """Updates of any length may be sent: no noise is large beside them."""
    of = terms_of(minimum=2, clip=1.0, noise=1.0, room=20)
    assert of.norm == inf
    with (
        aggregators(tmp_path, min_clients=None) as pair,
        pytest.raises(InputError, match="expected at least 4 of 6"),
    ):
        pair.trainer(0).open(ROUND, of.encode(), COHORT)


def test_noise_that_is_no_number_is_refused_when_a_sum_is_opened(tmp_path):
    """A norm next to zero makes the multiplier infinite, which no ledger notes."""
    of = terms_of(minimum=2, clip=1.0, norm=5e-324, noise=1.0, room=20)
    with (
        aggregators(tmp_path, min_clients=None) as pair,
        pytest.raises(InputError, match="finite noise"),
    ):
        pair.trainer(0).open(ROUND, of.encode(), COHORT)


def test_from_the_floor_on_two_are_enough(tmp_path):
    with aggregators(tmp_path, min_clients=None) as pair:
        assert released(pair, terms(HIDING_NOISE)) > HIDING_NOISE


def test_with_noise_of_any_size_as_enough_the_trainer_reads_the_victims_update(
    tmp_path, monkeypatch
):
    """The hole: aggregators ask whether there is noise, not how much."""
    monkeypatch.setattr(SumFacts, "hides_each_client", property(lambda facts: facts.noise > 0))
    with aggregators(tmp_path, min_clients=None) as pair:
        assert released(pair, terms(1e-9)) < 1e-6


def test_after_it_an_aggregator_adds_up_for_others_and_starts_again(tmp_path):
    """Its operator allows sums of two, and sets no budget."""
    with aggregators(tmp_path) as pair:
        assert released(pair, terms(1e-160)) < 1e-6
        for party in (0, 1):
            pair.stop(party)
            pair.start(party)
        again, of = round_name(b"b", 1), terms_of(b"b")
        pair.open(again, of)
        for name in COHORT:
            pair.share(again, of, name, SEEDS[name])
        pair.close(again)
        pair.wait(again, ("ready",))
