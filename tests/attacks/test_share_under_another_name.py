"""Somebody between devices and aggregators sends a device's shares under another device's name.

TLS ends at a proxy before each aggregator. It holds back the sealed shares of the victim and posts
both with tokens of a device of its own: the victim's update is in the sum, and the aggregators'
ledgers charge the other device. So the name of a device is sealed with its shares.
"""

import time

import pytest

from keyhole.aggregation import shares
from keyhole.aggregation.privacy.ledger import read_ledger
from keyhole.aggregation.shares import seal_share
from keyhole.device.device import Device
from keyhole.device.sums import _Line
from keyhole.errors import MalformedError
from tests.attacks.secure_sums import COHORT, SEEDS, VICTIM, round_name
from tests.service.sums.aggregators import aggregators, bodies_of, keyring, rows_of, terms_of

ROUND = round_name()
THIEF, *HONEST = COHORT[1:4]
TERMS = terms_of(minimum=2, noise=1.0, clip=1.0, norm=1.0, room=20)


def held_back(pair):
    """The shares of the victim as it sealed them, which reach no aggregator."""
    bodies = bodies_of(TERMS, rows_of(TERMS, SEEDS[VICTIM]), SEEDS[VICTIM], ROUND)
    return [
        seal_share(pair.public(party), ROUND, VICTIM, pair.device_token(party, VICTIM), body)
        for party, body in enumerate(bodies)
    ]


def move(pair):
    """Sends them under the other name, with good tokens of that name."""
    for party, sealed in enumerate(held_back(pair)):
        assert b"stored" in pair.send(party, ROUND, THIEF, b"", sealed=sealed)


def charged(pair, directory):
    """Whom the aggregators charge for the sum, with two honest devices in it."""
    for name in HONEST:
        pair.share(ROUND, TERMS, name, SEEDS[name])
    pair.close(ROUND)
    pair.wait(ROUND, ("ready",))
    ledgers = [read_ledger(directory / str(party) / "ledger") for party in (0, 1)]
    return [[set(entry.devices) for entry in ledger] for ledger in ledgers]


def test_shares_under_another_name_do_not_open_and_nobody_is_charged(tmp_path):
    with aggregators(tmp_path) as pair:
        pair.open(ROUND, TERMS)
        for party, sealed in enumerate(held_back(pair)):
            with pytest.raises(MalformedError, match="cannot be opened"):
                pair.send(party, ROUND, THIEF, b"", sealed=sealed)
            assert pair.trainer(party).status(ROUND).devices == []
        assert charged(pair, tmp_path) == [[set(HONEST)]] * 2


def test_sealed_without_the_name_another_device_pays(tmp_path, monkeypatch):
    """The hole: shares are sealed for a round alone, and without a token, as they were."""
    monkeypatch.setattr(shares, "_bound", lambda round_id, device: round_id.encode())
    monkeypatch.setattr(shares, "_info", lambda token: b"keyhole share 1")
    with aggregators(tmp_path) as pair:
        pair.open(ROUND, TERMS)
        move(pair)
        assert charged(pair, tmp_path) == [[{THIEF, *HONEST}]] * 2


def test_a_service_that_hands_out_tokens_of_another_name_does_not_change_the_name():
    """A device that its operator gave a token, for the aggregator or for the service, goes by the
    name in that; by the round's token where it has no other."""
    ring = keyring()

    def token(name):
        return ring.issue("device", name, now=time.time(), seconds=60, audience="aggregator")

    def name(own, at_service):
        with (
            Device("http://127.0.0.1:9", token=own) as aggregator,
            Device("http://127.0.0.1:9", token=at_service) as device,
        ):
            return _Line(0, aggregator, ROUND, token(THIEF)).name_of(device)

    assert name(token(VICTIM), token("other")) == name(None, token(VICTIM)) == VICTIM
    assert name(None, None) == name("no token", None) == THIEF
