"""Work: seconds as they were measured, memory as it is held, building told from answering."""

import json
from dataclasses import replace

import numpy as np
import pytest

from keyhole.delivery.base import PrivateTable
from keyhole.delivery.paths import path_bytes
from keyhole.delivery.pir.database import Database
from keyhole.delivery.pir.two_server import Batch, TwoServerPir, params_of
from keyhole.planner.prices import price_all, price_of
from keyhole.planner.speeds import calibrate
from keyhole.pricing import ServiceSpeeds, Speeds, SumSpeeds, Workload, measured
from tests.helpers import ROOT

CELLS = json.loads((ROOT / "benchmarks/results/private_select.json").read_text())["cells"]
CLIENTS = [cell for cell in CELLS if "server_together" in cell]
TABLES = [cell for cell in CELLS if "build_cpu" in cell]
LATTICES = [cell for cell in CELLS if "encode" in cell]
SLICE_BYTES, TOGETHER = 2_048, 16  # of that benchmark


IN_CACHE = 50_000  # keys of 2 KB: smaller tables stay in the cache of a quiet machine


def within_twice(planned, measured, num_keys=10**9):
    """Whether a plan is as measured. What stays in a cache may be faster than planned."""
    return measured / 2 <= planned and (planned <= 2 * measured or num_keys < IN_CACHE)


def size_of(cell):
    return f"K={cell['num_keys']} m={cell.get('keys_per_client', 1)}"


@pytest.mark.parametrize("cell", CLIENTS, ids=size_of)
def test_two_servers_and_their_clients_work_as_long_as_measured(cell):
    one, many = (
        price_of("pir", Workload(cell["num_keys"], cell["keys_per_client"], SLICE_BYTES, cohort))
        for cohort in (1, TOGETHER)
    )
    assert within_twice(1e3 * one.client_seconds, cell["ask"] + cell["open"], cell["num_keys"])
    assert within_twice(1e3 * one.seconds_by["first server"], cell["server"], cell["num_keys"])
    each = 1e3 * many.seconds_by["first server"] / TOGETHER
    assert within_twice(each, cell["server_together"], cell["num_keys"])


@pytest.mark.parametrize("cell", TABLES, ids=size_of)
def test_a_table_with_paths_takes_as_long_to_build_as_measured(cell):
    need = Workload(cell["num_keys"], 1, SLICE_BYTES, 1)
    planned = price_of("pir", need).building_by["second server"]
    assert within_twice(planned, cell["build_cpu"], cell["num_keys"])


@pytest.mark.parametrize("cell", LATTICES, ids=size_of)
def test_one_server_and_its_clients_work_as_long_as_measured(cell):
    """In files a pass of few queries reads what a pass of eight does."""
    numbers = cell["num_keys"], cell["keys_per_client"], SLICE_BYTES
    one, eight = (price_of("pir-one-server", Workload(*numbers, cohort)) for cohort in (1, 8))
    assert within_twice(one.seconds_by["server"], cell["one"], cell["num_keys"])
    assert within_twice(eight.seconds_by["server"] / 8, cell["together"], cell["num_keys"])
    spent = cell["read_hint"] + cell["ask"] + cell["open"]
    assert within_twice(one.client_seconds, spent, cell["num_keys"])
    assert one.bytes_total == cell["up"] + cell["down"] + cell["hint"] + cell["top"]


def test_building_does_not_grow_with_the_cohort_and_answering_has_nothing_else_in_it():
    few, many = (price_all(Workload(10_000, 100, 2_000, cohort)) for cohort in (1, 32 * 100))
    for one, more in zip(few, many, strict=True):
        assert one.building_by == more.building_by
        assert one.server_seconds == pytest.approx(
            sum(one.seconds_by.values()) + sum(one.building_by.values())
        )
    builds = {price.name for price in few if sum(price.building_by.values()) > 0}
    assert builds == {price.name for price in few} - {"broadcast", "on-demand"}


@pytest.mark.parametrize(("num_keys", "m"), [(2_000, 100), (2_000, 12), (9_000, 12)])
def test_a_server_holds_what_planner_and_service_say(num_keys, m):
    """Rows, and the keys of all buckets where there are any."""
    records = np.zeros((num_keys, 21), np.uint8)
    database = Database.of(PrivateTable.of("7", bytes(32), records, m))
    placement = Batch.of(params_of(database)).placement
    held = database.rows.nbytes + (placement.members().nbytes if placement else 0)
    assert (placement is None) == (m == 12)
    assert price_of("pir", Workload(num_keys, m, 21, 1)).server_memory == held
    row_bytes = 21 + path_bytes(num_keys)
    assert TwoServerPir().held_bytes(num_keys, row_bytes, m) == held


def test_both_servers_work_alike_and_a_larger_cohort_works_more():
    few, many = (price_of("pir", Workload(10_000, 100, 2_000, cohort)) for cohort in (1, 64))
    assert few.seconds_by["first server"] == few.seconds_by["second server"]
    assert few.building_by["first server"] == few.building_by["second server"]
    one, more = few.seconds_by["first server"], many.seconds_by["first server"]
    assert one < more < 64 * one
    assert few.client_seconds == many.client_seconds


@pytest.mark.parametrize("kind", [Speeds, ServiceSpeeds, SumSpeeds])
def test_speeds_say_what_measured_them_where_and_when(kind):
    record = json.loads((ROOT / "src/keyhole/measured.json").read_text())[kind.__name__]
    assert all(record[name] for name in ("by", "cpu", "cores", "date", "commit"))
    script = record["by"].split()[1]
    assert script == "plan" or (ROOT / script).exists()
    found = vars(measured(kind))
    assert record["speeds"].items() <= found.items()
    assert all(value > 0 for value in found.values())


def test_a_pass_runs_at_the_speed_of_its_size():
    machine = replace(measured(Speeds), scan=10e9, scan_many=40e9, pass_queries=32)
    assert machine.scan_seconds(1e9, 1) == pytest.approx(1 / 10)
    assert machine.scan_seconds(1e9, 32) == pytest.approx(32 / 40)
    assert machine.scan_seconds(1e9, 64) == pytest.approx(64 / 40)


def test_calibration_measures_and_changes_seconds_but_no_byte():
    machine = calibrate(num_keys=3_000)
    ours = vars(measured(Speeds))
    changed = {name for name, value in vars(machine).items() if value != ours[name]}
    given = {"quote_seconds", "pass_queries", "reading"}
    only_with_buckets = {"scan_buckets", "scan_buckets_many", "expand"}
    assert vars(machine).keys() - changed <= given | only_with_buckets
    assert all(value > 0 for value in vars(machine).values())
    need = Workload(10_000, 100, 2_000, 50)
    for mine, ours in zip(price_all(need, machine), price_all(need), strict=True):
        assert (mine.bytes_down, mine.bytes_up) == (ours.bytes_down, ours.bytes_up)
        assert (mine.server_seconds == ours.server_seconds) == (mine.name == "broadcast")
