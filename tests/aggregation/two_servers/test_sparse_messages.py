"""Messages of a sparse sum: their bytes, their lengths, and every bad one refused with nothing
added."""

from dataclasses import replace
from hashlib import sha256

import pytest

from keyhole.aggregation.two_servers.params import SPARSE_OWN_BYTES
from keyhole.aggregation.two_servers.server import SparsePart
from keyhole.delivery.base import name_of_round
from keyhole.errors import InputError, MalformedError, StaleError
from tests.aggregation.two_servers.sparse_sums import (
    client_of,
    servers_of,
    shares_of,
    terms_of,
)
from tests.delivery.pir.golden import assert_golden
from tests.delivery.pir.mutations import bit_flips, extensions, flipped, truncations

HEAD_BYTES = 56
MAGIC_BITS = 8 * 8  # of the head that say what it is: magic, kind, server, zeros
parties = pytest.mark.parametrize("party", [0, 1])


def small():
    """Terms with short messages that have every part there is, two spare bits among them."""
    return terms_of(num_keys=6, width=1, max_keys=1, bits=16)


def sealed(message):
    """With the check that belongs to its bytes, written from the layout: as a forger would."""
    return message[:-16] + sha256(message[:-16]).digest()[:16]


def refuses(terms, party, public, own, error):
    """Whether a message is refused, and nothing is added."""
    part = SparsePart(terms, party)
    with pytest.raises(error) as raised:
        part.add(public, own)
    return type(raised.value) is error and not part._waiting and not part.take().any()


# Forms


def test_messages_are_the_bytes_they_always_were():
    terms = terms_of(num_keys=6, width=2, max_keys=2, bits=16, min_clients=2, with_counts=True)
    clients = [client_of(terms, keys, seed) for seed, keys in enumerate([[4, 1], []])]
    servers = servers_of(terms, clients)
    shares = shares_of(servers)
    messages = {"terms": terms.encode()}
    for place, client in enumerate(clients):
        messages[f"public of client {place}"] = client.shares.public
        for party in (0, 1):
            messages[f"own of client {place} to server {party}"] = client.shares.to[party]
    for party in (0, 1):
        messages[f"share of server {party}"] = shares[party].astype("<u2").tobytes()
    assert_golden("sparse-sum", messages)


@pytest.mark.parametrize("shape", [(1, 1, 1), (6, 1, 1), (100, 7, 20), (5000, 3, 40)], ids=str)
@pytest.mark.parametrize("bits", [16, 32])
def test_lengths_follow_from_the_terms_whatever_the_keys(shape, bits):
    terms = terms_of(*shape, bits=bits)
    for keys in ([], [0], range(shape[2])):
        shares = client_of(terms, keys).shares
        assert len(shares.public) == terms.public_bytes
        assert [len(own) for own in shares.to] == [SPARSE_OWN_BYTES, SPARSE_OWN_BYTES] == [120, 120]
        assert terms.upload_bytes == terms.public_bytes + 240


def test_an_upload_is_at_most_one_and_a_half_times_the_clear_rows():
    """1308 buckets a row each, 8 levels of 16 bytes and 2 bits: 1.39."""
    terms = terms_of(100_000, 500, 1000)
    assert terms.public_bytes == 56 + 16 + 1308 * (2 + 8 * 16 + 500 * 4)
    assert terms.upload_bytes <= 1.5 * 1000 * 500 * 4


def test_terms_tell_each_other_apart():
    terms = terms_of(1000, 5, 10, 16, 3, True)
    changed = [
        replace(terms, round=name_of_round("round-8")),
        replace(terms, num_keys=1001),
        replace(terms, width=6),
        replace(terms, max_keys=9),
        replace(terms, bits=32),
        replace(terms, min_clients=4),
        replace(terms, with_counts=False),
    ]
    assert len({some.digest for some in (terms, *changed)}) == 8


def test_terms_that_make_no_sense_are_refused():
    good = terms_of()
    for bad in (
        {"round": b"short"},
        {"num_keys": 0},
        {"num_keys": 2**31},
        {"width": 0},
        {"max_keys": 0},
        {"max_keys": 21},
        {"bits": 8},
        {"min_clients": 0},
    ):
        with pytest.raises(InputError):
            replace(good, **bad)


# Refused. That a public message is the one its client speaks of is seen by the digests of the sum
# that the part belongs to.


@parties
def test_every_truncated_extended_or_flipped_own_message_is_refused(party):
    terms = small()
    public, own = client_of(terms, [3]).to(party)
    for bad in (*truncations(own), *extensions(own), *bit_flips(own)):
        assert refuses(terms, party, public, bad, MalformedError)


@parties
def test_every_truncated_or_extended_public_message_is_refused(party):
    terms = small()
    public, own = client_of(terms, [3]).to(party)
    for bad in (*truncations(public), *extensions(public)):
        assert refuses(terms, party, bad, own, MalformedError)


@parties
def test_every_head_that_is_forged_with_its_check_is_refused(party):
    terms = small()
    public, own = client_of(terms, [3]).to(party)
    for at in range(8 * HEAD_BYTES):
        error = MalformedError if at < MAGIC_BITS else StaleError
        assert refuses(terms, party, public, sealed(flipped(own, at)), error)
        assert refuses(terms, party, flipped(public, at), own, error)


def test_bits_that_are_always_zero_are_refused_when_set():
    """Of 3 levels: 6 of 8 control bits are used, and the lowest bit of every seed is clear."""
    terms = small()
    public, own = client_of(terms, [3]).to(0)
    start = 8 * (HEAD_BYTES + 16)
    for at in (6, 7, *(8 + 128 * level for level in range(3))):
        assert refuses(terms, 0, flipped(public, start + at), own, MalformedError)
    # The other bits are anybody's: nobody can see that they are wrong.
    SparsePart(terms, 0).add(flipped(public, start + 5), own)


@parties
def test_a_message_for_the_other_server_or_in_the_others_place_is_refused(party):
    terms = small()
    one = client_of(terms, [3], 1)
    assert refuses(terms, party, one.shares.public, one.shares.to[1 - party], MalformedError)
    assert refuses(terms, party, one.shares.to[party], one.shares.public, MalformedError)


@pytest.mark.parametrize(
    "change",
    [
        {"round": name_of_round("round-8")},
        {"min_clients": 2},
        {"num_keys": 7},
        {"width": 2},
        {"bits": 32},
        {"with_counts": True},
        {"max_keys": 2},
    ],
    ids=str,
)
def test_messages_under_other_terms_are_refused(change):
    terms = small()
    public, own = client_of(replace(terms, **change), [3]).to(0)
    assert refuses(terms, 0, public, own, StaleError)
    # An own message that pretends to be of this sum does not help the public one.
    pretended = sealed(client_of(terms, [3]).shares.to[0][:HEAD_BYTES] + own[HEAD_BYTES:])
    is_short = len(public) != terms.public_bytes
    assert refuses(terms, 0, public, pretended, MalformedError if is_short else StaleError)
