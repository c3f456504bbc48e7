"""Shares of an earlier round, or of another run, are sent again into a sum that is open now.

Whoever stands before an aggregator has recorded them and has a token of the device. A share that is
added twice moves the model twice, and of two sums with it the victim's update can be computed.
"""

import pytest

from keyhole.aggregation.shares import SumFacts
from keyhole.errors import StaleError
from keyhole.service.sum_services import SumServices
from tests.attacks.secure_sums import COHORT, SEEDS, VICTIM, is_the_victims, round_name, terms
from tests.service.sums.aggregators import aggregators, bodies_of, rows_of
from tests.service.sums.private_run import LAYOUT, make_plan
from tests.service.sums.test_sum_training import fake_lines

EARLIER, NOW = round_name(b"earlier", 3), round_name(b"now", 4)


def victims(of, round_id):
    return bodies_of(of, rows_of(of, SEEDS[VICTIM]), SEEDS[VICTIM], round_id)


@pytest.mark.parametrize("name", [b"a", b"another run"])
def test_a_share_of_an_earlier_round_or_another_run_is_refused(tmp_path, name):
    """Of the same name under another manifest, and of another name."""
    old = victims(terms(name), EARLIER)
    with aggregators(tmp_path) as pair:
        pair.open(NOW, terms())
        for party, body in enumerate(old):
            with pytest.raises(StaleError):
                pair.send(party, NOW, VICTIM, body)
        assert [pair.trainer(party).status(NOW).devices for party in (0, 1)] == [[], []]


def test_rounds_and_runs_have_sums_of_different_names():
    """The salt is the run's own: with the same seed, a second run has other names."""
    names = set()
    for salt in (bytes(16), bytes(range(16))):
        for t in (0, 1):
            inbox = SumServices(*fake_lines(), salt=salt)
            inbox.open(t, range(5), LAYOUT, make_plan())
            names.add(inbox._now().facts.round)
    assert len(names) == 4


def test_with_messages_of_no_round_the_victim_is_added_again(tmp_path, monkeypatch):
    """The hole: messages name the sum, and neither its params nor the model."""
    monkeypatch.setattr(SumFacts, "digest", property(lambda facts: bytes(32)))
    of, old = terms(), victims(terms(), EARLIER)
    with aggregators(tmp_path) as pair:
        pair.open(NOW, of)
        for party, body in enumerate(old):
            pair.send(party, NOW, VICTIM, body)
        rows = [pair.share(NOW, of, name, SEEDS[name]) for name in COHORT[1:]]
        pair.close(NOW)
        pair.wait(NOW, ("ready",))
        total = pair.combined(NOW, of)
    for table, part in zip(total, range(3), strict=True):
        for client in rows:
            keys, values = client[part]
            table[keys] -= values
    assert is_the_victims(of, total)
