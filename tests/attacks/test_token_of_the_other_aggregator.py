"""An aggregator acts for a device at the other one.

A device shows it a token of the round, and its operator has the key for such tokens. While a sum is
open, a share of the attacker's own making takes the place of the victim's at the other aggregator,
and what the two would add is the attacker's, or nothing of the victim's.
"""

import time

import pytest

from keyhole.device.device import Device
from keyhole.errors import AccessError
from keyhole.service.access import Access, Keyring
from keyhole.wire.sockets import Retry
from tests.attacks.secure_sums import SEEDS, VICTIM, terms
from tests.service.small_service import small_service
from tests.service.sums.aggregators import Keyrings, Pair, bodies_of, keyring, rows_of

SERVICE = Keyring((b"k" * 32,))
ATTACKER, OTHER = 0, 1


class Sum:
    """A sum whose aggregators take tokens of the service, each by the key that it was given."""

    def __init__(self, directory, keys_of):
        self.keys = [keys_of(party) for party in (0, 1)]
        self.pair = Pair(directory)
        rings = [Keyrings(ring, keyring(), self.pair.peer_key) for ring in self.keys]
        self.pair.keys = rings
        for party in (0, 1):
            self.pair.start(party)

    def begin(self, round_id):
        self.round = round_id
        self.pair.open(round_id, terms())

    def send(self, party, token, seed):
        body = bodies_of(terms(), rows_of(terms(), seed), seed, self.round)[party]
        return self.pair.send(party, self.round, VICTIM, body, token=token)

    def close(self):
        self.pair.close_lines()
        for party in (0, 1):
            self.pair.stop(party)
        self.pair.give_up_ports()


@pytest.fixture
def told_to(tmp_path):
    """What a device of the service is told when it checks in, with a sum that is open."""
    made = []
    with small_service(tmp_path / "rounds", access=Access(SERVICE)) as service:
        service.publish()
        token = SERVICE.issue("device", VICTIM, now=time.time(), seconds=60.0)

        def start(keys_of):
            made.append(Sum(tmp_path / "sums", keys_of))
            with Device(service.url, token=token, retry=Retry(attempts=1)) as device:
                told = device.check_in()
            made[0].begin(told.round)
            return made[0], told

        yield start
    for each in made:
        each.close()


def forged(ring, round_id):
    """A token of the victim that a holder of these keys makes."""
    more = {"seconds": 60.0, "audience": "aggregator", "round_id": round_id}
    return ring.issue("round", VICTIM, now=time.time(), **more)


def test_neither_the_token_nor_the_key_of_one_aggregator_counts_at_the_other(told_to):
    sums, told = told_to(SERVICE.for_aggregator)
    seen = told.sum_tokens[ATTACKER]
    for token in (seen, forged(sums.keys[ATTACKER], told.round)):
        with pytest.raises(AccessError, match="not signed here"):
            sums.send(OTHER, token, seed=99)
    for party, token in enumerate(told.sum_tokens):
        assert b"stored" in sums.send(party, token, SEEDS[VICTIM])


def test_the_key_of_an_aggregator_makes_no_token_for_the_service(told_to):
    sums, told = told_to(SERVICE.for_aggregator)
    ring = sums.keys[ATTACKER]
    made = ring.issue("device", VICTIM, now=time.time(), seconds=60.0)
    with pytest.raises(AccessError, match="not signed here"):
        SERVICE.verify(made.encode(), time.time())
    assert SERVICE.verify(told.token.encode(), time.time()).device == VICTIM


def test_with_one_key_for_all_the_attacker_replaces_the_victims_share(told_to, monkeypatch):
    """The hole: both aggregators have the service's own key, and one token counts at both."""
    monkeypatch.setattr(Keyring, "for_aggregator", lambda ring, party: ring)
    sums, told = told_to(SERVICE.for_aggregator)
    for party, token in enumerate(told.sum_tokens):
        assert b"stored" in sums.send(party, token, SEEDS[VICTIM])
    assert b"stored" in sums.send(OTHER, told.sum_tokens[ATTACKER], seed=99)
