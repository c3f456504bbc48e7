"""A server that cheats: what it can do without signatures, and what they put an end to."""

from itertools import combinations

import numpy as np
import pytest

from keyhole.aggregation.masked.client import SecAggClient, Secrets
from keyhole.aggregation.masked.messages import (
    Identity,
    UnmaskRequest,
    seal,
    seal_asked,
    seal_slots,
)
from keyhole.aggregation.masked.server import SecAggServer
from keyhole.crypto.hpke import PrivateKey
from keyhole.crypto.ring import add_masks
from keyhole.crypto.shamir import combine
from keyhole.errors import (
    InputError,
    MalformedError,
    MismatchError,
    ProtocolError,
    StaleError,
    ThresholdError,
    ViolationError,
)
from tests.aggregation.masked.secagg_parties import (
    ROUND,
    STEPS,
    Parties,
    body_of,
    forgot_everything,
    masked_of,
    plain_sum,
    seeded,
    settings_of,
    shares_given,
    vector_of,
)

# A server that cheats


def test_without_signatures_a_server_that_invents_clients_opens_a_vector():
    """What the docstring admits: the victim cannot tell them from others."""
    settings = settings_of(4)
    world = Parties(settings)  # the server runs clients 1 to 3 itself
    zeros = np.zeros(settings.length, np.uint32)
    world.do("keys")
    world.do("shares")
    world.do("input", [0])
    for place in (1, 2, 3):
        listed = world.server.share_list(place)
        world.receive("input", place, world.clients[place].mask(listed, zeros))
    world.do("unmasking")
    np.testing.assert_array_equal(world.server.sum(), vector_of(settings, 0))


def test_without_signatures_and_with_a_low_threshold_two_lists_open_a_vector():
    """What the docstring admits: half of the clients say that client 0 stays, half that it is
    lost."""
    settings = settings_of(4, threshold=2)
    parties = Parties(settings).until("unmasking")
    stays = UnmaskRequest(frozenset(range(4)), frozenset())
    gone = UnmaskRequest(frozenset({1, 2, 3}), frozenset({0}))
    for place, asked in ((0, stays), (1, stays), (2, gone), (3, gone)):
        listed = seal_asked(settings, place, asked)
        parties.said["unmasking", place] = parties.clients[place].unmask(listed)
    seed = combine(shares_given(parties, 0, [0, 1]), 2, 16)
    key = PrivateKey(combine(shares_given(parties, 0, [2, 3]), 2, 32))
    stolen = Secrets(settings, 0, seeded(0), key, key, seed)
    opened = masked_of(parties, 0)
    masks = stolen.masks({place: parties.secrets(place).keys() for place in (1, 2, 3)})
    add_masks(opened, [(one, -sign) for one, sign in masks])
    np.testing.assert_array_equal(opened, vector_of(settings, 0))


def test_signatures_show_clients_that_the_server_has_invented():
    settings = settings_of(4, signed=True)
    true = Parties(settings)
    true.do("keys", [0])
    inventions = Identity.all_of(4, seeded(5))
    slots = {0: body_of(true.said["keys", 0])}
    for place in (1, 2, 3):
        invented = SecAggClient(settings, place, seeded(place), inventions[place])
        slots[place] = body_of(invented.advertise())
    with pytest.raises(MalformedError, match="client 1 "):
        true.clients[0].share(seal_slots("key list", settings, 0, slots))
    assert forgot_everything(true.clients[0])


def test_signatures_show_keys_of_another_round_or_place():
    settings = settings_of(3, signed=True)
    parties = Parties(settings)
    parties.do("keys")
    slots = {place: body_of(parties.said["keys", place]) for place in range(3)}
    identities = parties.identities
    old = type(settings)(bytes(16), 3, 3, signed=True)
    slots[1] = body_of(SecAggClient(old, 1, seeded(1), identities[1]).advertise())
    with pytest.raises(MalformedError, match="client 1 "):
        parties.clients[0].share(seal_slots("key list", settings, 0, slots))
    with pytest.raises(MalformedError, match="client 1 "):
        SecAggServer(settings, identities[0].everyone).receive_keys(
            1, seal("keys", settings, 1, slots[1])
        )


def test_signatures_show_a_server_that_shows_different_survivors():
    """Clients 0 and 1 are told that everyone stays, 2 to 4 that client 0 is lost: each list has
    enough survivors, and no list has enough signatures."""
    settings = settings_of(5, signed=True)
    parties = Parties(settings).until("confirmation")
    stays = UnmaskRequest(frozenset(range(5)), frozenset())
    gone = UnmaskRequest(frozenset({1, 2, 3, 4}), frozenset({0}))
    shown = {0: stays, 1: stays, 2: gone, 3: gone, 4: gone}
    signed = {
        place: body_of(parties.clients[place].confirm(seal_asked(settings, place, asked)))
        for place, asked in shown.items()
    }
    for place, asked in shown.items():
        client = parties.clients[place]
        same = {one: signed[one] for one in shown if shown[one] == asked}
        everything = {one: signed[one] for one in asked.survivors}
        error = {True: MismatchError, False: ThresholdError}
        sent, expected = (everything, True) if place % 2 else (same, False)
        with pytest.raises(error[expected]):
            client.unmask(seal_slots("confirmation list", settings, place, sent))
        assert forgot_everything(client)


def test_the_same_lists_with_honest_signatures_pass():
    """What shows that the test above fails for the reason it names."""
    settings = settings_of(5, signed=True)
    parties = Parties(settings).until("input")
    parties.do("input", [1, 2, 3, 4])
    for step in STEPS[3:]:
        parties.do(step, [1, 2, 3, 4])
    np.testing.assert_array_equal(parties.server.sum(), plain_sum(settings, [1, 2, 3, 4]))


def test_a_signature_over_another_list_is_refused_by_the_server_too():
    settings = settings_of(5, signed=True)
    parties = Parties(settings).until("confirmation")
    parties.list_for("confirmation", 1)
    other = seal_asked(settings, 1, UnmaskRequest(frozenset({1, 2, 3, 4}), frozenset({0})))
    with pytest.raises(MismatchError, match="client 1 "):
        parties.receive("confirmation", 1, parties.clients[1].confirm(other))


def test_confirmations_of_clients_that_did_not_survive_are_a_violation():
    settings = settings_of(5, signed=True)
    parties = Parties(settings).until("input")
    parties.do("input", [0, 1, 2, 3])
    parties.do("confirmation", [0, 1, 2, 3])
    signatures = {place: body_of(parties.said["confirmation", place]) for place in range(4)}
    with pytest.raises(ViolationError):
        parties.clients[0].unmask(
            seal_slots("confirmation list", settings, 0, signatures | {4: bytes(64)})
        )


def some_of(places):
    """Every way to leave some of them out."""
    return [some for count in range(len(places) + 1) for some in combinations(places, count)]


def test_every_pattern_of_loss_before_and_after_the_confirmation_gives_the_sum_or_nothing():
    """All vectors have arrived: the sum is that of everyone as soon as 3 of 4 sign and 3 of these
    give their shares."""
    settings, opened = settings_of(4, signed=True), 0
    for signing in some_of(range(4)):
        for giving in some_of(signing):
            parties = Parties(settings).until("confirmation")
            parties.do("confirmation", signing)
            try:
                parties.do("unmasking", giving)
                total = parties.server.sum()
            except (StaleError, ThresholdError):
                assert len(giving) < 3
                assert parties.server._total is None or not giving
                continue
            opened += 1
            assert len(giving) >= 3
            np.testing.assert_array_equal(total, plain_sum(settings, range(4)))
    assert opened == 4 + 1 + 4  # three of three that sign; four, or three, of four


def test_a_survivor_that_has_not_signed_is_neither_told_nor_heard():
    settings = settings_of(4, signed=True)
    everyone = Parties(settings).until("unmasking")
    everyone.do("unmasking")
    parties = Parties(settings).until("confirmation")
    parties.do("confirmation", [0, 1, 2])
    parties.list_for("unmasking", 0)
    with pytest.raises(StaleError):
        parties.list_for("unmasking", 3)
    with pytest.raises(StaleError):
        parties.receive("unmasking", 3, everyone.said["unmasking", 3])
    parties.do("unmasking", [0, 1, 2])
    np.testing.assert_array_equal(parties.server.sum(), plain_sum(settings, range(4)))


@pytest.mark.parametrize("signed", [False, True])
def test_a_step_for_signatures_exists_only_where_they_are_asked_for(signed):
    parties = Parties(settings_of(3, signed=signed)).until("input")
    parties.do("input")
    survivors = parties.list_for("confirmation", 0)
    with pytest.raises(ProtocolError):
        (parties.clients[0].unmask if signed else parties.clients[0].confirm)(survivors)


def test_a_signed_sum_needs_identities():
    settings = settings_of(3, signed=True)
    for identity in (None, Identity.all_of(2, seeded(0))[0]):
        with pytest.raises(InputError):
            SecAggClient(settings, 0, identity=identity)
    with pytest.raises(InputError):
        SecAggServer(settings)
    for secret, everyone in ((b"short", (bytes(32),)), (bytes(32), (bytes(32), bytes(32)))):
        with pytest.raises(InputError):
            Identity(secret, everyone)
    assert settings.round == ROUND
