"""Somebody between devices and aggregators sends each share to the other aggregator, or reads both.

Where TLS ends at a load balancer, whoever runs those of both aggregators has both shares of every
device: together they are the update.
"""

import pytest

from keyhole.aggregation.shares import SEAL_BYTES, seal_share
from keyhole.aggregation.two_servers.client import read_sparse_own
from keyhole.errors import MalformedError, TooLargeError
from keyhole.wire.http import HttpClient
from tests.attacks.secure_sums import SEEDS, VICTIM, round_name, terms
from tests.service.sums.aggregators import aggregators, bodies_of, rows_of

ROUND = round_name()


def victims():
    of = terms()
    return bodies_of(of, rows_of(of, SEEDS[VICTIM]), SEEDS[VICTIM], ROUND)


def roots(of, seen):
    """The secret root of the first part, where a body lies open: of both servers it is the key to
    the whole update."""
    found = []
    for party, body in enumerate(seen):
        own = body[: of.facts.own_message_bytes(party)]
        start = 56 + 32  # head, digest of the public message
        try:
            found.append(read_sparse_own(of.sparse[0], party, own[start : start + 120])[0])
        except MalformedError:
            continue
    return found


def seen_on_the_way(monkeypatch, act):
    """What a load balancer sees of the bodies of requests."""
    seen, honest = [], HttpClient.send

    def send(client, path, body, **options):
        seen.append(body)
        return honest(client, path, body, **options)

    monkeypatch.setattr(HttpClient, "send", send)
    act()
    return seen[-2:]


@pytest.mark.parametrize("party", [0, 1])
def test_a_share_for_the_other_aggregator_is_refused(tmp_path, party):
    """A device whose addresses were swapped, or a balancer that swaps what is sent: sealed to one,
    it does not open at the other; and sealed to the other, it is no message for it."""
    with aggregators(tmp_path) as pair:
        pair.open(ROUND, terms())
        mine, other = victims()[party], victims()[1 - party]
        swapped = seal_share(pair.public(1 - party), ROUND, VICTIM, "", mine)
        with pytest.raises(MalformedError, match="another key"):
            pair.send(party, ROUND, VICTIM, mine, sealed=swapped)
        with pytest.raises((MalformedError, TooLargeError)):
            pair.send(party, ROUND, VICTIM, other)
        fitted = other[: len(mine)] + bytes(max(0, len(mine) - len(other)))
        with pytest.raises(MalformedError):
            pair.send(party, ROUND, VICTIM, fitted)
        assert pair.trainer(party).status(ROUND).devices == []


def test_who_sees_both_bodies_on_the_way_reads_nothing(tmp_path, monkeypatch):
    with aggregators(tmp_path) as pair:
        pair.open(ROUND, terms())

        def act():
            for party, body in enumerate(victims()):
                pair.send(party, ROUND, VICTIM, body)

        seen = seen_on_the_way(monkeypatch, act)
    assert roots(terms(), [body[40:] for body in seen]) == []
    assert not any(b"KHX2" in body or b"KHW1" in body for body in seen)


def test_without_sealing_both_roots_lie_open_on_the_way(tmp_path, monkeypatch):
    """The hole: the device sends its shares as they are, and aggregators take them."""
    monkeypatch.setattr(
        "keyhole.service.sums.open_share", lambda key, name, device, token, body: body[SEAL_BYTES:]
    )
    with aggregators(tmp_path) as pair:
        pair.open(ROUND, terms())

        def act():
            for party, body in enumerate(victims()):
                pair.send(party, ROUND, VICTIM, body, sealed=bytes(SEAL_BYTES) + body)

        seen = seen_on_the_way(monkeypatch, act)
    assert len(set(roots(terms(), [body[SEAL_BYTES:] for body in seen]))) == 2
