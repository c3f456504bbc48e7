"""Prices of sums: bytes as parties send them, seconds as they were measured, limits as they are."""

import json

import numpy as np
import pytest

from keyhole.aggregation import aggregation_named
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.aggregation.masked.server import run_secagg
from keyhole.aggregation.two_servers.client import share_rows
from keyhole.aggregation.two_servers.params import SparseParams
from keyhole.planner.capacity import price_sums
from keyhole.pricing import Workload
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.wire.messages import encode_update
from tests.helpers import ROOT

CELLS = json.loads((ROOT / "benchmarks/results/secure_sum.json").read_text())["cells"]
SPARSE = [cell for cell in CELLS if "unplaced" in cell]
SKETCHES = [cell for cell in CELLS if "decode" in cell]
DENSE = [cell for cell in CELLS if "entries" in cell]


def within_twice(planned, measured):
    return measured / 2 <= planned <= 2 * measured


def need_of(cohort):
    return Workload(
        cohort["num_keys"], cohort["keys_per_client"], 4 * cohort["width"], cohort["clients"]
    )


def test_a_plain_update_has_as_many_bytes_as_planned():
    space = KeySpace("row", 500)
    model = {"w": np.zeros((500, 3), np.float32)}
    rows = {"w": np.zeros((20, 3), np.float32)}
    layout, keys = Layout.of(model, Cut(space, {"w": 0})), {"row": space.keys(range(20))}
    body = encode_update(layout, rows, keys, bytes(32))
    assert aggregation_named("plain").price(Workload(500, 20, 12, 1)).bytes_up == len(body)


@pytest.mark.parametrize("clients", [5, 9])
def test_clients_of_a_masked_sum_send_and_receive_as_many_bytes_as_planned(clients):
    price = aggregation_named("secure-dense").price(Workload(30, 3, 8, clients))
    settings = SecAggParams(bytes(16), clients, 60)
    vectors = {place: np.zeros(60, "<u4") for place in range(clients)}
    opened = run_secagg(settings, vectors, {})
    assert set(opened.bytes_up.values()) == {price.bytes_up}
    assert set(opened.bytes_down.values()) == {price.bytes_down}


def test_a_client_of_two_servers_sends_as_many_bytes_as_planned():
    terms = SparseParams(bytes(16), 2_000, 5, 40, 32, min_clients=1)
    shares = share_rows(terms, np.arange(40), np.ones((40, 5), np.uint32))
    sent = len(shares.public) + sum(map(len, shares.to))
    assert aggregation_named("secure-sparse").price(Workload(2_000, 40, 20, 10)).bytes_up == sent


@pytest.mark.parametrize("cell", SPARSE, ids=lambda cell: f"K={cell['cohort']['num_keys']}")
def test_two_servers_and_their_clients_add_up_as_long_as_measured(cell):
    need = need_of(cell["cohort"])
    price = aggregation_named("secure-sparse").price(need)
    assert price.bytes_up == cell["up"]
    assert within_twice(price.client_seconds, cell["client"])
    assert within_twice(price.seconds_by["second server"] / need.cohort, cell["server"])


@pytest.mark.parametrize("cell", SKETCHES, ids=lambda cell: f"K={cell['cohort']['num_keys']}")
def test_a_sketch_is_as_long_and_takes_as_long_as_measured(cell):
    price = aggregation_named("secure-sketch").price(need_of(cell["cohort"]))
    # The benchmark knows how many keys there are; the planner takes the most there can be.
    assert within_twice(price.bytes_up, cell["up_cautious"])
    longer = price.bytes_up / cell["up"]
    spent = cell["add"] + cell["unmask"] + cell["decode"]
    assert within_twice(price.seconds_by["server"] / longer, spent)


@pytest.mark.parametrize("cell", DENSE, ids=lambda cell: f"{cell['entries']} entries")
def test_a_dense_sum_takes_as_long_as_measured(cell):
    load = Workload(cell["entries"], 1, 4, cell["clients"])
    price = aggregation_named("secure-dense").price(load)
    assert within_twice(price.client_seconds, cell["ours"]["client"])
    assert within_twice(price.seconds_by["server"], cell["ours"]["server"])


def test_masked_sums_of_a_million_clients_are_beyond_their_limits():
    assert [p.name for p in price_sums(Workload(10**6, 100, 256, 10**6))] == [
        "plain",
        "dense",
        "trimmed-mean",
        "median",
        "secure-sparse",
    ]
    assert "secure-dense" in {price.name for price in price_sums(Workload(10**6, 100, 256, 10**4))}
