"""Keys, shares and secrets that are false: refused, with the place of the client they are of."""

import struct

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from keyhole.aggregation.masked.client import Secrets
from keyhole.aggregation.masked.messages import (
    PublicKeys,
    commitment_of,
    open_slots,
    seal,
    seal_slots,
)
from keyhole.crypto.ring import pair_seed
from keyhole.errors import MalformedError, MismatchError, ReplayError, ViolationError
from tests.aggregation.masked.secagg_parties import (
    ROUND,
    Parties,
    forgot_everything,
    seeded,
    settings_of,
    vector_of,
)

# Points of Curve25519 of order 1, 2, 4 and 8, from RFC 7748's curve: u = 0, 1, p - 1 and two more
# (Bernstein, "Curve25519", the list of inputs to reject if one wants contributory behaviour).
LOW_ORDER = [
    0,
    1,
    2**255 - 20,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
]


# Public keys


def with_keys(parties, place, **changed):
    """The message of a client that advertises other keys."""
    keys = parties.secrets(place).keys()._replace(**changed)
    return seal("keys", parties.settings, place, keys.encode())


def key_list(parties, place, **peers):
    """A list of keys in which the server has changed some."""
    slots = {one: parties.secrets(one).keys().encode() for one in parties.invited}
    slots |= {int(name[1:]): keys.encode() for name, keys in peers.items()}
    return seal_slots("key list", parties.settings, place, slots)


BAD_POINTS = [point.to_bytes(32, "little") for point in (*LOW_ORDER, 2**255 - 19, 2**256 - 1)]
"""The last two are points, written another way."""


def share_and_mask(parties, listed):
    """What client 0 does with a list of keys: a mask is agreed on when a vector is masked, before
    anything of it is sent."""
    parties.receive("shares", 0, parties.clients[0].share(listed))
    parties.clients[0].mask(parties.list_for("input", 0), vector_of(parties.settings, 0))


@pytest.mark.parametrize("which", ["cipher", "mask"])
@pytest.mark.parametrize("point", BAD_POINTS, ids=lambda point: point[:4].hex())
def test_a_key_of_low_order_is_refused_by_the_server_and_by_clients(which, point):
    parties = Parties(settings_of(3))
    with pytest.raises(MalformedError, match="client 1"):
        parties.receive("keys", 1, with_keys(parties, 1, **{which: point}))
    parties.do("keys")
    client = parties.clients[0]
    forged = parties.secrets(1).keys()._replace(**{which: point})
    parties.do("shares", [1, 2])
    with pytest.raises(MalformedError, match="client 1"):
        share_and_mask(parties, key_list(parties, 0, _1=forged))
    assert forgot_everything(client)


def test_a_key_that_somebody_else_has_is_refused_by_the_server():
    parties = Parties(settings_of(3))
    parties.do("keys", [0])
    taken = parties.secrets(0).keys()
    own = parties.secrets(1).keys()
    for changed in (
        {"cipher": taken.cipher},
        {"mask": taken.mask},
        {"cipher": taken.mask},
        {"mask": own.cipher},
    ):
        with pytest.raises(MalformedError, match="client 1"):
            parties.receive("keys", 1, with_keys(parties, 1, **changed))
    parties.do("keys", [1, 2])


def test_a_key_that_occurs_twice_makes_a_client_leave():
    for taken in (0, 2):
        parties = Parties(settings_of(3))
        parties.do("keys")
        forged = parties.secrets(1).keys()._replace(mask=parties.secrets(taken).keys().mask)
        with pytest.raises(MalformedError, match=r"client [12]"):
            parties.clients[0].share(key_list(parties, 0, _1=forged))
        assert forgot_everything(parties.clients[0])


def test_a_list_without_ones_own_keys_is_a_violation():
    for change in ({"_0": PublicKeys(b"\1" * 32, b"\2" * 32, bytes(32), b"")}, {}):
        parties = Parties(settings_of(4, threshold=2))
        parties.do("keys", [0, 1, 2])
        parties.invited = [0, 1, 2] if change else [1, 2]
        with pytest.raises(ViolationError):
            parties.clients[0].share(key_list(parties, 0, **change))


# Shares that are false


def test_shares_that_were_sealed_for_somebody_else_do_not_open():
    """The associated data: as another sender's, or to another receiver."""
    parties = Parties(settings_of(4)).until("input")
    good = open_slots(parties.list_for("input", 0), "share list", parties.settings, 0)
    for other in (good | {1: good[2], 2: good[1]}, good | {3: bytes(148)}):
        client = Parties(settings_of(4)).until("input").clients[0]
        listed = seal_slots("share list", parties.settings, 0, other)
        with pytest.raises(MalformedError, match=r"client [123]"):
            client.mask(listed, vector_of(parties.settings, 0))
        assert forgot_everything(client)


def test_shares_of_another_round_do_not_open():
    ours, theirs = Parties(settings_of(3)), Parties(settings_of(3))
    theirs.settings = type(ours.settings)(bytes(16), 3, 3)
    keys = ours.secrets(1).keys()
    pair = b"\7" * 132
    old = Secrets.draw(theirs.settings, 0, seeded(0)).seal(1, keys, pair)
    with pytest.raises(MalformedError, match="client 0"):
        ours.secrets(1).open(0, ours.secrets(0).keys(), old)
    new = ours.secrets(0).seal(1, keys, pair)
    assert ours.secrets(1).open(0, ours.secrets(0).keys(), new) == pair


def test_sealed_shares_are_bound_to_the_round_the_sender_and_the_receiver():
    """AES-128-GCM by hand: whatever else stands in the associated data, they do not open."""
    parties = Parties(settings_of(3))
    secrets, pair = parties.secrets(2), b"\7" * 132
    sealed = secrets.seal(1, parties.secrets(1).keys(), pair)
    key = pair_seed(secrets.cipher, parties.secrets(1).cipher.public, ROUND, 1, 2, use=b"shares")
    nonce = struct.pack("<I8x", 2)
    bound = ROUND + struct.pack("<II", 2, 1)
    assert AESGCM(key).decrypt(nonce, sealed, bound) == pair
    swapped, other = ROUND + struct.pack("<II", 1, 2), bytes(16) + bound[16:]
    for wrong in (b"", bound[:-1], swapped, other):
        with pytest.raises(InvalidTag):
            AESGCM(key).decrypt(nonce, sealed, wrong)


def test_shares_of_a_client_that_was_not_on_the_list_of_keys_are_a_violation():
    """And so is a list without the client's own bit: its shares would have been lost."""
    for change in (lambda good: good | {3: bytes(148)}, lambda good: {1: good[1], 2: good[2]}):
        parties = Parties(settings_of(4, threshold=2))
        parties.do("keys", [0, 1, 2])
        parties.do("shares", [0, 1, 2])
        good = open_slots(parties.list_for("input", 0), "share list", parties.settings, 0)
        listed = seal_slots("share list", parties.settings, 0, change(good))
        with pytest.raises(ViolationError):
            parties.clients[0].mask(listed, vector_of(parties.settings, 0))
        assert forgot_everything(parties.clients[0])


def with_false_share(parties, giver, owner):
    """What a survivor sends that lies about its share of one client."""
    slots = open_slots(parties.said["unmasking", giver], "unmasking", parties.settings, giver)
    slots[owner] = slots[owner][:-1] + bytes([slots[owner][-1] ^ 1])
    return seal_slots("unmasking", parties.settings, giver, slots)


@pytest.mark.parametrize("owner", [2, 3], ids=["of a survivor", "of a lost client"])
def test_a_false_share_is_noticed_and_the_client_named(owner):
    parties = Parties(settings_of(4)).until("input")
    parties.do("input", [0, 1, 2])
    parties.say("unmasking", [0, 1, 2])
    for giver in (0, 2):
        parties.receive("unmasking", giver, parties.said["unmasking", giver])
    parties.receive("unmasking", 1, with_false_share(parties, 1, owner))
    with pytest.raises(MismatchError, match=f"client {owner} "):
        parties.server.sum()
    assert parties.server._total is None
    with pytest.raises(ReplayError):
        parties.server.sum()


@pytest.mark.parametrize("liar", [2, 3], ids=["a survivor", "a lost client"])
def test_a_rebuilt_secret_that_is_not_behind_the_keys_is_noticed(liar):
    """The client advertises one key and one commitment and shares other secrets, consistently."""
    parties = Parties(settings_of(4)).until("shares")
    client, true = parties.clients[liar], parties.secrets(liar)
    others = Secrets.draw(parties.settings, liar, seeded(77))
    lying = Secrets(parties.settings, liar, true.prg, true.cipher, others.mask, others.seed)
    listed = parties.list_for("shares", liar)
    client._secrets = lying
    parties.receive("shares", liar, client.share(listed))
    parties.do("shares", [place for place in range(4) if place != liar])
    client._secrets = true
    parties.do("input", [0, 1, 2])
    parties.do("unmasking", [0, 1, 2])
    with pytest.raises(MismatchError, match=f"client {liar} "):
        parties.server.sum()


def test_a_commitment_belongs_to_one_round_and_place():
    settings = settings_of(3)
    seed = bytes(16)
    texts = {
        commitment_of(one, place, some)
        for one in (settings, settings_of(4))
        for place in (0, 1)
        for some in (seed, b"\1" * 16)
    }
    assert len(texts) == 8
