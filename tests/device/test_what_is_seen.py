"""What a service sees of a device: looked at where its requests arrive, not where they are sent."""

from contextlib import contextmanager

import numpy as np

from keyhole import tree
from keyhole.device.device import Device
from keyhole.device.take_part import Participant, fetch_at_home, take_part
from keyhole.service.transport import serving
from keyhole.wire.messages import decode_query, decode_update
from tests.service.recorder import Recorder
from tests.service.small_service import LAYOUT

KEYS = {"word": [6, 1, 6], "neuron": [5]}


@contextmanager
def watched(service, name):
    """A device of a service whose requests are recorded on arrival."""
    recorder = Recorder(service.app)
    with serving(recorder) as url, service.device(url, name=name) as device:
        yield recorder, device


def take(service, fetch):
    """What the service saw of one round of a device."""
    service.publish()
    chosen = Participant(
        lambda known: KEYS,
        lambda known, fetched: tree.map_leaves(np.zeros_like, fetched.model),
        fetch,
    )
    with watched(service, f"phone-{fetch.__name__}") as (recorder, device):
        take_part(device, chosen)
    return recorder


def keys_in_the_update(recorder):
    (update,) = recorder.bodies("/updates")
    _, found = decode_update(update, LAYOUT, 100, update[8:40])
    return {name: list(keys) for name, keys in found.items()}


def test_a_device_that_selects_at_home_shows_no_key_before_its_update(service):
    seen = take(service, fetch_at_home)
    assert seen.routes()[-1] == ("POST", "updates")
    before = seen.seen[:-1]
    assert {method for method, *_ in before} == {"GET", "POST"}
    assert [path for method, path, *_ in before if method != "GET"] == ["/v1/checkin"]
    assert not any(body or query for _, _, query, body, _ in before)
    assert not any("slices" in path for _, path, *_ in before)
    # Other keys, the same requests: what arrives before the update does not depend on them.
    other = Participant(
        lambda known: {"word": [0], "neuron": [2, 3]},
        lambda known, fetched: fetched.model,
        fetch_at_home,
    )
    with watched(service, "another") as (again, device):
        take_part(device, other)
    assert shown(again.seen[:-1]) == shown(before)
    assert keys_in_the_update(seen) == KEYS


def shown(seen):
    """Requests without the tokens and the port, which differ between devices."""
    hidden = {b"authorization", b"host"}
    return [
        (method, path, query, body, [h for h in headers if h[0] not in hidden])
        for method, path, query, body, headers in seen
    ]


def test_one_fetch_shows_the_keys_once_in_one_query(service):
    seen = take(service, Device.fetch)
    assert seen.routes() == [
        ("POST", "checkin"),
        ("GET", "current"),
        ("GET", "manifest"),
        ("POST", "slices"),
        ("GET", "current"),
        ("POST", "updates"),
    ]
    (query,) = seen.bodies("/slices")
    asks = decode_query(query, [2**31] * 9, max_keys=100)
    expected = [part.keys_of(LAYOUT.keys_by_space(own_keys())).array for part in LAYOUT.parts]
    assert [ask.keys.tolist() for ask in asks] == [keys.tolist() for keys in expected]
    assert all(ask.names is None for ask in asks)  # without a cache, nothing else is told
    assert keys_in_the_update(seen) == KEYS


def own_keys():
    return tuple(space.keys(KEYS[space.name]) for space in LAYOUT.spaces)
