"""Server 0 of two gives everybody but one device another model, so that their updates are nothing.

It alone gives out what everyone receives, and it answers half of every query. Without a root that
both are compared with, it can do so under the round's true name, and the other server sees nothing.
"""

import numpy as np
import pytest

from keyhole.delivery.pir.database import Database
from keyhole.delivery.pir.two_server import TwoServerPir, servers_of
from keyhole.errors import DamageError, StaleError
from tests.attacks.failing_devices import LAYOUT, SETTINGS, WANTED
from tests.attacks.lying_service import believing, lying
from tests.service.pir.pair import pair

BROADCAST, CUT = 0, 1


def minus_a_million(records):
    records.view(np.float32)[:] = -1e6
    return records


def fetched(both, state):
    fetch = both.fetch()
    with fetch.others[0], both.device() as device:
        return fetch(device, state.published.id, {"row": [WANTED]})


def test_another_bias_from_server_0_is_refused(tmp_path):
    with pair(tmp_path) as both:
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        with (
            lying(both.service, BROADCAST, minus_a_million),
            pytest.raises(DamageError, match="not those of the round"),
        ):
            fetched(both, state)


def test_without_a_root_server_0_alone_gives_a_device_another_bias(tmp_path, monkeypatch):
    believing(monkeypatch)
    with pair(tmp_path) as both:
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        with lying(both.service, BROADCAST, minus_a_million):
            found = fetched(both, state)
        assert (found.model["bias"] == -1e6).all()


@pytest.mark.parametrize("has_own_tree", [True, False])
def test_other_rows_from_server_0_are_not_served_or_not_asked_for(tmp_path, has_own_tree):
    """Its files do not have the root of the manifest, so an honest program refuses them."""
    with pair(tmp_path) as both:
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        lies = lying(both.service, CUT, lambda records: records ^ 1, has_own_tree)
        with lies, pytest.raises(Exception, match=r"damaged|no usable answer"):
            fetched(both, state)


def test_params_of_another_root_are_not_asked_under(tmp_path, monkeypatch):
    """Both servers of a round that was altered at both: the manifest says otherwise."""
    monkeypatch.setattr("keyhole.service.private._check_root", lambda info, tree: None)
    with pair(tmp_path) as both:
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        with (
            lying(both.service, CUT, lambda records: records ^ 1, has_own_tree=True),
            pytest.raises(StaleError),
        ):
            fetched(both, state)
        for recorder in both.recorders:
            assert not [path for method, path, *_ in recorder.seen if method == "POST"]


def test_other_rows_under_the_true_params_are_left_out(tmp_path, monkeypatch):
    """Server 0 states the true root, and scans rows of its own."""

    def open_it(self, table):
        true = Database.of(table)
        altered = Database(true.public, true.rows ^ np.uint64(1))
        return servers_of(altered)[0], servers_of(true)[1]

    monkeypatch.setattr(TwoServerPir, "open", open_it)
    with pair(tmp_path) as both:
        state = both.service.publish(LAYOUT, settings=SETTINGS)
        found = fetched(both, state)
        # An even number of altered rows in the answer of server 0 cancels out.
        assert (len(found.keys["row"]), found.wrong) in [(0, 1), (1, 0)]
        expected = state.select(tuple(found.keys.values()))
        np.testing.assert_array_equal(found.model["w"], expected["w"])
