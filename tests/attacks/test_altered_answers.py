"""Attack: a cache, a mirror or the service alters what a device receives: any row, any way."""

import numpy as np
import pytest

from keyhole.device.cache import SliceCache
from keyhole.errors import DamageError
from tests.attacks.lying_service import believing, lying
from tests.helpers import LAYOUTS
from tests.service.small_service import small_service

LAYOUT = LAYOUTS["rows with a broadcast bias"]
KEYS = {space.name: [1, 3] for space in LAYOUT.spaces}
TABLES = range(len(LAYOUT.parts))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with small_service(tmp_path_factory.mktemp("rounds")) as made:
        yield made


def one_bit(records):
    """One bit of a row that is asked for."""
    records[min(3, len(records) - 1), -1] ^= 1
    return records


WAYS = {
    "by key": lambda device, round_id: device.fetch(round_id, KEYS).model,
    "whole": lambda device, round_id: device.fetch_all(round_id).select(KEYS).model,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_own_tree", [False, True])
@pytest.mark.parametrize("place", TABLES)
def test_one_bit_of_one_row_is_found(service, monkeypatch, place, has_own_tree, way):
    published = service.publish(LAYOUT, seed=place).published
    fetch = WAYS[way]
    with service.device() as device:
        fetch(device, published.id)
        with lying(service, place, one_bit, has_own_tree):
            with pytest.raises(DamageError, match="do not lead to the root"):
                fetch(device, published.id)
            believing(monkeypatch)  # the planted hole: the altered model is taken
            fetch(device, published.id)


def test_a_service_cannot_call_an_old_record_unchanged(service, monkeypatch):
    """A device that holds the record of an earlier round must not be left with it."""
    old = service.publish(LAYOUT, seed=5)
    cache = SliceCache(None, min_record=0)
    with service.device(cache=cache) as device:
        before = device.fetch(old.published.id, KEYS).model
        new = service.publish(LAYOUT, seed=6)
        monkeypatch.setattr(  # as if nothing had changed, whatever the device names
            "keyhole.service.answers.unchanged",
            lambda ask, leaves: None if ask.names is None else np.ones(len(ask.keys), bool),
        )
        found = device.fetch(new.published.id, KEYS)
        assert found.traffic.requests == 2  # what was held is not used a second time
        expected = new.select(tuple(found.keys.values()))
        for name in expected:
            np.testing.assert_array_equal(found.model[name], expected[name])
        believing(monkeypatch)
        cache = SliceCache(None, min_record=0)
        with service.device(cache=cache) as fooled:
            fooled.fetch(old.published.id, KEYS)
            taken = fooled.fetch(new.published.id, KEYS).model
        assert all(np.array_equal(taken[name], before[name]) for name in before)
