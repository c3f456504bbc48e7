"""A trainer adds up the same shares twice: once all of them, once all but the victim's.

The difference of the two sums is the victim's update, however many clients each has. The trainer
has recorded what devices sent, as a load balancer before both aggregators could, and has tokens for
every name.
"""

import shutil

import pytest

from keyhole.aggregation.shares import FRAMING
from keyhole.errors import ConflictError, KeyholeError, StaleError, TooLateError
from tests.attacks.secure_sums import COHORT, OWN, SEEDS, VICTIM, is_the_victims, round_name, terms
from tests.service.sums.aggregators import aggregators, bodies_of, rows_of

ROUND, AGAIN = round_name(), round_name(b"again", 1)


def recorded():
    """What every device sent, once, for the sum of ROUND."""
    of = terms()
    return {name: bodies_of(of, rows_of(of, seed), seed) for name, seed in SEEDS.items()}


def add_up(pair, round_id, of, sent):
    """Makes a sum of recorded messages."""
    pair.open(round_id, of)
    for name, bodies in sent.items():
        for party, body in enumerate(bodies):
            pair.send(party, round_id, name, body)
    pair.close(round_id)
    pair.wait(round_id, ("ready",))
    return pair.combined(round_id, of)


def difference(one, other):
    return [more - fewer for more, fewer in zip(one, other, strict=True)]


def without_victim(sent):
    return {name: bodies for name, bodies in sent.items() if name != VICTIM}


def test_shares_of_one_sum_are_of_no_use_under_another_name(tmp_path):
    sent = recorded()
    with aggregators(tmp_path) as pair:
        add_up(pair, ROUND, terms(), sent)
        pair.open(AGAIN, terms(b"again"))
        for name, bodies in without_victim(sent).items():
            for party, body in enumerate(bodies):
                with pytest.raises(StaleError):
                    pair.send(party, AGAIN, name, body)
        # nor with the name of the first for a second round,
        with pytest.raises(ConflictError):
            pair.open(round_name(b"third", 2), terms())
        # nor with another cohort for the same one.
        with pytest.raises(ConflictError):
            pair.open(ROUND, terms(), OWN)


def test_a_sum_that_was_closed_is_burned_also_across_restarts(tmp_path):
    sent = recorded()
    with aggregators(tmp_path) as pair:
        add_up(pair, ROUND, terms(), sent)
        for party in (0, 1):
            pair.trainer(party).forget(ROUND)
            pair.stop(party)
            pair.start(party)
            for cohort in (COHORT, list(without_victim(sent))):
                with pytest.raises(TooLateError):
                    pair.trainer(party).open(ROUND, terms().encode(), cohort)
            with pytest.raises(KeyholeError):
                pair.send(party, ROUND, COHORT[1], sent[COHORT[1]][party])


def test_with_aggregators_that_forget_names_the_difference_is_the_victims(tmp_path):
    """The hole: names of sums are not kept."""
    sent = recorded()
    with aggregators(tmp_path) as pair:
        whole = add_up(pair, ROUND, terms(), sent)
        for party in (0, 1):
            pair.trainer(party).forget(ROUND)
            pair.stop(party)
            for folder in ("names", "uploads"):
                shutil.rmtree(tmp_path / str(party) / folder)
            pair.start(party)
        fewer = add_up(pair, ROUND, terms(), without_victim(sent))
    assert is_the_victims(terms(), difference(whole, fewer))


def test_with_messages_of_no_sum_the_difference_is_the_victims(tmp_path, monkeypatch):
    """The hole: what a head says of name, params and model is not compared."""
    sent = recorded()
    with aggregators(tmp_path) as pair:
        whole = add_up(pair, ROUND, terms(), sent)
        monkeypatch.setattr(type(FRAMING), "check_head", lambda *arguments: None)
        fewer = add_up(pair, AGAIN, terms(b"again"), without_victim(sent))
    assert is_the_victims(terms(), difference(whole, fewer))
