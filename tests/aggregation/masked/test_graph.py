"""The graph of neighbours: regular, symmetric, connected after dropouts, and as large as the stated
bounds ask for."""

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from keyhole.aggregation.masked.params import (
    COMPLETE_BELOW,
    Risk,
    degree_of,
    neighbours,
    threshold_of,
)
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError

SEED = bytes(range(16))


def is_connected(near, members):
    """Whether those of `members` are connected among themselves."""
    members = set(members)
    reached, ahead = set(), [next(iter(members))]
    while ahead:
        client = ahead.pop()
        if client not in reached:
            reached.add(client)
            ahead += [other for other in near[client] if other in members]
    return reached == members


def tail(count, special, degree, minimum):
    """P[a client has `minimum` or more special neighbours], exact."""
    ways = sum(
        math.comb(special, number) * math.comb(count - 1 - special, degree - number)
        for number in range(minimum, degree + 1)
    )
    return Fraction(ways, math.comb(count - 1, degree))


@pytest.mark.parametrize("count", [2, 3, 50, COMPLETE_BELOW - 1])
def test_below_200_clients_everybody_is_a_neighbour(count):
    near = neighbours(count)
    assert near == neighbours(count, count - 1, SEED)
    for own, others in enumerate(near):
        assert list(others) == [other for other in range(count) if other != own]


@pytest.mark.parametrize(
    ("count", "degree"), [(5, 2), (6, 4), (9, 4), (10, 8), (200, None), (201, None), (1000, None)]
)
def test_every_client_has_the_same_number_of_neighbours_and_is_theirs(count, degree):
    near = neighbours(count, degree, SEED)
    degree = degree or degree_of(count)
    assert len(near) == count
    assert degree < count - 1
    for own, others in enumerate(near):
        assert len(set(others)) == len(others) == degree
        assert list(others) == sorted(others)
        assert own not in others
        assert all(own in near[other] for other in others)


@pytest.mark.parametrize(("count", "degree"), [(7, 2), (8, 4), (9, 4), (10, 6)])
def test_no_fewer_than_degree_clients_that_leave_cut_the_graph(count, degree):
    """The connectivity of Harary's graph is its degree, exhaustively."""
    near = neighbours(count, degree, SEED)

    def is_cut(size):
        everybody = set(range(count))
        return any(
            not is_connected(near, everybody - set(gone))
            for gone in combinations(range(count), size)
        )

    assert not is_cut(degree - 1)
    assert is_cut(degree)


@pytest.mark.parametrize("count", [200, 500])
def test_with_a_fifth_corrupt_and_a_fifth_dropped_every_property_holds(count):
    """Each fails at most once in 2^30 rounds: not in these 30."""
    prg, degree = Prg(SEED), degree_of(count)
    threshold, fifth = threshold_of(count, degree), count // 5
    for number in range(15):
        near = neighbours(count, seed=bytes([number]))
        order = prg.permutation(count).tolist()
        corrupt, dropped = set(order[:fifth]), set(order[fifth : 2 * fifth])
        assert is_connected(near, order[2 * fifth :])
        for others in near:
            assert len(corrupt & set(others)) < threshold
            assert degree - len(dropped & set(others)) >= threshold


def test_with_far_fewer_neighbours_these_properties_do_not_hold():
    """Negative control: 6 neighbours, and two of five clients gone, fall apart."""
    prg = Prg(SEED)
    apart = 0
    for number in range(30):
        order = prg.permutation(200).tolist()
        apart += not is_connected(neighbours(200, 6, bytes([number])), order[80:])
    assert apart > 15


@pytest.mark.parametrize("count", [200, 1000])
@pytest.mark.parametrize(("corrupt", "dropped"), [(0.2, 0.2), (0.1, 0.1), (1 / 3, 0.1)])
def test_degree_and_threshold_keep_the_bounds_in_exact_arithmetic(count, corrupt, dropped):
    risk = Risk(corrupt, dropped)
    degree = degree_of(count, risk)
    threshold = threshold_of(count, degree, risk)
    bad, gone = math.ceil(corrupt * count), math.ceil(dropped * count)
    run = degree // 2
    apart = count * Fraction(math.comb(bad + gone, run), math.comb(count, run))
    assert apart <= Fraction(1, 2**40)
    assert count * tail(count, bad, degree, threshold) <= Fraction(1, 2**40)
    assert count * tail(count, gone, degree, degree - threshold + 1) <= Fraction(1, 2**30)
    # The most with which sums can be opened: with one more they cannot be.
    assert count * tail(count, gone, degree, degree - threshold) > Fraction(1, 2**30)


def test_a_degree_below_that_of_the_bounds_has_no_threshold():
    for count in (200, 1000):
        with pytest.raises(InputError, match="no threshold bears the risk"):
            threshold_of(count, degree_of(count) - 2)
        assert threshold_of(count, degree_of(count) + 2) >= threshold_of(count, degree_of(count))


def test_a_graph_that_may_fall_apart_has_no_threshold_though_every_group_could_have_one():
    """2 of 200 are corrupt, so 3 shares are safe, and hardly ever are fewer than 3 neighbours of 26
    left by 60 that drop. But the bound on 13 in a row being gone is 200 * 2^-23."""
    risk = Risk(corrupt=0.01, dropped=0.3)
    assert tail(200, 2, 26, 3) == 0
    assert 200 * tail(200, 60, 26, 26 - 3 + 1) < 2**-30
    with pytest.raises(InputError, match="no threshold"):
        threshold_of(200, 26, risk)


@pytest.mark.parametrize(
    ("corrupt", "dropped", "count", "degree", "threshold"),
    [
        (0.1, 0.1, 1000, 52, 28),
        (0.1, 0.1, 10_000, 60, 32),
        (0.2, 0.2, 10_000, 134, 70),
        (1 / 3, 0.1, 1000, 114, 78),
    ],
)
def test_degrees_and_thresholds_are_those_of_an_independent_computation(
    corrupt, dropped, count, degree, threshold
):
    """Computed before this code, from the same three bounds, with 40 and 30 bits."""
    risk = Risk(corrupt, dropped)
    assert degree_of(count, risk) == degree
    assert threshold_of(count, degree, risk) == threshold


def test_degrees_grow_with_the_logarithm_of_the_count():
    degrees = [degree_of(10**power) for power in (3, 4, 5, 6)]
    assert degrees == sorted(degrees)
    assert degrees[-1] < 160


def test_the_bound_on_falling_apart_is_kept_and_is_not_far_off():
    """60 clients on a circle, 12 gone, runs of 4: the bound is 60 C(12, 4) / C(60, 4) = 0.061.
    Runs are found in at most so many of 2,000 rounds (and 5 standard deviations), and in a third
    of that at least; whoever stays is connected whenever there is none."""
    bound, rounds, prg = 60 * math.comb(12, 4) / math.comb(60, 4), 2000, Prg(SEED)
    runs = 0
    for _ in range(rounds):
        gone = np.zeros(60, bool)
        gone[prg.permutation(60)[:12]] = True
        runs += bool(np.logical_and.reduce([np.roll(gone, i) for i in range(4)]).any())
    assert bound / 3 < runs / rounds < bound + 5 * math.sqrt(bound / rounds)


def test_those_who_stay_are_connected_if_no_run_of_half_a_degree_is_gone():
    """On the circle itself, whose order is read off the graph of degree 2."""
    near, circle = neighbours(40, 8, SEED), [0]
    ring = neighbours(40, 2, SEED)
    while len(circle) < 40:
        circle.append(next(c for c in ring[circle[-1]] if c not in circle[-2:]))
    # Three of every four in a row are gone: the graph holds. A fourth at two places: it does not.
    gone = {client for place, client in enumerate(circle) if place % 4}
    assert is_connected(near, set(circle) - gone)
    assert not is_connected(near, set(circle) - gone - {circle[8], circle[24]})


def test_the_order_comes_from_the_round_alone():
    assert neighbours(200, seed=SEED) == neighbours(200, seed=SEED)
    assert neighbours(200, seed=SEED) != neighbours(200, seed=bytes(16))


def test_who_is_a_neighbour_is_even_over_rounds():
    """Client 0 and each other of 20, with degree 4, in 4 of 19 rounds: over 1,900 rounds 400 times,
    within 6 standard deviations."""
    seen = np.zeros(20)
    for number in range(1900):
        seen[list(neighbours(20, 4, number.to_bytes(2, "big"))[0])] += 1
    share = 4 / 19
    assert (np.abs(seen[1:] - 400) < 6 * math.sqrt(1900 * share * (1 - share))).all()


@pytest.mark.parametrize(
    ("count", "threshold"), [(1, 1), (2, 2), (3, 3), (4, 3), (6, 5), (50, 34), (199, 133)]
)
def test_the_threshold_of_the_complete_graph_is_two_thirds_and_one(count, threshold):
    assert threshold_of(count) == math.floor(Fraction(2 * count, 3)) + 1 == threshold
    if count > 1:
        assert threshold_of(count, count - 1) == threshold


@pytest.mark.parametrize(
    ("count", "degree"), [(0, None), (1, None), (10, 3), (10, 0), (10, -2), (10, 10), (10, 12)]
)
def test_a_graph_that_does_not_exist_is_refused(count, degree):
    with pytest.raises(InputError, match="graph of neighbours"):
        neighbours(count, degree)


@pytest.mark.parametrize("fractions", [(-0.1, 0.1), (0.1, -0.1), (0.5, 0.5), (math.nan, 0.1)])
def test_fractions_that_leave_nobody_are_refused(fractions):
    with pytest.raises(InputError, match="corrupt and dropped clients"):
        Risk(*fractions)


def test_where_no_sparse_graph_bears_the_risk_the_complete_one_is_taken():
    assert degree_of(200, Risk(0.6, 0.3)) == 199
