"""A trainer chooses whose updates are added: its own devices and one victim.

With four of six the sum is released, and three of the four are the trainer's: what is left is the
victim's update, to the bit.
"""

import msgspec
import pytest

from keyhole.aggregation.sum_server import SumServer
from keyhole.errors import KeyholeError, TooLargeError
from tests.attacks.secure_sums import (
    COHORT,
    OWN,
    SEEDS,
    VICTIM,
    is_the_victims,
    round_name,
    terms,
    what_remains,
)
from tests.service.sums.aggregators import aggregators

ROUND = round_name()


def close_for(pair, names):
    """The trainer closes the sum at both, and says who is to count."""
    for party in (0, 1):
        line = pair.trainer(party)
        line._post(f"/v1/sums/{ROUND}/close", msgspec.json.encode({"taken": names}))


def attack(pair, close):
    """All six send; returns what the trainer knows of the victim in the end."""
    of = terms()
    pair.open(ROUND, of)
    for name, seed in SEEDS.items():
        pair.share(ROUND, of, name, seed)
    close(pair)
    pair.wait(ROUND, ("ready",))
    return is_the_victims(of, what_remains(of, pair.combined(ROUND, of), OWN))


def test_no_trainer_can_name_whom_to_add(tmp_path):
    with aggregators(tmp_path) as pair:

        def close(pair):
            with pytest.raises(TooLargeError):
                close_for(pair, [VICTIM, *OWN])
            assert {pair.trainer(party).status(ROUND).phase for party in (0, 1)} == {"open"}
            pair.close(ROUND)

        assert not attack(pair, close)
        added = [pair.trainer(party).status(ROUND).devices for party in (0, 1)]
        assert added == [COHORT, COHORT]


def test_a_sum_is_not_closed_again_for_others(tmp_path):
    """Closing early at one, or again, leaves what both had when the first was closed."""
    with aggregators(tmp_path) as pair:

        def close(pair):
            pair.close(ROUND)
            pair.wait(ROUND)
            pair.close(ROUND)
            for party in (0, 1):
                with pytest.raises(KeyholeError):
                    close_for(pair, [VICTIM, *OWN])
                pair.stop(party)
                pair.start(party)
            pair.close(ROUND)

        assert not attack(pair, close)


def test_with_a_hole_the_trainer_reads_the_victims_update(tmp_path, monkeypatch):
    """The hole: aggregators keep of their lists whom the trainer names."""
    honest_close = SumServer.close

    def close(server):
        kept = {server._place(name) for name in (VICTIM, *OWN)}
        server._digests = {p: d for p, d in server._digests.items() if p in kept}
        return honest_close(server)

    monkeypatch.setattr(SumServer, "close", close)
    with aggregators(tmp_path) as pair:
        assert attack(pair, lambda pair: pair.close(ROUND))
