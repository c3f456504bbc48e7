"""Rows that fewer than t clients sent are dropped by both servers, before anything is opened."""

import numpy as np
import pytest

from keyhole.aggregation import aggregation_named
from keyhole.aggregation.exchange import combine
from keyhole.aggregation.privacy.mechanism import Privacy, PrivateSum
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.aggregation.two_servers.params import PartParams
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, MalformedError, MismatchError, ViolationError
from keyhole.sampling import Cohorts
from tests.aggregation.two_servers.two_server_sums import (
    COHORT,
    add_all,
    agree,
    combined,
    plain_sum,
    rows_of,
    servers_of,
    share_of,
    shares_of,
    terms_of,
)
from tests.delivery.pir.mutations import bit_flips, extensions, truncations

# Sparse, dense, sparse, and one that everybody sends.
PARTS = (
    *(PartParams(12, 3, 4, True), PartParams(7, 2, 7, False)),
    *(PartParams(9, 1, 4, True), PartParams(1, 5, 1, False)),
)


def added(terms, clients=COHORT):
    """Both servers with everything added, and the rows of each client."""
    rows = {name: rows_of(terms, seed) for seed, name in enumerate(clients)}
    sent = {name: shares_of(terms, rows[name], seed) for seed, name in enumerate(clients)}
    servers = servers_of(terms, sent)
    agree(servers)
    add_all(servers, sent)
    return servers, rows


def noise_of(seed, server):
    return lambda part: Prg(bytes([seed, server.party, part, 1] * 4))


def without_rare(terms, rows):
    """The definition: the plain sum with rows of too few at zero, and how many those were."""
    totals, dropped = plain_sum(terms, rows.values()), 0
    for place, total in enumerate(totals):
        counts = np.zeros(len(total), int)
        for client in rows.values():
            counts[client[place][0]] += 1
        if len(total) > 1:
            total[counts < terms.min_per_key] = 0
            dropped += np.count_nonzero((counts < terms.min_per_key) & (counts > 0))
    shapes = map(terms.given_shape, range(len(terms.parts)))
    return [total[:, :row] for total, (_, row) in zip(totals, shapes, strict=True)], dropped


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("with_counts", [False, True])
@pytest.mark.parametrize("least", [1, 2, 3, 6])
def test_what_is_opened_is_the_plain_sum_without_rows_of_few(bits, with_counts, least):
    terms = terms_of(parts=PARTS, bits=bits, with_counts=with_counts, clip=1.0, min_per_key=least)
    servers, rows = added(terms)
    counts = [server.counts() for server in servers]
    for server in servers:
        server.drop(*counts)
    shares = [share_of(server) for server in servers]
    expected, dropped = without_rare(terms, rows)
    assert shares[0].told == shares[1].told
    assert shares[0].dropped == dropped
    assert dropped or least == 1
    for found, total in zip(combined(terms, *shares), expected, strict=True):
        np.testing.assert_array_equal(found, total)


def test_both_set_their_shares_of_a_dropped_row_to_zero_before_they_give_them_out():
    """Else what one gives out, with what the other one keeps, would be the row."""
    terms = terms_of(parts=PARTS, min_per_key=3)
    servers, rows = added(terms)
    counts = [server.counts() for server in servers]
    for server in servers:
        server.drop(*counts)
    first, *_ = without_rare(terms, rows)[0]
    gone = ~first.any(axis=1)
    assert gone.any()
    for server in servers:
        share = np.frombuffer(share_of(server).payload, "<u4")[: 12 * 3].reshape(12, 3)
        assert not share[gone].any()
        assert share[~gone].all()  # of others, noise


def test_noise_on_counts_moves_borders_and_both_still_drop_the_same():
    terms = terms_of(parts=PARTS, min_per_key=3, count_noise=2.0)
    found = set()
    for seed in range(8):
        servers, _ = added(terms)
        counts = [server.counts(noise_of(seed, server)) for server in servers]
        for server in servers:
            server.drop(*counts)
        shares = [share_of(server) for server in servers]
        assert shares[0].told == shares[1].told
        first, *_ = combined(terms, *shares)
        found.add(first.any(axis=1).tobytes())
    assert len(found) > 1


def test_nothing_is_given_out_before_counts_were_compared():
    terms = terms_of(parts=PARTS, min_per_key=2)
    servers, _ = added(terms)
    with pytest.raises(ViolationError):
        servers[0].share()
    counts = [server.counts() for server in servers]
    for act in (servers[0].share, servers[0].counts):
        with pytest.raises(ViolationError):
            act()
    for bad in (*truncations(counts[1]), *extensions(counts[1]), *bit_flips(counts[1])):
        with pytest.raises(MalformedError):
            servers[0].drop(counts[0], bad)
    with pytest.raises(MalformedError):
        servers[0].drop(counts[1], counts[0])
    servers[0].drop(*counts)
    with pytest.raises(ViolationError):
        servers[0].drop(*counts)
    plain, _ = added(terms_of(parts=PARTS))
    with pytest.raises(ViolationError):
        plain[0].drop(*counts)


def test_shares_of_different_counts_are_not_combined():
    terms = terms_of(parts=PARTS, min_per_key=2, count_noise=1.0)
    shares = []
    for seed in range(2):
        servers, _ = added(terms)
        counts = [server.counts(noise_of(seed, server)) for server in servers]
        for server in servers:
            server.drop(*counts)
        shares.append([share_of(server) for server in servers])
    with pytest.raises(MismatchError, match="counts"):
        combine(TwoServers(), terms.encode(), (shares[0][0], shares[1][1]))


@pytest.mark.parametrize(
    "changes",
    [
        {"min_per_key": -1},
        {"min_per_key": 7},
        {"count_noise": 1.0},
        {"min_per_key": 2, "count_noise": -1.0},
        {"min_per_key": 2, "count_noise": float("nan")},
        {"min_per_key": 2, "noise": 0.5, "room": 19, "clip": 1.0, "norm": 1.0},
    ],
)
def test_thresholds_that_make_no_sense_are_refused(changes):
    with pytest.raises(InputError):
        terms_of(**changes)


def test_sums_that_open_every_row_and_private_ones_refuse_a_threshold():
    with pytest.raises(InputError, match="opens every row"):
        aggregation_named("plain", min_per_key=2)
    inner = aggregation_named("secure-sparse", min_per_key=2)
    with pytest.raises(InputError, match="no account covers"):
        PrivateSum(inner, Privacy(1.0, 1.0), Cohorts(10, 5)).check(None, {}, "cohort")


def test_what_servers_learn_of_counts_is_declared():
    leaks = TwoServers(min_per_key=4).about.seen_by().values()
    assert all("how many chose each key" in leak and "4 or more" in leak for leak in leaks)
    noisy = TwoServers(min_per_key=4, count_noise=1.0).about.seen_by().values()
    assert all("about how many" in leak for leak in noisy)
