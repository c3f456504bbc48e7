"""Capacity: servers of each resource, what runs out first, and what more servers do not help."""

import json
from dataclasses import replace

import pytest

from keyhole.aggregation import aggregation_named
from keyhole.delivery import delivery_names
from keyhole.errors import InputError
from keyhole.planner.capacity import Fleet, checkin_need, delivery_needs, sum_needs
from keyhole.planner.prices import price_all, price_of
from keyhole.pricing import ServiceSpeeds, Speeds, Workload, measured
from tests.helpers import ROOT

RESULTS = ROOT / "benchmarks/results"
SLICES = json.loads((RESULTS / "slices.json").read_text())["cells"]
GATHERED = [cell["scores"]["keyhole"] for cell in SLICES if "scores" in cell]
MEASURED = json.loads((RESULTS / "internet_scale.json").read_text())["cells"]
GROWTH = json.loads((RESULTS / "growth.json").read_text())["cells"]
(COSTS,) = [cell["costs"] for cell in MEASURED if "costs" in cell]
NEED = Workload(10**6, 100, 256, 10**6)
FREE = replace(
    measured(ServiceSpeeds), request_seconds=1e-30, sending=1e30, handshake_seconds=1e-30
)


def needs_of(way, need=NEED, fleet=None, speeds=None):
    found = delivery_needs(price_of(way, need), need, fleet or Fleet(600), speeds)
    return {one.party: one for one in found}


def within_twice(planned, measured):
    return measured / 2 <= planned <= 2 * measured


def test_the_line_carries_what_devices_receive_in_the_time_there_is():
    one = needs_of("pregenerated")["slice server"]
    down = price_of("pregenerated", NEED).bytes_down
    assert one.gbit == pytest.approx(10**6 * 8e-9 * down / 600)
    assert one.by["line"] == pytest.approx(one.gbit / 25 / 0.7)
    slower = needs_of("pregenerated", fleet=Fleet(1200))["slice server"]
    assert slower.gbit == pytest.approx(one.gbit / 2)
    assert slower.cores == pytest.approx(one.cores / 2)


def test_the_work_of_a_delivery_is_in_its_cores_and_requests_come_on_top():
    work = price_of("pir", NEED).seconds_by["first server"]
    assert needs_of("pir", speeds=FREE)["first server"].cores == pytest.approx(work / 600)
    speeds = measured(ServiceSpeeds)
    on_top = 10**6 * (3 * speeds.request_seconds + speeds.handshake_seconds)
    on_top += 10**6 * price_of("pir", NEED).bytes_down / 2 / speeds.sending
    found = needs_of("pir")["first server"].cores
    assert found == pytest.approx((work + on_top) / 600, rel=1e-3)


def test_fewer_cores_or_a_narrower_line_take_more_servers_and_say_which_runs_out():
    few, narrow = (
        needs_of("pregenerated", fleet=fleet)["slice server"]
        for fleet in (Fleet(600, cores=1), Fleet(600, gbit=0.1))
    )
    assert (few.first, narrow.first) == ("CPU", "line")
    assert few.servers > 1
    assert narrow.servers == 13  # 0.87 Gbit/s over 0.07


def test_two_servers_share_the_bytes_and_a_relay_carries_them_twice():
    two = needs_of("pir")
    assert two["first server"].by == two["second server"].by
    price = price_of("relay", NEED)
    one = needs_of("relay")
    both = 10**6 * (price.bytes_down + price.bytes_up) * 8e-9 / 600
    assert one["relay"].gbit == pytest.approx(both)
    assert one["gateway"].gbit == pytest.approx(10**6 * price.bytes_down * 8e-9 / 600)
    assert one["gateway"].memory == price.server_memory
    assert one["relay"].memory == 0


def test_a_table_beyond_the_memory_of_a_server_is_not_helped_by_more_of_them():
    (one,) = needs_of("pregenerated", fleet=Fleet(600, memory=1e6)).values()
    assert not one.fits
    assert one.first == "memory"
    assert needs_of("pregenerated")["slice server"].fits


def test_one_coordinator_and_one_trainer_must_do():
    storing, adding = sum_needs(aggregation_named("plain").price(NEED), NEED, Fleet(600))
    assert (storing.party, adding.party) == ("coordinator", "trainer")
    assert storing.fits
    assert adding.fits
    assert not sum_needs(aggregation_named("plain").price(NEED), NEED, Fleet(600, cores=1))[0].fits
    crowd = Workload(10**6, 1_000, 256, 10**6)
    late = sum_needs(aggregation_named("plain").price(crowd), crowd, Fleet(60))[1]
    assert (late.fits, late.first) == (False, "CPU")  # one process, however many cores there are
    assert checkin_need(NEED, Fleet(600)).servers == 1


def test_both_aggregators_work_and_the_first_passes_on_what_is_public():
    first, second = sum_needs(aggregation_named("secure-sparse").price(NEED), NEED, Fleet(600))
    assert first.cores > second.cores > 0.99 * first.cores
    assert first.memory == second.memory


def test_every_way_says_how_many_servers_it_takes():
    need = Workload(10_000, 100, 256, 1_000)
    for price in price_all(need):
        assert all(one.servers >= 1 for one in delivery_needs(price, need, Fleet(60)))
    assert {price.name for price in price_all(need)} == set(delivery_names())


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0},
        {"cores": 0},
        {"gbit": float("nan")},
        {"memory": -1},
        {"busy": 0},
        {"busy": 1.1},
    ],
)
def test_servers_that_could_do_nothing_are_refused(wrong):
    with pytest.raises(InputError):
        Fleet(**{"seconds": 600, **wrong})


@pytest.mark.parametrize("score", GATHERED, ids=lambda score: f"{score['answer_bytes']:.0f} B")
def test_a_fetch_costs_the_service_what_was_measured(score):
    speeds, size = measured(ServiceSpeeds), score["answer_bytes"]
    planned = speeds.request_seconds + size / speeds.sending + size / measured(Speeds).gather
    assert within_twice(planned, 1 / score["per_cpu_second"])


def points_of(of):
    """Place and what was spent at each point of the lines of growth."""
    lines = [cell for cell in GROWTH if cell.get("of") == of]
    return [pair for line in lines for pair in zip(line["places"], line["spent"], strict=True)]


def test_check_ins_and_handshakes_cost_the_service_what_was_measured():
    speeds = measured(ServiceSpeeds)
    (handshake,) = [cell["seconds"] for cell in GROWTH if "seconds" in cell]
    assert within_twice(speeds.handshake_seconds, handshake)
    assert within_twice(speeds.request_seconds, COSTS["checkin"])


def test_fetches_and_updates_of_all_sizes_cost_what_was_measured():
    speeds, gather = measured(ServiceSpeeds), measured(Speeds).gather
    for of, seconds in {
        "a fetch": lambda size: speeds.request_seconds + size / speeds.sending + size / gather,
        "storing an update": lambda size: (
            speeds.request_seconds + speeds.store_seconds + size / speeds.receiving
        ),
        "adding an update": speeds.adding_seconds,
    }.items():
        found = points_of(of)
        assert len(found) > 6
        assert all(within_twice(seconds(one["message"]), one["cpu"]) for _, one in found)


def test_adding_up_a_round_costs_the_trainer_what_was_measured():
    """With the sums of blocks, which are added to one another."""
    names = "num_keys", "keys_per_client", "slice_bytes", "cohort"
    for place, one in points_of("adding all updates"):
        price = aggregation_named("plain").price(Workload(*(place[name] for name in names)))
        assert within_twice(price.seconds_by["trainer"], one["cpu"])
