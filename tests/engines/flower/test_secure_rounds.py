"""Secure rounds on Flower: two slice servers and two aggregators, each a process of its own."""

import numpy as np
import pytest

from benchmarks.engine_cells.local_deployment import free_port
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.rounds.loop import start_run
from tests.engines.flower.deployment import deployment
from tests.engines.flower.toy_app import plan_of
from tests.rounds import toy

CONFIG = {"cohort": 3, "rounds": 2, "over-selection": 1.0}


def private_services(made):
    """Slices by private retrieval from two servers, updates in shares to two aggregators."""
    second = free_port()
    made.serve("--pir", "0")
    made.serve("--pir", "1", "--open-queries", name="second", port=second)
    made.second = f"http://127.0.0.1:{second}"
    return {"delivery": "pir", "second": made.second, **made.aggregators()}


@pytest.mark.slow
def test_a_secure_run_is_the_plain_run_up_to_rounding(tmp_path):
    with deployment(tmp_path, 3, before=private_services, **CONFIG) as made:
        made.start_run()
        made.wait_for_model(300.0)
        records = made.records()
        model = (made.run / "model").read_text()
        spooled = list((made.rounds / "updates").glob("*/*"))
    plain = start_run(toy.make_state(), toy.make_clients(), plan_of(CONFIG))
    list(plain.rounds(CONFIG["rounds"]))
    found = np.frombuffer(bytes.fromhex(model), np.float32)
    # A mean is off by one step of the ring at most, here 2^-25 = 3e-8, which training carries
    # on to the second round; float32 holds such numbers to 1e-7.
    assert 1 / TwoServers().rounding.for_clients(3).scale == 2.0**-25
    assert np.abs(found - plain.state.model()["x"]).max() < 1e-6
    assert np.abs(found).max() > 0.1
    assert [len(record.staleness) for record in records] == [3, 3]
    assert all("second server" in record.seen_in_sum for record in records)
    learned = {"first server": "who takes part", "second server": "who takes part"}
    assert all(record.seen_by == learned for record in records)
    assert spooled == []  # no update has been at the slice service
