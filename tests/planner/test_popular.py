"""What popular keys save and drop, against clients that are drawn and placed."""

import numpy as np
import pytest

from keyhole.delivery import all_deliveries
from keyhole.delivery.pir.database import numbers_only
from keyhole.delivery.pir.two_server import Batch
from keyhole.delivery.popular import PopularKeys
from keyhole.errors import InputError
from keyhole.planner.popular import Zipf
from keyhole.planner.prices import price_all
from keyhole.pricing import Workload

K, M, CLIENTS = 20_000, 200, 40


def drawn(exponent, rng):
    """The first m different keys of an endless stream of them, by the arrival of each."""
    weights = np.arange(1, K + 1, dtype=np.float64) ** -exponent
    return np.argsort(rng.exponential(size=K) / weights)[:M]


def dropped_by(keys, popular):
    """How many keys of a client are dropped by two servers, as it places them."""
    params = numbers_only("two-server", K, 100, M, popular)
    chosen, whole, _ = popular.split(np.sort(keys), M - popular.slots, seed=3)
    placed = len(chosen)
    if len(params.tables) > 1:
        placement = Batch.of(params.tables[1]).placement
        placed += len(np.unique(placement.buckets_of(np.sort(keys)[whole])))
    return M - placed


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("numbers", [(2000, 200), (2000, 160), (400, 100), (10_000, 180)], ids=str)
def test_the_share_that_is_dropped_is_that_of_clients_that_are_drawn(exponent, numbers):
    load = Workload(K, M, 100, cohort=1, popular=numbers)
    popular, rng = PopularKeys(((0, numbers[0] - 1),), numbers[1]), np.random.default_rng(5)
    found = [dropped_by(drawn(exponent, rng), popular) / M for _ in range(CLIENTS)]
    spread = 4 * np.std(found) / CLIENTS**0.5
    # The mean of a maximum is above the maximum of a mean: where both parts are about full.
    assert abs(np.mean(found) - Zipf(load, exponent).dropped) < spread + 0.01


def test_popular_keys_of_a_large_table_are_counted_as_those_of_a_small_one():
    """Groups of keys behind the first 65,536 change nothing that matters."""
    load = Workload(300_000, 1000, 100, cohort=1, popular=(120_000, 900))
    ranks = np.arange(1, 300_001, dtype=np.float64)
    law = Zipf(load, 1.0)
    rate = 1.0
    for _ in range(200):
        rate *= 1000 / -np.expm1(-rate / ranks).sum()
    assert law.popular == pytest.approx(-np.expm1(-rate / ranks[:120_000]).sum(), rel=1e-3)


def test_nothing_is_dropped_without_popular_keys_and_most_where_all_keys_are_alike():
    assert Zipf(Workload(K, M, 100, cohort=1), 1.0).dropped == 0
    alike = Zipf(Workload(K, M, 100, cohort=1, popular=(K // 10, M)), 0.0)
    assert alike.dropped == pytest.approx(0.9, abs=0.005)


@pytest.mark.parametrize("exponent", [-0.1, 11, float("nan")])
def test_a_law_that_is_none_is_refused(exponent):
    with pytest.raises(InputError, match="popularity"):
        Zipf(Workload(K, M, 100, cohort=1), exponent)


@pytest.mark.parametrize("numbers", [(1, 1), (K, 5), (50, 50), (500, 201), (500, 0)])
def test_popular_keys_that_make_no_sense_are_refused(numbers):
    with pytest.raises(InputError, match="popular"):
        Workload(K, M, 100, cohort=1, popular=numbers)


def test_popular_keys_make_private_retrieval_cheaper_and_change_no_other_way():
    usual = Workload(10**6, 1000, 2000, cohort=50)
    some, alone = (Workload(10**6, 1000, 2000, cohort=50, popular=(10**5, m)) for m in (900, 1000))
    have = {each.about.name for each in all_deliveries() if each.about.has_popular}
    assert have == {"pir", "pir-one-server"}
    for price, less, least in zip(*map(price_all, (usual, some, alone)), strict=True):
        if price.name not in have:
            assert price == less == least
            continue
        work = [sum(each.seconds_by.values()) for each in (least, less, price)]
        assert work[0] < 0.2 * work[2]
        assert work[1] < 0.5 * work[2]
        assert least.bytes_total < price.bytes_total
