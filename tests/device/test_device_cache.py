"""A device with a cache: unchanged slices are not sent again, and no byte differs for it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole as kh
from keyhole.crypto.merkle import TreeShape, proof_length
from keyhole.device.cache import SliceCache
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.helpers import LAYOUTS, assert_trees_equal
from tests.service.fault_proxy import CUT


def changed(service, state, rows):
    """The next round, in which some rows of the first table differ."""
    model = state.select(tuple(space.all_keys() for space in state.layout.spaces))
    model["w"] = model["w"].copy()
    model["w"][rows] += 1
    return service.publish_state(ServerState.dense(state.layout, model, SGD(lr=0.5)))


WIDE = kh.Layout.of({"w": np.zeros((50, 64), np.float32)}, kh.Cut(kh.KeySpace("row", 50), {"w": 0}))


def proof_of(keys):
    """Bytes of the proof for these of the 50 keys."""
    return 32 * proof_length(TreeShape(50), np.array(keys))


@pytest.mark.parametrize("on_disk", [False, True])
def test_only_slices_that_changed_are_sent_again(service, tmp_path, on_disk):
    directory = tmp_path / "cache" if on_disk else None
    cache, state = SliceCache(directory), service.publish(WIDE)
    with service.device(cache=cache) as device:
        device.fetch(state.published.id, {"row": [1, 2, 3]})
        state = changed(service, state, [2, 9])
        if on_disk:
            device._cache = SliceCache(directory)  # as after a restart
        found = device.fetch(state.published.id, {"row": [3, 2, 1, 9, 9, 3]})
        assert found.traffic.reused == 3
        # Proof, a bit for each of 6 keys, and the records of 2, 9 and 9.
        assert found.traffic.bytes_down == proof_of([1, 2, 3, 9]) + 1 + 3 * 256
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        found = device.fetch(state.published.id, {"row": [9, 2]})
        assert found.traffic.bytes_down == proof_of([2, 9]) + 1
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


@settings(max_examples=20)
@given(rounds=st.lists(st.lists(st.integers(0, 49), max_size=6), min_size=1, max_size=3))
def test_a_cache_changes_no_byte(service, rounds):
    cache, state = SliceCache(None, 5 * 304), service.publish(WIDE)
    with service.device(cache=cache) as device:
        for place, keys in enumerate(rounds):
            found = device.fetch(state.published.id, {"row": keys})
            assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
            assert found.model["w"].flags.aligned
            state = changed(service, state, [place])


def test_slices_that_all_changed_are_arrays_that_any_library_takes(service):
    cache, state = SliceCache(None), service.publish(WIDE)
    with service.device(cache=cache) as device:
        device.fetch(state.published.id, {"row": [1, 2]})
        state = changed(service, state, [1, 2])
        found = device.fetch(state.published.id, {"row": [2, 1]})
    # The numbers begin at an odd place.
    assert found.traffic.bytes_down == proof_of([1, 2]) + 1 + 2 * 256
    assert found.model["w"].flags.aligned
    assert found.model["w"].flags.writeable


def test_a_cut_answer_to_a_device_with_a_cache_goes_on(service, proxy, proxied):
    state = service.publish(WIDE)
    for at in range(0, 900, 7):
        proxied._cache = SliceCache(None)
        proxy.arm()
        proxied.fetch(state.published.id, {"row": [1, 2, 3]})
        proxy.arm(CUT, at)
        found = proxied.fetch(state.published.id, {"row": [1, 9, 2, 8, 3, 7]})
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        # The proof comes once, or twice where it was cut.
        assert found.traffic.bytes_down <= 2 * proof_of([1, 2, 3, 7, 8, 9]) + 6 + 256 * 4


def test_a_cache_that_rots_in_memory_is_not_used_again(service):
    cache, state = SliceCache(None), service.publish(WIDE)
    with service.device(cache=cache) as device:
        device.fetch(state.published.id, {"row": [1, 2]})
        for table in cache._tables.values():
            table.records[0, 5] ^= 1
        found = device.fetch(state.published.id, {"row": [1, 2]})
        assert found.traffic.requests == 2
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


def test_a_full_cache_keeps_no_device_from_fetching(service, tmp_path):
    cache = SliceCache(tmp_path / "cache", max_bytes=100, min_record=0)
    with service.device(cache=cache) as device:
        for seed, name in enumerate(["rows", "two key spaces", "rows"]):
            state = service.publish(LAYOUTS[name], seed=seed)
            keys = {space.name: [0, 1, 2, 3] for space in state.layout.spaces}
            found = device.fetch(state.published.id, keys)
            assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
            assert cache.nbytes <= 100


def test_a_full_disk_keeps_no_device_from_fetching(service, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    cache, state = SliceCache(tmp_path / "cache"), service.publish(WIDE)
    with service.device(cache=cache) as device, monkeypatch.context() as patch:
        device.known(state.published.id)
        patch.setattr("keyhole.device.cache.write_all", full)
        found = device.fetch(state.published.id, {"row": [1, 2]})
    assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
    assert list((tmp_path / "cache").iterdir()) == []
