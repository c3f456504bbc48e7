"""A trainer tells one aggregator of one manifest and the other, or devices, of another.

What both aggregators add must have been made from one model: a share names its manifest, and an
aggregator that was told another refuses it.
"""

from hashlib import sha256

import pytest

from keyhole.aggregation.shares import SumFacts
from keyhole.errors import KeyholeError, StaleError
from tests.attacks.secure_sums import COHORT, SEEDS, VICTIM, round_name, terms
from tests.service.sums.aggregators import aggregators, bodies_of, rows_of

ONE, OTHER = round_name(b"one"), round_name(b"other")


def shares_for(round_id, name=VICTIM):
    of = terms()
    return bodies_of(of, rows_of(of, SEEDS[name]), SEEDS[name], round_id)


@pytest.mark.parametrize("party", [0, 1])
def test_a_share_for_another_manifest_is_refused_by_both(tmp_path, party):
    with aggregators(tmp_path) as pair:
        pair.open(ONE, terms())
        with pytest.raises(StaleError):
            pair.send(party, ONE, VICTIM, shares_for(OTHER)[party])
        pair.send(party, ONE, VICTIM, shares_for(ONE)[party])


def test_aggregators_that_were_told_different_manifests_release_nothing(tmp_path):
    """Devices get one of the two, and reach one aggregator only."""
    with aggregators(tmp_path) as pair:
        for party, at in enumerate((ONE, OTHER)):
            pair.trainer(party).open(at, terms().encode(), COHORT)
        for name in COHORT:
            for party, at in enumerate((ONE, OTHER)):
                for made_for in (ONE, OTHER):
                    body = shares_for(made_for, name)[party]
                    if made_for == at:
                        pair.send(party, at, name, body)
                    else:
                        with pytest.raises(KeyholeError):
                            pair.send(party, at, name, body)
        for party, at in enumerate((ONE, OTHER)):
            pair.trainer(party).close_sum(at)
            (status,) = pair.wait(at, ("failed",), parties=[party])
            assert status.failure.kind == "MismatchError"


def test_with_a_digest_of_params_alone_the_share_would_be_taken(tmp_path, monkeypatch):
    """The hole: the head of a message holds the params, and not the manifest."""
    hole = property(lambda facts: sha256(facts.params).digest())
    monkeypatch.setattr(SumFacts, "digest", hole)
    with aggregators(tmp_path) as pair:
        pair.open(ONE, terms())
        for party, body in enumerate(shares_for(OTHER)):
            assert b"stored" in pair.send(party, ONE, VICTIM, body)
