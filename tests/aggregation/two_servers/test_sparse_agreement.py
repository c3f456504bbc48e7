"""Nothing is released before both servers have agreed whom they add, nor for too few, nor twice."""

import struct
from dataclasses import replace
from hashlib import sha256
from itertools import product

import numpy as np
import pytest

from keyhole.aggregation.two_servers import sparse_server
from keyhole.aggregation.two_servers.sparse import pack_sparse_own
from keyhole.aggregation.two_servers.sparse_server import SparseServer, combine
from keyhole.crypto.once import SumsJoined
from keyhole.delivery.pir.database import name_of_round
from keyhole.errors import (
    MalformedError,
    MismatchError,
    ReplayError,
    StaleError,
    ThresholdError,
    TooLateError,
)
from tests.aggregation.two_servers.sparse_sums import (
    client_of,
    plain_sum,
    servers_of,
    shares_of,
    terms_of,
)
from tests.delivery.pir.mutations import bit_flips, extensions, truncations

parties = pytest.mark.parametrize("party", [0, 1])


def clients_of(terms, count):
    return [client_of(terms, [at], at) for at in range(count)]


def releases_nothing(server):
    with pytest.raises((MismatchError, ThresholdError)):
        server.share()
    return True


@parties
def test_no_share_is_released_before_the_servers_agree(party):
    terms = terms_of()
    servers = servers_of(terms, clients_of(terms, 2))
    with pytest.raises(MismatchError):
        servers[party].share()
    servers[1 - party].agree(servers[party].accepted)  # the other one's part is not one's own
    with pytest.raises(MismatchError):
        servers[party].share()


def test_servers_with_different_clients_release_nothing_until_they_have_the_same():
    terms = terms_of()
    clients = clients_of(terms, 3)
    servers = servers_of(terms, clients[:2])
    servers[0].add(2, *clients[2].to(0))
    for party, (here, there) in enumerate([(1, 0), (0, 1)]):
        with pytest.raises(MismatchError) as raised:
            servers[party].agree(servers[1 - party].accepted)
        assert f"{here} clients only here and {there} only there" in str(raised.value)
        assert releases_nothing(servers[party])
    servers[1].add(2, *clients[2].to(1))
    np.testing.assert_array_equal(combine(*shares_of(servers)), plain_sum(terms, clients))


def test_the_same_messages_under_other_places_do_not_agree():
    terms = terms_of()
    clients = clients_of(terms, 2)
    servers = servers_of(terms, clients)[0], servers_of(terms, clients[::-1])[1]
    for server, other in (servers, servers[::-1]):
        with pytest.raises(MismatchError):
            server.agree(other.accepted)
        assert releases_nothing(server)


def test_a_client_that_tells_each_server_another_public_message_is_found():
    terms = terms_of()
    first, forged = client_of(terms, [3], 1), client_of(terms, [4], 2)
    servers = servers_of(terms, clients_of(terms, 2))
    own = pack_sparse_own(terms, 1, bytes(range(16)), forged.shares.public)
    servers[0].add(9, *first.to(0))
    servers[1].add(9, forged.shares.public, own)
    for server, other in (servers, servers[::-1]):
        with pytest.raises(MismatchError):
            server.agree(other.accepted)
        assert releases_nothing(server)


@parties
@pytest.mark.parametrize("count", [0, 1, 2])
def test_each_server_refuses_too_few_clients_by_itself(party, count):
    terms = terms_of(min_clients=3)
    servers = servers_of(terms, clients_of(terms, count))
    with pytest.raises(ThresholdError):
        servers[party].agree(servers[1 - party].accepted)
    with pytest.raises(ThresholdError):
        servers[party].share()


def test_as_many_clients_as_must_be_are_enough():
    terms = terms_of(min_clients=3)
    clients = clients_of(terms, 3)
    total = combine(*shares_of(servers_of(terms, clients)))
    np.testing.assert_array_equal(total, plain_sum(terms, clients))


REACHES = {"none": (), "both": (0, 1), "server 0": (0,), "server 1": (1,)}


def test_every_pattern_of_clients_that_reach_one_server_or_none_gives_the_sum_or_nothing():
    terms = terms_of(6, 1, 1, min_clients=2)
    clients, released = clients_of(terms, 4), 0
    for pattern in product(REACHES.values(), repeat=4):
        servers = SparseServer(terms, 0), SparseServer(terms, 1)
        for place, reached in enumerate(pattern):
            for party in reached:
                servers[party].add(place, *clients[place].to(party))
        there = [client for client, reached in zip(clients, pattern, strict=True) if reached]
        if all(len(reached) != 1 for reached in pattern) and len(there) >= 2:
            np.testing.assert_array_equal(combine(*shares_of(servers)), plain_sum(terms, there))
            released += 1
            continue
        for server, other in (servers, servers[::-1]):
            with pytest.raises((MismatchError, ThresholdError)):
                server.agree(other.accepted)
            assert releases_nothing(server)
    assert released == 11  # all sets of 2 or more of 4


@parties
def test_a_round_is_added_up_once(party):
    """Two sums of one round, with a client more or less, show what that client sent."""
    terms, rounds = terms_of(), SumsJoined()
    SparseServer(terms, party, rounds)
    for known in (rounds, SumsJoined(rounds.names)):
        with pytest.raises(ReplayError):
            SparseServer(replace(terms, min_clients=2), party, known)
    SparseServer(replace(terms, round=name_of_round("round-8")), party, rounds)


def test_two_sums_of_one_round_would_show_what_one_client_sent():
    """Why a server keeps its rounds: without them nothing stops it."""
    terms = terms_of(min_clients=2)
    clients = clients_of(terms, 3)
    three, two = (combine(*shares_of(servers_of(terms, some))) for some in (clients, clients[:2]))
    np.testing.assert_array_equal(three - two, plain_sum(terms, clients[2:]))


@parties
def test_a_share_is_given_out_once(party):
    terms = terms_of()
    servers = servers_of(terms, clients_of(terms, 2))
    shares_of(servers)
    for _ in range(2):
        with pytest.raises(ReplayError):
            servers[party].share()


@parties
def test_nobody_is_added_once_the_servers_agree(party):
    terms = terms_of()
    clients = clients_of(terms, 3)
    servers = servers_of(terms, clients[:2])
    servers[party].agree(servers[1 - party].accepted)
    with pytest.raises(TooLateError):
        servers[party].add(2, *clients[2].to(party))
    shares = shares_of(servers)
    np.testing.assert_array_equal(combine(*shares), plain_sum(terms, clients[:2]))


@parties
def test_every_damaged_list_is_refused(party):
    terms = terms_of(6, 1, 1)
    servers = servers_of(terms, clients_of(terms, 2))
    good = servers[1 - party].accepted
    for bad in (*truncations(good), *extensions(good), *bit_flips(good)):
        with pytest.raises(MalformedError):
            servers[party].agree(bad)
    assert releases_nothing(servers[party])


def sealed(message):
    return message + sha256(message).digest()[:16]


@parties
def test_a_forged_list_is_refused(party):
    """Its check is right: the length, the order, or what it says is not."""
    terms = terms_of(6, 1, 1)
    servers = servers_of(terms, clients_of(terms, 2))
    good = servers[1 - party].accepted[:-16]
    head, digest = good[:56], good[64:96]
    for count, places in ((2, (1, 0)), (2, (0, 0)), (2, (0, 1, 2)), (3, (0, 1)), (2**61, (0, 1))):
        body = struct.pack("<Q", count) + digest + struct.pack(f"<{len(places)}Q", *places)
        with pytest.raises(MalformedError):
            servers[party].agree(sealed(head + body))
    with pytest.raises(MismatchError):
        servers[party].agree(sealed(good[:64] + bytes(32) + good[96:]))
    assert releases_nothing(servers[party])


@parties
def test_a_servers_own_list_and_lists_of_other_sums_are_refused(party):
    terms = terms_of(6, 1, 1)
    servers = servers_of(terms, clients_of(terms, 2))
    with pytest.raises(MalformedError):
        servers[party].agree(servers[party].accepted)
    for other in (replace(terms, round=name_of_round("round-8")), replace(terms, min_clients=2)):
        with pytest.raises(StaleError):
            servers[party].agree(SparseServer(other, 1 - party).accepted)
    with pytest.raises(MalformedError):
        servers[party].agree(client_of(terms, [1]).shares.to[party])
    assert releases_nothing(servers[party])


def test_a_sum_whose_adding_broke_off_is_not_released(monkeypatch):
    terms = terms_of()
    servers = servers_of(terms, clients_of(terms, 2))

    def breaks_off(total, *_):
        total += 1
        raise MemoryError

    monkeypatch.setattr(sparse_server, "add_clients", breaks_off)
    with pytest.raises(MemoryError):
        shares_of(servers)
    monkeypatch.undo()
    with pytest.raises(ReplayError):
        servers[0].share()
