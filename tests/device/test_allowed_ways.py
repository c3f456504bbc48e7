"""A device fetches as the round says, and only in ways that its operator allows."""

from math import inf

import pytest

from keyhole import tree
from keyhole.delivery import delivery_named
from keyhole.device.allowed import Allowed, AllowedFetch
from keyhole.device.device import Device
from keyhole.device.take_part import Participant, fetch_at_home, take_part
from keyhole.errors import ViolationError
from keyhole.planner.prices import max_bytes
from tests.service.small_service import small_service

KEYS = {"word": [3, 1], "neuron": [5]}


def habit(max_bytes=inf, **allowed):
    ways = {name: Allowed(delivery_named(name), fetch) for name, fetch in allowed.items()}

    def train(known, fetched):
        return tree.map_leaves(lambda leaf: 2 * leaf, fetched.model)

    return Participant(lambda known: KEYS, train, AllowedFetch(ways, next(iter(ways)), max_bytes))


@pytest.fixture
def service(tmp_path):
    with small_service(tmp_path) as made:
        yield made


def test_a_round_that_fetches_in_another_way_gets_nothing(service):
    state = service.publish(settings={"delivery": "pregenerated"})
    refused = pytest.raises(ViolationError, match="got 'pregenerated'; expected broadcast")
    with service.device() as device, refused:
        take_part(device, habit(broadcast=fetch_at_home))
    assert service.stored(state.published.id) == {}
    assert b"keyhole_keys_total 0.0" in service.app.metrics.page()


@pytest.mark.parametrize("named", [["pregenerated"], {"broadcast": 1}, 3, True])
def test_a_round_that_names_no_delivery_is_refused_and_breaks_no_device(service, named):
    service.publish(settings={"delivery": named})
    with service.device() as device, pytest.raises(ViolationError, match="does not allow"):
        take_part(device, habit(broadcast=fetch_at_home))


@pytest.mark.parametrize("named", ["broadcast", "pregenerated", None])
def test_a_round_says_how_slices_are_fetched(service, named):
    service.publish(settings={} if named is None else {"delivery": named})
    used = []

    def noting(name, fetch):
        def noted(*told):
            used.append(name)
            return fetch(*told)

        return noted

    ways = {"broadcast": fetch_at_home, "pregenerated": Device.fetch}
    with service.device() as device:
        take_part(device, habit(**{name: noting(name, fetch) for name, fetch in ways.items()}))
    assert used == [named or "broadcast"]


@pytest.mark.parametrize("name", ["pregenerated", "broadcast"])
def test_a_round_that_could_take_more_bytes_than_a_device_gives_gets_nothing(service, name):
    counts = {"word": 2, "neuron": 1}
    told = {"nonce": "0" * 32, "keys_per_client": counts, "delivery": name}
    state = service.publish(settings=told)
    needed = sum(max_bytes(delivery_named(name), state.layout, counts))
    needed += state.layout.client_bytes(**counts)
    fetch = {"pregenerated": Device.fetch, "broadcast": fetch_at_home}[name]
    refused = pytest.raises(ViolationError, match=f"got {needed:,}; expected at most")
    with service.device() as device:
        with refused:
            take_part(device, habit(max_bytes=needed - 1, **{name: fetch}))
        assert service.stored(state.published.id) == {}
        take_part(device, habit(max_bytes=needed, **{name: fetch}))
    assert len(service.stored(state.published.id)) == 1
