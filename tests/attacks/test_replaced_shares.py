"""One who ends TLS before both aggregators sends shares of its own in the name of all but one.

It has seen what every device showed, and an open sum takes a new share in the place of an old one.
With zeros from all others the sum is the victim's update, to the bit, and the next model tells it.
So a share is sealed with the token itself, of which requests show a digest alone.
"""

import time

import numpy as np
import pytest

from keyhole.aggregation.shares import seal_share
from keyhole.errors import AccessError, MalformedError
from keyhole.service.access import Access, Keyring
from keyhole.wire.assignment import claims_in, shown
from tests.attacks.secure_sums import COHORT, SEEDS, VICTIM, is_the_victims, round_name, terms
from tests.service.sums.aggregators import aggregators, bodies_of, keyring, rows_of

ROUND = round_name()


class Proxy:
    """What it has of each device: the head of a request to each aggregator."""

    def __init__(self, pair, of):
        self.pair, self.of = pair, of
        self.seen = {}

    def pass_on(self, name, body_of):
        """A device sends its shares: what it shows is seen, and its shares go on."""
        for party, body in enumerate(body_of):
            token = self.pair.device_token(party, name)
            sealed = seal_share(self.pair.public(party), ROUND, name, token, body)
            self.seen[name, party] = shown(token)
            assert b"stored" in self.pair.send(party, ROUND, name, b"", shown(token), sealed)

    def replace(self, name):
        """Sends zeros in the name of a device, with all that was seen of its token."""
        for party, body in enumerate(bodies_of(self.of, nothing(self.of), 99 + SEEDS[name])):
            head = self.seen[name, party]
            sealed = seal_share(self.pair.public(party), ROUND, name, head, body)
            assert b"stored" in self.pair.send(party, ROUND, name, b"", head, sealed)


def nothing(of):
    """An update of no sparse row and zeros elsewhere."""
    empty, rows = np.zeros(0, np.int64), []
    for part in of.parts:
        keys = empty if part.is_sparse else np.arange(part.num_keys)
        rows.append((keys, np.zeros((len(keys), part.width), of.dtype)))
    return rows


def attack(pair, names):
    """All devices send, and some are replaced; returns whether the sum is the victim's update."""
    of = terms()
    pair.open(ROUND, of)
    proxy = Proxy(pair, of)
    for name, seed in SEEDS.items():
        proxy.pass_on(name, bodies_of(of, rows_of(of, seed), seed))
    for name in names:
        proxy.replace(name)
    pair.close(ROUND)
    assert {one.phase for one in pair.wait(ROUND)} == {"ready"}
    return is_the_victims(of, pair.combined(ROUND, of))


def test_what_was_seen_of_a_token_replaces_no_share(tmp_path):
    with aggregators(tmp_path) as pair:
        with pytest.raises(MalformedError, match="cannot be opened"):
            attack(pair, COHORT[1:2])
        pair.close(ROUND)
        assert {one.phase for one in pair.wait(ROUND)} == {"ready"}
        assert pair.trainer(0).status(ROUND).devices == COHORT


def test_sealed_without_the_token_the_sum_is_the_victims_update(tmp_path, monkeypatch):
    """The hole: what is seen on the way is enough to seal a share, as it was."""
    monkeypatch.setattr("keyhole.aggregation.shares._info", lambda token: b"keyhole share 2")
    with aggregators(tmp_path) as pair:
        assert attack(pair, [name for name in COHORT if name != VICTIM])


RING, OTHER = keyring(), keyring()
NOW = time.time()


def test_what_is_shown_lets_in_and_is_not_the_token():
    token = RING.issue("device", VICTIM, now=NOW, seconds=60, audience="aggregator")
    seen = shown(token)
    assert claims_in(seen) == claims_in(token)
    assert token.rpartition(".")[2] not in seen
    for told in (token, seen):
        assert RING.verify(told.encode(), NOW).device == VICTIM
        assert RING.whole(told.encode()) == token
        with pytest.raises(AccessError, match="not signed here"):
            OTHER.whole(told.encode())
    assert Keyring((*OTHER.keys, *RING.keys)).whole(seen.encode()) == token
    access = Access(RING, audience="aggregator")
    assert access.whole({b"authorization": b"Bearer " + seen.encode()}) == token


@pytest.mark.parametrize("text", ["", "kh2", "kh2.a", "kh2..b", "kh2s.a.b", "another.a.b"])
def test_what_is_no_token_is_shown_as_it_is(text):
    assert shown(text) == text


def test_a_digest_of_other_claims_is_refused():
    one, two = (
        RING.issue("device", name, now=NOW, seconds=60, audience="aggregator")
        for name in (VICTIM, COHORT[1])
    )
    mixed = ".".join([*shown(one).split(".")[:2], shown(two).split(".")[2]])
    for wrong in (mixed, shown(shown(one)), mixed + "é"):
        if wrong != shown(one):
            with pytest.raises(AccessError):
                RING.verify(wrong.encode(), NOW)
