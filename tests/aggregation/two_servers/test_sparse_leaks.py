"""What one server sees does not tell keys or rows apart.

A server sees the public message, its own root and what it computes from both. Messages and shares
are put to a linear distinguisher: that finds bugs and proves nothing; planted leaks show that it
would find one. Work is counted, never timed.
"""

from functools import cache

import numpy as np
import pytest

from keyhole.aggregation.two_servers import client as sparse_points
from keyhole.aggregation.two_servers.server import SparsePart
from keyhole.crypto import dpf
from tests.aggregation.two_servers.sparse_sums import client_of, servers_of, shares_of, terms_of
from tests.delivery.pir.distinguisher import bits_of, compare, work_of

HEAD_BYTES = 56
CLIENTS = 250  # of each kind
TERMS = terms_of(num_keys=7, width=2, max_keys=2, bits=16, with_counts=True)
LEVELS = 3  # of the tree of 7 positions
WORLDS = {
    "the first key or the last": ([0], [6], 7),
    "no key or as many as there may be": ([], [3, 5], 7),
    "a row of zeros or of ones": ([5], [5], None),
}
worlds = pytest.mark.parametrize("world", WORLDS)
parties = pytest.mark.parametrize("party", [0, 1])


def clients_of(world, count=CLIENTS):
    """Many clients of either kind."""
    one, other, value = WORLDS[world]
    kinds = (one, 0 if value is None else value), (other, 2**16 - 1 if value is None else value)
    return [
        [client_of(TERMS, keys, 2 * at + kind, rows_of(keys, number)) for at in range(count)]
        for kind, (keys, number) in enumerate(kinds)
    ]


def rows_of(keys, number):
    return np.full((len(keys), TERMS.width), number, TERMS.dtype)


@cache
def honest(world):
    return clients_of(world)


def views(clients, party):
    """All that a server is sent and that is not the same for everyone: public body and root."""
    return bits_of(
        [c.shares.public[HEAD_BYTES:] + c.shares.to[party][HEAD_BYTES:72] for c in clients]
    )


def zero_bits():
    """The bits of a view that are never set: spare control bits, and the lowest bit of seeds."""
    control = 8 * 16
    used = 2 * LEVELS * TERMS.num_buckets
    seeds = control + -(-used // 8) * 8
    spare = range(control + used, seeds)
    return [*spare, *(seeds + 128 * at for at in range(LEVELS * TERMS.num_buckets))]


@worlds
@parties
def test_what_a_server_is_sent_does_not_tell_clients_apart(world, party):
    verdict = compare(*(views(clients, party) for clients in honest(world)))
    assert not verdict.tells_apart, verdict
    assert not verdict.biased
    assert verdict.constant == zero_bits()


@cache
def shares_in(world):
    """Both servers' shares of each client alone, one pair of lists for either kind."""
    kinds = ([shares_of(servers_of(TERMS, [client])) for client in kind] for kind in honest(world))
    return [list(zip(*kind, strict=True)) for kind in kinds]


@pytest.mark.parametrize(
    "world",
    [
        "the first key or the last",
        *(pytest.param(world, marks=pytest.mark.slow) for world in list(WORLDS)[1:]),
    ],
)
def test_what_a_server_computes_does_not_tell_clients_apart_and_what_both_do_does(world):
    for party in (0, 1):
        verdict = compare(*(share_bits(kind[party]) for kind in shares_in(world)))
        assert not verdict.tells_apart, verdict
        assert not verdict.biased
        assert not verdict.constant
    sums = [[one + other for one, other in zip(*kind, strict=True)] for kind in shares_in(world)]
    assert compare(*map(share_bits, sums)).tells_apart


def share_bits(shares):
    return bits_of([share.tobytes() for share in shares])


@parties
def test_a_share_alone_is_uniform_and_the_sum_is_not(party):
    """Chi-square of bytes: 255 degrees of freedom, passed by chance once in 10^6 times at 373."""
    terms = terms_of(3000, 8, 5)
    servers = servers_of(terms, [client_of(terms, [1, 2], 3, np.ones((2, 8), np.uint32))])
    shares = shares_of(servers)
    assert chi_square(shares[party]) < 373
    assert chi_square(shares[0] + shares[1]) > 10**6


def chi_square(array):
    counts = np.bincount(array.view(np.uint8).reshape(-1), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2).sum() / expected)


# Planted leaks, which must be found


def test_rows_that_are_not_covered_by_the_seeds_would_be_found(monkeypatch):
    def nothing(seeds, row, dtype, nonce):
        return np.zeros((*seeds.shape[:-1], row), dtype)

    monkeypatch.setattr(sparse_points, "convert", nothing)
    kinds = clients_of("a row of zeros or of ones", 60)
    for party in (0, 1):
        assert compare(*(views(clients, party) for clients in kinds)).tells_apart


def test_a_path_that_shows_in_the_control_bits_would_be_found(monkeypatch):
    def bare(children, bits, goes_right):
        words, _ = correct_level(children, bits, goes_right)
        return words, np.stack([~goes_right, goes_right], axis=1)

    correct_level = dpf.correct_level
    monkeypatch.setattr(dpf, "correct_level", bare)
    monkeypatch.setattr(dpf, "follow", dpf.follow.plain)  # which calls it
    kinds = clients_of("the first key or the last", 60)
    for party in (0, 1):
        assert compare(*(views(clients, party) for clients in kinds)).tells_apart


def test_one_bit_that_depends_on_the_rows_of_three_clients_in_four_would_be_found():
    one, other = (views(clients, 0) for clients in honest("a row of zeros or of ones"))
    one[np.arange(CLIENTS) % 4 > 0, 130] = 1
    assert compare(one, other).tells_apart


# Counted


def work_of_server(server, client, party):
    """What an aggregator does with the message of a client."""

    def act():
        server.add(*client.to(party))
        server._work()

    return work_of(act, "crypto", "aggregation")


@parties
def test_a_server_does_the_same_work_in_the_same_order_for_all_keys(party):
    terms = terms_of(300, 2, 10)
    terms.placement.members()  # what is worked out once, on first use
    kinds = [], [0], [299], range(10), range(5, 300, 60)
    work = [
        work_of_server(SparsePart(terms, party), client_of(terms, keys, seed), party)
        for seed, keys in enumerate(kinds)
    ]
    assert len(work[0]) > 100
    assert all(lines == work[0] for lines in work[1:])
