"""What a server gets out of a secure sum, alone or with some clients, and what it does not."""

import numpy as np
import pytest

from keyhole.aggregation.masked import client as secagg_client
from keyhole.aggregation.masked.client import SecAggClient, Secrets
from keyhole.aggregation.masked.messages import UnmaskRequest, seal_asked
from keyhole.aggregation.masked.server import SecAggServer, run_secagg
from keyhole.crypto.hpke import PrivateKey
from keyhole.crypto.once import SumsJoined
from keyhole.crypto.ring import add_mask, add_masks
from keyhole.crypto.shamir import combine
from keyhole.errors import (
    InputError,
    MalformedError,
    ReplayError,
    StaleError,
    ThresholdError,
    ViolationError,
)
from tests.aggregation.masked.secagg_parties import (
    Parties,
    forgot_everything,
    masked_of,
    plain_sum,
    seeded,
    settings_of,
    shares_given,
    vector_of,
    vectors_of,
)

SHARE = 66

# A vector that comes too late


@pytest.fixture(scope="module")
def with_a_late_vector():
    """Client 3 sends its vector when the survivors are settled; all others go on to the end."""
    parties = Parties(settings_of(4, length=50)).until("input")
    parties.do("input", [0, 1, 2])
    parties.say("input", [3])
    parties.list_for("unmasking", 0)
    with pytest.raises(StaleError):
        parties.receive("input", 3, parties.said["input", 3])
    parties.do("unmasking", [0, 1, 2])
    return parties, parties.server.sum()


def test_a_vector_after_the_survivors_are_settled_is_not_added(with_a_late_vector):
    parties, total = with_a_late_vector
    np.testing.assert_array_equal(total, plain_sum(parties.settings, [0, 1, 2]))


def test_no_share_of_the_seed_of_a_late_client_is_given_out(with_a_late_vector):
    """What the others gave are shares of its key: together they are the key, and no seed."""
    parties, _ = with_a_late_vector
    given, secrets = shares_given(parties, 3, [0, 1, 2]), parties.secrets(3)
    assert combine(given, 3, 32) == secrets.mask.secret
    pairs = {giver + 1: pair for giver, pair in secrets.split([0, 1, 2, 3]).items()}
    assert all(pairs[x].startswith(share) for x, share in given.items())
    of_seed = {x: pair[SHARE:] for x, pair in pairs.items()}
    assert combine(of_seed, 3, 16) == secrets.seed
    sent = b"".join(parties.said.values())
    assert not any(share in sent for share in of_seed.values())
    assert all(share in sent for share in given.values())


def test_a_late_vector_stays_masked_whatever_the_server_does(with_a_late_vector):
    """It rebuilds the key, removes all masks that the client shared, and is left with the mask of
    a seed that it does not have. With the seed the vector would lie open: the test can fail."""
    parties, _ = with_a_late_vector
    settings, rebuilt = parties.settings, combine(shares_given(parties, 3, [0, 1, 2]), 3, 32)
    guess = Secrets(settings, 3, seeded(0), PrivateKey(rebuilt), PrivateKey(rebuilt), bytes(16))
    publics = {place: parties.secrets(place).keys() for place in range(3)}
    opened = masked_of(parties, 3)
    add_masks(opened, [(seed, -sign) for seed, sign in guess.masks(publics)[1:]])
    assert np.count_nonzero(opened == vector_of(settings, 3)) < 3
    add_mask(opened, parties.secrets(3).seed, -1)
    np.testing.assert_array_equal(opened, vector_of(settings, 3))


def test_a_run_drops_late_vectors():
    settings = settings_of(5)
    result = run_secagg(settings, vectors_of(settings), late=[4])
    np.testing.assert_array_equal(result.total, plain_sum(settings, range(4)))
    assert result.bytes_up[4] > settings.length * 4  # it did send it


# Collusion


@pytest.mark.parametrize("missing", [0, 1])
def test_a_server_with_fewer_than_t_clients_cannot_rebuild_the_key_of_a_survivor(missing):
    """All that t or t - 1 clients hold of client 0, which stays: t would be enough."""
    parties = Parties(settings_of(5)).until("unmasking")
    needed = parties.settings.shares_needed
    colluding = range(1, 1 + needed - missing)
    held = {place + 1: parties.clients[place]._kept[0][:SHARE] for place in colluding}
    if missing:
        with pytest.raises(ThresholdError):
            combine(held, needed, 32)
        with pytest.raises(MalformedError):  # as if fewer were enough
            combine(held, needed - missing, 32)
    else:
        assert combine(held, needed, 32) == parties.secrets(0).mask.secret


def test_survivors_give_one_kind_of_share_of_each_client():
    """Of those who stay shares of the seed, of those who are lost shares of the key."""
    parties = Parties(settings_of(5)).until("input")
    parties.do("input", range(4))
    parties.do("unmasking", range(4))
    needed = parties.settings.shares_needed
    for place in range(4):
        given = shares_given(parties, place, range(4))
        assert combine(given, needed, 16) == parties.secrets(place).seed
    assert combine(shares_given(parties, 4, range(4)), needed, 32) == parties.secrets(4).mask.secret


# Requests for both kinds


def test_a_request_for_both_kinds_of_one_client_wipes_the_state():
    parties = Parties(settings_of(4)).until("unmasking")
    everyone = frozenset(range(4))
    both = seal_asked(parties.settings, 0, UnmaskRequest(everyone, frozenset({2})))
    with pytest.raises(ViolationError):
        parties.clients[0].unmask(both)
    assert forgot_everything(parties.clients[0])
    with pytest.raises(ReplayError):
        parties.clients[0].unmask(parties.list_for("unmasking", 0))


STAYS = UnmaskRequest(frozenset(range(4)), frozenset())
LEAVES = UnmaskRequest(frozenset({0, 1, 3}), frozenset({2}))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    ("first", "turned"), [(STAYS, LEAVES), (LEAVES, STAYS)], ids=["then the key", "then the seed"]
)
def test_the_other_kind_in_a_second_request_is_a_violation(signed, first, turned):
    parties = Parties(settings_of(4, signed=signed)).until("input")
    parties.do("input")
    client, settings = parties.clients[0], parties.settings
    ask = client.confirm if signed else client.unmask
    ask(seal_asked(settings, 0, first))
    with pytest.raises(ReplayError):
        ask(seal_asked(settings, 0, first))
    with pytest.raises(ViolationError):
        ask(seal_asked(settings, 0, turned))
    assert forgot_everything(client)


@pytest.mark.parametrize(
    ("survivors", "lost"),
    [({1, 2, 3}, {0}), ({0, 1, 2}, set()), ({1, 2, 3}, set())],
    ids=["its own key", "nothing of one client", "nothing of its own"],
)
def test_a_request_that_does_not_fit_what_was_shared_is_a_violation(survivors, lost):
    parties = Parties(settings_of(4)).until("unmasking")
    asked = UnmaskRequest(frozenset(survivors), frozenset(lost))
    with pytest.raises(ViolationError):
        parties.clients[0].unmask(seal_asked(parties.settings, 0, asked))
    assert forgot_everything(parties.clients[0])


def test_a_client_whose_round_is_over_holds_nothing():
    parties = Parties(settings_of(3)).until("unmasking")
    parties.do("unmasking")
    assert all(forgot_everything(client) for client in parties.clients.values())


def test_a_client_forgets_its_own_secrets_as_soon_as_its_vector_is_masked():
    parties = Parties(settings_of(3)).until("unmasking")
    assert vars(parties.clients[0])["_secrets"] is None


@pytest.mark.parametrize("broken", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("step", "inside"), [("shares", "is_signed"), ("input", "add_masks")])
def test_a_step_that_breaks_off_makes_a_client_forget_everything(monkeypatch, step, inside, broken):
    """Neither is an error of ours; a second try would seal other shares under the same nonces."""
    parties = Parties(settings_of(3, signed=True)).until(step)
    listed = parties.list_for(step, 0)

    def breaks_off(*_):
        raise broken

    with monkeypatch.context() as patched:
        patched.setattr(secagg_client, inside, breaks_off)
        with pytest.raises(broken):
            parties.answer(step, 0, listed)
    assert forgot_everything(parties.clients[0])
    with pytest.raises(ReplayError):
        parties.answer(step, 0, listed)


def test_sealed_shares_are_not_kept_when_the_survivors_are_settled():
    """Nobody needs them any more: a server that is broken into later does not have them."""
    parties = Parties(settings_of(3)).until("unmasking")
    assert vars(parties.server)["_shares"]
    parties.list_for("unmasking", 0)
    assert not vars(parties.server)["_shares"]


# Rounds


def test_nobody_takes_part_in_a_round_twice():
    settings, rounds = settings_of(3), SumsJoined()
    SecAggClient(settings, 0, rounds=rounds)
    with pytest.raises(ReplayError):
        SecAggClient(settings, 0, rounds=rounds)
    with pytest.raises(ReplayError):
        SecAggServer(settings, rounds=SumsJoined(rounds.names))
    SecAggServer(settings, rounds=SumsJoined())


@pytest.mark.parametrize("place", [-1, 3])
def test_there_is_no_client_at_a_place_outside_the_cohort(place):
    with pytest.raises(InputError):
        SecAggClient(settings_of(3), place)
