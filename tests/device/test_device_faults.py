"""A device on a bad network: cut, reset, damaged or silent, it ends with the right bytes."""

import time
from itertools import count

import numpy as np
import pytest

from keyhole.errors import DamageError, InputError
from keyhole.wire.sockets import Clock, Retry, Timeouts
from tests.helpers import LAYOUTS, assert_trees_equal
from tests.service.fault_proxy import CUT, DELAY, FLIP, HALF_CLOSE, RESET

KEYS = {"word": [3, 1, 3], "neuron": [5]}

WAYS_TO_END = pytest.mark.parametrize(
    "kind", [CUT, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (RESET, HALF_CLOSE))]
)


def answer_length(proxy, ask):
    """Bytes of the answers that `ask` brings."""
    proxy.arm()
    ask()
    return proxy.passed


@WAYS_TO_END
def test_slices_survive_a_cut_at_every_byte(service, proxy, proxied, kind):
    state = service.publish(seed=1)
    proxied.known(state.published.id)
    keys = {"word": [7, 0, 2], "neuron": [1, 4]}
    expected = proxied.fetch(state.published.id, keys)
    length = answer_length(proxy, lambda: proxied.fetch(state.published.id, keys))
    assert length > 250
    for at in range(length):
        proxy.arm(kind, at)
        found = proxied.fetch(state.published.id, keys)
        assert_trees_equal(found.model, expected.model)


def test_a_cut_answer_is_asked_for_from_where_it_ended(service, proxy, proxied):
    state = service.publish(seed=1)
    proxied.known(state.published.id)
    keys = {"word": [7, 0, 2], "neuron": [1, 4]}
    whole = proxied.fetch(state.published.id, keys).traffic
    length = answer_length(proxy, lambda: proxied.fetch(state.published.id, keys))
    proxy.arm(CUT, length - 1)
    found = proxied.fetch(state.published.id, keys).traffic
    assert found.requests == 2
    assert found.bytes_down < whole.bytes_down + 24  # one record again, and what was cut of it


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CUT, RESET, HALF_CLOSE])
def test_segments_survive_a_cut_at_every_byte(service, proxy, proxied, kind):
    state = service.publish(LAYOUTS["rows"], seed=2)
    proxied.known(state.published.id)

    def fetch():
        return proxied.fetch_segment(state.published.id, "row", 0)

    expected, length = fetch().copy(), answer_length(proxy, fetch)
    for at in range(length):
        proxy.arm(kind, at)
        np.testing.assert_array_equal(fetch(), expected)


@WAYS_TO_END
def test_an_update_whose_answer_is_cut_at_any_byte_is_stored_once(service, proxy, proxied, kind):
    service.publish(seed=3)
    told = proxied.check_in()
    fetched = proxied.fetch(told, KEYS)
    length = answer_length(proxy, lambda: proxied.send(told, fetched.model, KEYS))
    expected = service.stored(told.round)
    for at in range(length):
        service.spool._path(told.round, "phone").unlink()
        proxy.arm(kind, at)
        proxied.send(told, fetched.model, KEYS)
        assert service.stored(told.round) == expected


def body_offsets(proxy, ask, body):
    """Where the bytes of a body lie among those of the answers."""
    length = answer_length(proxy, ask)
    return range(length - body, length)


def test_a_flipped_byte_of_slices_is_found_and_healed(service, proxy, proxied):
    state = service.publish(seed=4)
    proxied.known(state.published.id)
    expected = proxied.fetch(state.published.id, KEYS)

    def fetch():
        return proxied.fetch(state.published.id, KEYS)

    for at in body_offsets(proxy, fetch, expected.traffic.bytes_down):
        proxy.arm(FLIP, at)
        found = fetch()
        assert found.traffic.requests == 2
        assert_trees_equal(found.model, expected.model)


def test_a_flipped_byte_of_a_segment_its_proof_or_a_manifest_is_found(service, proxy, proxied):
    state = service.publish(LAYOUTS["rows"], seed=5)
    round_id = state.published.id
    expected = proxied.fetch_segment(round_id, "row", 0).copy()

    def fetch():
        return proxied.fetch_segment(round_id, "row", 0)

    for at in body_offsets(proxy, fetch, expected.nbytes):
        proxy.arm(FLIP, at)
        np.testing.assert_array_equal(fetch(), expected)
        assert proxy.passed > expected.nbytes * 2
    for at in body_offsets(proxy, lambda: service_manifest(proxied, round_id), 100):
        proxy.arm(FLIP, at)
        assert service_manifest(proxied, round_id) == state.published.manifest


def service_manifest(device, round_id):
    device._rounds.clear()
    return device.manifest(round_id)


def test_damage_that_stays_is_told(service, device):
    """A record that is not what it was when its leaf was made."""
    state = service.publish(LAYOUTS["rows"], seed=6)
    path = service.directory / "rounds" / state.published.id / "table-0" / "seg-0.bin"
    with path.open("r+b") as file:
        file.seek(5 * 12)
        file.write(b"\xff")
    with pytest.raises(DamageError, match="do not lead to the root"):
        device.fetch(state.published.id, {"row": [1, 5]})
    with pytest.raises(DamageError, match="do not lead to the root"):
        device.fetch_segment(state.published.id, "row", 0)
    device.fetch(state.published.id, {"row": [1, 4]})


def test_a_slow_service_is_asked_again(service, proxy, by_hand):
    state = service.publish()
    url = f"http://127.0.0.1:{proxy.port}"

    def wait():
        by_hand.now += 61

    proxy.arm()
    with service.device(url, timeouts=Timeouts(60, 60)) as device:
        device.known(state.published.id)
        proxy.arm(DELAY, 40, wait)
        found = device.fetch(state.published.id, KEYS)
        assert found.traffic.requests == 2
        proxy.released.set()
    assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


def test_a_clock_that_jumps_changes_nothing(service, proxy, monkeypatch):
    state, token = service.publish(), service.token()
    jumps = count(10**9, -(10**6))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    proxy.arm()
    url, retry = f"http://127.0.0.1:{proxy.port}", Retry(first_wait=0.01)
    with service.device(url, token=token, clock=Clock(), retry=retry) as device:
        device.known(state.published.id)
        proxy.arm(CUT, 200)
        found = device.fetch(state.published.id, KEYS)
        assert found.traffic.requests == 2
    assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


def test_an_error_never_names_keys(service, device):
    state = service.publish(LAYOUTS["rows"])
    device.known(state.published.id)
    with (
        service.device(max_keys=10**9) as greedy,
        pytest.raises(InputError, match="too many keys") as told,
    ):
        greedy.fetch(state.published.id, {"row": [6] * 70_000})
    assert "6, 6" not in str(told.value)
