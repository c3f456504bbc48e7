"""Popular keys of a round: at services, on devices, in runs."""

from contextlib import ExitStack
from dataclasses import replace

import msgspec
import numpy as np
import pytest

import keyhole as kh
from keyhole.delivery import popular as popular_module
from keyhole.delivery.pir.one_server import OneServerPir
from keyhole.device.private import QueryFetch
from keyhole.errors import StaleError
from keyhole.planner.prices import max_bytes
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from keyhole.wire.private import popular_of_table
from tests.helpers import zeros
from tests.rounds import toy
from tests.service.pir.pair import ONE, TWO, pair
from tests.service.pir.test_hostile_params import fetching, posted
from tests.service.pir.test_pir_training import train_over

LAYOUT = kh.Layout.of(zeros(w=(200, 5), b=(3,)), kh.Cut(kh.KeySpace("row", 200), {"w": 0}))
SHARES = {"row": ("0-19+50", 0.75)}
SETTINGS = {"keys_per_client": {"row": 8}, **popular_module.popular_settings(SHARES)}
KEYS = [3, 150, 50, 3, 7]
roles = pytest.mark.parametrize("roles", [TWO, ONE], ids=["two servers", "one server"])


@roles
def test_a_device_asks_for_popular_keys_because_the_round_says_so(tmp_path, roles):
    with ExitStack() as stack:
        both = stack.enter_context(pair(tmp_path, roles))
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        device = stack.enter_context(both.device())
        fetch = fetching(stack, both)
        found = fetch(device, state.published.id, {"row": KEYS})
        assert found.keys["row"].array.tolist() == KEYS  # 150 is one of two of the whole table
        expected = state.select(tuple(found.keys.values()))
        np.testing.assert_array_equal(found.model["w"], expected["w"])
        rare = np.arange(100, 108)
        found = fetch(device, state.published.id, {"row": rare})
        assert 1 <= len(found.keys["row"]) <= 2
        assert set(found.keys["row"].array) < set(rare.tolist())
        assert found.wrong == 0


@roles
@pytest.mark.parametrize("others", [None, {"row": ("0-19+51", 0.75)}, {"row": ("0-19+50", 0.5)}])
def test_popular_keys_that_are_not_those_of_the_manifest_are_not_asked_for(
    tmp_path, monkeypatch, roles, others
):
    """Servers that agree on others, which only the manifest can show."""

    def lying(delivery, manifest, table, max_keys):
        settings = {**manifest.settings, **popular_module.popular_settings(others or {})}
        if others is None:
            del settings[popular_module.POPULAR_SETTING]
        changed = msgspec.structs.replace(manifest, settings=settings)
        return popular_of_table(delivery, changed, table, max_keys)

    monkeypatch.setattr("keyhole.service.private.popular_of_table", lying)
    with ExitStack() as stack:
        both = stack.enter_context(pair(tmp_path, roles))
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        device = stack.enter_context(both.device())
        with pytest.raises(StaleError, match="popular keys"):
            fetching(stack, both)(device, state.published.id, {"row": KEYS})
        assert posted(both) == []


SHARES_OF_NONE = (0, -0.5, 1.01, 2, 1e308, 10**400, float("inf"), float("nan"), True)


@pytest.mark.parametrize(
    "told",
    [
        "words",
        *({"row": each} for each in (3, ["0-9"], ["0-9", "x"])),
        *({"row": ["0-9", share]} for share in SHARES_OF_NONE),
    ],
    ids=lambda told: str(told)[:30],
)
def test_settings_that_make_no_sense_name_no_popular_keys(told):
    assert popular_module.shares_of_round({"popular": told}) == {}


@roles
def test_devices_train_without_the_keys_that_are_dropped(tmp_path, roles):
    """What clients of a run in process make, who drop the same keys and count them."""
    shares = {"feature": ("20", 1.0)}
    plan = toy.make_plan(
        cohorts=Cohorts(len(toy.EXAMPLES), 2),
        keys_per_client={"feature": 8},
        delivery=replace(roles[0].delivery, popular=shares, keys_per_client={"feature": 8}),
    )
    with pair(tmp_path, roles) as both:
        fetch = QueryFetch(OneServerPir()) if roles is ONE else both.fetch()
        run = train_over(both, fetch, plan)
        if roles is TWO:
            fetch.others[0].close()
    expected = start_run(toy.make_state(), toy.make_clients(), plan)
    records = list(expected.rounds(len(run.records)))
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
    assert all(record.unplaced_keys > 0 for record in records)
    down, up = max_bytes(fetch.delivery, run.state.layout, plan.keys_per_client, popular=shares)
    for record in run.records:  # what was fetched has one length for all
        assert (set(record.bytes_down), min(record.bytes_up) > up) == ({down}, True)
